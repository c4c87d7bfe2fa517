"""The Delta sink where it differs: its transactions, its neighbours in a table, object stores."""

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake

from holdfast.errors import Invalid
from holdfast.spark.sinks import (
    NOTHING,
    DeltaSink,
    OutputError,
    OutputNotOurs,
    Sink,
    open_sink,
)
from holdfast.spark.sinks.delta_files import DeltaFiles
from holdfast.spark.sinks.files import no_step
from tests.spark.test_sinks import CUT, SCHEMA, begun, digests, part, refused, rows_of


class LostAnswer(Exception):
    pass


def test_a_delta_commit_whose_answer_was_lost_is_not_applied_twice(tmp_path: Path) -> None:
    def lose(step: str) -> None:
        if step == "transaction":
            raise LostAnswer

    sink = DeltaSink(str(tmp_path / "out"), step=lose)
    sink.begin("run-1", "labels", SCHEMA)
    with pytest.raises(LostAnswer):
        sink.commit(*part(0))
    assert sink.commit(*part(0)) == CUT - 1
    assert DeltaTable(tmp_path / "out").count() == CUT


def test_two_handles_that_race_for_a_part_apply_it_once(tmp_path: Path) -> None:
    other: list[Sink] = []

    def be_slower(step: str) -> None:
        if step == "files" and not other:
            other.append(begun("delta", tmp_path / "out"))
            other[0].commit(*part(0))

    sink = DeltaSink(str(tmp_path / "out"), step=be_slower)
    sink.begin("run-1", "labels", SCHEMA)
    assert sink.commit_many([part(0), part(1)]) == 2 * CUT - 1
    assert rows_of(sink) == list(range(2 * CUT))
    assert DeltaTable(tmp_path / "out").count() == 2 * CUT


def test_another_writer_of_the_delta_table_does_not_disturb_a_commit(tmp_path: Path) -> None:
    def intrude(step: str) -> None:
        if step == "files":
            write_deltalake(str(tmp_path / "out"), part(7).table, mode="append")

    sink = DeltaSink(str(tmp_path / "out"), step=intrude)
    sink.begin("run-1", "labels", SCHEMA)
    assert sink.commit(*part(0)) == CUT - 1
    assert rows_of(sink) == list(range(CUT))
    assert DeltaTable(tmp_path / "out").count() == 2 * CUT


def test_a_delta_table_of_somebody_else_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), part(0).table)
    with refused(OutputNotOurs, tmp_path):
        begun("delta", tmp_path / "out")


def test_append_adds_to_a_delta_table_of_somebody_else(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), part(7).table)
    sink = DeltaSink(str(tmp_path / "out"), append=True)
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    sink.commit(*part(0))
    again = open_sink(sink.spec())
    assert again.begin("run-1", "labels", SCHEMA) == CUT - 1
    assert rows_of(again) == list(range(CUT))
    assert DeltaTable(tmp_path / "out").count() == 2 * CUT


def test_append_to_a_delta_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), pa.table({"id": [1]}))
    with refused(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out"), append=True).begin("run-1", "labels", SCHEMA)


def test_append_to_a_delta_table_that_plain_files_would_break_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), part(7).table)
    DeltaTable(tmp_path / "out").alter.add_constraint({"positive": "id >= 0"})
    with refused(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out"), append=True).begin("run-1", "labels", SCHEMA)


def test_a_delta_table_whose_schema_changed_meanwhile_is_not_written_to(tmp_path: Path) -> None:
    sink = begun("delta", tmp_path / "out")
    DeltaTable(tmp_path / "out").alter.add_columns([Field("more", "string")])
    with pytest.raises(Invalid):
        begun("delta", tmp_path / "out")
    sink.commit(*part(0))  # a column that was added is null in the rows of this run
    assert DeltaTable(tmp_path / "out").to_pyarrow_table().column("more").null_count == CUT


def test_instants_of_any_zone_are_kept_in_utc(tmp_path: Path) -> None:
    schema = pa.schema([("at", pa.timestamp("us", "Europe/Berlin"))])
    sink = DeltaSink(str(tmp_path / "out"))
    sink.begin("run-1", "labels", schema)
    sink.commit(0, 2, pa.table({"at": pa.array([0, 1], schema.field("at").type)}))
    found = DeltaTable(tmp_path / "out").to_pyarrow_table().column("at")
    assert found.cast(pa.int64()).to_pylist() == [0, 1]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.timestamp("ns"), pa.float16()], ids=str)
def test_a_type_that_delta_cannot_hold_is_refused(kind: object, tmp_path: Path) -> None:
    with refused(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out")).begin("run-1", "labels", pa.schema([("x", kind)]))


def test_files_of_a_delta_table_carry_the_bounds_that_let_readers_skip_them(
    tmp_path: Path,
) -> None:
    sink = begun("delta", tmp_path / "out")
    sink.commit_many([part(0), part(1)])
    table = DeltaTable(tmp_path / "out")
    told = pa.table(table.get_add_actions(flatten=True)).sort_by("path").to_pylist()
    assert [(row["num_records"], row["min.id"], row["max.id"]) for row in told] == [
        (CUT, 0, CUT - 1),
        (CUT, CUT, 2 * CUT - 1),
    ]
    kept = table.to_pyarrow_dataset().to_table(columns=["id"])
    assert sorted(kept.column("id").to_pylist()) == list(range(2 * CUT))


def by_url(path: Path) -> DeltaSink:
    """A sink that reaches a directory as it reaches an object store: by the library alone."""
    sink = DeltaSink(str(path))
    sink._local, sink.path = None, f"file://{path}"
    sink._files = DeltaFiles(sink.path, None, no_step)
    return sink


def test_an_object_store_gets_the_same_bytes_through_the_delta_library(tmp_path: Path) -> None:
    sink = by_url(tmp_path / "there")
    (tmp_path / "there").mkdir()
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    sink.commit_many([part(0), part(1, rows=0), part(2)])
    sink.finish()
    here = begun("delta", tmp_path / "here")
    here.commit_many([part(0), part(1, rows=0), part(2)])
    assert digests(begun("delta", tmp_path / "there")) == digests(here)
    assert by_url(tmp_path / "there").begin("run-1", "labels", SCHEMA) == 3 * CUT - 1


def test_an_object_store_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("somebody's")
    with refused(OutputNotOurs, tmp_path):
        by_url(tmp_path / "there").begin("run-1", "labels", SCHEMA)


def test_a_missing_delta_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(Invalid) as error:
        begun("delta", tmp_path / "out")
    assert error.value.missing == "deltalake"


def test_a_run_id_that_makes_no_file_name_is_refused(tmp_path: Path) -> None:
    with refused(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out")).begin("../run", "labels", SCHEMA)


def test_a_damaged_delta_log_is_an_error_of_the_output(tmp_path: Path) -> None:
    begun("delta", tmp_path / "out").commit(*part(0))
    entry = tmp_path / "out" / "_delta_log" / "00000000000000000001.json"
    entry.write_bytes(b"{ cut")
    with pytest.raises(OutputError):
        begun("delta", tmp_path / "out")
