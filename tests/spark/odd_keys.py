"""Cases: ordered and unordered key types, and rows with a null or duplicate key."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame

from tests.spark.odd_bench import Case, OddInputBench

IN_ORDER = "success: rows in the order of the key"
REFUSED = "refused before the first call"


def ordered_case(given: str, columns: str, *rows: str, zone: str = "UTC") -> Case:
    """`rows` in the expected order. The run gets them reversed, from two partitions."""
    key = [name.strip() for name in columns.split(",")]
    return Case(given, IN_ORDER, lambda bench: key_order(bench, key, rows, zone))


def key_order(bench: OddInputBench, key: Sequence[str], rows: Sequence[str], zone: str) -> str:
    spark = bench.spark
    mixed = [f"({row}, {at}L)" for at, row in enumerate(rows)][::-1]
    names = ", ".join(f"`{name}`" for name in (*key, "n"))
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        df = spark.sql(f"SELECT * FROM VALUES {', '.join(mixed)} AS t({names})").repartition(2)
        with bench.run(df, number, key=list(key)) as run:
            found = [row.y for row in run.output().collect()]
            assert run.output().columns == [*key, "y"]
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))
    return IN_ORDER if found == list(range(len(rows))) else f"success: rows in the order {found}"


def number(row: Any) -> dict[str, Any]:
    return {"y": row.n}


def instant(text: str) -> str:
    return f"timestamp_seconds({int(dt.datetime.fromisoformat(text).timestamp())})"


def refused_type_case(given: str, value: str) -> Case:
    return Case(
        given, f"{REFUSED}: `KeyTypeUnsupported`",
        lambda bench: bench.rejects(bench.spark.sql(f"SELECT {value} AS k"), key="k"),
    )  # fmt: skip


def refused_rows_case(given: str, error: str, sql: str, key: Any, partitions: int = 1) -> Case:
    def frame(bench: OddInputBench) -> DataFrame:
        return bench.spark.range(0, 6, 1, partitions).selectExpr(*sql.split("; "))

    return Case(
        given, f"{REFUSED}: `{error}`", lambda bench: bench.rejects(frame(bench), key=key)
    )  # fmt: skip


KEYS = [
    ordered_case("a key of two columns", "name, part", "'', 7", "'a', 10", "'b', 1", "'b', 2", "'ä', 0"),
    ordered_case("a `decimal(38,10)` key", "k", *(
        f"CAST('{value}' AS DECIMAL(38,10))"
        for value in ("-1234567890123456789012345678.5", "-0.0000000001", "0", "0.0000000001", "9", "10",
                      "1234567890123456789012345678.5"))),
    # 00:30 UTC and 01:30 UTC are both 02:30 local time in Berlin.
    ordered_case("a timestamp key across the hour that a clock is set back", "k", *(
        instant(f"2026-10-25T{clock}:00+00:00") for clock in ("00:15", "00:30", "00:45", "01:15", "01:30")),
        zone="Europe/Berlin"),
    ordered_case("a `timestamp_ntz` key", "k", *(
        f"TIMESTAMP_NTZ '{text}'"
        for text in ("1969-12-31 23:59:59.999999", "2026-03-29 02:30:00", "2026-03-29 02:30:00.000001"))),
    ordered_case("a binary key", "k", *("X''", "X'00'", "X'00FF'", "X'7F'", "X'80'", "X'FF'")),
    ordered_case("a key of a boolean and a tinyint", "yes, small",
            "false, -128Y", "false, 127Y", "true, -1Y", "true, 0Y"),
    ordered_case("a key whose name is not ASCII", "größe_鍵", "1", "2", "3"),
    refused_rows_case("a null key", "KeyNull", "nullif(id, 3) AS k", "k"),
    refused_rows_case("a null in a key of two columns", "KeyNull", "id; nullif(id, 3) AS k", ["id", "k"]),
    refused_rows_case("a key twice in one partition", "KeyDuplicate", "id % 5 AS k", "k"),
    refused_rows_case("a key twice in different partitions", "KeyDuplicate", "id % 5 AS k", "k", 2),
    refused_type_case("a float key", "1.5F"),
    refused_type_case("a double key", "1.5D"),
    refused_type_case("a struct key", "named_struct('a', 1)"),
    refused_type_case("an array key", "array(1)"),
    refused_type_case("a map key", "map('a', 1)"),
    refused_type_case("a variant key", "parse_json('1')"),
    refused_type_case("a TIME key", "TIME '12:30:00'"),
    refused_type_case("an interval key", "INTERVAL '1' DAY"),
    refused_type_case("a key of text with a collation", "'a' COLLATE UTF8_LCASE"),
    refused_rows_case("a key in another case than the column (`DOC_ID`)", "KeyMissing", "id AS doc_id", "DOC_ID"),
    refused_rows_case("a key inside of a struct (`doc.id`)", "KeyMissing", "named_struct('id', id) AS doc",
                 "doc.id"),
]  # fmt: skip
