"""`Stage` over Spark Connect: the essential path, without a JVM in the driver."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from holdfast.spark import Call, Skip
from holdfast.spark.errors import (
    InPipeline,
    InputChanged,
    JobCancelled,
    NotAStage,
    RunCancelled,
    RunChanged,
)
from holdfast.spark.keys import KeyDuplicate, KeyMissing
from holdfast.spark.sinks.parquet import read_parts
from tests.spark.test_stage import (
    RunThread,
    StageRig,
    blocking_function,
    double,
    final_counts,
    wait_until_blocked,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("connect")]


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


def test_connect_run_ends_every_row_and_a_second_run_calls_nothing(
    connected: SparkSession, place: StageRig
) -> None:
    log = place.log

    async def work(row: Any, call: Call) -> Any:
        from tests.spark.row_functions import append_line

        append_line(log, row.id)
        await asyncio.sleep(0.001)
        if row.id == 3:
            return Skip("three")
        if row.id == 4:
            raise ValueError("four")
        if row.id == 5 and call.attempt == 1:
            raise TimeoutError("five")
        if row.id == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"y": row.id, "tags": [f"{call.attempt}"]}

    df = connected.range(0, 60, 1, 4).select((59 - F.col("id")).alias("id"))
    stage = place.stage(
        work, schema="y bigint, tags array<string>", concurrency=8, attempts=2, flush_rows=8
    )
    with stage.run(df, output=place.output) as run:
        assert run.counts() == final_counts(
            COMMITTED=60, TERMINAL_SUCCESS=57, TERMINAL_SKIP=1, TERMINAL_FAIL=2
        )
        rows = run.output().collect()
        assert [row.id for row in rows] == [i for i in range(60) if i not in (3, 4, 6)]
        assert {tuple(row.tags) for row in rows} <= {("1",), ("2",)}
        failed = {row.id: row._error_class for row in run.failed().collect()}
        assert failed == {4: "input", 6: "lease_expired"}
        assert "job" in str(run.report())
    calls = len(place.calls())
    with stage.run(df, output=place.output) as run:
        assert run.counts()["COMMITTED"] == 60
    assert len(place.calls()) == calls
    assert read_parts(place.output).complete
    with pytest.raises(RunChanged):
        place.stage(work, schema="y bigint").run(df, output=place.output)
    with pytest.raises(InputChanged):
        stage.run(connected.range(5), output=place.output)


def test_connect_lazy_form_calls_each_row_once(connected: SparkSession, place: StageRig) -> None:
    lazy = connected.range(0, 30, 1, 3).transform(
        place.stage(place.counting_function(), "lazy", meta=True)
    )
    assert lazy.orderBy(F.desc("id")).select("id", "y", "_state").first() == Row(
        id=29, y=58, _state="TERMINAL_SUCCESS"
    )
    assert lazy.count() == 30
    assert len(place.calls()) == 30


def test_connect_run_is_cancelled(connected: SparkSession, place: StageRig) -> None:
    df = connected.range(0, 50, 1, 2)
    stage = place.stage(blocking_function(place), grace_s=0.2, flush_rows=2)
    thread = RunThread(lambda: stage.run(df, output=place.output))
    wait_until_blocked(place)
    stage.cancel()
    thread.join(60)
    assert isinstance(thread.error, RunCancelled)
    (place.path / "go").touch()


def test_connect_bad_input_is_refused(connected: SparkSession, place: StageRig) -> None:
    with pytest.raises(KeyMissing):
        place.stage(double, key="doc").run(connected.range(3))
    twice = connected.createDataFrame([(1,), (1,)], "id int")
    with pytest.raises(KeyDuplicate):
        place.stage(double).run(twice)
    with pytest.raises(NotAStage):
        place.stage(double, schema="y nonsense").run(connected.range(3))


def test_connect_run_resumes_after_an_interrupted_operation(
    connected: SparkSession, place: StageRig
) -> None:
    stage = place.stage(blocking_function(place), flush_rows=1)
    df = connected.range(0, 50, 1, 2)
    thread = RunThread(lambda: stage.run(df, output=place.output))
    wait_until_blocked(place)
    connected.interruptAll()
    thread.join(60)
    assert isinstance(thread.error, JobCancelled)
    (place.path / "go").touch()
    with stage.run(df, output=place.output) as run:
        assert run.output().count() == 50


def test_pipeline_query_function_is_refused_in_one_line(
    connected: SparkSession, place: StageRig
) -> None:
    from pyspark.pipelines.add_pipeline_analysis_context import add_pipeline_analysis_context
    from pyspark.pipelines.spark_connect_pipeline import create_dataflow_graph

    graph = create_dataflow_graph(connected, None, None, None)
    df = connected.range(4)
    for act in (place.stage(double), place.stage(double).run):
        inside = add_pipeline_analysis_context(connected, graph, "labels")
        with inside, pytest.raises(InPipeline) as caught:
            act(df)
        assert "\n" not in str(caught.value)
    assert not list(place.path.glob("**/*.mdb"))
