"""Sinks of a changed input: unchanged files are kept, files with a changed or removed row are rewritten."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.catalog import load_catalog

from holdfast.errors import Invalid
from holdfast.spark.part_cuts import PartCuts
from holdfast.spark.sinks import (
    Base,
    DeltaSink,
    IcebergSink,
    KeptPart,
    OutputNotOurs,
    OutputTaken,
    ParquetSink,
    Part,
    Same,
)
from holdfast.spark.sinks.api import kept_files
from holdfast.spark.sinks.object_store import options_of
from tests.deep_variants import deep_after


def same_ranges(old: list[tuple[int, int]], new: list[tuple[int, int]]) -> list[Same]:
    """The ranges of equal (key, value) rows in both lists. The lists are in key order."""
    where = {row: at for at, row in enumerate(old)}
    ranges: list[Same] = []
    for at, row in enumerate(new):
        base = where.get(row)
        if base is None:
            continue
        if ranges and ranges[-1].hi == at and base == ranges[-1].base_lo + at - ranges[-1].lo:
            ranges[-1] = ranges[-1]._replace(hi=at + 1)
        else:
            ranges.append(Same(at, at + 1, base))
    return ranges


values = st.dictionaries(st.integers(0, 40), st.integers(0, 1), max_size=40)


@given(old=values, new=values, cut=st.integers(1, 7))
def test_kept_files_are_those_with_contiguous_unchanged_rows(
    old: dict[int, int], new: dict[int, int], cut: int
) -> None:
    before, after = sorted(old.items()), sorted(new.items())
    files = [(f"{lo}", lo, min(lo + cut, len(before))) for lo in range(0, len(before), cut)]
    kept = kept_files(Base("base", same_ranges(before, after)), files)
    expected = []
    for name, lo, hi in files:
        rows = before[lo:hi]
        at = after.index(rows[0]) if rows[0] in after else -1
        if at >= 0 and after[at : at + len(rows)] == rows:
            expected.append(KeptPart(at, at + len(rows), name))
    assert kept == expected
    assert all(one.hi <= two.lo for one, two in pairwise(kept))


def test_kept_files_omit_an_empty_file() -> None:
    assert kept_files(Base("base", [Same(0, 10, 0)]), [("empty", 0, 0)]) == []


# --- sinks --------------------------------------------------------------------------------------

SCHEMA = pa.schema([("id", pa.int64()), ("value", pa.int64())])
CUT = 5

Rows = list[tuple[int, int]]


def sink_at(kind: str, path: Path, mode: str = "", **options: Any) -> Any:
    if kind == "parquet":
        return ParquetSink(path, mode=mode or "replace", grace_s=0, **options)
    if kind == "iceberg":
        return iceberg_sink(path, mode=mode or "upsert", **options)
    return DeltaSink(path, mode=mode or "upsert", **options)


def iceberg_sink(path: Path, **options: Any) -> IcebergSink:
    """An Iceberg sink with a catalog in the directory."""
    catalog = {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}"}
    load_catalog("cat", **catalog).create_namespace_if_not_exists("db")
    return IcebergSink("cat.db.labels", catalog=catalog, **options)


def table_of(rows: Rows) -> pa.Table:
    columns = [pa.array([row[at] for row in rows], pa.int64()) for at in (0, 1)]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def parts_of(rows: Rows, kept: Sequence[KeptPart]) -> Iterator[Part | KeptPart]:
    def sizes(lo: int, hi: int) -> Any:
        raise AssertionError

    cuts = PartCuts(len(rows), CUT, 1 << 30, sizes, width=16, kept=kept)
    at = 0
    while (span := cuts.next_part(at, len(rows))) is not None:
        at = span.hi
        yield span.kept or Part(span.lo, span.hi, table_of(rows[span.lo : span.hi]))


def write(sink: Any, run_id: str, rows: Rows, runs: dict[str, Rows], *, finish: bool = True) -> int:
    """Write a run over the previous output. Return the number of kept parts."""
    owner = sink.owner()
    kept: Sequence[KeptPart] = ()
    if owner in ("", run_id):
        sink.begin(run_id, "labels", SCHEMA)
    else:
        base = Base(owner, same_ranges(runs[owner], rows))
        _, kept = sink.begin_after(base, run_id, "labels", SCHEMA)
    runs[run_id] = rows
    for part in parts_of(rows, kept):
        sink.commit_many([part])
    if finish:
        sink.finish()
    return len(kept)


def file_bytes(file: str) -> bytes:
    return Path(file.removeprefix("file://")).read_bytes()


def read(sink: Any, run_id: str) -> Rows:
    found: Rows = []
    for file in sink.parts(run_id):
        rows = pq.read_table(file.removeprefix("file://"), partitioning=None).to_pylist()
        found += [(row["id"], row["value"]) for row in rows]
    return found


def rows_seen_by_a_plain_reader(kind: str, path: Path) -> Rows:
    """The rows that a reader without the manifest sees."""
    if kind == "delta":
        rows = DeltaTable(path).to_pyarrow_table().to_pylist()
    elif kind == "iceberg":
        catalog = load_catalog("cat", **options_of("iceberg:cat"))
        rows = catalog.load_table("db.labels").scan().to_arrow().to_pylist()
    else:
        files = sorted(path.glob("*.parquet"))
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return sorted((row["id"], row["value"]) for row in rows)


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("seed", deep_after(1, range(3)))
def test_sink_follows_its_input_and_keeps_unchanged_files(
    kind: str, seed: int, tmp_path: Path
) -> None:
    draw = Random(seed)
    data = dict.fromkeys(draw.sample(range(100), 40), 0)
    runs: dict[str, Rows] = {}
    kept = 0
    for step in range(7):
        run_id = f"run-{step}"
        rows = sorted(data.items())
        if step % 3 == 2:  # an abandoned run: the next run succeeds the last finished one
            write(sink_at(kind, tmp_path), f"{run_id}-lost", rows, runs, finish=False)
        before = sink_at(kind, tmp_path).owner()
        previous_files = (
            [(f, file_bytes(f)) for f in sink_at(kind, tmp_path).parts(before)] if before else []
        )
        kept += write(sink_at(kind, tmp_path), run_id, rows, runs)
        sink = sink_at(kind, tmp_path)
        assert (sink.owner(), read(sink, run_id)) == (run_id, rows)
        assert rows_seen_by_a_plain_reader(kind, tmp_path) == rows
        now = set(sink.parts(run_id))
        assert all(
            file_bytes(f) == previous_bytes for f, previous_bytes in previous_files if f in now
        )
        # Repeat, as after a kill that follows the swap. The repeat changes nothing.
        write(sink_at(kind, tmp_path), run_id, rows, runs)
        assert rows_seen_by_a_plain_reader(kind, tmp_path) == rows
        for key in draw.sample(sorted(data), min(2, len(data))):
            data.pop(key)
        data |= dict.fromkeys(draw.sample(range(50), 2), step + 1)
    assert kept > 5


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_append_mode_adds_only_new_and_changed_rows(kind: str, tmp_path: Path) -> None:
    runs: dict[str, Rows] = {}
    old: Rows = [(key, 0) for key in range(20)]
    new: Rows = [(key, 7 if key == 4 else 0) for key in range(1, 23)]
    write(sink_at(kind, tmp_path, "append"), "run-1", old, runs)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.parquet")}
    write(sink_at(kind, tmp_path, "append"), "run-2", new, runs)
    assert rows_seen_by_a_plain_reader(kind, tmp_path) == sorted(
        [*old, (4, 7), (20, 0), (21, 0), (22, 0)]
    )
    assert before
    assert all(path.read_bytes() == previous_bytes for path, previous_bytes in before.items())


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_killed_append_resumes_without_unchanged_rows(kind: str, tmp_path: Path) -> None:
    runs: dict[str, Rows] = {}
    old: Rows = [(key, 0) for key in range(20)]
    new: Rows = [*((key, 1) for key in range(-6, 0)), *old, (20, 1)]
    write(sink_at(kind, tmp_path, "append"), "run-1", old, runs)
    sink = sink_at(kind, tmp_path, "append")
    base = Base("run-1", same_ranges(old, new))
    _, kept = sink.begin_after(base, "run-2", "labels", SCHEMA)
    sink.commit_many([next(parts_of(new, kept))])
    write(sink_at(kind, tmp_path, "append"), "run-2", new, runs)
    assert rows_seen_by_a_plain_reader(kind, tmp_path) == sorted(new)
    assert sink_at(kind, tmp_path, "append").owner() == "run-2"


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_readers_see_the_previous_output_until_finish(kind: str, tmp_path: Path) -> None:
    runs: dict[str, Rows] = {}
    old: Rows = [(key, 0) for key in range(12)]
    write(sink_at(kind, tmp_path), "run-1", old, runs)
    write(sink_at(kind, tmp_path), "run-2", [(1, 1)], runs, finish=False)
    assert read(sink_at(kind, tmp_path), "run-1") == old
    if kind != "parquet":
        assert rows_seen_by_a_plain_reader(kind, tmp_path) == old


def test_previous_run_is_fenced_by_its_successor(tmp_path: Path) -> None:
    runs: dict[str, Rows] = {}
    former = sink_at("parquet", tmp_path)
    former.begin("run-1", "labels", SCHEMA)
    former.commit(0, 2, table_of([(0, 0), (1, 0)]))
    runs["run-1"] = [(0, 0), (1, 0)]
    write(sink_at("parquet", tmp_path), "run-2", [(0, 0), (1, 0), (2, 0)], runs)
    with pytest.raises(OutputTaken):
        former.commit(2, 3, table_of([(9, 9)]))
    with pytest.raises(OutputTaken):
        former.finish()
    assert rows_seen_by_a_plain_reader("parquet", tmp_path) == [(0, 0), (1, 0), (2, 0)]


STEPS = ["write", "rename", "log-write", "log-fsync", "head-fsync", "head-rename"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("count", [1, 2])
def test_successor_killed_at_any_step_leaves_one_complete_output(
    step: str, count: int, tmp_path: Path
) -> None:
    class SinkKilled(BaseException):
        pass

    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == step
        if seen == count:
            raise SinkKilled

    runs: dict[str, Rows] = {}
    old: Rows = [(key, 0) for key in range(20)]
    new: Rows = [(key, int(key == 7)) for key in range(30) if key != 2]
    write(sink_at("parquet", tmp_path), "run-1", old, runs)
    with contextlib.suppress(SinkKilled):
        write(sink_at("parquet", tmp_path, step=die), "run-2", new, runs)
    runs["run-2"] = new
    owner = sink_at("parquet", tmp_path).owner()
    assert read(sink_at("parquet", tmp_path), owner) == runs[owner]
    write(sink_at("parquet", tmp_path), "run-2", new, runs)
    assert read(sink_at("parquet", tmp_path), "run-2") == new
    assert rows_seen_by_a_plain_reader("parquet", tmp_path) == new


def test_compacted_delta_table_is_refused(tmp_path: Path) -> None:
    runs: dict[str, Rows] = {}
    write(sink_at("delta", tmp_path), "run-1", [(key, 0) for key in range(12)], runs)
    write(sink_at("delta", tmp_path), "run-2", [(key, 0) for key in range(13)], runs)
    DeltaTable(tmp_path).optimize.compact()
    with pytest.raises(OutputNotOurs):
        write(sink_at("delta", tmp_path), "run-3", [(0, 0)], runs)


@pytest.mark.parametrize("kind", [ParquetSink, DeltaSink, IcebergSink])
def test_unknown_sink_mode_is_refused(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(Invalid) as raised:
        kind("./cat.db.labels", mode="merge")
    assert raised.value.what == "mode"
