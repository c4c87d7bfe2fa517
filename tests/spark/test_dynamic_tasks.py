"""`tasks="dynamic"`: added executors take rows, and tasks release their slots to other pools."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from holdfast.spark import Retry, stage_run_record
from holdfast.spark.session import session
from tests.processes import TIMEOUT_S
from tests.spark.clusters import cluster
from tests.spark.row_functions import append_line
from tests.spark.test_stage import RunThread, StageRig, wait_until_blocked

CHILDREN = 4
# Longer than an idle task keeps its slot.
RETRY_AFTER_S = 5


@pytest.mark.deep
@pytest.mark.timeout(240)
def test_dynamically_allocated_executors_take_rows(no_session: None, tmp_path: Path) -> None:
    place = StageRig(tmp_path)
    met = tmp_path / "met"
    met.mkdir()
    directory = str(met)

    def work(row: Any) -> dict[str, Any]:
        """Wait in the first call until CHILDREN processes have a call."""
        Path(directory, str(os.getpid())).touch()
        for _ in range(3000):
            if len(os.listdir(directory)) >= CHILDREN:
                return {"y": os.getpid()}
            time.sleep(0.02)
        raise AssertionError(f"only {os.listdir(directory)} work")

    allocation_config = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "0",
        "spark.dynamicAllocation.maxExecutors": str(CHILDREN),
        "spark.executor.cores": "1",
        "spark.executor.memory": "480m",
    }
    with cluster(tmp_path / "cluster", cores=2) as spark_cluster:
        spark = session(
            spark_cluster.url, app="tests", config={**spark_cluster.config, **allocation_config}
        )
        try:
            stage = place.stage(work, tasks="dynamic", flush_rows=1, attempts=1)
            with stage.run(spark.range(0, 40, 1, 2)) as run:
                rows = run.output().collect()
        finally:
            spark.stop()
    assert len(rows) == 40
    assert len({row.y for row in rows}) >= CHILDREN


@pytest.mark.timeout(120)
def test_dynamic_tasks_release_their_slots_after_a_time_slice(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_run_record, "TIME_SLICE_S", 0.2)
    place = StageRig(tmp_path)
    work = fail_until_go(place)
    stage = place.stage(work, tasks="dynamic", attempts=200)
    run = RunThread(lambda: _run_in_pool(spark, "stages", lambda: stage.run(spark.range(4))))
    wait_until_blocked(place)
    other = RunThread(lambda: _run_in_pool(spark, "others", spark.range(0, 100, 1, 2).count))
    other.join(2 * TIMEOUT_S)
    assert not other.is_alive()
    assert run.is_alive()
    (tmp_path / "go").touch()
    run.join(2 * TIMEOUT_S)
    assert not run.is_alive()
    assert (run.error, other.error) == (None, None)


@pytest.mark.timeout(120)
def test_idle_tasks_release_their_slots_while_rows_are_in_backoff(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_run_record, "IDLE_RELEASE_S", 0.2)
    place = StageRig(tmp_path)
    fail_or_return = fail_until_go(place)

    def work(row: Any) -> Any:
        try:
            return fail_or_return(row)
        except TimeoutError:
            return Retry("later", after_s=RETRY_AFTER_S)

    stage = place.stage(work, attempts=200)
    run = RunThread(lambda: _run_in_pool(spark, "stages", lambda: stage.run(spark.range(4))))
    wait_until_blocked(place)
    other = RunThread(lambda: _run_in_pool(spark, "others", spark.range(0, 100, 1, 2).count))
    other.join(2 * TIMEOUT_S)
    assert not other.is_alive()
    assert run.is_alive()
    (tmp_path / "go").touch()
    run.join(2 * TIMEOUT_S)
    assert not run.is_alive()
    assert (run.error, other.error) == (None, None)


def fail_until_go(place: StageRig) -> Callable[[Any], Any]:
    """A function that raises a retryable error until the file `go` exists. It writes each call to a FIFO."""
    busy, go = str(place.path / "busy"), str(place.path / "go")
    os.mkfifo(busy)
    reader = os.open(busy, os.O_RDWR)  # kept open: a call must not block without a reader

    def work(row: Any) -> dict[str, Any]:
        if not os.path.exists(go):
            append_line(busy, row.id)
            raise TimeoutError("not yet")
        return {"y": row.id}

    assert reader
    return work


def _run_in_pool(spark: SparkSession, pool: str, action: Callable[[], Any]) -> Any:
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", pool)
    return action()
