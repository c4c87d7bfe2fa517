"""Stages with a PostgreSQL store. The driver and the ledger service connect to the server, executors never do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from holdfast.cli import main
from holdfast.spark import Stage
from holdfast.store.postgres.server import ServerDenied
from tests.postgres import fresh_url, role_url
from tests.process.watch import until
from tests.spark.clusters import SparkCluster, service_pids
from tests.spark.row_functions import append_line
from tests.spark.test_stage import StageRig

# A cluster takes half a minute, so this runs in `make chaos`. `test_postgres_local` covers a local session.
pytestmark = [pytest.mark.timeout(200), pytest.mark.deep, pytest.mark.xdist_group("cluster")]

SECRET = "sw0rdfish"
ROWS = 60


@pytest.fixture(scope="module")
def spark(cluster_spark: SparkSession) -> SparkSession:
    return cluster_spark


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    """The store is a database that requires a password. Its role creates the tables."""
    made = StageRig(tmp_path)
    url = fresh_url(empty=True)
    made.store = role_url(url, "guarded", SECRET)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("GRANT ALL ON SCHEMA public TO guarded")
    return made


def output_values(run: Any) -> list[int]:
    return [row.y for row in run.output().orderBy("id").collect()]


def test_second_run_on_postgres_calls_no_row_again(
    spark: SparkSession, place: StageRig, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = place.stage(place.counting_function())
    df = spark.range(0, ROWS, 1, 4)
    for _ in range(2):
        with stage.run(df) as run:
            assert output_values(run) == [2 * n for n in range(ROWS)]
            assert SECRET not in str(run.report())
    assert sorted(map(int, place.calls())) == list(range(ROWS))
    assert main(["runs", "show", "job", "--store", place.store]) == 0
    printed = capsys.readouterr()
    assert "FINISHED" in printed.out.upper()
    assert SECRET not in printed.out + printed.err


def test_killed_ledger_service_on_postgres_restarts_without_repeated_calls(
    spark: SparkSession, place: StageRig
) -> None:
    stage = place.stage(slow_function(place.log), flush_rows=1)
    killer = ServiceKiller(place)
    with killer, stage.run(spark.range(0, ROWS, 1, 4)) as run:
        assert output_values(run) == list(range(ROWS))
    assert killer.done
    assert sorted(map(int, place.calls())) == list(range(ROWS))


def test_executors_have_no_postgres_password_or_connection(
    spark: SparkSession, place: StageRig, two_workers: SparkCluster
) -> None:
    log = place.log

    def looks(row: Any) -> dict[str, Any]:
        seen = Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
        append_line(log, int(SECRET.encode() in seen))
        return {"y": os.getpid()}

    with place.stage(looks).run(spark.range(0, ROWS, 1, 4)) as run:
        pids = set(output_values(run))
    assert set(place.calls()) == {"0"}
    # The driver and the service have the connections. No process that made calls is one of them.
    assert pids.isdisjoint({os.getpid(), *service_pids(os.getpid())})


def slow_function(log: str) -> Callable[[Any], Any]:
    def work(row: Any) -> dict[str, Any]:
        append_line(log, row.id)
        time.sleep(0.02)
        return {"y": row.id}

    return work


class ServiceKiller:
    """Kills the ledger service after a third of the rows were called."""

    def __init__(self, place: StageRig) -> None:
        self.done = False
        self._place = place

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._thread.start()

    def _kill(self) -> None:
        until(lambda: len(self._place.calls()) >= ROWS // 3, "calls", 100)
        for pid in service_pids(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        self.done = True

    def __exit__(self, *exc: object) -> None:
        self._thread.join(100)


def test_wrong_postgres_password_raises_denied(place: StageRig) -> None:
    stage = Stage(
        "job", place.counting_function(), key="id", schema="y bigint",
        store=place.store.replace(SECRET, "wrong"), progress="quiet",
    )  # fmt: skip
    with pytest.raises(ServerDenied):
        stage.explain()
