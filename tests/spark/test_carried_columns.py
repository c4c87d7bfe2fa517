"""Carried columns: input columns that a stage copies to its output, in every sink and form of a run."""

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
from tests.spark.row_functions import append_line
from tests.spark.test_stage import StageRig, tuples

pytestmark = pytest.mark.timeout(300)

COLUMNS = "id long, text string, n int, tags array<string>"


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


def rows(count: int, changes: dict[int, str] | None = None) -> list[Any]:
    text = {i: f"text {i}" for i in range(count)} | (changes or {})
    return [(i, text[i], i * 7, [text[i], "x"]) for i in sorted(text)]


def frame(spark: SparkSession, count: int, changes: dict[int, str] | None = None) -> DataFrame:
    return spark.createDataFrame(rows(count, changes), COLUMNS)


def listed_rows(place: StageRig) -> list[Any]:
    """The rows of all Parquet files in the output directory."""
    files = sorted(Path(place.output).glob("*.parquet"))
    rows_found = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted(tuple(row.values()) for row in rows_found)


def expected(given: list[Any]) -> list[Any]:
    return [(*row, row[0] * 2) for row in given]


def test_carry_star_carries_all_columns(spark: SparkSession, place: StageRig) -> None:
    stage = place.stage(place.counting_function(), carry="*", file_rows=4)
    with stage.run(frame(spark, 10), output=place.output) as run:
        assert run.output().columns == ["id", "text", "n", "tags", "y"]
        assert tuples(run.output()) == expected(rows(10))
        assert listed_rows(place) == expected(rows(10))
        run.write(DeltaSink(place.path / "delta"))
        written = DeltaTable(place.path / "delta").to_pyarrow_table().sort_by("id").to_pylist()
        assert [tuple(row.values()) for row in written] == expected(rows(10))
    # A repeated run makes no call.
    with stage.run(frame(spark, 10), output=place.output):
        assert len(place.calls()) == 10


def test_carry_list_keeps_its_column_order(spark: SparkSession, place: StageRig) -> None:
    stage = place.stage(place.counting_function(), carry=["tags", "text", "id", "n"])
    with stage.run(frame(spark, 3)) as run:
        assert run.output().columns == ["id", "tags", "text", "n", "y"]
        row = tuples(run.output())[2]
        assert (row[0], *row[2:]) == (2, "text 2", 14, 4)


def test_bytes_of_carried_columns_count_for_file_bytes(
    spark: SparkSession, place: StageRig
) -> None:
    stage = place.stage(place.counting_function(), carry=["text"], file_bytes=250)
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
def test_invalid_carry_is_refused_before_the_first_call(
    spark: SparkSession, place: StageRig, carry: Any, schema: str
) -> None:
    with pytest.raises(NotAStage) as raised:
        place.stage(place.counting_function(), schema=schema, carry=carry).run(frame(spark, 3))
    assert raised.value.what == "carry"
    with pytest.raises(NotAStage):
        place.stage(place.counting_function(), schema=schema, carry=carry)(frame(spark, 3))
    assert place.calls() == []


def test_carried_type_unsupported_by_the_sink_is_refused_before_the_first_call(
    spark: SparkSession, place: StageRig
) -> None:
    df = frame(spark, 3).selectExpr("*", "time'10:00:00' as at")
    with pytest.raises(NotAStage, match="cannot read this type"):
        place.stage(place.counting_function(), carry="*").run(df, output=place.output)
    assert place.calls() == []


def test_changed_carry_raises_run_changed(spark: SparkSession, place: StageRig) -> None:
    with place.stage(place.counting_function(), carry=["text"]).run(frame(spark, 3)):
        pass
    with pytest.raises(RunChanged) as raised:
        place.stage(place.counting_function()).run(frame(spark, 3))
    assert raised.value.what == "carry"


def test_lazy_form_carries_columns_of_failed_rows(spark: SparkSession, place: StageRig) -> None:
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
    plain = frame(spark, 4).transform(
        place.stage(place.counting_function(), name="plain", carry="*")
    )
    assert tuples(plain.orderBy("id")) == expected(rows(4))


def test_retry_carries_columns_into_the_same_output(spark: SparkSession, place: StageRig) -> None:
    log, fixed = place.log, place.path / "mended"

    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id % 4 == 1 and not fixed.exists():
            raise ValueError("bad")
        return {"y": row.id * 2}

    stage = place.stage(work, carry="*", file_rows=3)
    with stage.run(frame(spark, 10), output=ParquetSink(place.output, grace_s=0)) as run:
        assert run.failed().count() == 3
        assert len(listed_rows(place)) == 7
    fixed.touch()
    sink = ParquetSink(place.output, grace_s=0)
    with stage.run(frame(spark, 10), output=sink, changed="extend") as run:
        assert tuples(run.output()) == listed_rows(place) == expected(rows(10))
    assert len(place.calls()) == 13


def test_changed_carried_column_is_rewritten_without_calls(
    spark: SparkSession, place: StageRig
) -> None:
    """Its rows are not called again, and the file with the old value is replaced."""
    stage = place.stage(place.counting_function(), carry=["text", "tags"], file_rows=3)
    sink = ParquetSink(place.output, grace_s=0)
    extend_options: Any = {"changed": "extend", "match": ["n"]}

    def want(changes: dict[int, str]) -> list[Any]:
        return [(i, text, tags, i * 2) for i, text, _, tags in rows(12, changes)]

    with stage.run(frame(spark, 12), output=sink, **extend_options):
        before = {file.name for file in Path(place.output).glob("*.parquet")}
    with stage.run(frame(spark, 12, {4: "new"}), output=sink, **extend_options) as run:
        assert tuples(run.output()) == listed_rows(place) == want({4: "new"})
        after = {file.name for file in Path(place.output).glob("*.parquet")}
        assert len(before & after) == 3, "the other files stay"
    # The old value returns: the outcome is in the first run, and the file with the new value is replaced.
    with stage.run(frame(spark, 12), output=sink, changed="extend") as run:
        assert tuples(run.output()) == listed_rows(place) == want({})
    assert len(place.calls()) == 12


def test_new_carried_column_is_added_without_calls(spark: SparkSession, place: StageRig) -> None:
    stage = place.stage(place.counting_function(), carry="*")
    sink = ParquetSink(place.output, grace_s=0)
    extend_options: Any = {"changed": "extend", "match": ["text"]}
    with stage.run(frame(spark, 3).select("id", "text"), output=sink, **extend_options):
        pass
    with stage.run(
        frame(spark, 3).select("id", "text", "tags"), output=sink, **extend_options
    ) as run:
        want = [(i, text, tags, i * 2) for i, text, _, tags in rows(3)]
        assert tuples(run.output()) == listed_rows(place) == want
    assert len(place.calls()) == 3
