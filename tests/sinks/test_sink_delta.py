"""Tests specific to the Delta sink: transactions, concurrent writers of the table, object stores."""

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
from holdfast.spark.sinks.parquet_files import ignore_step
from tests.sinks.test_sinks import (
    CUT,
    SCHEMA,
    begin_sink,
    digests,
    part,
    refuses_without_change,
    rows_of,
)


class LostReply(Exception):
    pass


def test_delta_commit_with_a_lost_reply_is_applied_once(tmp_path: Path) -> None:
    def lose(step: str) -> None:
        if step == "transaction":
            raise LostReply

    sink = DeltaSink(str(tmp_path / "out"), step=lose)
    sink.begin("run-1", "labels", SCHEMA)
    with pytest.raises(LostReply):
        sink.commit(*part(0))
    assert sink.commit(*part(0)) == CUT - 1
    assert DeltaTable(tmp_path / "out").count() == CUT


def test_two_delta_sinks_racing_for_a_part_apply_it_once(tmp_path: Path) -> None:
    other: list[Sink] = []

    def be_slower(step: str) -> None:
        if step == "files" and not other:
            other.append(begin_sink("delta", tmp_path / "out"))
            other[0].commit(*part(0))

    sink = DeltaSink(str(tmp_path / "out"), step=be_slower)
    sink.begin("run-1", "labels", SCHEMA)
    assert sink.commit_many([part(0), part(1)]) == 2 * CUT - 1
    assert rows_of(sink) == list(range(2 * CUT))
    assert DeltaTable(tmp_path / "out").count() == 2 * CUT


def test_delta_commit_survives_a_concurrent_append(tmp_path: Path) -> None:
    def intrude(step: str) -> None:
        if step == "files":
            write_deltalake(str(tmp_path / "out"), part(7).table, mode="append")

    sink = DeltaSink(str(tmp_path / "out"), step=intrude)
    sink.begin("run-1", "labels", SCHEMA)
    assert sink.commit(*part(0)) == CUT - 1
    assert rows_of(sink) == list(range(CUT))
    assert DeltaTable(tmp_path / "out").count() == 2 * CUT


def test_foreign_delta_table_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), part(0).table)
    with refuses_without_change(OutputNotOurs, tmp_path):
        begin_sink("delta", tmp_path / "out")


def test_append_adds_to_a_foreign_delta_table(tmp_path: Path) -> None:
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
    with refuses_without_change(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out"), append=True).begin("run-1", "labels", SCHEMA)


def test_append_to_a_delta_table_with_constraints_is_refused(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "out"), part(7).table)
    DeltaTable(tmp_path / "out").alter.add_constraint({"positive": "id >= 0"})
    with refuses_without_change(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out"), append=True).begin("run-1", "labels", SCHEMA)


def test_delta_begin_refuses_a_changed_schema(tmp_path: Path) -> None:
    sink = begin_sink("delta", tmp_path / "out")
    DeltaTable(tmp_path / "out").alter.add_columns([Field("more", "string")])
    with pytest.raises(Invalid):
        begin_sink("delta", tmp_path / "out")
    sink.commit(*part(0))  # the added column is null in the rows of this run
    assert DeltaTable(tmp_path / "out").to_pyarrow_table().column("more").null_count == CUT


def test_delta_timestamps_of_any_zone_are_stored_in_utc(tmp_path: Path) -> None:
    schema = pa.schema([("at", pa.timestamp("us", "Europe/Berlin"))])
    sink = DeltaSink(str(tmp_path / "out"))
    sink.begin("run-1", "labels", schema)
    sink.commit(0, 2, pa.table({"at": pa.array([0, 1], schema.field("at").type)}))
    found = DeltaTable(tmp_path / "out").to_pyarrow_table().column("at")
    assert found.cast(pa.int64()).to_pylist() == [0, 1]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.timestamp("ns"), pa.float16()], ids=str)
def test_delta_begin_refuses_unsupported_types(kind: object, tmp_path: Path) -> None:
    with refuses_without_change(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out")).begin("run-1", "labels", pa.schema([("x", kind)]))


def test_delta_files_have_min_max_statistics(
    tmp_path: Path,
) -> None:
    sink = begin_sink("delta", tmp_path / "out")
    sink.commit_many([part(0), part(1)])
    table = DeltaTable(tmp_path / "out")
    add_actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path").to_pylist()
    assert [(row["num_records"], row["min.id"], row["max.id"]) for row in add_actions] == [
        (CUT, 0, CUT - 1),
        (CUT, CUT, 2 * CUT - 1),
    ]
    kept = table.to_pyarrow_dataset().to_table(columns=["id"])
    assert sorted(kept.column("id").to_pylist()) == list(range(2 * CUT))


def sink_by_url(path: Path) -> DeltaSink:
    """A sink that writes a directory through the Delta library, as it writes an object store."""
    sink = DeltaSink(str(path))
    sink._local, sink.path = None, f"file://{path}"
    sink._files = DeltaFiles(sink.path, None, ignore_step)
    return sink


def test_delta_sink_writes_equal_bytes_to_directory_and_object_store(tmp_path: Path) -> None:
    sink = sink_by_url(tmp_path / "there")
    (tmp_path / "there").mkdir()
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    sink.commit_many([part(0), part(1, rows=0), part(2)])
    sink.finish()
    here = begin_sink("delta", tmp_path / "here")
    here.commit_many([part(0), part(1, rows=0), part(2)])
    assert digests(begin_sink("delta", tmp_path / "there")) == digests(here)
    assert sink_by_url(tmp_path / "there").begin("run-1", "labels", SCHEMA) == 3 * CUT - 1


def test_delta_sink_refuses_a_non_empty_object_store_prefix(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("somebody's")
    with refuses_without_change(OutputNotOurs, tmp_path):
        sink_by_url(tmp_path / "there").begin("run-1", "labels", SCHEMA)


def test_missing_deltalake_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(Invalid) as error:
        begin_sink("delta", tmp_path / "out")
    assert error.value.missing == "deltalake"


def test_delta_begin_refuses_a_run_id_with_a_path(tmp_path: Path) -> None:
    with refuses_without_change(Invalid, tmp_path):
        DeltaSink(str(tmp_path / "out")).begin("../run", "labels", SCHEMA)


def test_damaged_delta_log_raises_output_error(tmp_path: Path) -> None:
    begin_sink("delta", tmp_path / "out").commit(*part(0))
    entry = tmp_path / "out" / "_delta_log" / "00000000000000000001.json"
    entry.write_bytes(b"{ cut")
    with pytest.raises(OutputError):
        begin_sink("delta", tmp_path / "out")
