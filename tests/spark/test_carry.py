"""Input columns that are carried to the output: of every sink, of every form of a run, up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from holdfast.spark import Skip
from holdfast.spark.errors import NotAStage, RunChanged
from holdfast.spark.sinks import DeltaSink, ParquetSink
from tests.spark.test_stage import Place, note, tuples

pytestmark = pytest.mark.timeout(300)

COLUMNS = "id long, text string, n int, tags array<string>"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def rows(count: int, changes: dict[int, str] | None = None) -> list[Any]:
    text = {i: f"text {i}" for i in range(count)} | (changes or {})
    return [(i, text[i], i * 7, [text[i], "x"]) for i in sorted(text)]


def frame(spark: SparkSession, count: int, changes: dict[int, str] | None = None) -> DataFrame:
    return spark.createDataFrame(rows(count, changes), COLUMNS)


def listed(place: Place) -> list[Any]:
    """By a plain listing of the directory."""
    files = sorted(Path(place.output).glob("*.parquet"))
    found = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted(tuple(row.values()) for row in found)


def expected(given: list[Any]) -> list[Any]:
    return [(*row, row[0] * 2) for row in given]


def test_all_columns_are_carried(spark: SparkSession, place: Place) -> None:
    stage = place.stage(place.counting(), carry="*", file_rows=4)
    with stage.run(frame(spark, 10), output=place.output) as run:
        assert run.output().columns == ["id", "text", "n", "tags", "y"]
        assert tuples(run.output()) == expected(rows(10))
        assert listed(place) == expected(rows(10))
        run.write(DeltaSink(place.path / "delta"))
        written = DeltaTable(place.path / "delta").to_pyarrow_table().sort_by("id").to_pylist()
        assert [tuple(row.values()) for row in written] == expected(rows(10))
    # The same again: nothing is called.
    with stage.run(frame(spark, 10), output=place.output):
        assert len(place.calls()) == 10


def test_a_list_of_columns_is_carried_in_its_order(spark: SparkSession, place: Place) -> None:
    stage = place.stage(place.counting(), carry=["n", "id", "text"])
    with stage.run(frame(spark, 3)) as run:
        assert run.output().columns == ["id", "n", "text", "y"]
        assert tuples(run.output())[2] == (2, 14, "text 2", 4)


def test_the_bytes_of_carried_columns_count_for_the_size_of_a_file(
    spark: SparkSession, place: Place
) -> None:
    stage = place.stage(place.counting(), carry=["text"], file_bytes=250)
    with stage.run(frame(spark, 8, dict.fromkeys(range(8), "x" * 100)), output=place.output):
        assert len(list(Path(place.output).glob("*.parquet"))) == 4


@pytest.mark.parametrize(
    ("carry", "schema"),
    [
        ("*", "text string"),
        (["text"], "TEXT string"),
        (["nothing"], "y long"),
        ("text", "y long"),
        (["text", "Text"], "y long"),
        (3, "y long"),
    ],
)
def test_a_column_that_cannot_be_carried_is_refused_before_the_first_call(
    spark: SparkSession, place: Place, carry: Any, schema: str
) -> None:
    with pytest.raises(NotAStage) as told:
        place.stage(place.counting(), schema=schema, carry=carry).run(frame(spark, 3))
    assert told.value.what == "carry"
    with pytest.raises(NotAStage):
        place.stage(place.counting(), schema=schema, carry=carry)(frame(spark, 3))
    assert place.calls() == []


def test_a_carried_type_that_the_output_does_not_hold_is_refused_before_the_first_call(
    spark: SparkSession, place: Place
) -> None:
    df = frame(spark, 3).selectExpr("*", "time'10:00:00' as at")
    with pytest.raises(NotAStage, match="cannot read this type"):
        place.stage(place.counting(), carry="*").run(df, output=place.output)
    assert place.calls() == []


def test_another_carry_is_another_run(spark: SparkSession, place: Place) -> None:
    with place.stage(place.counting(), carry=["text"]).run(frame(spark, 3)):
        pass
    with pytest.raises(RunChanged) as told:
        place.stage(place.counting()).run(frame(spark, 3))
    assert told.value.what == "carry"


def test_the_lazy_form_carries_columns_of_failed_rows_too(
    spark: SparkSession, place: Place
) -> None:
    def work(row: Any) -> Any:
        if row.id == 1:
            raise ValueError("bad")
        return Skip("no") if row.id == 2 else {"y": row.id * 2}

    found = frame(spark, 4).transform(place.stage(work, carry=["text"], meta=True))
    assert [(row.id, row.text, row.y) for row in found.orderBy("id").collect()] == [
        (0, "text 0", 0),
        (1, "text 1", None),
        (2, "text 2", None),
        (3, "text 3", 6),
    ]
    plain = frame(spark, 4).transform(place.stage(place.counting(), name="plain", carry="*"))
    assert tuples(plain.orderBy("id")) == expected(rows(4))


def test_a_retry_carries_and_is_in_the_same_listing(spark: SparkSession, place: Place) -> None:
    log, mended = place.log, place.path / "mended"

    def work(row: Any) -> Any:
        note(log, row.id)
        if row.id % 4 == 1 and not mended.exists():
            raise ValueError("bad")
        return {"y": row.id * 2}

    stage = place.stage(work, carry="*", file_rows=3)
    with stage.run(frame(spark, 10), output=ParquetSink(place.output, grace_s=0)) as run:
        assert run.failed().count() == 3
        assert len(listed(place)) == 7
    mended.touch()
    sink = ParquetSink(place.output, grace_s=0)
    with stage.run(frame(spark, 10), output=sink, changed="extend") as run:
        assert tuples(run.output()) == listed(place) == expected(rows(10))
    assert len(place.calls()) == 13


def test_a_carried_column_that_is_not_matched_is_up_to_date_in_the_output(
    spark: SparkSession, place: Place
) -> None:
    """Its rows are not called again, and the file that has the old value does not stay."""
    stage = place.stage(place.counting(), carry=["text", "tags"], file_rows=3)
    sink = ParquetSink(place.output, grace_s=0)
    growth: Any = {"changed": "extend", "match": ["n"]}

    def want(changes: dict[int, str]) -> list[Any]:
        return [(i, text, tags, i * 2) for i, text, _, tags in rows(12, changes)]

    with stage.run(frame(spark, 12), output=sink, **growth):
        before = {file.name for file in Path(place.output).glob("*.parquet")}
    with stage.run(frame(spark, 12, {4: "new"}), output=sink, **growth) as run:
        assert tuples(run.output()) == listed(place) == want({4: "new"})
        after = {file.name for file in Path(place.output).glob("*.parquet")}
        assert len(before & after) == 3, "the other files stay"
    # Back again: the row lies in the first run, the file that has the new value does not stay.
    with stage.run(frame(spark, 12), output=sink, changed="extend") as run:
        assert tuples(run.output()) == listed(place) == want({})
    assert len(place.calls()) == 12


def test_a_new_input_column_joins_a_replaced_output_without_a_call(
    spark: SparkSession, place: Place
) -> None:
    stage = place.stage(place.counting(), carry="*")
    sink = ParquetSink(place.output, grace_s=0)
    growth: Any = {"changed": "extend", "match": ["text"]}
    with stage.run(frame(spark, 3).select("id", "text"), output=sink, **growth):
        pass
    with stage.run(frame(spark, 3).select("id", "text", "tags"), output=sink, **growth) as run:
        want = [(i, text, tags, i * 2) for i, text, _, tags in rows(3)]
        assert tuples(run.output()) == listed(place) == want
    assert len(place.calls()) == 3
