"""`python -m tests.spark.job_driver`: a Spark driver that runs sequential jobs until it is killed.

The first line of standard input defines the session, every later line is a `Job`, both in JSON.
`ready APP_ID` is printed after a warm-up on all executors. A warm-up also precedes each job. A job ends
with a line `done JSON`.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from typing import Any, Literal

import msgspec

from tests.spark.paid_calls import NAIVE_SCHEMA, SCHEMA, Naive, PaidCall

PR_SET_PDEATHSIG = 1
WARM_S = 60.0


class Session(msgspec.Struct):
    master: str
    config: dict[str, str]


class Job(msgspec.Struct):
    """`how`: naive and stage write an output. The ordered variants sort and self-join instead."""

    how: Literal["naive", "stage", "naive-ordered", "stage-ordered"]
    name: str
    log: str
    store: str
    output: str
    rows: int
    parts: int = 8
    shuffled: bool = False
    concurrency: int = 4
    flush_rows: int = 100
    file_rows: int = 500
    lease_s: float = 15
    tasks: int = 0
    slow_node: str = ""
    poison: list[int] = []
    mild: bool = False


class Done(msgspec.Struct):
    wall_s: float
    error: str = ""
    counts: dict[str, int] = {}
    reclaims: int = 0
    fenced: int = 0
    # Ordered jobs write the sorted answers to a file. This is the row count of the self-join.
    joined: int = 0


def main() -> None:
    from holdfast.spark.session import session

    # The parent may be killed. This process then gets SIGKILL, too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = msgspec.json.decode(sys.stdin.readline(), type=Session)
    spark = session(settings.master, app="bench", config=settings.config)
    slots = spark.sparkContext.defaultParallelism
    warm(spark, slots)
    print("ready", spark.sparkContext.applicationId, flush=True)
    for line in sys.stdin:
        # The previous job may have lost an executor. The warm-up keeps that cost out of this job.
        warm(spark, slots)
        done = do(spark, msgspec.json.decode(line, type=Job))
        print("done", msgspec.json.encode(done).decode(), flush=True)
    spark.stop()


def warm(spark: Any, slots: int) -> None:
    """Wait until each slot has an executor with a Python worker. On a cluster an executor has one slot."""
    context = spark.sparkContext
    if not str(context.master).startswith("local"):
        until = time.monotonic() + WARM_S
        while _executors(context) < slots and time.monotonic() < until:
            time.sleep(0.1)
    spark.range(0, 4 * slots, 1, 4 * slots).mapInArrow(_nothing, "id long").collect()


def _executors(context: Any) -> int:
    """Executors that have registered. Spark's table also lists the driver."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1


def do(spark: Any, job: Job) -> Done:
    paid = PaidCall(job.log, job.slow_node, frozenset(job.poison), job.mild)
    df = spark.range(0, job.rows, 1, job.parts)
    if job.shuffled:
        df = df.repartition(job.parts)
    began = time.monotonic()
    try:
        if job.how == "naive":
            naive = df.mapInArrow(Naive(paid, job.concurrency), NAIVE_SCHEMA)
            naive.write.mode("overwrite").parquet(job.output)
            return Done(time.monotonic() - began)
        if job.how == "stage":
            return _run(job, paid, df, began)
        return _ordered(job, paid, df, began)
    except Exception as error:
        return Done(time.monotonic() - began, _first_line(error))


def _run(job: Job, paid: PaidCall, df: Any, began: float) -> Done:
    with stage_of(job, paid).run(df, output=job.output) as run:
        wall_s = time.monotonic() - began
        progress = run.progress()
        return Done(wall_s, "", run.counts(), progress.reclaims, progress.fenced)


def _ordered(job: Job, paid: PaidCall, df: Any, began: float) -> Done:
    """Sort by the answer into a file, and self-join. Spark evaluates the input at least three times."""
    if job.how == "naive-ordered":
        made = df.mapInArrow(Naive(paid, job.concurrency), NAIVE_SCHEMA)
    else:
        made = df.transform(stage_of(job, paid))
    made.orderBy("answer").coalesce(1).write.mode("overwrite").parquet(job.output)
    joined = made.alias("a").join(made.alias("b"), "id").count()
    return Done(time.monotonic() - began, joined=joined)


def stage_of(job: Job, paid: PaidCall) -> Any:
    from holdfast.spark import Stage

    return Stage(
        job.name,
        paid,
        key="id",
        schema=SCHEMA,
        store=job.store,
        concurrency=job.concurrency,
        flush_rows=job.flush_rows,
        file_rows=job.file_rows,
        lease_s=job.lease_s,
        tasks=job.tasks,
        progress="quiet",
    )


def _nothing(batches: Any) -> Any:
    yield from batches


def _first_line(error: Exception) -> str:
    from holdfast.spark.spark_jobs import error_reason

    return f"{type(error).__name__}: {error_reason(error)}"[:300]


if __name__ == "__main__":
    main()
