"""Shared fixtures of the Spark tests: one local session per module, and workers that can import the tests.

A missing dependency is a failure, never a skip: the error names the command that installs it. A process
has one SparkContext, so a module uses the `spark` fixture, or a cluster, or Connect, not two of them.
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
    # The tables are small: compiling a query takes longer than interpreting it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


# Modules that take minutes start first, so that no process runs alone at the end.
SLOW_MODULES = ("test_tutorial", "test_faults", "test_stage", "test_service", "test_hosts", "test_sinks",
        "test_row_executor", "test_stage_connect", "test_carried_columns")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    positions = [position for position, item in enumerate(items) if here in item.path.parents]
    ours = sorted((items[position] for position in positions), key=_start_order)
    for position, item in zip(positions, ours, strict=True):
        items[position] = item


def _start_order(item: pytest.Item) -> int:
    return (
        SLOW_MODULES.index(item.path.stem) if item.path.stem in SLOW_MODULES else len(SLOW_MODULES)
    )


@pytest.fixture(scope="session", autouse=True)
def _importable_tests() -> Iterator[None]:
    """Let Spark workers import functions of the tests by name, from the paths of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
        patch.delenv("SPARK_REMOTE", raising=False)
        # Every JVM has the JDBC driver: one process shares one JVM between all modules.
        patch.setenv("SPARK_DIST_CLASSPATH", JDBC_JAR)
        # A JVM that lives for minutes gains nothing from its second compiler.
        patch.setenv("SPARK_SUBMIT_OPTS", JVM_OPTIONS)
        yield


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """A classic session on two cores of this machine."""
    spark_session = session("local[2]", app="tests", config=LOCAL)
    yield spark_session
    spark_session.stop()


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Connect session on a separate server, on two cores of this machine."""
    directory: Path = tmp_path_factory.mktemp("connect")
    with connect_server(directory) as server, pytest.MonkeyPatch.context() as patch:
        # PySpark marks the whole process as remote. The patch resets this for modules with a classic session.
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        spark_session = session(connect=server.url, app="tests")
        yield spark_session
        spark_session.stop()
