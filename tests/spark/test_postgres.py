"""Stages whose outcomes are kept on PostgreSQL: the driver and the ledger service talk to the server, executors
never do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from holdfast.cli import main
from holdfast.spark import Stage
from holdfast.spark.session import session
from holdfast.store.pg.server import Denied
from tests.postgres import fresh_url, role_url
from tests.process.watch import until
from tests.spark.clusters import Cluster, cluster, services
from tests.spark.test_stage import Place, note

# A cluster takes half a minute: `make chaos`. What a stage is on PostgreSQL, `test_postgres_local` shows.
pytestmark = [pytest.mark.timeout(200), pytest.mark.deep]

SECRET = "sw0rdfish"
ROWS = 60


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def spark(two_workers: Cluster) -> Iterator[SparkSession]:
    made = session(two_workers.url, app="tests", config=two_workers.config)
    yield made
    made.stop()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Its store is a database that is not let into without a password."""
    made = Place(tmp_path)
    url = fresh_url()
    made.store = role_url(url, "guarded", SECRET)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("GRANT ALL ON SCHEMA public TO guarded")
    return made


def answers(run: Any) -> list[int]:
    return [row.y for row in run.output().orderBy("id").collect()]


def test_a_run_is_kept_on_a_server_and_a_second_one_calls_nothing(
    spark: SparkSession, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = place.stage(place.counting())
    df = spark.range(0, ROWS, 1, 4)
    for _ in range(2):
        with stage.run(df) as run:
            assert answers(run) == [2 * n for n in range(ROWS)]
            assert SECRET not in str(run.report())
    assert sorted(map(int, place.calls())) == list(range(ROWS))
    assert main(["runs", "show", "job", "--store", place.store]) == 0
    told = capsys.readouterr()
    assert "FINISHED" in told.out.upper()
    assert SECRET not in told.out + told.err


def test_a_ledger_service_that_is_killed_comes_back_and_nothing_is_called_again(
    spark: SparkSession, place: Place
) -> None:
    stage = place.stage(slow(place.log), flush_rows=1)
    killed = Killing(place)
    with killed, stage.run(spark.range(0, ROWS, 1, 4)) as run:
        assert answers(run) == list(range(ROWS))
    assert killed.done
    assert sorted(map(int, place.calls())) == list(range(ROWS))


def test_no_executor_knows_the_password_or_talks_to_the_server(
    spark: SparkSession, place: Place, two_workers: Cluster
) -> None:
    log = place.log

    def looks(row: Any) -> dict[str, Any]:
        seen = Path("/proc/self/environ").read_bytes() + Path("/proc/self/cmdline").read_bytes()
        note(log, int(SECRET.encode() in seen))
        return {"y": os.getpid()}

    with place.stage(looks).run(spark.range(0, ROWS, 1, 4)) as run:
        pids = set(answers(run))
    assert set(place.calls()) == {"0"}
    # Who is connected is on this machine, and none of those that made calls.
    assert pids.isdisjoint({os.getpid(), *services(os.getpid())})


def slow(log: str) -> Callable[[Any], Any]:
    def work(row: Any) -> dict[str, Any]:
        note(log, row.id)
        time.sleep(0.02)
        return {"y": row.id}

    return work


class Killing:
    """Kills the ledger service once a third of the rows were called."""

    def __init__(self, place: Place) -> None:
        self.done = False
        self._place = place

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self._thread.start()

    def _kill(self) -> None:
        until(lambda: len(self._place.calls()) >= ROWS // 3, "calls", 100)
        for pid in services(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        self.done = True

    def __exit__(self, *exc: object) -> None:
        self._thread.join(100)


def test_a_stage_that_is_not_let_in_says_so_at_once(place: Place) -> None:
    stage = Stage(
        "job", place.counting(), key="id", schema="y bigint",
        store=place.store.replace(SECRET, "wrong"), progress="quiet",
    )  # fmt: skip
    with pytest.raises(Denied):
        stage.explain()
