"""Cases: kinds of inputs, column types and row sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame

from holdfast.spark.errors import NotADataFrame
from tests.spark.odd_bench import Case, OddInputBench, ReferencedCase, append_call, counted

REFUSED_TYPE = "refused before the first call: `ColumnTypeUnsupported`"
REFUSED_SCHEMA = "refused before the first call: `NotAStage`"
TOO_LARGE = "refused before the first call: `RowTooLarge`"


# --- inputs ---------------------------------------------------------------------------------------


def a_streaming_input(bench: OddInputBench) -> str:
    df = bench.spark.readStream.format("rate").load().withColumnRenamed("value", "id")
    return bench.rejects(df)


def names_with_marks(bench: OddInputBench) -> str:
    """Column names that Spark parses as paths or patterns unless quoted, in every option that takes a name."""
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


def refusal_of_object(bench: OddInputBench, df: Any) -> str:
    """The error of `run` and of the lazy form, with the `use` field of its message."""
    refusals = set()
    for act in (bench.run, bench.stage(counted(bench.path))):
        with pytest.raises(NotADataFrame) as caught:
            act(df)
        assert "\n" not in str(caught.value)
        refusals.add(f"`{type(caught.value).__name__}`, use `{caught.value.fields['use']}`")
    [one] = refusals
    return f"refused before the first call: {one}"


def no_partitions(bench: OddInputBench) -> str:
    df = bench.spark.createDataFrame(bench.spark.sparkContext.emptyRDD(), "id bigint")
    assert df.rdd.getNumPartitions() == 0
    out = str(bench.path / "out")
    with bench.stage(counted(bench.path)).run(df, output=out) as run:
        found = bench.spark.read.parquet(out)
        assert (run.output().columns, found.columns) == (["id", "y"], ["id", "y"])
        return f"success: an output of {found.count()} rows, with its columns"


def tiny_partitions(bench: OddInputBench) -> str:
    with bench.run(bench.spark.range(0, 300, 1, 100)) as run:
        found = [row.id for row in run.output().collect()]
    assert found == list(range(300))
    return f"success: {len(found)} rows in the order of the key, {bench.calls()} calls"


INPUTS = [
    Case("a streaming DataFrame", "refused before the first call: `InputStreaming`", a_streaming_input),
    Case("a pandas DataFrame",
         "refused before the first call: `NotADataFrame`, use `spark.createDataFrame(df)`",
         lambda bench: refusal_of_object(bench, pd.DataFrame({"id": [1]}))),
    Case("a pandas-on-Spark DataFrame",
         "refused before the first call: `NotADataFrame`, use `df.to_spark()`",
         lambda bench: refusal_of_object(bench, bench.spark.range(2).pandas_api())),
    Case("a column with a name of ours (`_seq`)", "refused before the first call: `ColumnReserved`",
         lambda bench: bench.rejects(bench.spark.range(2).selectExpr("id", "id AS _seq"))),
    Case("names with a dot, a backtick or `*` (input, key, match, carry, result)",
         "success: column `a.b`", names_with_marks),
    ReferencedCase("an input without rows", "success: an output of 0 rows, with its columns",
          "spark/test_stage_output.py::test_an_output_without_rows_has_its_columns"),
    Case("an input of 0 partitions", "success: an output of 0 rows, with its columns", no_partitions),
    Case("100 partitions of 3 rows", "success: 300 rows in the order of the key, 300 calls",
         tiny_partitions),
]  # fmt: skip


# --- columns --------------------------------------------------------------------------------------


class ColumnCase:
    """An input column that the function returns unchanged. All columns share one run."""

    def __init__(self, given: str, got: str, value: str, kind: str) -> None:
        self.given = given
        self.outcome = f"success: `{got}` in the function, the same in the output"
        self.value = value
        self.kind = kind


COLUMNS = [
    ColumnCase("a struct", "Row", "named_struct('x', 1, 'y', 'a')", "struct<x: int, y: string>"),
    ColumnCase("an array", "list", "array(1, null)", "array<int>"),
    ColumnCase("a map", "dict", "map('k', 1)", "map<string, int>"),
    ColumnCase("binary", "bytes", "X'00FF'", "binary"),
    ColumnCase("a variant", "VariantVal", "parse_json('{\"a\": [1, null]}')", "variant"),
    ColumnCase("a decimal", "Decimal", "CAST('1234567890.125' AS DECIMAL(20, 3))", "decimal(20, 3)"),
    ColumnCase("a timestamp", "datetime", "TIMESTAMP '2026-10-25 00:30:00.000001'", "timestamp"),
    ColumnCase("a `timestamp_ntz`", "datetime", "TIMESTAMP_NTZ '2026-03-29 02:30:00.000001'", "timestamp_ntz"),
    ColumnCase("a day-time interval", "timedelta", "INTERVAL '1 02:03:04.5' DAY TO SECOND",
           "interval day to second"),
    ColumnCase("void", "NoneType", "NULL", "void"),
]  # fmt: skip


def run_columns(bench: OddInputBench) -> dict[int, str]:
    """By column index: the Python type in the function, and whether the output equals the input."""
    places = range(len(COLUMNS))
    values = [f"{column.value} AS c{at}" for at, column in enumerate(COLUMNS)]
    df = bench.spark.range(0, 1, 1, 1).selectExpr("id", *values)
    kinds = [f"r{at} {column.kind}" for at, column in enumerate(COLUMNS)]

    def work(row: Any) -> Any:
        got = [type(row[f"c{at}"]).__name__ for at in places]
        return {"got": got, **{f"r{at}": row[f"c{at}"] for at in places}}

    stage = bench.stage(work, schema=", ".join(["got array<string>", *kinds]))
    with stage.run(df, output=str(bench.path / "out")) as run:
        failures = [(row._error_class, row._error) for row in run.failed().collect()]
        assert not failures, failures
        found = run.output()
        assert found.schema["r4"].dataType.simpleString() == "variant"
        [row], [source] = found.collect(), df.collect()
    ends = {}
    for at in places:
        is_same = str(row[f"r{at}"]) == str(source[f"c{at}"])
        now = "the same" if is_same else f"`{row[f'r{at}']}`"
        ends[at] = f"success: `{row.got[at]}` in the function, {now} in the output"
    return ends


def a_column_of(bench: OddInputBench, value: str, **options: Any) -> str:
    """The outcome of a run over rows with a column `v` of this SQL value."""
    df = bench.spark.range(0, 2, 1, 1).selectExpr("id", f"{value} AS v")
    return text_of(bench, df, **options)


def text_of(bench: OddInputBench, df: DataFrame, **options: Any) -> str:
    """The outcome of a run whose function returns `str(row.v)`."""

    def work(row: Any) -> dict[str, str]:
        append_call(log)
        return {"y": f"{row.v}"}

    log = str(bench.path / "calls")
    outcomes: list[str] = []

    def act() -> None:
        with bench.run(df, work, schema="y string", **options) as run:
            outcomes.extend(f"success: `{row.y}`" for row in run.output().limit(1).collect())
            outcomes.extend(
                f"row fails as `{row._error_class}`: {row._error.partition(':')[0]}"
                for row in run.failed().limit(1).collect()
            )

    refused = bench.refused(act)
    return outcomes[0] if outcomes else refused


def a_vector(bench: OddInputBench) -> str:
    from pyspark.ml.linalg import Vectors

    rows = [(0, Vectors.dense([0.5, 1.5]))]
    return text_of(bench, bench.spark.createDataFrame(rows, ["id", "v"]))


def a_schema_of(bench: OddInputBench, kind: str) -> str:
    return bench.refused(lambda: bench.run(bench.spark.range(2), schema=f"t {kind}"))


def input_column(given: str, value: str, outcome: str) -> Case:
    return Case(given, outcome, lambda bench: a_column_of(bench, value))


INPUT_COLUMNS = [
    *(
        Case(column.given, column.outcome,
             lambda bench, at=at: bench.once("columns", run_columns)[at])  # type: ignore[misc]
        for at, column in enumerate(COLUMNS)
    ),
    Case("a `Vector` of MLlib (a user-defined type)",
         "success: `Row(type=1, size=None, indices=None, values=[0.5, 1.5])`", a_vector),
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
]  # fmt: skip


# --- sizes ----------------------------------------------------------------------------------------


def wide(bench: OddInputBench, *sizes: int) -> DataFrame:
    """One text row per size."""
    cases = " ".join(f"WHEN {at} THEN {size}" for at, size in enumerate(sizes))
    return bench.spark.range(0, len(sizes), 1, 1).selectExpr(
        "id", f"repeat('x', CASE id {cases} END) AS text"
    )


def large_rows(bench: OddInputBench) -> str:
    def work(row: Any) -> dict[str, int]:
        return {"y": len(row.text)}

    with bench.run(wide(bench, 10_000_000, 15_500_000), work) as run:
        return f"success: {', '.join(f'{row.y:,}' for row in run.output().collect())} characters"


def too_large_a_row(bench: OddInputBench, spool: Path | None = None) -> str:
    options = {} if spool is None else {"spool": str(spool)}
    df = wide(bench, 10, 20_000_000, 10)
    found = bench.rejects(df, **options)
    # A run of the same name without the large row succeeds.
    with bench.run(df.where("id != 1"), **options) as run:
        assert run.counts()["COMMITTED"] == 2
    return found


SIZES = [
    Case("input rows of 10 and 15.5 MB", "success: 10,000,000, 15,500,000 characters", large_rows),
    Case("an input row of 20 MB", TOO_LARGE, too_large_a_row),
    Case("an input row of 20 MB, with a spool", TOO_LARGE,
         lambda bench: too_large_a_row(bench, bench.path / "spool")),
]  # fmt: skip
