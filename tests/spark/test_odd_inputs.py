"""Odd inputs of a stage and odd results of its function, one case a row.

A case is what a user does (`given`), the outcome that is documented (`outcome`), and `observe`, which
does it on a real session and says what came of it in the same words. The test compares the two, and
`tools/odd_inputs.py` writes docs/spark-odd-inputs.md from `given` and `outcome`: a table of the docs
cannot say what the code does not do. Add a case to the list of its topic, then run `make docs`.

Cases of `RETURNED` share one run: each is one row of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast.errors import HoldfastError
from holdfast.spark import Run, Stage
from holdfast.spark.errors import NotADataFrame

pytestmark = pytest.mark.timeout(300)


class Case(NamedTuple):
    """`observe` gets the bench and answers with the outcome, in the words of `outcome`."""

    given: str
    outcome: str
    observe: Callable[[Bench], str]


@dataclass
class Bench:
    """A session, a directory of its own, and the run of the cases in `RETURNED`."""

    spark: SparkSession
    path: Path
    returned: dict[int, str]

    def stage(self, fn: Callable[..., Any], **options: Any) -> Stage:
        settings: dict[str, Any] = {
            "key": "id", "schema": "y bigint", "store": str(self.path / "data"), "progress": "quiet",
            **options,
        }  # fmt: skip
        return Stage("odd", fn, **settings)

    def refused(self, act: Callable[[], Any]) -> str:
        """The type and the code of the refusal; the calls that were made are counted in `calls`."""
        try:
            act()
        except HoldfastError as error:
            calls = self.path / "calls"
            made = len(calls.read_text()) if calls.exists() else 0
            when = "before the first call" if not made else f"after {made} calls"
            return f"refused {when}: `{type(error).__name__}`"
        return "not refused"

    def run(self, df: DataFrame, fn: Callable[..., Any] | None = None, **options: Any) -> Run:
        return self.stage(fn or counted(self.path), **options).run(df)


def counted(path: Path) -> Callable[[Any], dict[str, int]]:
    """A function that counts its calls in a file, one character a call."""
    log = str(path / "calls")

    def work(row: Any) -> dict[str, int]:
        with open(log, "a") as calls:
            calls.write(".")
        return {"y": 1}

    return work


# --- what a function returns ----------------------------------------------------------------------


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
    Returned("a result of 9 MB", "success: `9,000,000 characters`", lambda: only(s="x" * 9_000_000)),
    Returned("an exception that cannot be printed", "row fails as `input`", lambda: raised(Unspeakable())),
    Returned("`sys.exit()`", "row fails as `input`", lambda: sys.exit("no")),
    Returned("an `ExceptionGroup` of `TimeoutError`s", "row fails as `transient` after 2 tries",
             lambda: raised(ExceptionGroup("g", [TimeoutError(), TimeoutError()]))),
    Returned("`MemoryError`", "row fails as `resource` after 2 tries", lambda: raised(MemoryError())),
    Returned("a rate limit of a client library (429)", "row fails as `transient` after 2 tries",
             lambda: raised(RateLimited())),
]  # fmt: skip


def answer(row: Any) -> Any:
    return RETURNED[row.id].value()


def run_returned(spark: SparkSession, path: Path) -> dict[int, str]:
    """The outcome of every case of `RETURNED`, by its place in the list."""
    schema = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
    bench = Bench(spark, path, {})
    found: dict[int, str] = {}
    df = spark.range(0, len(RETURNED), 1, 1)
    with bench.stage(answer, schema=schema, attempts=2).run(df) as run:
        for row in run.output().collect():
            told = [shown(row[name]) for name in COLUMNS if row[name] is not None]
            found[row.id] = f"success: `{', '.join(told)}`"
        for row in run.failed().collect():
            tries = f" after {row._attempts} tries" if row._attempts > 1 else ""
            kept = ", `_raw` keeps it" if row._raw else ""
            found[row.id] = f"row fails as `{row._error_class}`{tries}{kept}"
    return found


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{len(text):,} characters"


# --- the table --------------------------------------------------------------------------------------


def a_streaming_input(bench: Bench) -> str:
    df = bench.spark.readStream.format("rate").load().withColumnRenamed("value", "id")
    return bench.refused(lambda: bench.run(df))


def a_column_of(bench: Bench, value: str, **options: Any) -> str:
    """A run over rows with a column `v` of this SQL value; the result is its text."""

    def work(row: Any) -> dict[str, str]:
        with open(log, "a") as calls:
            calls.write(".")
        return {"y": f"{row.v}"}

    log = str(bench.path / "calls")
    df = bench.spark.range(0, 2, 1, 1).selectExpr("id", f"{value} AS v")
    told: list[str] = []

    def act() -> None:
        with bench.run(df, work, schema="y string", **options) as run:
            told.extend(f"success: `{row.y}`" for row in run.output().limit(1).collect())
            told.extend(
                f"row fails as `{row._error_class}`: {row._error.partition(':')[0]}"
                for row in run.failed().limit(1).collect()
            )

    refused = bench.refused(act)
    return told[0] if told else refused


def a_schema_of(bench: Bench, kind: str) -> str:
    return bench.refused(lambda: bench.run(bench.spark.range(2), schema=f"t {kind}"))


def names_with_marks(bench: Bench) -> str:
    """Names that Spark takes for paths and patterns unless they are quoted, in each place of a name."""
    df = bench.spark.range(0, 40, 1, 2).selectExpr(
        "id % 2 AS `a.b`", "id AS `c``d`", "named_struct('x.y', map(id, id)) AS `p.q`", "id AS `*`"
    )
    stage = bench.stage(
        lambda row: {"r.s": row["c`d"] + row["p.q"]["x.y"][row["*"]]},
        key=["a.b", "c`d"],
        schema="`r.s` bigint",
        carry=["*"],
    )
    out = str(bench.path / "out")
    with stage.run(df, output=out, changed="extend", match=["p.q"]) as run:
        first = [tuple(row) for row in run.output().collect()]
    grown = df.where("`*` < 30")
    with stage.run(grown, output=out, changed="extend", match=["p.q", "*"]) as run:
        assert run.reused().count() == 30
        assert run.gone().count() == 10
        again = [tuple(row) for row in run.output().collect()]
    expected = sorted((i % 2, i, i, 2 * i) for i in range(40))
    assert first == expected, first
    assert again == [one for one in expected if one[1] < 30], again
    name = "a.b"
    return f"success: column `{name}`" if run.output().columns[0] == name else "renamed"


def an_object(bench: Bench, df: Any) -> str:
    """The refusal of `run` and of the lazy form, and what it says to use."""
    told = set()
    for act in (bench.run, bench.stage(counted(bench.path))):
        with pytest.raises(NotADataFrame) as caught:
            act(df)
        assert "\n" not in str(caught.value)
        told.add(f"`{type(caught.value).__name__}`, use `{caught.value.fields['use']}`")
    [one] = told
    return f"refused before the first call: {one}"


def input_column(given: str, value: str, outcome: str) -> Case:
    return Case(given, outcome, lambda bench: a_column_of(bench, value))


REFUSED_TYPE = "refused before the first call: `ColumnTypeUnsupported`"
REFUSED_SCHEMA = "refused before the first call: `NotAStage`"

INPUTS = [
    input_column("a calendar interval column", "make_interval(1, 2)", REFUSED_TYPE),
    input_column("a calendar interval in an array", "array(make_interval(1, 2))", REFUSED_TYPE),
    input_column("a year-month interval column", "INTERVAL '1-2' YEAR TO MONTH", REFUSED_TYPE),
    input_column(
        "a timestamp that Python has no value for", "TIMESTAMP '+12000-01-01 00:00:00'",
        "row fails as `input`: its input cannot be converted",
    ),
    Case('`schema="t time"`', REFUSED_SCHEMA, lambda bench: a_schema_of(bench, "time")),
    Case("`schema=` with a calendar interval", REFUSED_SCHEMA,
         lambda bench: a_schema_of(bench, "interval")),
    Case("a streaming DataFrame", "refused before the first call: `InputStreaming`", a_streaming_input),
    Case("names with a dot, a backtick or `*` (input, key, match, carry, result)",
         "success: column `a.b`", names_with_marks),
    Case("a pandas DataFrame",
         "refused before the first call: `NotADataFrame`, use `spark.createDataFrame(df)`",
         lambda bench: an_object(bench, pd.DataFrame({"id": [1]}))),
    Case("a pandas-on-Spark DataFrame",
         "refused before the first call: `NotADataFrame`, use `df.to_spark()`",
         lambda bench: an_object(bench, bench.spark.range(2).pandas_api())),
]  # fmt: skip

TOPICS: dict[str, list[Case]] = {
    "Input": INPUTS,
    "Results": [
        Case(one.given, one.outcome, lambda bench, at=at: bench.returned[at])  # type: ignore[misc]
        for at, one in enumerate(RETURNED)
    ],
}


@pytest.fixture(scope="module")
def returned(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return run_returned(spark, tmp_path_factory.mktemp("returned"))


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path, returned: dict[int, str]) -> Bench:
    return Bench(spark, tmp_path, returned)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{topic}: {case.given}")
        for topic, cases in TOPICS.items()
        for case in cases
    ],
)
def test_the_documented_outcome_is_the_one_that_is_seen(case: Case, bench: Bench) -> None:
    assert case.observe(bench) == case.outcome


def test_a_case_is_listed_once() -> None:
    for topic, cases in TOPICS.items():
        given = [case.given for case in cases]
        assert len(set(given)) == len(given), topic
