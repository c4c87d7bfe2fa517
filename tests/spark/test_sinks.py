"""Sinks: what is committed is there once, in order and whole, whatever happens to the writer.

What both kinds promise is tested on both. A process that is to die runs `write` below and kills
itself at the step it is told; the survivor begins again and must end with the same bytes.
"""

import fcntl
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from tests.processes import ROOT, Proc

SCHEMA = pa.schema([("id", pa.int64()), ("label", pa.string())])
CUT = 100
DISK_BYTES = 2_000_000
KINDS = ["parquet", "delta"]


def part(number: int, *, rows: int = CUT) -> Part:
    lo = number * CUT
    ids = range(lo, lo + rows)
    columns = {"id": list(ids), "label": [f"label {i % 7}" for i in ids]}
    return Part(lo, lo + CUT, pa.table(columns, schema=SCHEMA))


def sink_at(kind: str, path: Path) -> Sink:
    return open_sink({"kind": kind, "path": str(path)})


def begun(kind: str, path: Path) -> Sink:
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


def picture(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that lies at `path`, with times and contents."""
    found = {}
    for item in [path, *sorted(path.rglob("*"))]:
        told = item.lstat()
        content = item.read_bytes() if item.is_file() else b""
        found[str(item)] = (told.st_mtime_ns, told.st_ctime_ns, content)
    return found


@contextmanager
def refused(kind: type[HoldfastError], path: Path) -> Iterator[None]:
    """It raises `kind` and leaves everything as it is."""
    before = picture(path)
    with pytest.raises(kind) as told:
        yield
    assert picture(path) == before
    assert type(told.value) is kind
    assert told.value.hint or kind is Invalid


# --- what every sink promises -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_output_holds_nothing_and_its_parents_are_made(kind: str, tmp_path: Path) -> None:
    sink = sink_at(kind, tmp_path / "a" / "b")
    assert sink.begin("run-1", "labels", SCHEMA) == NOTHING
    assert sink.parts("run-1") == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_directory_is_taken(kind: str, tmp_path: Path) -> None:
    assert sink_at(kind, tmp_path).begin("run-1", "labels", SCHEMA) == NOTHING


@pytest.mark.parametrize("kind", KINDS)
def test_committed_rows_are_read_in_the_order_of_seq(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    assert sink.commit(*part(0)) == CUT - 1
    assert sink.commit_many([part(1), part(2)]) == 3 * CUT - 1
    assert rows_of(sink) == list(range(3 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_committed_part_is_not_committed_again(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    sink.commit_many([part(0), part(1)])
    before = picture(tmp_path)
    assert sink.commit(*part(0)) == 2 * CUT - 1
    assert sink.commit_many([part(0), part(1)]) == 2 * CUT - 1
    assert picture(tmp_path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_done_in_part_are_completed(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    sink.commit(*part(0))
    assert sink.commit_many([part(0), part(1)]) == 2 * CUT - 1
    assert rows_of(sink) == list(range(2 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_without_rows_has_no_file_and_counts(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    sink.commit_many([part(0), part(1, rows=0)])
    assert sink.commit(*part(2, rows=0)) == 3 * CUT - 1
    assert len(sink.parts("run-1")) == 1
    assert begun(kind, tmp_path / "out").commit(*part(3)) == 4 * CUT - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_rebuilt_sink_goes_on_where_the_former_ended(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    sink.commit(*part(0))
    again = open_sink(sink.spec())
    assert again.begin("run-1", "labels", SCHEMA) == CUT - 1
    again.commit(*part(1))
    assert rows_of(again) == list(range(2 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_spec_names_the_path_in_full(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_sink({"kind": kind, "path": "out"}).spec()["path"] == str(tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_may_hold_any_letters(kind: str, tmp_path: Path) -> None:
    name = "a b #ü?*" + ("%20" if kind == "parquet" else "")
    sink = begun(kind, tmp_path / name)
    sink.commit(*part(0))
    assert rows_of(begun(kind, tmp_path / name)) == list(range(CUT))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 3], ids=["overlap", "gap"])
def test_a_part_that_does_not_follow_is_refused(kind: str, number: int, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    sink.commit(*part(0))
    lo, _, table = part(number)
    with refused(PartOutOfOrder, tmp_path):
        sink.commit(lo, lo + 2 * CUT, table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_with_other_columns_is_refused(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    with refused(Invalid, tmp_path):
        sink.commit(0, CUT, pa.table({"id": [1], "label": [2]}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_with_more_rows_than_seqs_is_refused(kind: str, tmp_path: Path) -> None:
    sink = begun(kind, tmp_path / "out")
    with refused(Invalid, tmp_path):
        sink.commit(0, 1, part(0).table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_output_takes_no_more_and_is_not_touched_by_begin(
    kind: str, tmp_path: Path
) -> None:
    sink = begun(kind, tmp_path / "out")
    sink.commit(*part(0))
    sink.finish()
    before = picture(tmp_path)
    sink.finish()
    again = sink_at(kind, tmp_path / "out")
    assert again.begin("run-1", "labels", SCHEMA) == CUT - 1
    assert again.commit(*part(0)) == CUT - 1
    assert picture(tmp_path) == before
    with refused(PartOutOfOrder, tmp_path):
        again.commit(*part(1))


@pytest.mark.parametrize("kind", KINDS)
def test_another_schema_under_the_same_run_is_refused(kind: str, tmp_path: Path) -> None:
    begun(kind, tmp_path / "out")
    with refused(Invalid, tmp_path):
        sink_at(kind, tmp_path / "out").begin("run-1", "labels", pa.schema([("id", pa.int64())]))


@given(cuts=st.lists(st.integers(1, CUT - 1), max_size=5), offset=st.integers(0, 9))
def test_equal_rows_give_equal_bytes_however_they_are_chunked(cuts: list[int], offset: int) -> None:
    from holdfast.spark.sinks.api import fitted
    from holdfast.spark.sinks.files import write_rows

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
        write_rows(fitted(table, schema, path=""), held)
        return bytes(held.getvalue())

    whole = pa.Table.from_pylist(rows, schema=schema)
    shifted = pa.Table.from_pylist(rows[:offset] + rows, schema=schema).slice(offset)
    edges = sorted({0, *cuts, CUT})
    chunks = [shifted.slice(lo, hi - lo) for lo, hi in itertools.pairwise(edges)]
    assert written(pa.concat_tables(chunks)) == written(whole)


# --- places that are not ours -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["part-0.parquet", "_SUCCESS", ".hidden", "_holdfast/notes.txt"])
def test_a_directory_with_something_in_it_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("somebody's")
    with refused(OutputNotOurs, tmp_path):
        begun(kind, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_of_another_run_is_refused(kind: str, tmp_path: Path) -> None:
    begun(kind, tmp_path / "out").commit(*part(0))
    with refused(OutputNotOurs, tmp_path):
        sink_at(kind, tmp_path / "out").begin("run-2", "labels", SCHEMA)
    with refused(OutputNotOurs, tmp_path):
        sink_at(kind, tmp_path / "out").parts("run-2")


def test_the_output_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    for kind, other in [("parquet", "delta"), ("delta", "parquet")]:
        begun(kind, tmp_path / kind)
        with refused(OutputNotOurs, tmp_path):
            begun(other, tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("below", ["", "out"], ids=["path", "parent"])
def test_a_file_in_the_way_is_refused(kind: str, below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("somebody's")
    with refused(OutputNotOurs, tmp_path):
        begun(kind, file / below)


# --- a process that dies ------------------------------------------------------------------------

# Each step, and which time it happens: in the first commit, and in the second.
STEPS = {
    "parquet": {
        "write": (1, 3),
        "fsync": (1, 3),
        "rename": (1, 3),
        "log-write": (1, 2),
        "log-fsync": (1, 2),
        "head-fsync": (1, 2, 3),  # the first is that of `begin`
        "head-rename": (1, 2, 3),
    },
    "delta": {
        "directory": (1,),
        "create": (1,),
        "write": (1, 3),
        "fsync": (1, 3),
        "rename": (1, 3),
        "files": (1, 2),
        "transaction": (1, 2, 3),  # the third is that of `finish`
    },
}


def write(kind: str, path: str, step: str, count: int) -> None:
    """Runs in a process of its own: begin, commit four parts in two steps, die at a step."""
    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == step
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sink: Sink
    sink = ParquetSink(path, step=die) if kind == "parquet" else DeltaSink(path, step=die)
    sink.begin("run-1", "labels", SCHEMA)
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2), part(3)])
    sink.finish()


def killed_at(kind: str, path: Path, step: str, count: int) -> None:
    call = f"from tests.spark.test_sinks import write; write({kind!r}, {str(path)!r}, {step!r}, {count})"
    with Proc.spawn([sys.executable, "-c", call], ready=None, cwd=ROOT) as writer:
        assert writer.wait() == -signal.SIGKILL, writer.errors


@pytest.mark.parametrize(
    ("kind", "step", "count"),
    [
        (kind, step, count)
        for kind, steps in STEPS.items()
        for step, counts in steps.items()
        for count in counts
    ],
)
def test_a_kill_at_any_step_leaves_whole_commits_and_the_repeat_ends_with_the_same_bytes(
    kind: str, step: str, count: int, tmp_path: Path
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

    straight = begun(kind, tmp_path / "straight")
    straight.commit_many([part(n) for n in range(4)])
    assert rows_of(sink) == list(range(4 * CUT))
    assert digests(sink) == digests(straight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_former_writer_whose_unfinished_file_was_swept_away_is_told_to_stop(
    kind: str, tmp_path: Path
) -> None:
    def take_over(step: str) -> None:
        if step == "fsync":
            begun(kind, tmp_path)

    former: Sink
    former = (
        ParquetSink(tmp_path, step=take_over)
        if kind == "parquet"
        else DeltaSink(str(tmp_path), step=take_over)
    )
    former.begin("run-1", "labels", SCHEMA)
    with pytest.raises(OutputTaken):
        former.commit(*part(0))


def test_a_reader_sees_no_part_of_a_commit_that_was_cut_off(tmp_path: Path) -> None:
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


def large(number: int, rows: int = CUT) -> Part:
    """A part of about 400 kB that does not compress."""
    noise = [sha256(f"{number} {i}".encode()).hexdigest() * 64 for i in range(rows)]
    shaken = ["".join(sha256(f"{t}{k}".encode()).hexdigest() for k in range(64)) for t in noise]
    columns = {"id": list(range(number * CUT, number * CUT + rows)), "label": shaken}
    return Part(number * CUT, (number + 1) * CUT, pa.table(columns, schema=SCHEMA))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("free_bytes", [0, 4096, 150_000])
def test_a_full_disk_refuses_a_commit_until_there_is_space_again(
    kind: str, free_bytes: int, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        sink = begun(kind, disk / "out")
        sink.commit(*large(0))
        filler = disk / "filler"
        told = os.statvfs(disk)
        filler.write_bytes(bytes(told.f_bavail * told.f_frsize - free_bytes))
        with pytest.raises(OutputFull) as error:
            sink.commit(*large(1))
        assert error.value.path == str(disk / "out")
        assert rows_of(sink) == list(range(CUT))
        filler.unlink()
        sink.commit(*large(1))
        sink.finish()
        assert rows_of(begun(kind, disk / "out")) == list(range(2 * CUT))


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_output_on_a_full_disk_is_refused_and_may_be_begun_later(
    kind: str, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        with pytest.raises(OutputFull):
            begun(kind, disk / "out").commit(*part(0))
        filler.unlink()
        assert begun(kind, disk / "out").commit(*part(0)) == CUT - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_disk_is_refused(kind: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        sink = begun(kind, disk / "out")
        sink.commit(*part(0))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with refused(OutputReadOnly, disk):
            sink.commit(*part(1))
        with refused(OutputReadOnly, disk):
            begun(kind, disk / "new").commit(*part(0))
        assert rows_of(sink) == list(range(CUT))


# --- Parquet ------------------------------------------------------------------------------------


def test_the_files_of_two_runs_are_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for run in ("run-1", "run-2"):
        sink = ParquetSink(tmp_path / run)
        sink.begin(run, f"name of {run}", SCHEMA.with_metadata({"run": run}))
        sink.commit(*part(0))
        files.append(Path(sink.parts(run)[0]).read_bytes())
    assert files[0] == files[1]


def test_the_manifest_tells_rows_sizes_hashes_schema_and_completion(tmp_path: Path) -> None:
    sink = begun("parquet", tmp_path)
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


def test_a_commit_writes_no_more_for_the_last_part_than_for_the_first(tmp_path: Path) -> None:
    sink = begun("parquet", tmp_path)
    sizes = []
    for number in range(300):
        sink.commit(*part(number, rows=1))
        log = (tmp_path / "_holdfast" / "parts.jsonl").stat().st_size
        sizes.append((tmp_path / "_holdfast" / "manifest.json").stat().st_size)
    assert max(sizes) - min(sizes[1:]) < 20
    assert log < 300 * 300
    assert len(read_parts(tmp_path).files) == 300


def test_a_part_file_that_was_never_committed_is_overwritten(tmp_path: Path) -> None:
    sink = begun("parquet", tmp_path)
    stray = tmp_path / "part-000000000000-000000000100.parquet"
    stray.write_bytes(b"cut off")
    assert read_parts(tmp_path).files == []
    sink.commit(*part(0))
    assert rows_of(sink) == list(range(CUT))


@pytest.mark.parametrize("name", ["manifest.json", "parts.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "other"])
def test_a_damaged_manifest_is_named_and_left_alone(name: str, damage: str, tmp_path: Path) -> None:
    begun("parquet", tmp_path).commit_many([part(0), part(1)])
    file = tmp_path / "_holdfast" / name
    whole = file.read_bytes()
    damaged = {
        "cut": whole[: len(whole) // 2],
        "garbage": b"\xff\x00" * 40,
        "other": whole.replace(b"sha256", b"sha257").replace(b"holdfast-output-1", b"another-2"),
    }[damage]
    file.write_bytes(damaged)
    with refused(OutputCorrupt, tmp_path):
        begun("parquet", tmp_path)
    with pytest.raises(OutputCorrupt) as error:
        read_parts(tmp_path)
    assert error.value.path == str(file)


def test_a_line_of_the_log_that_was_changed_is_seen(tmp_path: Path) -> None:
    begun("parquet", tmp_path).commit_many([part(0), part(1)])
    log = tmp_path / "_holdfast" / "parts.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"rows":100', b'"rows":900'))
    with pytest.raises(OutputCorrupt):
        read_parts(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_committed_part_that_is_missing_or_cut_is_named(damage: str, tmp_path: Path) -> None:
    sink = begun("parquet", tmp_path)
    sink.commit(*part(0))
    file = Path(sink.parts("run-1")[0])
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OutputCorrupt) as error:
        begun("parquet", tmp_path)
    assert error.value.path == str(file)


def test_a_former_writer_that_wakes_up_is_fenced(tmp_path: Path) -> None:
    former = begun("parquet", tmp_path)
    former.commit(*part(0))
    successor = begun("parquet", tmp_path)
    successor.commit(*part(1))
    with pytest.raises(OutputTaken):
        former.commit(*part(1))
    with pytest.raises(OutputTaken):
        former.finish()
    assert read_parts(tmp_path).version == 2 * CUT - 1


def test_a_former_writer_is_fenced_also_between_its_files_and_its_manifest(tmp_path: Path) -> None:
    successors: list[Sink] = []

    def take_over(step: str) -> None:
        if step == "rename" and not successors:
            successors.append(begun("parquet", tmp_path))
            successors[0].commit(*part(0))

    former = ParquetSink(tmp_path, step=take_over)
    former.begin("run-1", "labels", SCHEMA)
    with pytest.raises(OutputTaken):
        former.commit(*part(0))
    assert rows_of(successors[0]) == list(range(CUT))


def test_a_manifest_that_stays_locked_is_reported_as_held(tmp_path: Path) -> None:
    begun("parquet", tmp_path)
    handle = os.open(tmp_path / "_holdfast", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with refused(OutputHeld, tmp_path):
            ParquetSink(tmp_path, lock_wait_s=0).begin("run-1", "labels", SCHEMA)
    finally:
        os.close(handle)


def test_a_file_url_names_its_directory(tmp_path: Path) -> None:
    assert ParquetSink(f"file://{tmp_path}").path == tmp_path


def test_a_read_of_a_place_without_manifest_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputNotOurs):
        read_parts(tmp_path)


# --- sinks of others ----------------------------------------------------------------------------


def test_the_sinks_are_imported_without_the_delta_library() -> None:
    call = "import sys, holdfast.spark.sinks; print('deltalake' in sys.modules)"
    with Proc.spawn([sys.executable, "-c", call], ready=None, cwd=ROOT) as process:
        assert process.wait() == 0
        assert process.lines == ["False"]


class HeldInMemory:
    """A sink somebody else might write; `open_sink` finds it by its name."""

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


def test_a_sink_of_somebody_else_is_built_from_its_name() -> None:
    sink = open_sink({"kind": "tests.spark.test_sinks:HeldInMemory", "path": "x"})
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
def test_a_spec_of_no_sink_is_refused(spec: dict[str, str | int | bool]) -> None:
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
def test_a_schema_that_has_no_fixed_bytes_is_refused(
    kind: str, schema: object, tmp_path: Path
) -> None:
    with refused(Invalid, tmp_path):
        sink_at(kind, tmp_path / "out").begin("run-1", "labels", schema)
