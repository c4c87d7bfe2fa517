"""Cases: return values and exceptions of functions, and functions that kill their process.

All cases of `RETURNED` share one run, all cases of `DEADLY` another one. Each case is one row.
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

from tests.spark.odd_bench import Case, OddInputBench, ReferencedCase, row_outcomes

# --- one row of a run per case --------------------------------------------------------------------


class ReturnCase(NamedTuple):
    """`value` builds the function's return value in the child process."""

    given: str
    outcome: str
    value: Callable[[], Any]


# Result columns of this run. `only` sets the columns that it is not given to null.
COLUMNS = {
    "s": "string",
    "i": "int",
    "d": "double",
    "a": "array<float>",
    "p": "struct<x: int, y: string>",
    "t": "timestamp_ntz",
    "n": "decimal(10,2)",
}
RAW_KEPT = "row fails as `schema`, `_raw` keeps it"


def only(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(COLUMNS), **values}


@dataclass
class StructDataclass:
    x: int
    y: str


@dataclass
class RowDataclass:
    s: str
    i: int | None = None
    d: float | None = None
    a: Any = None
    p: Any = None
    t: Any = None
    n: Any = None
    more: str = "left out"


class WithoutRepr:
    def __repr__(self) -> str:
        raise ValueError("mute")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise ValueError("mute")


class RateLimited(Exception):
    status_code = 429


def raise_error(error: BaseException) -> Any:
    raise error


def recurse_forever(depth: int = 0) -> int:
    return recurse_forever(depth + 1) + 1


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
    ReturnCase("a str for `string`", "success: `a`", lambda: only(s="a")),
    ReturnCase("an int for `string`", RAW_KEPT, lambda: only(s=1)),
    ReturnCase("a str for `int`", RAW_KEPT, lambda: only(i="1")),
    ReturnCase("`2.0` for `int`", "success: `2`", lambda: only(i=2.0)),
    ReturnCase("`2.5` for `int`", RAW_KEPT, lambda: only(i=2.5)),
    ReturnCase("an int beyond 32 bits for `int`", RAW_KEPT, lambda: only(i=1 << 40)),
    ReturnCase("an int for `double`", "success: `3.0`", lambda: only(d=3)),
    ReturnCase("`2**53 + 1` for `double`", RAW_KEPT, lambda: only(d=2**53 + 1)),
    ReturnCase("a NumPy scalar", "success: `0.5`", lambda: only(d=np.float32(0.5))),
    ReturnCase("an `ndarray` for `array<float>`", "success: `[0.5, 1.5]`",
             lambda: only(a=np.array([0.5, 1.5]))),
    ReturnCase("a two-dimensional `ndarray` for `array<float>`", RAW_KEPT,
             lambda: only(a=np.zeros((2, 2)))),
    ReturnCase("a float that overflows `float`", RAW_KEPT, lambda: only(a=[1e39])),
    ReturnCase("a dataclass for a struct", "success: `Row(x=1, y='a')`", lambda: only(p=StructDataclass(1, "a"))),
    ReturnCase("a dict with other fields, too", "success: `Row(x=1, y='a')`",
             lambda: only(p={"y": "a", "z": 0, "x": 1})),
    ReturnCase("a dict without a field of the struct", RAW_KEPT, lambda: only(p={"x": 1})),
    ReturnCase("a dataclass for the whole result", "success: `b`", lambda: RowDataclass(s="b")),
    ReturnCase("a result with a column that the schema has not", "success: `c`",
             lambda: {**only(s="c"), "more": 1}),
    ReturnCase("a result without a column", RAW_KEPT, lambda: {"s": "d"}),
    ReturnCase("a pandas Timestamp with nanoseconds", RAW_KEPT, lambda: only(t=pd.Timestamp(1))),
    ReturnCase("an int for `decimal`", "success: `7.00`", lambda: only(n=7)),
    ReturnCase("a float for `decimal`", RAW_KEPT, lambda: only(n=7.5)),
    ReturnCase("an object that cannot be printed", RAW_KEPT, lambda: only(s=WithoutRepr())),
    ReturnCase("`None`, a str, a number as the whole result", RAW_KEPT, lambda: 5),
    ReturnCase("a result of 7 MB", "success: `7,000,000 characters`", lambda: only(s="x" * 7_000_000)),
    ReturnCase("a result of 9 MB", "success: `9,000,000 characters`", lambda: only(s="x" * 9_000_000)),
    ReturnCase("a result above 64 MiB", "row fails as `schema`, `_raw` keeps its beginning",
             lambda: only(s="x" * (65 << 20))),
    ReturnCase("an exception that cannot be printed", "row fails as `input`", lambda: raise_error(UnprintableError())),
    ReturnCase("`sys.exit()`", "row fails as `input`", lambda: sys.exit("no")),
    ReturnCase("`KeyboardInterrupt`", "row fails as `input`", lambda: raise_error(KeyboardInterrupt())),
    ReturnCase("a recursion without end (`RecursionError`)", "row fails as `input`", recurse_forever),
    ReturnCase("`StopIteration`", "row fails as `input`", lambda: next(iter(()))),
    ReturnCase("an `ExceptionGroup` of `TimeoutError`s", "row fails as `transient` after 2 tries",
             lambda: raise_error(ExceptionGroup("g", [TimeoutError(), TimeoutError()]))),
    ReturnCase("`MemoryError`", "row fails as `resource` after 2 tries", lambda: raise_error(MemoryError())),
    ReturnCase("a rate limit of a client library (429)", "row fails as `transient` after 2 tries",
             lambda: raise_error(RateLimited())),
    ReturnCase("a print of 1 MB", "success: `1`", printed),
    ReturnCase("a function that reads stdin", "success: `0`", from_stdin),
    ReturnCase("a fork in the function", "success: `3`", forked),
    ReturnCase("a `ProcessPoolExecutor` in the function", "success: `3`", pooled),
]  # fmt: skip


def return_case(row: Any) -> Any:
    return RETURNED[row.id].value()


def run_returned(bench: OddInputBench) -> dict[int, str]:
    """The outcome of every case of `RETURNED`, by its index in the list."""
    schema = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    df = bench.spark.range(0, len(RETURNED), 1, 1)
    with bench.stage(return_case, schema=schema, attempts=2).run(df) as run:
        return row_outcomes(run, lambda row: ", ".join(
            short_text(row[name]) for name in COLUMNS if row[name] is not None
        ))  # fmt: skip


def short_text(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{len(text):,} characters"


# --- functions that kill their process ------------------------------------------------------------

DEADLY: dict[int, tuple[str, Callable[[], Any]]] = {
    2: ("`os._exit(0)`", lambda: os._exit(0)),
    5: ("a segmentation fault", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
}


def deadly(row: Any) -> Any:
    if row.id in DEADLY:
        DEADLY[row.id][1]()
    return {"y": row.id}


def run_deadly(bench: OddInputBench) -> dict[int, str]:
    df = bench.spark.range(0, 20, 1, 1)
    with bench.stage(deadly, attempts=2).run(df) as run:
        outcomes = row_outcomes(run, lambda row: str(row.y))
    others = [outcomes[n] == f"success: `{n}`" for n in range(20) if n not in DEADLY]
    others_text = "the other rows succeed" if all(others) else "others fail, too"
    return {n: f"{outcomes[n]}, {others_text}" for n in DEADLY}


# --- functions that cannot be pickled -------------------------------------------------------------


def with_a_lock(bench: OddInputBench) -> Callable[[Any], Any]:
    lock = threading.Lock()

    def work(row: Any) -> Any:
        with lock:
            return {"y": 1}

    return work


def with_a_session(bench: OddInputBench) -> Callable[[Any], Any]:
    spark = bench.spark
    return lambda row: {"y": spark.range(3).count()}


def not_picklable_case(given: str, make: Callable[[OddInputBench], Callable[[Any], Any]]) -> Case:
    return Case(
        given, "refused before the first call: `NotPicklable`",
        lambda bench: bench.refused(lambda: bench.run(bench.spark.range(2), make(bench))),
    )  # fmt: skip


# --- batches --------------------------------------------------------------------------------------


def batch_outcome(bench: OddInputBench, fn: Callable[[pa.Table], Any]) -> str:
    """The common outcome of the three rows of a batch."""
    with bench.run(bench.spark.range(0, 3, 1, 1), fn, batch=True, tasks=1) as run:
        outcomes = row_outcomes(run, lambda row: str(row.y))
    ends = {text.replace(", `_raw` keeps it", "") for text in outcomes.values()}
    [one] = ends
    return f"{len(outcomes)} rows: {one}"


def return_fewer_rows(table: pa.Table) -> pa.Table:
    return pa.table({"y": [1]})


def return_pandas(table: pa.Table) -> Any:
    return pd.DataFrame({"y": [5] * table.num_rows})


TIMEOUT_TEST = "ledger_service/test_timeouts.py::test_call_timeout_repeats_only_the_timed_out_call"
TIMEOUT_OUTCOME = (
    "row is tried again as `transient`: `TimeoutError: timed out`, calls beside it are not repeated"
)

RESULTS = [
    Case(one.given, one.outcome, lambda bench, at=at: bench.once("returned", run_returned)[at])  # type: ignore[misc]
    for at, one in enumerate(RETURNED)
]

FUNCTIONS: list[Case | ReferencedCase] = [
    *(
        Case(given, "row fails as `lease_expired` after 2 tries, the other rows succeed",
             lambda bench, at=at: bench.once("deadly", run_deadly)[at])  # type: ignore[misc]
        for at, (given, _) in DEADLY.items()
    ),
    ReferencedCase("a call that holds the GIL for longer than `lease_s`", "success, called once",
          "ledger_service/test_timeouts.py::test_a_call_that_holds_the_gil_keeps_its_lease"),
    ReferencedCase("a `def` that is silent for longer than `timeout_s`", TIMEOUT_OUTCOME, TIMEOUT_TEST),
    ReferencedCase("an `async def` that blocks its loop for longer than `timeout_s`", TIMEOUT_OUTCOME, TIMEOUT_TEST),
    ReferencedCase("a call that is out of time at every try",
          "row fails: `TimeoutError: timed out: no end and no progress for timeout_s=…`",
          "ledger_service/test_timeouts.py::test_call_timeout_at_every_attempt_fails_the_row"),
    not_picklable_case("a lock in the closure", with_a_lock),
    not_picklable_case("a SparkSession in the closure", with_a_session),
    Case("a batch with another number of rows", "3 rows: row fails as `schema`",
         lambda bench: batch_outcome(bench, return_fewer_rows)),
    Case("a batch that is a pandas DataFrame", "3 rows: success: `5`",
         lambda bench: batch_outcome(bench, return_pandas)),
]  # fmt: skip
