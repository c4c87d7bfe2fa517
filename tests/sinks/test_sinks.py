"""Sinks commit each row once and in order, also when the writer is killed.

Tests of common guarantees run on the Parquet and the Delta sink. Kill tests run a writer in a process that
kills itself at a given step (`killed_writer`). A second writer then resumes and must produce the same bytes.
"""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HoldfastError, Invalid
from holdfast.spark.sinks import (
    NOTHING,
    DeltaSink,
    OutputCorrupt,
    OutputFull,
    OutputHeld,
    OutputNotOurs,
    OutputReadOnly,
    OutputTaken,
    ParquetSink,
    Part,
    PartOutOfOrder,
    Sink,
    open_sink,
    read_parts,
)
from tests.processes import ROOT, Proc, python_proc
from tests.sinks.killed_writer import CUT, SCHEMA, part

DISK_BYTES = 2_000_000
KINDS = ["parquet", "delta"]


def sink_at(kind: str, path: Path) -> Sink:
    return open_sink({"kind": kind, "path": str(path)})


def begin_sink(kind: str, path: Path) -> Sink:
    sink = sink_at(kind, path)
    sink.begin("run-1", "labels", SCHEMA)
    return sink


def rows_of(sink: Sink) -> list[int]:
    found: list[int] = []
    for file in sink.parts("run-1"):
        found += pq.read_table(file, partitioning=None).column("id").to_pylist()
    return found


def digests(sink: Sink) -> dict[str, str]:
    return {Path(f).name: sha256(Path(f).read_bytes()).hexdigest() for f in sink.parts("run-1")}


def snapshot_files(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """All files and directories at `path`, with times and contents."""
    snapshot = {}
    for item in [path, *sorted(path.rglob("*"))]:
        status = item.lstat()
        content = item.read_bytes() if item.is_file() else b""
        snapshot[str(item)] = (status.st_mtime_ns, status.st_ctime_ns, content)
    return snapshot


@contextmanager
def refuses_without_change(kind: type[HoldfastError], path: Path) -> Iterator[None]:
    """The block raises `kind` and changes no file."""
    before = snapshot_files(path)
    with pytest.raises(kind) as raised:
        yield
    assert snapshot_files(path) == before
    assert type(raised.value) is kind
    assert raised.value.hint or kind is Invalid


# --- guarantees of every sink -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_begin_creates_the_parent_directories_of_a_new_output(kind: str, tmp_path: Path) -> None:
    sink = sink_at(kind, tmp_path / "a" / "b")
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    assert sink.parts("run-1") == []


@pytest.mark.parametrize("kind", KINDS)
def test_begin_accepts_an_empty_directory(kind: str, tmp_path: Path) -> None:
    assert sink_at(kind, tmp_path).begin("run-1", "labels", SCHEMA) == NOTHING


@pytest.mark.parametrize("kind", KINDS)
def test_committed_rows_are_read_in_the_order_of_seq(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    assert sink.commit(*part(0)) == CUT - 1
    assert sink.commit_many([part(1), part(2)]) == 3 * CUT - 1
    assert rows_of(sink) == list(range(3 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_commit_of_a_part_changes_nothing(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    sink.commit_many([part(0), part(1)])
    before = snapshot_files(tmp_path)
    assert sink.commit(*part(0)) == 2 * CUT - 1
    assert sink.commit_many([part(0), part(1)]) == 2 * CUT - 1
    assert snapshot_files(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_commit_many_skips_parts_already_committed(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    sink.commit(*part(0))
    assert sink.commit_many([part(0), part(1)]) == 2 * CUT - 1
    assert rows_of(sink) == list(range(2 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_part_has_no_file_and_advances_the_version(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    sink.commit_many([part(0), part(1, rows=0)])
    assert sink.commit(*part(2, rows=0)) == 3 * CUT - 1
    assert len(sink.parts("run-1")) == 1
    assert begin_sink(kind, tmp_path / "out").commit(*part(3)) == 4 * CUT - 1


@pytest.mark.parametrize("kind", KINDS)
def test_reopened_sink_continues_at_the_committed_version(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    sink.commit(*part(0))
    again = open_sink(sink.spec())
    assert again.begin("run-1", "labels", SCHEMA) == CUT - 1
    again.commit(*part(1))
    assert rows_of(again) == list(range(2 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_sink_spec_has_the_absolute_path(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_sink({"kind": kind, "path": "out"}).spec()["path"] == str(tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_sink_path_may_contain_special_characters(kind: str, tmp_path: Path) -> None:
    name = "a b #ü?*" + ("%20" if kind == "parquet" else "")
    sink = begin_sink(kind, tmp_path / name)
    sink.commit(*part(0))
    assert rows_of(begin_sink(kind, tmp_path / name)) == list(range(CUT))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 3], ids=["overlap", "gap"])
def test_part_with_overlap_or_gap_is_refused(kind: str, number: int, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    sink.commit(*part(0))
    lo, _, table = part(number)
    with refuses_without_change(PartOutOfOrder, tmp_path):
        sink.commit(lo, lo + 2 * CUT, table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_with_other_columns_is_refused(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    with refuses_without_change(Invalid, tmp_path):
        sink.commit(0, CUT, pa.table({"id": [1], "label": [2]}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_with_more_rows_than_seqs_is_refused(kind: str, tmp_path: Path) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    with refuses_without_change(Invalid, tmp_path):
        sink.commit(0, 1, part(0).table)


@pytest.mark.parametrize("kind", KINDS)
def test_finished_output_refuses_new_parts_and_begin_changes_nothing(
    kind: str, tmp_path: Path
) -> None:
    sink = begin_sink(kind, tmp_path / "out")
    sink.commit(*part(0))
    sink.finish()
    before = snapshot_files(tmp_path)
    sink.finish()
    again = sink_at(kind, tmp_path / "out")
    assert again.begin("run-1", "labels", SCHEMA) == CUT - 1
    assert again.commit(*part(0)) == CUT - 1
    assert snapshot_files(tmp_path) == before
    with refuses_without_change(PartOutOfOrder, tmp_path):
        again.commit(*part(1))


@pytest.mark.parametrize("kind", KINDS)
def test_begin_refuses_another_schema_of_the_same_run(kind: str, tmp_path: Path) -> None:
    begin_sink(kind, tmp_path / "out")
    with refuses_without_change(Invalid, tmp_path):
        sink_at(kind, tmp_path / "out").begin("run-1", "labels", pa.schema([("id", pa.int64())]))


@given(cuts=st.lists(st.integers(1, CUT - 1), max_size=5), offset=st.integers(0, 9))
def test_equal_rows_give_equal_bytes_for_any_chunking(cuts: list[int], offset: int) -> None:
    from holdfast.spark.sinks.api import with_schema
    from holdfast.spark.sinks.parquet_files import write_rows

    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("text", pa.string()),
            ("score", pa.float64()),
            ("at", pa.timestamp("us", "UTC")),
            ("tags", pa.list_(pa.string())),
        ]
    )
    rows = [
        {
            "id": i,
            "text": f"t{i % 5}" if i % 3 else None,
            "score": i / 7,
            "at": i,
            "tags": ["a"] * (i % 3),
        }
        for i in range(CUT)
    ]

    def written(table: object) -> bytes:
        held = pa.BufferOutputStream()
        write_rows(with_schema(table, schema, path=""), held)
        return bytes(held.getvalue())

    whole = pa.Table.from_pylist(rows, schema=schema)
    shifted = pa.Table.from_pylist(rows[:offset] + rows, schema=schema).slice(offset)
    edges = sorted({0, *cuts, CUT})
    chunks = [shifted.slice(lo, hi - lo) for lo, hi in itertools.pairwise(edges)]
    assert written(pa.concat_tables(chunks)) == written(whole)


# --- foreign outputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["part-0.parquet", "_SUCCESS", ".hidden", "_holdfast/notes.txt"])
def test_begin_refuses_a_non_empty_directory(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("somebody's")
    with refuses_without_change(OutputNotOurs, tmp_path):
        begin_sink(kind, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_of_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    begin_sink(kind, tmp_path / "out").commit(*part(0))
    with refuses_without_change(OutputNotOurs, tmp_path):
        sink_at(kind, tmp_path / "out").begin("run-2", "labels", SCHEMA)
    with refuses_without_change(OutputNotOurs, tmp_path):
        sink_at(kind, tmp_path / "out").parts("run-2")


def test_output_of_another_sink_kind_is_refused(tmp_path: Path) -> None:
    for kind, other in [("parquet", "delta"), ("delta", "parquet")]:
        begin_sink(kind, tmp_path / kind)
        with refuses_without_change(OutputNotOurs, tmp_path):
            begin_sink(other, tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("below", ["", "out"], ids=["path", "parent"])
def test_begin_refuses_a_file_as_output_or_parent(kind: str, below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("somebody's")
    with refuses_without_change(OutputNotOurs, tmp_path):
        begin_sink(kind, file / below)


# --- killed writers -----------------------------------------------------------------------------

# Each step, and its occurrences to test: in the first and in the second commit.
STEPS = {
    "parquet": {
        "write": (1, 3),
        "fsync": (1, 3),
        "rename": (1, 3),
        "log-write": (1, 2),
        "log-fsync": (1, 2),
        "head-fsync": (1, 2, 3),  # the first is in `begin`
        "head-rename": (1, 2, 3),
    },
    "delta": {
        "directory": (1,),
        "create": (1,),
        "write": (1, 3),
        "fsync": (1, 3),
        "rename": (1, 3),
        "files": (1, 2),
        "transaction": (1, 2, 3),  # the third is in `finish`
    },
}


KilledWriter = Callable[[str, Path, str, int], None]


@pytest.fixture(scope="module")
def killed_at() -> Iterator[KilledWriter]:
    """A function that runs a writer of four parts in a process, which kills itself at a step."""
    with python_proc("tests.sinks.killed_writer") as forks:

        def run_writer(kind: str, path: Path, step: str, count: int) -> None:
            forks.send(json.dumps([kind, str(path), step, count]))
            assert forks.expect("ended") == f"ended {-signal.SIGKILL}", forks.errors

        yield run_writer


@pytest.mark.parametrize(
    ("kind", "step", "count"),
    [
        (kind, step, count)
        for kind, steps in STEPS.items()
        for step, counts in steps.items()
        for count in counts
    ],
)
def test_sink_killed_at_any_step_resumes_to_the_same_bytes(
    killed_at: KilledWriter, kind: str, step: str, count: int, tmp_path: Path
) -> None:
    killed_at(kind, tmp_path / "out", step, count)
    sink = sink_at(kind, tmp_path / "out")
    version = sink.begin("run-1", "labels", SCHEMA)
    assert version in (NOTHING, 2 * CUT - 1, 4 * CUT - 1)
    assert rows_of(sink) == list(range(version + 1))
    assert not list((tmp_path / "out" / "_holdfast").glob("*.tmp"))
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2), part(3)])
    sink.finish()

    straight = begin_sink(kind, tmp_path / "straight")
    straight.commit_many([part(n) for n in range(4)])
    assert rows_of(sink) == list(range(4 * CUT))
    assert digests(sink) == digests(straight)


@pytest.mark.parametrize("kind", KINDS)
def test_previous_writer_with_a_removed_temporary_file_raises_output_taken(
    kind: str, tmp_path: Path
) -> None:
    def take_over(step: str) -> None:
        if step == "fsync":
            begin_sink(kind, tmp_path)

    former: Sink
    former = (
        ParquetSink(tmp_path, step=take_over)
        if kind == "parquet"
        else DeltaSink(str(tmp_path), step=take_over)
    )
    former.begin("run-1", "labels", SCHEMA)
    with pytest.raises(OutputTaken):
        former.commit(*part(0))


def test_reader_sees_no_part_of_an_interrupted_commit(
    killed_at: KilledWriter, tmp_path: Path
) -> None:
    killed_at("parquet", tmp_path / "out", "log-fsync", 2)
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 4
    manifest = read_parts(tmp_path / "out")
    assert [Path(file).name for file in manifest.files] == [
        "part-000000000000-000000000100.parquet",
        "part-000000000100-000000000200.parquet",
    ]
    assert (manifest.version, manifest.complete) == (2 * CUT - 1, False)


# --- the disk -----------------------------------------------------------------------------------


@contextmanager
def small_disk(at: Path, size: int = DISK_BYTES) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.fail("these tests mount a small disk, as root only: sudo make test")
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def large_part(number: int, rows: int = CUT) -> Part:
    """A part of about 400 kB that does not compress."""
    noise = [sha256(f"{number} {i}".encode()).hexdigest() * 64 for i in range(rows)]
    shaken = ["".join(sha256(f"{t}{k}".encode()).hexdigest() for k in range(64)) for t in noise]
    columns = {"id": list(range(number * CUT, number * CUT + rows)), "label": shaken}
    return Part(number * CUT, (number + 1) * CUT, pa.table(columns, schema=SCHEMA))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("free_bytes", [0, 4096, 150_000])
def test_commit_on_a_full_disk_raises_output_full_until_space_is_freed(
    kind: str, free_bytes: int, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        sink = begin_sink(kind, disk / "out")
        sink.commit(*large_part(0))
        filler = disk / "filler"
        disk_status = os.statvfs(disk)
        filler.write_bytes(bytes(disk_status.f_bavail * disk_status.f_frsize - free_bytes))
        with pytest.raises(OutputFull) as error:
            sink.commit(*large_part(1))
        assert error.value.path == str(disk / "out")
        assert rows_of(sink) == list(range(CUT))
        filler.unlink()
        sink.commit(*large_part(1))
        sink.finish()
        assert rows_of(begin_sink(kind, disk / "out")) == list(range(2 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_begin_on_a_full_disk_is_refused_and_succeeds_later(kind: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        with pytest.raises(OutputFull):
            begin_sink(kind, disk / "out").commit(*part(0))
        filler.unlink()
        assert begin_sink(kind, disk / "out").commit(*part(0)) == CUT - 1


@pytest.mark.parametrize("kind", KINDS)
def test_commit_on_a_read_only_disk_is_refused(kind: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        sink = begin_sink(kind, disk / "out")
        sink.commit(*part(0))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with refuses_without_change(OutputReadOnly, disk):
            sink.commit(*part(1))
        with refuses_without_change(OutputReadOnly, disk):
            begin_sink(kind, disk / "new").commit(*part(0))
        assert rows_of(sink) == list(range(CUT))


# --- Parquet ------------------------------------------------------------------------------------


def test_part_files_of_two_runs_have_equal_bytes(tmp_path: Path) -> None:
    files = []
    for run in ("run-1", "run-2"):
        sink = ParquetSink(tmp_path / run)
        sink.begin(run, f"name of {run}", SCHEMA.with_metadata({"run": run}))
        sink.commit(*part(0))
        files.append(Path(sink.parts(run)[0]).read_bytes())
    assert files[0] == files[1]


def test_manifest_has_rows_sizes_hashes_schema_and_completion(tmp_path: Path) -> None:
    sink = begin_sink("parquet", tmp_path)
    sink.commit_many([part(0, rows=7), part(1, rows=0)])
    sink.finish()
    manifest = read_parts(tmp_path)
    first, second = manifest.parts
    assert (first.lo, first.hi, first.rows) == (0, CUT, 7)
    assert (tmp_path / first.path).stat().st_size == first.bytes
    assert sha256((tmp_path / first.path).read_bytes()).hexdigest() == first.sha256
    assert (second.path, second.lo, second.hi, second.rows) == ("", CUT, 2 * CUT, 0)
    assert (manifest.run_id, manifest.name) == ("run-1", "labels")
    assert (manifest.schema, manifest.rows, manifest.complete) == (SCHEMA, 7, True)


def test_manifest_size_does_not_grow_with_commits(tmp_path: Path) -> None:
    sink = begin_sink("parquet", tmp_path)
    sizes = []
    for number in range(300):
        sink.commit(*part(number, rows=1))
        log = (tmp_path / "_holdfast" / "parts.jsonl").stat().st_size
        sizes.append((tmp_path / "_holdfast" / "manifest.json").stat().st_size)
    assert max(sizes) - min(sizes[1:]) < 20
    assert log < 300 * 300
    assert len(read_parts(tmp_path).files) == 300


def test_uncommitted_part_file_is_overwritten(tmp_path: Path) -> None:
    sink = begin_sink("parquet", tmp_path)
    stray = tmp_path / "part-000000000000-000000000100.parquet"
    stray.write_bytes(b"cut off")
    assert read_parts(tmp_path).files == []
    sink.commit(*part(0))
    assert rows_of(sink) == list(range(CUT))


@pytest.mark.parametrize("name", ["manifest.json", "parts.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "other"])
def test_damaged_manifest_is_named_and_unchanged(name: str, damage: str, tmp_path: Path) -> None:
    begin_sink("parquet", tmp_path).commit_many([part(0), part(1)])
    file = tmp_path / "_holdfast" / name
    whole = file.read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "garbage": b"\xff\x00" * 40,
        "other": whole.replace(b"sha256", b"sha257").replace(b"holdfast-output-1", b"another-2"),
    }[damage]
    file.write_bytes(damaged)
    with refuses_without_change(OutputCorrupt, tmp_path):
        begin_sink("parquet", tmp_path)
    with pytest.raises(OutputCorrupt) as error:
        read_parts(tmp_path)
    assert error.value.path == str(file)


def test_changed_manifest_log_line_raises_output_corrupt(tmp_path: Path) -> None:
    begin_sink("parquet", tmp_path).commit_many([part(0), part(1)])
    log = tmp_path / "_holdfast" / "parts.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"rows":100', b'"rows":900'))
    with pytest.raises(OutputCorrupt):
        read_parts(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_missing_or_truncated_committed_part_is_named(damage: str, tmp_path: Path) -> None:
    sink = begin_sink("parquet", tmp_path)
    sink.commit(*part(0))
    file = Path(sink.parts("run-1")[0])
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OutputCorrupt) as error:
        begin_sink("parquet", tmp_path)
    assert error.value.path == str(file)


def test_previous_writer_is_fenced_after_a_takeover(tmp_path: Path) -> None:
    former = begin_sink("parquet", tmp_path)
    former.commit(*part(0))
    successor = begin_sink("parquet", tmp_path)
    successor.commit(*part(1))
    with pytest.raises(OutputTaken):
        former.commit(*part(1))
    with pytest.raises(OutputTaken):
        former.finish()
    assert read_parts(tmp_path).version == 2 * CUT - 1


def test_previous_writer_is_fenced_between_files_and_manifest(tmp_path: Path) -> None:
    successors: list[Sink] = []

    def take_over(step: str) -> None:
        if step == "rename" and not successors:
            successors.append(begin_sink("parquet", tmp_path))
            successors[0].commit(*part(0))

    former = ParquetSink(tmp_path, step=take_over)
    former.begin("run-1", "labels", SCHEMA)
    with pytest.raises(OutputTaken):
        former.commit(*part(0))
    assert rows_of(successors[0]) == list(range(CUT))


def test_locked_manifest_raises_output_held(tmp_path: Path) -> None:
    begin_sink("parquet", tmp_path)
    handle = os.open(tmp_path / "_holdfast", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with refuses_without_change(OutputHeld, tmp_path):
            ParquetSink(tmp_path, lock_wait_s=0).begin("run-1", "labels", SCHEMA)
    finally:
        os.close(handle)


def test_parquet_sink_accepts_a_file_url(tmp_path: Path) -> None:
    assert ParquetSink(f"file://{tmp_path}").path == tmp_path


def test_read_parts_without_a_manifest_raises_output_not_ours(tmp_path: Path) -> None:
    with pytest.raises(OutputNotOurs):
        read_parts(tmp_path)


# --- custom sinks -------------------------------------------------------------------------------


def test_sinks_import_does_not_load_deltalake() -> None:
    call = "import sys, holdfast.spark.sinks; print('deltalake' in sys.modules)"
    with Proc.spawn([sys.executable, "-c", call], ready=None, cwd=ROOT) as process:
        assert process.wait() == 0
        assert process.lines == ["False"]


class HeldInMemory:
    """A custom sink. `open_sink` imports it by its dotted name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = NOTHING

    def spec(self) -> dict[str, str | int | bool]:
        return {"kind": f"{__name__}:HeldInMemory", "path": self.path}

    def check_vacant(self) -> None: ...

    def begin(self, run_id: str, name: str, schema: object) -> int:
        return self.version

    def commit(self, lo: int, hi: int, table: object) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: list[Part]) -> int:
        self.version = max(self.version, parts[-1].version)
        return self.version

    def finish(self) -> None: ...

    def parts(self, run_id: str) -> list[str]:
        return []


def test_open_sink_builds_a_custom_sink_from_its_dotted_name() -> None:
    sink = open_sink({"kind": "tests.sinks.test_sinks:HeldInMemory", "path": "x"})
    assert type(sink).__name__ == "HeldInMemory"
    assert sink.commit(*part(0)) == CUT - 1


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "csv", "path": "x"},
        {"path": "x"},
        {"kind": "no_such_module:Sink"},
        {"kind": "pathlib:NoSuchClass"},
        {"kind": "pathlib:Path"},
        {"kind": "subprocess:Popen", "args": "false"},
        {"kind": "parquet", "path": "x", "colour": "red"},
        {"kind": "parquet", "path": ""},
        {"kind": "delta", "path": ""},
        {"kind": "delta", "path": "a%20b"},
    ],
)
def test_open_sink_refuses_an_invalid_spec(spec: dict[str, str | int | bool]) -> None:
    with pytest.raises(Invalid):
        open_sink(spec)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("a", pa.int64()), ("a", pa.string())]),
        pa.schema([]),
        pa.schema([("a", pa.dictionary(pa.int32(), pa.string()))]),
    ],
    ids=["twice", "none", "dictionary"],
)
def test_begin_refuses_a_schema_without_deterministic_bytes(
    kind: str, schema: object, tmp_path: Path
) -> None:
    with refuses_without_change(Invalid, tmp_path):
        sink_at(kind, tmp_path / "out").begin("run-1", "labels", schema)
