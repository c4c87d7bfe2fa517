"""`tasks="dynamic"`: executors that join take rows, and tasks give their slots back to other pools."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from holdfast.spark import Retry
from holdfast.spark import stage as stage_module
from holdfast.spark.session import session
from tests.processes import TIMEOUT_S
from tests.spark.clusters import cluster
from tests.spark.conftest import LOCAL
from tests.spark.test_stage import Place, Thread, note, until_held_up

CHILDREN = 4
# Longer than a task stays without a row.
REST_S = 5


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_executors_that_dynamic_allocation_adds_take_rows(tmp_path: Path) -> None:
    place = Place(tmp_path)
    met = tmp_path / "met"
    met.mkdir()
    directory = str(met)

    def work(row: Any) -> dict[str, Any]:
        """Stays in its first call until so many processes have one."""
        Path(directory, str(os.getpid())).touch()
        for _ in range(3000):
            if len(os.listdir(directory)) >= CHILDREN:
                return {"y": os.getpid()}
            time.sleep(0.02)
        raise AssertionError(f"only {os.listdir(directory)} work")

    growing = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "0",
        "spark.dynamicAllocation.maxExecutors": str(CHILDREN),
        "spark.executor.cores": "1",
        "spark.executor.memory": "480m",
    }
    with cluster(tmp_path / "cluster", cores=2) as found:
        spark = session(found.url, app="tests", config={**found.config, **growing})
        try:
            stage = place.stage(work, tasks="dynamic", flush_rows=1, attempts=1)
            with stage.run(spark.range(0, 40, 1, 2)) as run:
                rows = run.output().collect()
        finally:
            spark.stop()
    assert len(rows) == 40
    assert len({row.y for row in rows}) >= CHILDREN


@pytest.mark.timeout(120)
def test_tasks_of_a_dynamic_run_give_their_slots_to_another_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "TURN_S", 0.2)
    place = Place(tmp_path)
    work = refused_until_go(place)
    spark = session("local[2]", app="tests", config={**LOCAL, "spark.scheduler.mode": "FAIR"})
    try:
        stage = place.stage(work, tasks="dynamic", attempts=200)
        run = Thread(lambda: _in_pool(spark, "stages", lambda: stage.run(spark.range(4))))
        until_held_up(place)
        other = Thread(lambda: _in_pool(spark, "others", spark.range(0, 100, 1, 2).count))
        other.join(2 * TIMEOUT_S)
        assert not other.is_alive()
        assert run.is_alive()
        (tmp_path / "go").touch()
        run.join(2 * TIMEOUT_S)
        assert not run.is_alive()
        assert (run.error, other.error) == (None, None)
    finally:
        spark.stop()


@pytest.mark.timeout(120)
def test_tasks_whose_rows_all_rest_give_their_slots_to_another_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_module, "IDLE_S", 0.2)
    place = Place(tmp_path)
    refused = refused_until_go(place)

    def work(row: Any) -> Any:
        try:
            return refused(row)
        except TimeoutError:
            return Retry("later", after_s=REST_S)

    spark = session("local[2]", app="tests", config={**LOCAL, "spark.scheduler.mode": "FAIR"})
    try:
        stage = place.stage(work, attempts=200)
        run = Thread(lambda: _in_pool(spark, "stages", lambda: stage.run(spark.range(4))))
        until_held_up(place)
        other = Thread(lambda: _in_pool(spark, "others", spark.range(0, 100, 1, 2).count))
        other.join(2 * TIMEOUT_S)
        assert not other.is_alive()
        assert run.is_alive()
        (tmp_path / "go").touch()
        run.join(2 * TIMEOUT_S)
        assert not run.is_alive()
        assert (run.error, other.error) == (None, None)
    finally:
        spark.stop()


def refused_until_go(place: Place) -> Callable[[Any], Any]:
    """A function whose rows are to be tried again until `go` is there; it says when it is called."""
    busy, go = str(place.path / "busy"), str(place.path / "go")
    os.mkfifo(busy)
    reader = os.open(busy, os.O_RDWR)  # it stays open: a call must not wait for a reader

    def work(row: Any) -> dict[str, Any]:
        if not os.path.exists(go):
            note(busy, row.id)
            raise TimeoutError("not yet")
        return {"y": row.id}

    assert reader
    return work


def _in_pool(spark: SparkSession, pool: str, action: Callable[[], Any]) -> Any:
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", pool)
    return action()
