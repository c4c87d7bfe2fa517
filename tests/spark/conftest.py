"""What the Spark tests share: one local session a module, and workers that can import the tests.

A missing part is a failure, never a skip: the error names the command that installs it. A process
holds one SparkContext, so a module uses the `spark` fixture, or a cluster, or Connect, not two.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.spark.session import session
from tests.processes import ROOT
from tests.spark.clusters import JVM_OPTIONS, connect_server

JDBC_JAR = "/usr/share/java/postgresql.jar"
LOCAL = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    # Tables of some rows: compiling a query takes longer than interpreting it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


# Modules that take minutes: they begin first, so that no process works alone at the end.
LONG = ("test_tutorial", "test_faults", "test_stage", "test_service", "test_hosts", "test_sinks", "test_engine",
        "test_stage_connect", "test_carry")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if here in item.path.parents]
    ours = sorted((items[at] for at in places), key=_turn)
    for at, item in zip(places, ours, strict=True):
        items[at] = item


def _turn(item: pytest.Item) -> int:
    return LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG)


@pytest.fixture(scope="session", autouse=True)
def _importable_tests() -> Iterator[None]:
    """Spark's workers import a test's functions by name, from where this process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
        patch.delenv("SPARK_REMOTE", raising=False)
        # Every Java that is started here knows the driver: one process has one Java for all modules.
        patch.setenv("SPARK_DIST_CLASSPATH", JDBC_JAR)
        # A Java that lives for minutes gains nothing from its second compiler.
        patch.setenv("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
        yield


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A classic session on two cores of this machine."""
    made = session("local[2]", app="tests", config=LOCAL)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Connect session on a server of its own, on two cores of this machine."""
    directory: Path = tmp_path_factory.mktemp("connect")
    with connect_server(directory) as server, pytest.MonkeyPatch.context() as patch:
        # PySpark marks the whole process as remote; the next module may want a classic session.
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        made = session(connect=server.url, app="tests")
        yield made
        made.stop()
