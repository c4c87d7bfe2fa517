"""`Stage` on a local Spark session: runs, the lazy form, retries, cancellation and refusals."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from holdfast import failpoints
from holdfast.errors import HoldfastError, NotFound
from holdfast.ledger import runs
from holdfast.ledger.states import RowState
from holdfast.spark import Call, Fail, Retry, Run, Skip, Stage
from holdfast.spark.errors import (
    InputChanged,
    NotAStage,
    RowsFailed,
    RunCancelled,
    RunChanged,
)
from holdfast.spark.function_pickle import NotPicklable
from holdfast.spark.keys import KeyDuplicate, KeyMissing, KeyNull
from holdfast.spark.lazy_frame import FIRST_ROWS
from holdfast.spark.retry_run import make_remap_record
from holdfast.spark.run import RunDriver
from holdfast.spark.sinks import OutputNotOurs
from holdfast.spark.sinks.delta import DeltaSink
from holdfast.spark.sinks.parquet import ParquetSink, read_parts
from holdfast.spark.spark_jobs import use_driver_python
from holdfast.spark.stage import _lazy_services
from holdfast.spark.stage_options import parse_schema
from holdfast.spark.stage_run_record import new_run_record
from holdfast.store import open as open_store
from tests.process.watch import until
from tests.processes import TIMEOUT_S
from tests.spark.conftest import SessionSlot, local_session
from tests.spark.row_functions import append_line, double

pytestmark = pytest.mark.timeout(120)

Y = "y bigint"
NAMES = [state.name for state in RowState]


class StageRig:
    """The store, the output and the call log of a test. Every process appends to the call log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = str(path / "data")
        self.output = str(path / "out")
        self.log = str(path / "calls.log")

    def stage(
        self, fn: Callable[..., Any], name: str = "job", schema: Any = Y, **options: Any
    ) -> Stage:
        options = {"key": "id", "store": self.store, "progress": "quiet", **options}
        return Stage(name, fn, schema=schema, **options)

    def calls(self) -> list[str]:
        try:
            return Path(self.log).read_text().split()
        except FileNotFoundError:
            return []

    def counting_function(self) -> Callable[[Any], Any]:
        """A function that appends the id of each row it is called for to the call log."""
        log = self.log

        def work(row: Any) -> dict[str, Any]:
            append_line(log, row.id)
            return {"y": row.id * 2}

        return work


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


def final_counts(**counts: int) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in NAMES}


def tuples(df: DataFrame) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in df.collect()]


def count_spark_jobs(spark: SparkSession) -> int:
    """The number of Spark jobs that this session has started."""
    tracker = spark.sparkContext._jsc.sc().dagScheduler()
    return int(tracker.numTotalJobs())


# --- one run, several facts ----------------------------------------------------------------------

SCRIPT = """
FACTOR = 3

class Helper:
    def times(self, n):
        return n * FACTOR

def work(row, call):
    return {"y": Helper().times(row.id)}
"""
ANY_NAME = "labels, v2/ü (a b):c"


class PlainRun(NamedTuple):
    """What the tests below observe of one run: without an output, of a function of `__main__`, in a job group."""

    run_id: str
    name: str
    counts: dict[str, int]
    output: list[tuple[Any, ...]]
    failed_columns: list[str]
    not_done_rows: int
    job_descriptions: set[str]
    pull_jobs: int


@pytest.fixture(scope="module")
def plain_run(session_slot: SessionSlot, tmp_path_factory: pytest.TempPathFactory) -> PlainRun:
    spark, place = local_session(session_slot), StageRig(tmp_path_factory.mktemp("plain"))
    script: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, script)
    with failpoints.on("spark.build_pull_job") as build, job_group(spark, "cell-1"):
        run = place.stage(script["work"], ANY_NAME, store=Path(place.store)).run(spark.range(10))
        descriptions = job_descriptions(spark, "cell-1")
    with run:
        return PlainRun(
            run_id=run.run_id,
            name=run.name,
            counts=run.counts(),
            output=tuples(run.output()),
            failed_columns=run.failed().columns,
            not_done_rows=run.failed().count() + run.skipped().count(),
            job_descriptions=descriptions,
            pull_jobs=build.hits,
        )


@contextlib.contextmanager
def job_group(spark: SparkSession, name: str) -> Iterator[None]:
    context = spark.sparkContext
    context.setJobGroup(name, "a cell")
    try:
        yield
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
        context.setLocalProperty("spark.job.description", None)  # type: ignore[arg-type]


def job_descriptions(spark: SparkSession, group: str) -> set[str]:
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)  # type: ignore[union-attr]
    found = [jobs.apply(at) for at in range(jobs.size())]
    return {job.description().get() for job in found if f"({group})" in job.jobGroup().toString()}


def test_run_without_output_keeps_rows_in_the_store(plain_run: PlainRun) -> None:
    assert [row[0] for row in plain_run.output] == list(range(10))
    assert plain_run.not_done_rows == 0
    assert plain_run.failed_columns[:2] == ["id", "_seq"]


def test_function_of_main_is_pickled_with_its_globals(plain_run: PlainRun) -> None:
    assert plain_run.output == [(i, 3 * i) for i in range(10)]


def test_run_name_may_be_any_text(plain_run: PlainRun) -> None:
    assert plain_run.name == ANY_NAME
    assert plain_run.counts["COMMITTED"] == 10


def test_spark_job_descriptions_name_the_run(plain_run: PlainRun) -> None:
    about = f"holdfast stage {ANY_NAME}, run {plain_run.run_id}"
    assert plain_run.job_descriptions == {f"{about}: read the input", f"{about}: call rows"}


def test_run_builds_its_pull_job_once(plain_run: PlainRun) -> None:
    """The pull job built during the ingest is the job that is started afterwards."""
    assert plain_run.counts == final_counts(TERMINAL_SUCCESS=10, COMMITTED=10)
    assert plain_run.pull_jobs == 1


# --- runs ---------------------------------------------------------------------------------------


def test_run_reports_every_row_outcome_and_a_second_run_calls_nothing(
    spark: SparkSession, place: StageRig
) -> None:
    log = place.log

    def work(row: Any, call: Call) -> Any:
        append_line(log, row.id)
        call.cost = 0.5
        if row.id % 10 == 3:
            return Skip(f"three of {row.id}")
        if row.id % 10 == 4:
            raise ValueError(f"four of {row.id}")
        if row.id % 10 == 5:
            return Fail("five")
        if row.id % 10 == 6 and call.attempt < 3:
            return Retry("six", after_s=0)
        if row.id % 10 == 7 and call.attempt == 1:
            raise TimeoutError("seven")
        return {"s": f"{row.id}:{call.attempt}", "y": row.id * 2}

    # The input comes unsorted, in several partitions.
    df = spark.range(0, 100, 1, 5).select((99 - F.col("id")).alias("id"))
    stage = place.stage(work, schema="y bigint, s string", concurrency=4)
    run = stage.run(df, output=place.output)

    assert run.counts() == final_counts(
        COMMITTED=100, TERMINAL_SUCCESS=70, TERMINAL_SKIP=10, TERMINAL_FAIL=20
    )
    assert (run.name, run.status) == ("job", "finished")
    tries = {6: 3, 7: 2}
    good = [i for i in range(100) if i % 10 not in (3, 4, 5)]
    output = run.output()
    assert output.columns == ["id", "y", "s"]
    assert tuples(output) == [(i, 2 * i, f"{i}:{tries.get(i % 10, 1)}") for i in good]

    failed = run.failed()
    columns = ["id", "_seq", "_state", "_attempts", "_error_class", "_error", "_raw"]
    assert failed.columns == columns
    assert tuples(failed.drop("_raw")) == [
        (i, i, "TERMINAL_FAIL", 1, "input", f"ValueError: four of {i}" if i % 10 == 4 else "five")
        for i in range(100)
        if i % 10 in (4, 5)
    ]
    assert [(r.id, r._state, r._error) for r in run.skipped().collect()] == [
        (i, "TERMINAL_SKIP", f"three of {i}") for i in range(3, 100, 10)
    ]
    calls = Counter(map(int, place.calls()))
    assert calls == {i: tries.get(i % 10, 1) for i in range(100)}
    figures = run.progress()
    assert (figures.calls, figures.cost, figures.retries) == (130, 65.0, 30)

    text = str(run.report())
    for word in ("job", "70", "20"):
        assert word in text
    path = place.path / "report.html"
    run.report().save(str(path))
    assert "<html" in path.read_text().lower()

    plan = stage.explain()
    assert (plan.rows, plan.to_run, plan.to_retry, plan.reused) == (100, 0, 0, 70)
    assert "70 done" in str(plan)

    before, jobs = sorted(Path(place.output).rglob("*")), count_spark_jobs(spark)
    again = stage.run(df, output=place.output)
    resumed = stage.resume(spark)
    assert count_spark_jobs(spark) == jobs
    assert {run.run_id, again.run_id, resumed.run_id} == {run.run_id}
    assert again.counts() == run.counts()
    assert len(place.calls()) == 130
    assert sorted(Path(place.output).rglob("*")) == before
    manifest = read_parts(place.output)
    assert (manifest.rows, manifest.complete) == (70, True)
    for one in (run, again, resumed):
        one.close()


def test_run_over_an_empty_input_has_an_empty_output(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(10).where("id > 100")
    with place.stage(double).run(df, output=place.output) as run:
        assert run.counts() == final_counts()
        assert tuples(run.output()) == []
        assert run.output().columns == ["id", "y"]
        assert "job" in str(run.report())
    assert read_parts(place.output).complete


# --- kinds of functions -------------------------------------------------------------------------


async def add_attempt_async(row: Any, call: Call) -> Any:
    await asyncio.sleep(0.001)
    if row.id == 3:
        raise KeyError("three")
    return Row(y=row.id + call.attempt)


def double_table(table: pa.Table) -> pa.Table:
    ids = table.column("id").to_pylist()
    if 13 in ids:
        raise ValueError("thirteen")
    skip = pa.array(["five" if i % 5 == 0 else None for i in ids], pa.string())
    return pa.table({"y": pc.multiply(table.column("id"), 2), "_skip": skip})


async def add_row_count_async(table: pa.Table, call: Call) -> pa.RecordBatch:
    await asyncio.sleep(0.001)
    return pa.table({"y": pc.add(table.column("id"), call.rows)}).to_batches()[0]


class Adder:
    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, row: Any) -> Any:
        return (row.id + self.by,)


def test_functions_may_be_sync_or_async_by_row_or_by_batch(
    spark: SparkSession, place: StageRig
) -> None:
    df = spark.range(0, 50, 1, 3)
    with place.stage(add_attempt_async, "async", concurrency=16).run(df) as run:
        assert tuples(run.output()) == [(i, i + 1) for i in range(50) if i != 3]
        assert run.failed().first()._error == "KeyError: 'three'"
    with place.stage(double_table, "batch", batch=True, batch_rows=8, concurrency=2).run(df) as run:
        good = [i for i in range(50) if i % 5 and i != 13]
        assert tuples(run.output()) == [(i, 2 * i) for i in good]
        assert [row.id for row in run.failed().collect()] == [13]
        assert run.counts()["TERMINAL_SKIP"] == 10
    stage = place.stage(add_row_count_async, "both", batch=True, batch_rows=20, concurrency=4)
    with stage.run(df) as run:
        assert tuples(run.output()) == [(i, i + (20 if i < 40 else 10)) for i in range(50)]
    with place.stage(Adder(7), "object").run(df) as run:
        assert tuples(run.output()) == [(i, i + 7) for i in range(50)]


def test_rate_per_s_limits_batch_calls(spark: SparkSession, place: StageRig) -> None:
    log = place.log

    def work(table: pa.Table) -> pa.Table:
        append_line(log, table.num_rows)
        return pa.table({"y": table.column("id")})

    stage = place.stage(work, batch=True, batch_rows=10, rate_per_s=50, concurrency=2)
    with stage.run(spark.range(0, 95, 1, 2)) as run:
        assert run.counts()["TERMINAL_SUCCESS"] == 95
    assert sorted(map(int, place.calls())) == [5] + [10] * 9


def test_function_gets_its_broadcasts_and_imported_modules(
    spark: SparkSession, place: StageRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = spark.sparkContext.broadcast({i: i * 100 for i in range(20)})
    home = place.path / "beside"
    home.mkdir()
    (home / "lookup_module.py").write_text("STEP = 7\n\ndef step(n):\n    return n + STEP\n")
    monkeypatch.syspath_prepend(str(home))
    lookup: Any = importlib.import_module("lookup_module")

    def work(row: Any) -> Any:
        return {"y": lookup.step(table.value[row.id])}

    with place.stage(work).run(spark.range(20)) as run:
        assert tuples(run.output()) == [(i, i * 100 + 7) for i in range(20)]


# --- column types -------------------------------------------------------------------------------

WHEN = dt.datetime(2024, 2, 29, 23, 59, 59, 123456)


def test_nested_and_time_columns_round_trip_through_the_function(
    spark: SparkSession, place: StageRig
) -> None:
    schema = "id int, at timestamp, day date, price decimal(8,2), tags array<string>, p struct<x:int,y:string>, m map<string,int>, raw binary"
    rows = [
        (
            1,
            WHEN,
            WHEN.date(),
            Decimal("12.50"),
            ["a", None],
            Row(x=1, y="q"),
            {"k": 1},
            bytearray(b"\x00\xff"),
        ),
        (2, None, None, None, None, None, None, None),
    ]
    df = spark.createDataFrame(rows, schema)

    def work(row: Any) -> Any:
        assert row.p is None or row.p.x == 1
        return {
            "at2": row.at,
            "day2": row.day,
            "price2": row.price,
            "tags2": row.tags,
            "p2": row.p,
            "m2": row.m,
            "raw2": row.raw,
            "label": type(row.at).__name__,
        }

    result = "at2 timestamp, day2 date, price2 decimal(8,2), tags2 array<string>, p2 struct<x:int,y:string>, m2 map<string,int>, raw2 binary, label string"
    with place.stage(work, schema=result).run(df, output=place.output) as run:
        assert run.failed().collect() == []
        first, second = run.output().collect()
        assert tuple(first) == (*rows[0][:1], *rows[0][1:], "datetime")
        assert tuple(second) == (2, *[None] * 7, "NoneType")


def test_key_may_be_several_columns_with_text(spark: SparkSession, place: StageRig) -> None:
    rows = [("b", 2, 1.5), ("a", 10, 2.5), ("b", 1, 3.5), ("ä", 0, 4.5), ("", 7, 5.5)]
    df = spark.createDataFrame(rows, "name string, n int, v double").repartition(3)
    stage = place.stage(lambda row: {"y": row.v}, schema="y double", key=["name", "n"])
    with stage.run(df, output=place.output) as run:
        assert run.output().columns == ["name", "n", "y"]
        assert tuples(run.output()) == [
            ("", 7, 5.5),
            ("a", 10, 2.5),
            ("b", 1, 3.5),
            ("b", 2, 1.5),
            ("ä", 0, 4.5),
        ]


def test_results_that_do_not_fit_a_struct_schema_fail_per_row(
    spark: SparkSession, place: StageRig
) -> None:
    answers: dict[int, Any] = {
        0: {"y": 1, "s": "a"},
        1: {"y": 1.5, "s": "a"},
        2: {"y": 1},
        3: {"y": 1, "s": "a", "z": 1},
        4: {"y": None, "s": "a"},
        5: None,
        6: {"y": True, "s": "a"},
        7: (1,),
        8: {"y": 1 << 70, "s": "a"},
        9: {"y": 1, "s": 5},
        10: {"y": 2, "s": None},
    }
    schema = StructType([StructField("y", LongType(), False), StructField("s", StringType())])
    with place.stage(lambda row: answers[row.id], schema=schema).run(spark.range(11)) as run:
        # A field outside of the schema is dropped.
        assert tuples(run.output()) == [(0, 1, "a"), (3, 1, "a"), (10, 2, None)]
        failed = run.failed().collect()
        assert [row.id for row in failed] == [1, 2, 4, 5, 6, 7, 8, 9]
        assert {row._error_class for row in failed} == {"schema"}
        assert all(row._attempts == 1 and row._error and row._raw for row in failed)


# --- failing rows -------------------------------------------------------------------------------


def test_row_that_kills_its_process_is_one_failed_row(spark: SparkSession, place: StageRig) -> None:
    def work(row: Any) -> Any:
        if row.id == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if row.id == 27:
            sys.exit("bye")
        return {"y": 1}

    with place.stage(work, attempts=2, concurrency=2).run(spark.range(0, 60, 1, 2)) as run:
        assert run.counts()["TERMINAL_SUCCESS"] == 58
        killed, exited = run.failed().collect()
        assert (killed.id, killed._error_class, killed._attempts) == (13, "lease_expired", 2)
        assert (exited.id, exited._error) == (27, "SystemExit: bye")


def test_failed_rows_keep_any_error_text(spark: SparkSession, place: StageRig) -> None:
    def work(row: Any) -> Any:
        if row.id == 0:
            return Fail(ValueError("given as it is"))  # type: ignore[arg-type]
        if row.id == 1:
            raise RuntimeError("broken \udcff text")
        if row.id == 2:
            return Skip(None)  # type: ignore[arg-type]
        return {"y": 1}

    with place.stage(work).run(spark.range(4)) as run:
        assert [row._error for row in run.failed().collect()] == [
            "given as it is",
            "RuntimeError: broken \\udcff text",
        ]
        assert run.skipped().count() == 1


def test_on_fail_raise_raises_rows_failed(spark: SparkSession, place: StageRig) -> None:
    def work(row: Any) -> Any:
        if row.id > 7:
            raise ValueError(f"no {row.id}")
        return {"y": 1}

    df = spark.range(10)
    stage = place.stage(work, on_fail="raise")
    for _ in range(2):
        with pytest.raises(RowsFailed) as raised:
            stage.run(df)
        assert raised.value.fields["failed"] == 2
        assert "no 8" in str(raised.value.fields["examples"])
    with place.stage(work).run(df) as run:
        assert run.failed().count() == 2


def test_repeated_foreach_batch_calls_each_row_once(spark: SparkSession, place: StageRig) -> None:
    """The example of docs/spark.md. Spark repeats a batch after a crash."""
    source, work = place.path / "source", place.counting_function()
    spark.range(0, 6, 1, 2).write.parquet(str(source))
    seen: list[tuple[int, int]] = []

    def label(batch: Any, batch_id: int) -> None:
        for _ in range(2):
            stage = place.stage(work, f"labels-{batch_id}")
            stage.run(batch, output=f"{place.output}/batch={batch_id}").close()
        seen.append((batch_id, batch.count()))

    stream = spark.readStream.schema("id bigint").option("maxFilesPerTrigger", 1)
    query = (
        stream.parquet(str(source))
        .writeStream.foreachBatch(label)
        .option("checkpointLocation", str(place.path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert len(seen) == 2
    assert sorted(map(int, place.calls())) == list(range(6))
    found = spark.read.parquet(place.output)
    assert sorted((row.id, row.y) for row in found.collect()) == [(i, 2 * i) for i in range(6)]
    assert {row.batch for row in found.collect()} == {batch_id for batch_id, _ in seen}


# --- the lazy form ------------------------------------------------------------------------------


def test_lazy_form_calls_each_row_once_over_many_evaluations(
    spark: SparkSession, place: StageRig
) -> None:
    lazy = spark.range(0, 40, 1, 3).transform(place.stage(place.counting_function(), "lazy"))
    assert place.calls() == []
    assert lazy.columns == ["id", "y"]
    assert lazy.orderBy(F.desc("id")).first() == Row(id=39, y=78)
    assert lazy.alias("a").join(lazy.alias("b"), "id").count() == 40
    assert lazy.count() == 40
    assert sorted(map(int, place.calls())) == list(range(40))
    again = spark.range(0, 40, 1, 3).transform(place.stage(place.counting_function(), "lazy"))
    assert again.count() == 40
    assert len(place.calls()) == 40


def test_lazy_form_with_meta_returns_every_row_outcome(
    spark: SparkSession, place: StageRig
) -> None:
    def work(row: Any, call: Call) -> Any:
        if row.id == 1:
            return Skip("one")
        if row.id == 2:
            raise ValueError("two")
        if row.id == 3 and call.attempt == 1:
            return Retry("three", after_s=0)
        return {"y": row.id}

    lazy = spark.range(5).transform(place.stage(work, "meta", meta=True))
    assert lazy.columns == ["id", "y", "_seq", "_state", "_attempts", "_error_class", "_error"]
    assert tuples(lazy.orderBy("id")) == [
        (0, 0, 0, "TERMINAL_SUCCESS", 1, None, None),
        (1, None, 1, "TERMINAL_SKIP", 1, "none", "one"),
        (2, None, 2, "TERMINAL_FAIL", 1, "input", "ValueError: two"),
        (3, 3, 3, "TERMINAL_SUCCESS", 2, None, None),
        (4, 4, 4, "TERMINAL_SUCCESS", 1, None, None),
    ]
    empty = spark.range(5).where("id > 9").transform(place.stage(work, "none", meta=True))
    assert (empty.count(), len(empty.columns)) == (0, 7)


def test_lazy_form_calls_only_the_intervals_that_are_read(
    spark: SparkSession, place: StageRig
) -> None:
    lazy = spark.range(0, 2000, 1, 2).transform(
        place.stage(place.counting_function(), "part", tasks=2)
    )
    assert len(lazy.limit(5).collect()) == 5
    assert sorted(map(int, place.calls())) == list(range(FIRST_ROWS))
    with Run.of("part", spark, place.store) as run:
        # The service publishes its figures periodically.
        uncalled_text = f"{2000 - FIRST_ROWS:,} rows were not called"
        until(lambda: uncalled_text in str(run.report()), uncalled_text)
    # Called rows are not called again. Rows after the first interval need the next intervals.
    assert len(lazy.take(FIRST_ROWS + 1)) == FIRST_ROWS + 1
    assert 3 * FIRST_ROWS <= len(place.calls()) < 2000
    assert lazy.count() == 2000
    assert sorted(map(int, place.calls())) == list(range(2000))


@pytest.mark.parametrize(("options", "left"), [({}, None), ({"on_fail": "keep"}, 4)])
def test_lazy_form_omits_failed_rows_only_with_on_fail_keep(
    spark: SparkSession, place: StageRig, options: dict[str, Any], left: int | None
) -> None:
    def work(row: Any) -> Any:
        if row.id == 2:
            raise ValueError("two")
        return {"y": row.id}

    lazy = spark.range(5).transform(place.stage(work, "silent", **options))
    if left is not None:
        assert lazy.count() == left
        return
    with pytest.raises(Exception, match=r"RowsFailed.*failed=1") as caught:
        lazy.collect()
    assert "ValueError: two" in str(caught.value)


def test_lazy_form_gives_a_batch_function_whole_batches(
    spark: SparkSession, place: StageRig
) -> None:
    log = place.log

    def work(table: pa.Table) -> pa.Table:
        append_line(log, table.num_rows)
        return pa.table({"y": table.column("id")})

    stage = place.stage(work, "lazy batches", batch=True, batch_rows=7)
    lazy = spark.range(0, 100, 1, 3).transform(stage)
    assert tuples(lazy.orderBy("id")) == [(i, i) for i in range(100)]
    assert sorted(map(int, place.calls())) == [2] + [7] * 14


def test_lazy_form_and_run_of_one_name_share_outcomes(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(0, 12, 1, 2)
    stage = place.stage(place.counting_function(), "both")
    lazy = df.transform(stage)
    # The lazy form is not evaluated yet, but its service already runs.
    with stage.run(df) as run:
        assert run.counts()["COMMITTED"] == 12
    [supervisor] = [one for (_, name), one in _lazy_services.items() if name == "both"]
    os.kill(supervisor.pid, signal.SIGKILL)
    assert lazy.count() == 12
    assert supervisor.restarts == 1
    assert len(place.calls()) == 12
    with stage.run(df, fresh=True) as run:
        assert run.counts()["COMMITTED"] == 12
    assert len(place.calls()) == 24


# --- resume, fresh run, retry -------------------------------------------------------------------


def test_request_retry_runs_failed_rows_again(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(20)
    out = ParquetSink(place.output, grace_s=0)
    switch = place.path / "mended"
    log, mended = place.log, str(switch)

    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id % 5 == 0 and (row.id == 15 or not os.path.exists(mended)):
            raise ValueError("broken")
        return {"y": row.id}

    stage = place.stage(work)
    with stage.run(df, output=out) as run:
        assert run.counts()["TERMINAL_FAIL"] == 4
        first = run.run_id
    switch.touch()
    with open_store(place.store) as store:
        store.transact(runs.request_retry, first)
    with stage.run(df, output=out) as run:
        assert run.run_id != first
        assert run.counts() == final_counts(COMMITTED=20, TERMINAL_SUCCESS=19, TERMINAL_FAIL=1)
        assert tuples(run.output()) == [(i, i) for i in range(20) if i != 15]
        assert [(row.id, row._error) for row in run.failed().collect()] == [
            (15, "ValueError: broken")
        ]
    assert len(place.calls()) == 24
    with stage.run(df, output=out) as run:
        assert run.output().count() == 19
    assert len(place.calls()) == 24


def test_remap_converts_unfit_results_without_a_call(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(12)
    out = ParquetSink(place.output, grace_s=0)
    log = place.log

    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id == 1:
            raise ValueError("broken")
        return {"y": f"{row.id} points" if row.id % 3 == 0 else row.id}

    stage = place.stage(work)
    with stage.run(df, output=out) as run:
        assert run.counts()["TERMINAL_FAIL"] == 5
        kept = [(row.id, row._error_class, row._raw) for row in run.failed().collect()]
        assert kept[:3] == [
            (0, "schema", '{"y":"0 points"}'),
            (1, "input", None),
            (3, "schema", '{"y":"3 points"}'),
        ]

    def points(raw: Any) -> Any:
        number = int(raw["y"].split()[0])
        return {"y": number} if number != 9 else raw

    with stage.remap(points, spark) as run:
        assert run.counts() == final_counts(COMMITTED=12, TERMINAL_SUCCESS=10, TERMINAL_FAIL=2)
        assert tuples(run.output()) == [(i, i) for i in range(12) if i not in (1, 9)]
        # A reader that lists the output directory sees the same rows.
        assert sorted(tuples(spark.read.parquet(place.output))) == tuples(run.output())
        failed = [(row.id, row._error_class, row._raw) for row in run.failed().collect()]
        assert failed == [(1, "input", None), (9, "schema", '{"y":"9 points"}')]
        assert run.progress().calls == 0
    with stage.remap(lambda raw: {"y": 9}, spark) as run:
        assert run.output().count() == 11
        last = run.run_id
    # No row is left to remap, so `remap` returns the latest run.
    with stage.remap(points, spark) as run:
        assert run.run_id == last
    with stage.run(df, output=out) as run:
        assert run.run_id == last
    assert len(place.calls()) == 12


def test_interrupted_remap_resumes_without_calls(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(6)
    log = place.log

    def work(row: Any) -> Any:
        append_line(log, row.id)
        return {"y": str(row.id)}

    stage = place.stage(work)
    with stage.run(df) as run:
        old = run._record
    # The state of a driver that died after the ingest of the remap.
    with open_store(place.store) as home:
        new = new_run_record(stage, home, stage._prepare(spark), None)
        record = make_remap_record(home, old, new, follows=True)
        with stage._new_supervisor(
            home, spark, record, new=True, latest_run_id=old.run_id
        ) as supervisor:
            RunDriver("job", home, spark, supervisor, mode="quiet").reuse_input(old)
    with pytest.raises(HoldfastError, match="remap"):
        stage.run(df)
    with stage.remap(lambda raw: {"y": int(raw["y"])}, spark) as run:
        assert run.run_id == record.run_id
        assert tuples(run.output()) == [(i, i) for i in range(6)]
        assert run.counts() == final_counts(COMMITTED=6, TERMINAL_SUCCESS=6)
    assert len(place.calls()) == 6


def test_fresh_run_starts_a_new_run_of_the_same_name(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(5)
    with place.stage(place.counting_function()).run(df) as run:
        first = run.run_id
    with place.stage(place.counting_function(), version="2").run(df, fresh=True) as run:
        assert run.run_id != first
        assert tuples(run.output()) == [(i, 2 * i) for i in range(5)]
    assert len(place.calls()) == 10
    stage = place.stage(place.counting_function())
    assert (stage.delete(), stage.delete()) == (2, 0)
    with open_store(place.store) as store:
        assert store.read(runs.list_runs) == []


def blocking_function(place: StageRig) -> Callable[..., Any]:
    """A function that blocks in rows with id >= 5 until the file `go` exists, and notes it in `busy`."""
    log, busy, go = place.log, str(place.path / "busy"), str(place.path / "go")
    os.mkfifo(busy)

    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id >= 5 and not os.path.exists(go):
            append_line(busy, row.id)
            while not os.path.exists(go):
                time.sleep(0.02)
        return {"y": row.id}

    return work


def wait_until_blocked(place: StageRig) -> None:
    """Wait until a call of the blocking function blocks."""
    pipe = os.open(place.path / "busy", os.O_RDWR)
    try:
        assert select.select([pipe], [], [], 2 * TIMEOUT_S)[0], "no call came that far"
    finally:
        os.close(pipe)


class RunThread(threading.Thread):
    """A run in a separate thread. `error` is the exception that it raised."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._start_run = run
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._start_run()
        except BaseException as error:
            self.error = error


@pytest.mark.parametrize("how", ["stage", "store"])
def test_cancelled_run_raises_run_cancelled_and_stays_cancelled(
    spark: SparkSession, place: StageRig, how: str
) -> None:
    df = spark.range(0, 50, 1, 2)
    stage = place.stage(blocking_function(place), grace_s=0.2, flush_rows=2)
    thread = RunThread(lambda: stage.run(df, output=place.output))
    wait_until_blocked(place)
    if how == "stage":
        stage.cancel()
    else:
        with open_store(place.store) as store:
            found = store.read(runs.get_latest, "job")
            assert found is not None
            store.transact(runs.request_cancel, found.run_id)
    thread.join(60)
    assert isinstance(thread.error, RunCancelled)
    assert thread.error.fields["name"] == "job"
    assert "fresh=True" in thread.error.hint
    assert stage.explain().status == "cancelled"
    with pytest.raises(RunCancelled):
        stage.run(df, output=place.output)
    with pytest.raises(HoldfastError):
        stage.cancel()
    (place.path / "go").touch()


def test_interrupted_run_resumes_with_few_repeated_calls(
    spark: SparkSession, place: StageRig
) -> None:
    df = spark.range(0, 30, 1, 2)
    stage = place.stage(blocking_function(place), flush_rows=1)

    def interrupt() -> None:
        wait_until_blocked(place)
        os.kill(os.getpid(), signal.SIGINT)

    RunThread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        stage.run(df, output=place.output)
    plan = stage.explain()
    assert (plan.status, plan.rows) == ("open", 30)
    assert plan.to_run + plan.to_retry + plan.reused == 30
    (place.path / "go").touch()
    with stage.resume(spark) as run:
        assert tuples(run.output()) == [(i, i) for i in range(30)]
    # Only rows begun and not reported are called again.
    again = Counter(place.calls())
    assert set(map(int, again)) == set(range(30))
    assert sum(again.values()) - 30 <= 2 * (1 + 1)


# --- refusals -----------------------------------------------------------------------------------


def test_run_changed_names_the_changed_setting(spark: SparkSession, place: StageRig) -> None:
    df = spark.range(5).withColumn("k2", F.col("id"))
    with place.stage(double).run(df, output=place.output):
        pass
    changed: dict[str, tuple[Stage, str]] = {
        "key": (place.stage(double, key=["id", "k2"]), place.output),
        "schema": (place.stage(double, schema="y string"), place.output),
        "batch_rows": (place.stage(double, batch=True), place.output),
        "version": (place.stage(double, version="2"), place.output),
        "output": (place.stage(double), str(place.path / "elsewhere")),
        "file_rows": (place.stage(double, file_rows=10), place.output),
    }
    for what, (stage, output) in changed.items():
        with pytest.raises(RunChanged) as refused:
            stage.run(df, output=output)
        fields = refused.value.fields
        assert (fields["name"], fields["what"]) == ("job", what)
        assert fields["was"] != fields["now"]
        assert "fresh=True" in refused.value.hint
    assert not (place.path / "elsewhere").exists()
    # Settings that do not affect the results may change.
    with place.stage(double, attempts=7, concurrency=9, rate_per_s=5).run(df) as run:
        assert run.counts()["COMMITTED"] == 5


def test_another_input_of_a_run_name_raises_input_changed(
    spark: SparkSession, place: StageRig
) -> None:
    with place.stage(double).run(spark.range(5)):
        pass
    others = [
        spark.range(6),
        spark.range(1, 6),
        spark.range(5).withColumn("more", F.lit(1)),
        spark.range(5).select(F.col("id").cast("int")),
    ]
    for df in others:
        with pytest.raises(InputChanged) as refused:
            place.stage(double).run(df)
        assert refused.value.fields["name"] == "job"
        assert "fresh=True" in refused.value.hint
    with place.stage(double).run(spark.range(0, 5, 1, 4)) as run:
        assert run.counts()["COMMITTED"] == 5


def test_missing_duplicate_and_null_keys_are_refused(spark: SparkSession, place: StageRig) -> None:
    missing_key_stage = place.stage(place.counting_function(), key="doc_id")
    with pytest.raises(KeyMissing) as missing:
        missing_key_stage.run(spark.range(5), output=place.output)
    assert "doc_id" in str(missing.value)
    twice = spark.createDataFrame([(1,), (2,), (1,)], "id int").repartition(3)
    with pytest.raises(KeyDuplicate) as duplicate:
        place.stage(place.counting_function(), "twice").run(twice, output=place.output)
    assert "1" in str(duplicate.value)
    null = spark.createDataFrame([(1,), (None,)], "id int")
    with pytest.raises(KeyNull) as nulls:
        place.stage(place.counting_function(), "null").run(null, output=place.output)
    for error in (missing, duplicate, nulls):
        assert error.value.hint
    assert place.calls() == []
    assert not Path(place.output).exists()
    # A run of the same name with a valid key succeeds.
    with place.stage(place.counting_function(), "twice").run(
        twice.distinct(), output=place.output
    ) as run:
        assert run.counts()["COMMITTED"] == 2


def test_large_unordered_input_is_numbered_in_key_order(
    spark: SparkSession, place: StageRig
) -> None:
    """The input exceeds the merge limit, so Spark sorts it."""
    text = F.sha2(F.col("id").cast("string"), 256)
    df = spark.range(1700, numPartitions=4).select(
        text.alias("k"), F.repeat(text, 1000).alias("text"), "id"
    )
    stage = Stage("large", lambda row: {"y": len(row.text)}, key="k", schema=Y, store=place.store)
    with stage.run(df) as run:
        found = [(row.k, row.y) for row in run.output().collect()]
    assert [k for k, _ in found] == sorted(row.k for row in df.select("k").collect())
    assert {y for _, y in found} == {64_000}


def test_unpicklable_function_is_refused_before_the_store_is_created(
    spark: SparkSession, place: StageRig
) -> None:
    lock = threading.Lock()

    def work(row: Any) -> Any:
        with lock:
            return {"y": 1}

    with pytest.raises(NotPicklable) as refused:
        place.stage(work).run(spark.range(5), output=place.output)
    assert "lock" in refused.value.fields["why"]
    assert "work" in refused.value.fields["function"]
    with pytest.raises(NotPicklable):
        place.stage(lambda row: spark.range(3).count()).run(spark.range(5))
    assert not Path(place.store).exists()


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(one): (one.read_bytes() if one.is_file() else b"", one.stat().st_mtime_ns)
        for one in [path, *path.rglob("*")]
    }


def test_foreign_output_is_refused_and_unchanged(spark: SparkSession, place: StageRig) -> None:
    foreign = place.path / "foreign"
    spark.range(3).write.parquet(str(foreign))
    file = place.path / "file.txt"
    file.write_text("precious")
    notes = place.path / "notes"
    notes.mkdir()
    (notes / "readme.md").write_text("mine")
    ours = place.path / "ours"
    with place.stage(double, "older").run(spark.range(3), output=str(ours)):
        pass
    for path in (foreign, file, notes, ours):
        before = snapshot(path)
        with pytest.raises(OutputNotOurs) as refused:
            place.stage(place.counting_function()).run(spark.range(5), output=str(path))
        assert str(path) in str(refused.value)
        assert "nothing was touched" in refused.value.hint
        assert snapshot(path) == before
    assert place.calls() == []
    with place.stage(place.counting_function()).run(spark.range(5), output=place.output) as run:
        assert run.counts()["COMMITTED"] == 5


INVALID_OPTIONS: dict[str, dict[str, Any]] = {
    "name": {"name": ""},
    "long name": {"name": "x" * 200},
    "fn": {"fn": 5},
    "no row": {"fn": lambda: None},
    "key": {"key": []},
    "key of a number": {"key": 5},
    "key twice": {"key": ["id", "id"]},
    "concurrency": {"concurrency": 0},
    "half a call": {"concurrency": 1.5},
    "concurrency of text": {"concurrency": "8"},
    "rate": {"rate_per_s": -1},
    "rate of nothing": {"rate_per_s": float("nan")},
    "attempts": {"attempts": 0},
    "attempts of text": {"attempts": "3"},
    "retry_on": {"retry_on": ("no name",)},
    "on_fail": {"on_fail": "explode"},
    "batch_rows": {"batch": True, "batch_rows": 0},
    "huge batches": {"batch": True, "batch_rows": 1 << 22},
    "flush_rows": {"flush_rows": 0},
    "file_rows": {"file_rows": 0},
    "timeout_s": {"timeout_s": 0},
    "lease_s": {"lease_s": 0},
    "lease of text": {"lease_s": "15"},
    "grace_s": {"grace_s": -1},
    "ahead_rows": {"ahead_rows": -1},
    "retry_budget": {"retry_budget": -1},
    "version": {"version": 2},
    "progress": {"progress": "loud"},
    "tasks": {"tasks": -1},
}


@pytest.mark.parametrize("options", INVALID_OPTIONS.values(), ids=INVALID_OPTIONS.keys())
def test_invalid_stage_options_are_refused_at_construction(options: dict[str, Any]) -> None:
    whole = {"name": "job", "fn": double, "key": "id", "schema": Y, "store": "x", **options}
    with pytest.raises(HoldfastError) as refused:
        Stage(**whole)
    assert refused.value.code in ("not_a_stage", "invalid")
    assert "what" in refused.value.fields


def test_unknown_stage_option_raises_type_error() -> None:
    with pytest.raises(TypeError, match="concurency"):
        Stage("job", double, key="id", schema=Y, concurency=5)  # type: ignore[call-arg]


def test_use_driver_python_restores_python_exec_after_the_last_use(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = spark.sparkContext
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(context, "pythonExec", "python-of-theirs")
    with contextlib.ExitStack() as second:
        with use_driver_python(spark):
            second.enter_context(use_driver_python(spark))
        assert context.pythonExec == sys.executable, "another thread is still at it"
    assert context.pythonExec == "python-of-theirs"


@pytest.mark.parametrize(
    "ddl",
    [
        "y bigint",
        "y BIGINT NOT NULL, `a.b` string, c double",
        "a boolean, b tinyint, c smallint, d int, e float, f double, g binary, h date, i timestamp",
        "y bigint COMMENT 'why'",
        "y varchar(3), z char(2)",
        "y decimal(6, 2), z array<int>, m map<string, struct<a: int>>",
        "y string COLLATE UTF8_LCASE",
        "y timestamp_ntz, z interval day to second",
        "struct<y: bigint>",
        "y bigint DEFAULT 5",
        "bigint",
        "y bigint,",
        "y nothing",
        "",
    ],
)
def test_parse_schema_equals_the_schema_of_create_dataframe(spark: SparkSession, ddl: str) -> None:
    try:
        expected = spark.createDataFrame([], ddl).schema
    except Exception:
        with pytest.raises(NotAStage):
            parse_schema(spark, ddl)
        return
    found = parse_schema(spark, ddl)
    assert found == expected
    assert found.json() == expected.json()


def test_invalid_schemas_outputs_and_stores_are_refused(
    spark: SparkSession, place: StageRig
) -> None:
    df = spark.range(5)
    for schema in ("y nonsense", "", "id bigint", "_seq bigint", 5, "y bigint, y string"):
        with pytest.raises(HoldfastError) as refused:
            place.stage(double, schema=schema).run(df)
        assert refused.value.fields["what"] == "schema"
    with pytest.raises(NotAStage) as refused_output:
        place.stage(double).run(df, output=5)  # type: ignore[arg-type]
    assert refused_output.value.fields["what"] == "output"
    for store in ("memory:", None, ""):
        with pytest.raises(NotAStage) as refused_store:
            place.stage(double, store=store).run(df)
        assert refused_store.value.fields["what"] == "store"
    with pytest.raises(HoldfastError):
        place.stage(double, store="ftp://x").run(df)
    with pytest.raises(NotFound):
        place.stage(double).resume(spark)
    with pytest.raises(NotFound):
        place.stage(double).cancel()
    assert "no run yet" in str(place.stage(double).explain())


def test_failing_input_raises_the_spark_error_and_a_rerun_succeeds(
    spark: SparkSession, place: StageRig
) -> None:
    broken = spark.range(5).select(
        F.expr("if(id = 3, raise_error('a bad file'), id)").cast("bigint").alias("id")
    )
    with pytest.raises(Exception, match="a bad file"):
        place.stage(double).run(broken, output=place.output)
    assert not Path(place.output).exists()
    with place.stage(double).run(spark.range(5), output=place.output) as run:
        assert run.counts()["COMMITTED"] == 5


# --- Delta --------------------------------------------------------------------------------------


def test_run_writes_rows_to_a_delta_table_once(spark: SparkSession, place: StageRig) -> None:
    from deltalake import DeltaTable

    stage = place.stage(double, file_rows=8)
    df = spark.range(20)
    with stage.run(df, output=DeltaSink(place.output)) as run:
        assert tuples(run.output()) == [(i, 2 * i) for i in range(20)]
    with stage.run(df, output=DeltaSink(place.output)) as run:
        assert run.counts()["COMMITTED"] == 20
    table = DeltaTable(place.output).to_pyarrow_table().sort_by("id")
    assert table.to_pydict() == {"id": list(range(20)), "y": list(range(0, 40, 2))}
