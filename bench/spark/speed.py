"""Time ratios, warm and in one session: a stage, and the same by `mapInArrow` + `write.parquet`.

Base and stage take turns, so that a machine that slows down half-way slows both. The stage's time is
all of `Stage.run`: the ingest of the input, the ledger, the calls, the ordered commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.spark import children
from bench.spark.calls import CALL_S, calls
from bench.spark.driver import Job
from bench.spark.faults import RUN_S, new_driver
from tests.process.watch import until
from tests.processes import ROOT

MASTER = "local[2]"
CONFIG = {
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
}
SCHEMA = "y bigint"
BASE_SCHEMA = "id long, y long"
PARTS = 8
CALLS = 10_000
CONCURRENCY = 32
SLOTS = 2
RESUME_ROWS = 4_000
WARM_ROWS = 20_000


class Figure(msgspec.Struct):
    """Times of base and stage, turn by turn, or of the stage alone with a goal in seconds."""

    name: str
    what: str
    stage_s: list[float]
    base_s: list[float] = []
    ratio_max: float = 0.0
    seconds_max: float = 0.0
    note: str = ""
    ok: bool = True

    @property
    def ratios(self) -> list[float]:
        return [stage / base for stage, base in zip(self.stage_s, self.base_s, strict=True)]

    @property
    def met(self) -> bool:
        if self.base_s:
            return self.ok and median(self.ratios) <= self.ratio_max
        return self.ok and median(self.stage_s) <= self.seconds_max

    @property
    def base_text(self) -> str:
        return f"{median(self.base_s):.2f} s" if self.base_s else "\u2013"

    @property
    def stage_text(self) -> str:
        return f"{median(self.stage_s):.2f} s" + (f", {self.note}" if self.note else "")

    @property
    def ratio_text(self) -> str:
        if not self.base_s:
            return "\u2013"
        ratios = self.ratios
        return f"{median(ratios):.2f} ({min(ratios):.2f} \u2026 {max(ratios):.2f})"

    @property
    def goal_text(self) -> str:
        if self.base_s:
            return f"\u2264 {self.ratio_max:g} \u00d7"
        return f"\u2264 {self.seconds_max:g} s" if self.seconds_max < 1e6 else "no work"

    @property
    def met_text(self) -> str:
        return "yes" if self.met else "NO"


# --- the functions, and the same for mapInArrow -------------------------------------------------


def doubled(table: pa.Table) -> pa.Table:
    return pa.table({"y": pc.multiply(table.column("id"), 2)})


def base_doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        ids = batch.column(0)
        yield pa.RecordBatch.from_arrays([ids, pc.multiply(ids, 2)], names=["id", "y"])


def double(row: Any) -> dict[str, int]:
    return {"y": row.id * 2}


def base_double(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark.sql import Row

    for batch in batches:
        rows = [Row(id=key) for key in batch.column(0).to_pylist()]
        yield pa.RecordBatch.from_pydict(
            {"id": [row.id for row in rows], "y": [double(row)["y"] for row in rows]}
        )


def wait(row: Any) -> dict[str, int]:
    time.sleep(CALL_S)
    return {"y": time.monotonic_ns()}


def base_wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark.sql import Row

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        for batch in batches:
            rows = [Row(id=key) for key in batch.column(0).to_pylist()]
            results = [result["y"] for result in pool.map(wait, rows)]
            yield pa.RecordBatch.from_pydict({"id": [row.id for row in rows], "y": results})


async def wait_async(row: Any) -> dict[str, int]:
    await asyncio.sleep(CALL_S)
    return {"y": time.monotonic_ns()}


def base_wait_async(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from pyspark.sql import Row

    async def all_of(rows: list[Any]) -> list[int]:
        slots = asyncio.Semaphore(CONCURRENCY)

        async def one(row: Any) -> int:
            async with slots:
                return (await wait_async(row))["y"]

        return list(await asyncio.gather(*map(one, rows)))

    for batch in batches:
        rows = [Row(id=key) for key in batch.column(0).to_pylist()]
        results = asyncio.run(all_of(rows))
        yield pa.RecordBatch.from_pydict({"id": [row.id for row in rows], "y": results})


# --- measuring ----------------------------------------------------------------------------------


class Compared(msgspec.Struct, frozen=True):
    """One piece of work, as a stage and without one."""

    what: str
    rows: int
    fn: Callable[..., Any]
    base: Callable[..., Any]
    ratio_max: float
    # The result is the end time of the call, so that the time from the first call to the last is known, too.
    phase: bool = False
    parts: int = PARTS
    options: dict[str, Any] = {}


def _sleeps(kind: str) -> str:
    return f"{CALLS:,} calls of 5 ms, {kind}, {SLOTS} tasks with concurrency {CONCURRENCY}"


COMPARED = {
    "batch_1m": Compared(
        "1,000,000 rows, a trivial batch function", 1_000_000, doubled, base_doubled, 3.0,
        options={"batch": True},
    ),
    "batch_10m": Compared(
        "10,000,000 rows, a trivial batch function", 10_000_000, doubled, base_doubled, 2.0,
        options={"batch": True},
    ),
    "records_1m": Compared(
        "1,000,000 rows, a trivial function of a row", 1_000_000, double, base_double, 1.3
    ),
    "calls_threads": Compared(
        what=_sleeps("`def`"), rows=CALLS, fn=wait, base=base_wait, ratio_max=1.15, phase=True, parts=SLOTS,
        options={"concurrency": CONCURRENCY},
    ),
    "calls_async": Compared(
        what=_sleeps("`async def`"), rows=CALLS, fn=wait_async, base=base_wait_async, ratio_max=1.15, phase=True, parts=SLOTS,
        options={"concurrency": CONCURRENCY},
    ),
}  # fmt: skip
METRICS = (*COMPARED, "resume", "children")


def measure(names: Sequence[str], directory: Path, until_s: float, turns: int) -> Iterator[Figure]:
    """Yields the figures of these metrics as they are measured."""
    if "resume" in names:
        yield from _resume(directory, turns)
    if "children" in names:
        yield _children(turns)
    compared = [name for name in COMPARED if name in names]
    if not compared:
        return
    with _session() as spark:
        for name in compared:
            if time.monotonic() > until_s:
                print(f"{name}: skipped, the budget is used up")
                continue
            yield _compare(spark, directory, name, COMPARED[name], turns)


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    from holdfast.spark.session import session

    # Spark's workers import this module.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    spark = session(MASTER, app="bench", config=CONFIG)
    try:
        yield spark
    finally:
        spark.stop()


def _compare(spark: Any, directory: Path, name: str, work: Compared, turns: int) -> Figure:
    # Warm-up of the workers, the children and the code paths of both sides.
    for rows in (work.rows if work.rows <= CALLS else WARM_ROWS,) * 2:
        _base(spark, directory, work, rows)
        _stage(spark, directory, f"{name}-warm-{time.monotonic_ns()}", work, rows)
    figure = Figure(name, work.what, [], ratio_max=work.ratio_max)
    phases: list[tuple[float, float]] = []
    for turn in range(turns):
        figure.base_s.append(_base(spark, directory, work, work.rows))
        figure.stage_s.append(_stage(spark, directory, f"{name}-{turn}", work, work.rows))
        if work.phase:
            phases.append((_phase(directory / "base"), _phase(directory / "output")))
    if work.phase:
        base, stage = (median(times) for times in zip(*phases, strict=True))
        figure.note = f"of which first call to last {stage:.2f} s beside {base:.2f} s"
    return figure


def _phase(output: Path) -> float:
    """The time from the first call to the last, by the results of the calls."""
    ended = pq.read_table(output, columns=["y"]).column("y")
    ends = pc.min_max(ended).as_py()
    return float(ends["max"] - ends["min"]) / 1e9 + CALL_S


def _base(spark: Any, directory: Path, work: Compared, rows: int) -> float:
    output = directory / "base"
    shutil.rmtree(output, ignore_errors=True)
    began = time.monotonic()
    df = spark.range(0, rows, 1, work.parts)
    df.mapInArrow(work.base, BASE_SCHEMA).write.parquet(str(output))
    return time.monotonic() - began


def _stage(spark: Any, directory: Path, name: str, work: Compared, rows: int) -> float:
    from holdfast.spark import Stage

    output = directory / "output"
    shutil.rmtree(output, ignore_errors=True)
    store = str(directory / "store")
    began = time.monotonic()
    df = spark.range(0, rows, 1, work.parts)
    made = Stage(
        name, work.fn, key="id", schema=SCHEMA, store=store, progress="quiet", **work.options
    )
    run = made.run(df, output=output)
    took_s = time.monotonic() - began
    with run:
        assert run.counts()["TERMINAL_SUCCESS"] == rows
    return took_s


def _children(turns: int) -> Figure:
    """Reports of 400 children at the ledger service, while 400 more wait for rows."""
    runs = [children.one(400, 400, 1000.0, 10.0) for _ in range(turns)]
    cores = median(measured.cores for measured in runs)
    reached = median(measured.reports_s for measured in runs)
    return Figure(
        "children",
        "p95 of a report of 32 rows: 400 children, 1,000 reports/s in all, 400 more wait for rows",
        [measured.p95_ms / 1000 for measured in runs],
        seconds_max=0.1,
        note=f"{reached:,.0f} reports/s, service {cores:.2f} cores",
    )


def _resume(directory: Path, turns: int) -> Iterator[Figure]:
    """From `Stage.run` after a kill to the end, without the calls. Then `run` of the finished run."""
    resumed = Figure(
        "resume",
        "resume after SIGKILL of the driver: until the run is over, less the calls that were left",
        [],
        seconds_max=5.0,
    )
    finished = Figure("finished", "run of a finished run", [], seconds_max=1e9, note="0 calls")
    for turn in range(turns):
        with contextlib.ExitStack() as stack:
            home = directory / f"resume-{turn}"
            home.mkdir()
            log = home / "calls.log"
            job = Job(
                how="stage",
                name=f"resume-{turn}",
                log=str(log),
                store=str(directory / "store"),
                output=str(home / "output"),
                rows=RESUME_ROWS,
            )
            first = new_driver(MASTER, CONFIG, stack)
            first.begin(job)
            until(lambda log=log: calls(log) >= RESUME_ROWS // 2, "calls", RUN_S)
            first.proc.kill()
            second = new_driver(MASTER, CONFIG, stack)
            before = calls(log)
            second.begin(job)
            done = second.end()
            after = calls(log)
            left_s = (after - before) * CALL_S / (job.concurrency * SLOTS)
            resumed.stage_s.append(done.wall_s - left_s)
            second.begin(job)
            finished.stage_s.append(second.end().wall_s)
            resumed.ok = resumed.ok and not done.error
            finished.ok = finished.ok and calls(log) == after
    yield resumed
    yield finished
