"""What functions return, raise, and do to their process.

Cases of `RETURNED` share one run, and those of `DEADLY` another: each is one row of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from tests.spark.odd_bench import Bench, Case, Named, ends_of

# --- one row of a run each ------------------------------------------------------------------------


class Returned(NamedTuple):
    """`value` makes what the function returns, in the child."""

    given: str
    outcome: str
    value: Callable[[], Any]


# The columns that the function of this run may fill; what it leaves out of `only` is null.
COLUMNS = {
    "s": "string",
    "i": "int",
    "d": "double",
    "a": "array<float>",
    "p": "struct<x: int, y: string>",
    "t": "timestamp_ntz",
    "n": "decimal(10,2)",
}
KEPT = "row fails as `schema`, `_raw` keeps it"


def only(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(COLUMNS), **values}


@dataclass
class Point:
    x: int
    y: str


@dataclass
class Answer:
    s: str
    i: int | None = None
    d: float | None = None
    a: Any = None
    p: Any = None
    t: Any = None
    n: Any = None
    more: str = "left out"


class Mute:
    def __repr__(self) -> str:
        raise ValueError("mute")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("mute")


class RateLimited(Exception):
    status_code = 429


def raised(error: BaseException) -> Any:
    raise error


def without_end(depth: int = 0) -> int:
    return without_end(depth + 1) + 1


def printed() -> dict[str, Any]:
    print("x" * 1_000_000)
    return only(i=1)


def from_stdin() -> dict[str, Any]:
    return only(i=len(sys.stdin.read()))


def forked() -> dict[str, Any]:
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    return only(i=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def pooled() -> dict[str, Any]:
    with ProcessPoolExecutor(2) as pool:
        return only(i=sum(pool.map(abs, [-1, 2])))


RETURNED = [
    Returned("a str for `string`", "success: `a`", lambda: only(s="a")),
    Returned("an int for `string`", KEPT, lambda: only(s=1)),
    Returned("a str for `int`", KEPT, lambda: only(i="1")),
    Returned("`2.0` for `int`", "success: `2`", lambda: only(i=2.0)),
    Returned("`2.5` for `int`", KEPT, lambda: only(i=2.5)),
    Returned("an int beyond 32 bits for `int`", KEPT, lambda: only(i=1 << 40)),
    Returned("an int for `double`", "success: `3.0`", lambda: only(d=3)),
    Returned("`2**53 + 1` for `double`", KEPT, lambda: only(d=2**53 + 1)),
    Returned("a NumPy scalar", "success: `0.5`", lambda: only(d=np.float32(0.5))),
    Returned("an `ndarray` for `array<float>`", "success: `[0.5, 1.5]`",
             lambda: only(a=np.array([0.5, 1.5]))),
    Returned("a two-dimensional `ndarray` for `array<float>`", KEPT,
             lambda: only(a=np.zeros((2, 2)))),
    Returned("a float that overflows `float`", KEPT, lambda: only(a=[1e39])),
    Returned("a dataclass for a struct", "success: `Row(x=1, y='a')`", lambda: only(p=Point(1, "a"))),
    Returned("a dict with other fields, too", "success: `Row(x=1, y='a')`",
             lambda: only(p={"y": "a", "z": 0, "x": 1})),
    Returned("a dict without a field of the struct", KEPT, lambda: only(p={"x": 1})),
    Returned("a dataclass for the whole result", "success: `b`", lambda: Answer(s="b")),
    Returned("a result with a column that the schema has not", "success: `c`",
             lambda: {**only(s="c"), "more": 1}),
    Returned("a result without a column", KEPT, lambda: {"s": "d"}),
    Returned("a pandas Timestamp with nanoseconds", KEPT, lambda: only(t=pd.Timestamp(1))),
    Returned("an int for `decimal`", "success: `7.00`", lambda: only(n=7)),
    Returned("a float for `decimal`", KEPT, lambda: only(n=7.5)),
    Returned("an object that cannot be printed", KEPT, lambda: only(s=Mute())),
    Returned("`None`, a str, a number as the whole result", KEPT, lambda: 5),
    Returned("a result of 7 MB", "success: `7,000,000 characters`", lambda: only(s="x" * 7_000_000)),
    Returned("a result of 9 MB", "success: `9,000,000 characters`", lambda: only(s="x" * 9_000_000)),
    Returned("a result above 64 MiB", "row fails as `schema`, `_raw` keeps its beginning",
             lambda: only(s="x" * (65 << 20))),
    Returned("an exception that cannot be printed", "row fails as `input`", lambda: raised(Unspeakable())),
    Returned("`sys.exit()`", "row fails as `input`", lambda: sys.exit("no")),
    Returned("`KeyboardInterrupt`", "row fails as `input`", lambda: raised(KeyboardInterrupt())),
    Returned("a recursion without end (`RecursionError`)", "row fails as `input`", without_end),
    Returned("`StopIteration`", "row fails as `input`", lambda: next(iter(()))),
    Returned("an `ExceptionGroup` of `TimeoutError`s", "row fails as `transient` after 2 tries",
             lambda: raised(ExceptionGroup("g", [TimeoutError(), TimeoutError()]))),
    Returned("`MemoryError`", "row fails as `resource` after 2 tries", lambda: raised(MemoryError())),
    Returned("a rate limit of a client library (429)", "row fails as `transient` after 2 tries",
             lambda: raised(RateLimited())),
    Returned("a print of 1 MB", "success: `1`", printed),
    Returned("a function that reads stdin", "success: `0`", from_stdin),
    Returned("a fork in the function", "success: `3`", forked),
    Returned("a `ProcessPoolExecutor` in the function", "success: `3`", pooled),
]  # fmt: skip


def answer(row: Any) -> Any:
    return RETURNED[row.id].value()


def run_returned(bench: Bench) -> dict[int, str]:
    """The outcome of every case of `RETURNED`, by its place in the list."""
    schema = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    df = bench.spark.range(0, len(RETURNED), 1, 1)
    with bench.stage(answer, schema=schema, attempts=2).run(df) as run:
        return ends_of(run, lambda row: ", ".join(
            shown(row[name]) for name in COLUMNS if row[name] is not None
        ))  # fmt: skip


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{len(text):,} characters"


# --- functions that end their process -------------------------------------------------------------

DEADLY: dict[int, tuple[str, Callable[[], Any]]] = {
    2: ("`os._exit(0)`", lambda: os._exit(0)),
    5: ("a segmentation fault", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
}


def deadly(row: Any) -> Any:
    if row.id in DEADLY:
        DEADLY[row.id][1]()
    return {"y": row.id}


def run_deadly(bench: Bench) -> dict[int, str]:
    df = bench.spark.range(0, 20, 1, 1)
    with bench.stage(deadly, attempts=2).run(df) as run:
        found = ends_of(run, lambda row: str(row.y))
    others = [found[n] == f"success: `{n}`" for n in range(20) if n not in DEADLY]
    told = "the others succeed" if all(others) else "others fail, too"
    return {n: f"{found[n]}, {told}" for n in DEADLY}


# --- functions that cannot be taken along ---------------------------------------------------------


def with_a_lock(bench: Bench) -> Callable[[Any], Any]:
    lock = threading.Lock()

    def work(row: Any) -> Any:
        with lock:
            return {"y": 1}

    return work


def with_a_session(bench: Bench) -> Callable[[Any], Any]:
    spark = bench.spark
    return lambda row: {"y": spark.range(3).count()}


def not_taken(given: str, make: Callable[[Bench], Callable[[Any], Any]]) -> Case:
    return Case(
        given, "refused before the first call: `NotPicklable`",
        lambda bench: bench.refused(lambda: bench.run(bench.spark.range(2), make(bench))),
    )  # fmt: skip


# --- batches --------------------------------------------------------------------------------------


def a_batch(bench: Bench, fn: Callable[[pa.Table], Any]) -> str:
    """How the three rows of a batch end, if they end alike."""
    with bench.run(bench.spark.range(0, 3, 1, 1), fn, batch=True, tasks=1) as run:
        found = ends_of(run, lambda row: str(row.y))
    ends = {text.replace(", `_raw` keeps it", "") for text in found.values()}
    [one] = ends
    return f"{len(found)} rows: {one}"


def shorter(table: pa.Table) -> pa.Table:
    return pa.table({"y": [1]})


def of_pandas(table: pa.Table) -> Any:
    return pd.DataFrame({"y": [5] * table.num_rows})


TIMED_OUT = (
    "test_time_outs.py::test_a_call_out_of_time_fails_alone_and_costs_its_neighbours_nothing"
)
OUT_OF_TIME = (
    "row is tried again as `transient`: `TimeoutError: timed out`, calls beside it are not repeated"
)

RESULTS = [
    Case(one.given, one.outcome, lambda bench, at=at: bench.once("returned", run_returned)[at])  # type: ignore[misc]
    for at, one in enumerate(RETURNED)
]

FUNCTIONS: list[Case | Named] = [
    *(
        Case(given, "row fails as `lease_expired` after 2 tries, the others succeed",
             lambda bench, at=at: bench.once("deadly", run_deadly)[at])  # type: ignore[misc]
        for at, (given, _) in DEADLY.items()
    ),
    Named("a call that holds the GIL for longer than `lease_s`", "success, called once",
          "test_time_outs.py::test_a_call_that_holds_the_gil_keeps_its_lease"),
    Named("a `def` that is silent for longer than `timeout_s`", OUT_OF_TIME, TIMED_OUT),
    Named("an `async def` that blocks its loop for longer than `timeout_s`", OUT_OF_TIME, TIMED_OUT),
    Named("a call that is out of time at every try",
          "row fails: `TimeoutError: timed out: no end and no progress for timeout_s=…`",
          "test_time_outs.py::test_a_call_that_is_out_of_time_at_every_try_says_so"),
    not_taken("a lock in the closure", with_a_lock),
    not_taken("a SparkSession in the closure", with_a_session),
    Case("a batch with another number of rows", "3 rows: row fails as `schema`",
         lambda bench: a_batch(bench, shorter)),
    Case("a batch that is a pandas DataFrame", "3 rows: success: `5`",
         lambda bench: a_batch(bench, of_pandas)),
]  # fmt: skip
