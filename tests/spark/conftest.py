"""Shared fixtures of the Spark tests: one session per process, and workers that can import the tests.

A missing dependency is a failure, never a skip: the error names the command that installs it. A process
has one SparkContext, so a module uses `spark`, `cluster_spark` or `connected`, not two of them. The modules of a
process share the session, the cluster and the Connect server. Each of them starts for the first test that needs it.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from holdfast.spark.session import session
from tests.forked_services import forked_services
from tests.processes import ROOT
from tests.spark.class_archive import jvm_options
from tests.spark.clusters import (
    ConnectServer,
    SparkCluster,
    cluster,
    connect_server,
)

JDBC_JAR = "/usr/share/java/postgresql.jar"
# The tables are small: compiling a query takes longer than interpreting it.
INTERPRETED = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # The text of each plan, which only the web UI shows.
    "spark.sql.ui.explainMode": "simple",
}
WARM = {"spark.python.daemon.module": "tests.spark.warm_daemon"}
LOCAL = {
    "spark.driver.memory": "1g",
    "spark.ui.enabled": "false",
    # Within a pool, jobs run in order of submission. Tests with several pools need the fair scheduler.
    "spark.scheduler.mode": "FAIR",
    # The worker of a cancelled task is killed after this time.
    "spark.python.task.killTimeout": "200ms",
    **INTERPRETED,
    **WARM,
}


# Modules that take minutes start first, so that no process runs alone at the end.
SLOW_MODULES = ("test_tutorial", "test_faults", "test_stage", "test_hosts", "test_odd_inputs", "test_changed_input",
        "test_stage_connect", "test_carried_columns")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    positions = [position for position, item in enumerate(items) if item.path.parent == here]
    ours = sorted((items[position] for position in positions), key=_start_order)
    for position, item in zip(positions, ours, strict=True):
        items[position] = item


def _start_order(item: pytest.Item) -> int:
    return (
        SLOW_MODULES.index(item.path.stem) if item.path.stem in SLOW_MODULES else len(SLOW_MODULES)
    )


@contextlib.contextmanager
def spark_environment() -> Iterator[None]:
    """Let Spark workers import functions of the tests by name, from the paths of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
        patch.delenv("SPARK_REMOTE", raising=False)
        # Every JVM has the JDBC driver: one process shares one JVM between all modules.
        patch.setenv("SPARK_DIST_CLASSPATH", JDBC_JAR)
        # A JVM that lives for minutes gains nothing from its second compiler.
        patch.setenv("SPARK_SUBMIT_OPTS", jvm_options())
        yield


@pytest.fixture(scope="module", autouse=True)
def _importable_tests() -> Iterator[None]:
    """The environment ends with the module: the same process also runs tests of other directories."""
    with spark_environment(), forked_services():
        yield


@pytest.fixture(autouse=True)
def _stopped_lazy_services() -> Iterator[None]:
    """Stop the services of lazy forms after their test. Otherwise they would run until the process ends."""
    yield
    # Imported by the tests with stages only.
    stage = sys.modules.get("holdfast.spark.stage")
    for supervisor in list(stage._lazy_services.values()) if stage is not None else ():
        supervisor.release(wait=True)
        supervisor.store.close()
    if stage is not None:
        stage._lazy_services.clear()


class SessionSlot:
    """The Spark session of this process. A session of another kind replaces it."""

    def __init__(self) -> None:
        self._kind = ""
        self._resources = contextlib.ExitStack()
        self._session: SparkSession | None = None

    def use(self, kind: str, start: Callable[[], SparkSession]) -> SparkSession:
        """Return the session of this kind. Start it if the slot has another kind or none."""
        if self._session is None or self._kind != kind:
            self.stop()
            self._session, self._kind = start(), kind
            self._resources.callback(self._session.stop)
        return self._session

    def stop(self) -> None:
        self._resources.close()
        self._session = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Stop the session after a failed test: its jobs may still occupy the slots of the executors."""
    report: Any = yield
    if report.failed and {"spark", "connected"} & _fixture_values(item).keys():
        _fixture_values(item)["session_slot"].stop()
    return report


def _fixture_values(item: pytest.Item) -> dict[str, Any]:
    return getattr(item, "funcargs", {})


@pytest.fixture(scope="session")
def session_slot() -> Iterator[SessionSlot]:
    slot = SessionSlot()
    yield slot
    slot.stop()


@pytest.fixture
def spark(session_slot: SessionSlot) -> SparkSession:
    """A classic session on two cores of this machine. The modules of a process share it."""
    return local_session(session_slot)


def local_session(slot: SessionSlot) -> SparkSession:
    """The session of `spark`, for a fixture that several tests share. Such a fixture returns no DataFrame."""
    return slot.use("local", lambda: session("local[2]", app="tests", config=LOCAL))


@pytest.fixture
def no_session(session_slot: SessionSlot) -> None:
    """The process has no Spark session."""
    session_slot.stop()


@pytest.fixture(scope="session")
def two_workers(
    session_slot: SessionSlot, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkCluster]:
    """A cluster of two Workers. The modules of a process share it."""
    with contextlib.ExitStack() as stack:
        # A session fixture starts before the fixtures of its module.
        with spark_environment():
            spark_cluster = stack.enter_context(cluster(tmp_path_factory.mktemp("cluster")))
        stack.callback(session_slot.stop)  # before the cluster
        yield spark_cluster


@pytest.fixture(scope="module")
def cluster_spark(session_slot: SessionSlot, two_workers: SparkCluster) -> SparkSession:
    """A classic session on the cluster."""
    return session_slot.use(
        "cluster",
        lambda: session(
            two_workers.url, app="tests", config={**two_workers.config, **INTERPRETED, **WARM}
        ),
    )


@pytest.fixture(scope="session")
def remote_server(
    session_slot: SessionSlot, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ConnectServer]:
    """A Connect server on two cores of this machine. The modules of a process share it."""
    with contextlib.ExitStack() as stack:
        with spark_environment():
            server = stack.enter_context(
                connect_server(tmp_path_factory.mktemp("connect"), config={**INTERPRETED, **WARM})
            )
        # Without its server, a session repeats its last request for minutes.
        stack.callback(session_slot.stop)
        yield server


@pytest.fixture
def connected(
    session_slot: SessionSlot, remote_server: ConnectServer, monkeypatch: pytest.MonkeyPatch
) -> SparkSession:
    """A Connect session on the server."""
    # PySpark marks the whole environment as remote. The mark ends with the test: other tests start processes with
    # classic sessions.
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    return session_slot.use("connect", lambda: session(connect=remote_server.url, app="tests"))
