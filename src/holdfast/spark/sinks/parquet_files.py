"""Parquet part files: deterministic bytes, placed durably.

- Equal rows give equal files, independent of their chunks: one chunk per column, fixed writer
  options, no metadata of a run. (Another pyarrow version may write other bytes, because it records
  its version.)
- A file is written under a temporary name in `_holdfast/`, synced, then renamed, so it is complete
  under its final name. The caller syncs the directory once for several files.
- `step` is called with the name of each completed step. Tests kill the process there.

Integers are delta-packed. Sorted keys shrink to nearly nothing, and a tenth of the bytes is faster
to hash, sync and read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.clock import SYSTEM
from holdfast.errors import Invalid
from holdfast.spark.errors import OutputNotShared
from holdfast.spark.sinks.api import (
    ROW_GROUP_ROWS,
    OutputError,
    OutputFull,
    OutputNotOurs,
    OutputReadOnly,
    OutputTaken,
    Part,
)
from holdfast.spark.sinks.part_files import PartFile, WrittenFile, empty_part_file

SCRATCH = "_holdfast"  # readers of a directory skip names that begin with an underscore
TEMPORARY = ".tmp"
PAGE_BYTES = 1 << 20

StepHook = Callable[[str], object]


def ignore_step(_: str) -> None:
    """Ignore the step."""


def put_part(
    directory: Path,
    name: str,
    part: Part,
    schema: pa.Schema,
    *,
    step: StepHook = ignore_step,
    empty: bool = False,
) -> PartFile:
    """Write `part` as `directory/name`. It is durable after the directory is synced. A part without
    rows is written only if `empty`.
    """
    written = write_scratch(directory, name, part, schema, step=step, empty=empty)
    if written.scratch:
        place_scratch(directory, written)
        step("rename")
    return written.file


def write_scratch(
    directory: Path,
    name: str,
    part: Part,
    schema: pa.Schema,
    *,
    step: StepHook = ignore_step,
    empty: bool = False,
) -> WrittenFile:
    """Write and sync `part` in the scratch directory under a name unique to this process."""
    groups = part.groups()
    first = next(groups, None)
    if first is None and not empty:
        return WrittenFile(empty_part_file(part.lo, part.hi))
    all_groups = chain([first] if first is not None else [], groups)
    temporary = f"{name}.{os.getpid()}-{SYSTEM.entropy(4).hex()}{TEMPORARY}"
    path = directory / SCRATCH / temporary
    try:
        with HashedFile(path) as file:
            rows = write_groups(schema, all_groups, file)
            step("write")
            os.fsync(file.fileno())
    except FileNotFoundError as error:  # the `begin` of a successor deleted the temporary files
        raise OutputTaken(path=str(directory), lost=str(path)) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    step("fsync")
    digest = file.sha256.hexdigest()
    return WrittenFile(PartFile(name, part.lo, part.hi, rows, file.length, digest), temporary)


def place_scratch(directory: Path, written: WrittenFile) -> PartFile:
    """Rename a file of the scratch directory to its final name. Idempotent."""
    file = written.file
    try:
        os.replace(directory / SCRATCH / written.scratch, directory / file.path)
    except FileNotFoundError as error:
        if not is_intact(directory, file):
            raise OutputTaken(path=str(directory), lost=written.scratch) from error
    return file


def is_intact(directory: Path, file: PartFile) -> bool:
    """Return whether a part file exists with its recorded length."""
    path = directory / file.path
    return path.is_file() and path.stat().st_size == file.bytes


def write_rows(table: pa.Table, where: object) -> None:
    """Write `table` in row groups of a fixed number of rows."""
    write_groups(table.schema, Part(0, table.num_rows, table).groups(), where)


def write_groups(schema: pa.Schema, groups: Iterable[pa.Table], where: object) -> int:
    """Write each of `groups` as a row group; return the number of rows. Holds one group at a time."""
    rows = 0
    packed = {f.name: "DELTA_BINARY_PACKED" for f in schema if _is_packed(f)}
    try:
        with pq.ParquetWriter(
            where,
            schema,
            version="2.6",
            data_page_version="1.0",
            compression="snappy",
            use_dictionary=[f.name for f in schema if _is_text(f.type)],
            column_encoding=packed or None,
            write_statistics=True,
            data_page_size=PAGE_BYTES,
        ) as writer:
            for group in groups:
                rows += group.num_rows
                writer.write_table(group.combine_chunks(), row_group_size=ROW_GROUP_ROWS)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Invalid(what="part", why=str(error)) from error
    return rows


def in_utc(table: pa.Table) -> pa.Table:
    """Convert timestamps to UTC, the only zone that tables store."""
    for at, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz not in (None, "UTC"):
            kind = pa.timestamp(field.type.unit, "UTC")
            table = table.set_column(at, field.with_type(kind), table.column(at).cast(kind))
    return table


def _is_packed(field: pa.Field) -> bool:
    kind = field.type
    return "." not in field.name and (  # a dot would also address a leaf of a nested column
        pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


class HashedFile(io.FileIO):
    """A new file that computes the hash and the length of its content."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.sha256 = hashlib.sha256()
        self.length = 0

    def write(self, data: object, /) -> int:
        remaining = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(remaining)
        self.sha256.update(remaining)
        self.length += size
        while remaining:  # a nearly full disk may write only a part; the next call raises
            remaining = remaining[super().write(remaining) :]
        return size


# --- directories and their errors ----------------------------------------------------------------


def check_writable(path: Path) -> None:
    """Refuse a directory that this process cannot create or write to. Touches nothing."""
    with translate_os_errors(path):
        while not path.exists() and path.parent != path:
            path = path.parent
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise OutputReadOnly(path=str(path), why="it is not writable")


def check_scratch(directory: Path) -> None:
    """On an executor: refuse an output whose scratch directory, created by the ledger service, is
    missing or not writable here.
    """
    scratch = directory / SCRATCH
    if not scratch.is_dir():
        raise OutputNotShared(path=str(directory))
    probe = scratch / f"writable-{os.getpid()}-{SYSTEM.entropy(4).hex()}{TEMPORARY}"
    with translate_os_errors(directory):
        probe.touch()
        probe.unlink()


def make_directory(path: Path) -> None:
    """Create `path` and its parents, each durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise OutputNotOurs(path=str(path), found="a file") from None
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes, *, scratch: Path, step: StepHook = ignore_step) -> None:
    """Replace `path` atomically with `data`."""
    temporary = scratch / f"{path.name}.{os.getpid()}{TEMPORARY}"
    try:
        with HashedFile(temporary) as file:
            file.write(data)
            os.fsync(file.fileno())
        step("head-fsync")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    step("head-rename")
    sync_directory(path.parent)


def remove_temporaries(scratch: Path) -> None:
    """Delete the temporary files of killed processes."""
    for temporary in scratch.glob(f"*{TEMPORARY}"):
        temporary.unlink(missing_ok=True)


def is_scratch_only(path: Path) -> bool:
    """Return whether `path` contains nothing but the remains of an interrupted `begin`."""
    scratch = path / SCRATCH
    if os.listdir(path) not in ([], [SCRATCH]) or scratch.is_symlink() or scratch.is_file():
        return False
    return not scratch.exists() or all(n.endswith(TEMPORARY) for n in os.listdir(scratch))


_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBERED = re.compile(r"os error (\d+)|code: (\d+)")  # error numbers in messages of Rust libraries


@contextmanager
def translate_os_errors(path: Path | str) -> Iterator[None]:
    """Translate an OSError into an output error with its path and a hint."""
    try:
        yield
    except OSError as error:
        raise output_error_of(path, error.errno, str(error)) from error


def output_error_of(path: Path | str, number: int | None, why: str) -> OutputError:
    if number is None and (os_code := _NUMBERED.search(why)):
        number = int(os_code[1] or os_code[2])
    where, why = str(path), one_line(why)
    if number in _FULL:
        return OutputFull(path=where, why=why)
    if number in _READ_ONLY:
        return OutputReadOnly(path=where, why=why)
    return OutputError(path=where, why=why)


def one_line(why: str) -> str:
    """Join to one line and remove the colour codes of the Delta library."""
    return " ".join(_COLOUR.sub("", why).split())
