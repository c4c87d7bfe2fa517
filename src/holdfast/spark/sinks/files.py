"""Part files: Parquet whose bytes depend on the rows alone, put in place durably.

- Equal rows give equal files, whatever the chunks they came in: one chunk a column, fixed writer
  options, no metadata of a run. (Another pyarrow may write other bytes: it signs its name.)
- A file is written under another name in `_holdfast/`, synced, and then renamed: under its own name
  it is always whole. The directory is synced by the caller, once for several files.
- `step` is told the name of each step after it happened. Tests kill the process there.

Integers are delta-packed: keys arrive sorted and shrink to nearly no bytes, and a tenth of the bytes
is faster to hash, sync and read than the plain ones.
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
from holdfast.spark.sinks.written import PartFile, WrittenFile, no_file

SCRATCH = "_holdfast"  # readers of a directory pass over names that begin with an underscore
TEMPORARY = ".tmp"
PAGE_BYTES = 1 << 20

Step = Callable[[str], object]


def no_step(_: str) -> None:
    """Nobody listens."""


def put_part(
    home: Path,
    name: str,
    part: Part,
    schema: pa.Schema,
    *,
    step: Step = no_step,
    empty: bool = False,
) -> PartFile:
    """Write `part` as `home/name`. Durable once `home` is synced. Without rows only if `empty`."""
    written = write_scratch(home, name, part, schema, step=step, empty=empty)
    if written.scratch:
        place_scratch(home, written)
        step("rename")
    return written.file


def write_scratch(
    home: Path,
    name: str,
    part: Part,
    schema: pa.Schema,
    *,
    step: Step = no_step,
    empty: bool = False,
) -> WrittenFile:
    """Write and sync `part` in the scratch directory, under a name that no other process uses."""
    groups = part.groups()
    first = next(groups, None)
    if first is None and not empty:
        return WrittenFile(no_file(part.lo, part.hi))
    parted = chain([first] if first is not None else [], groups)
    temporary = f"{name}.{os.getpid()}-{SYSTEM.entropy(4).hex()}{TEMPORARY}"
    path = home / SCRATCH / temporary
    try:
        with HashedFile(path) as file:
            rows = write_groups(schema, parted, file)
            step("write")
            os.fsync(file.fileno())
    except (
        FileNotFoundError
    ) as error:  # the `begin` of a successor removed the directory's temporaries
        raise OutputTaken(path=str(home), lost=str(path)) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    step("fsync")
    digest = file.sha256.hexdigest()
    return WrittenFile(PartFile(name, part.lo, part.hi, rows, file.length, digest), temporary)


def place_scratch(home: Path, written: WrittenFile) -> PartFile:
    """Rename a file of the scratch directory to its own name. A repeat finds it there."""
    file = written.file
    try:
        os.replace(home / SCRATCH / written.scratch, home / file.path)
    except FileNotFoundError as error:
        if not is_whole(home, file):
            raise OutputTaken(path=str(home), lost=written.scratch) from error
    return file


def is_whole(home: Path, file: PartFile) -> bool:
    """Whether a part file is there with its length."""
    path = home / file.path
    return path.is_file() and path.stat().st_size == file.bytes


def write_rows(table: pa.Table, where: object) -> None:
    """All of `table`, in row groups of a fixed number of rows."""
    write_groups(table.schema, Part(0, table.num_rows, table).groups(), where)


def write_groups(schema: pa.Schema, groups: Iterable[pa.Table], where: object) -> int:
    """Each of `groups` as a row group; how many rows. Holds one group at a time."""
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
    """The same instants, each of them told in UTC: tables keep no other zone."""
    for at, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz not in (None, "UTC"):
            kind = pa.timestamp(field.type.unit, "UTC")
            table = table.set_column(at, field.with_type(kind), table.column(at).cast(kind))
    return table


def _is_packed(field: pa.Field) -> bool:
    kind = field.type
    return "." not in field.name and (  # a dot would also name the leaf of a nested column
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
    """A new file that knows the hash and the length of what went into it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.sha256 = hashlib.sha256()
        self.length = 0

    def write(self, data: object, /) -> int:
        left = memoryview(data).cast("B")  # type: ignore[arg-type]
        size = len(left)
        self.sha256.update(left)
        self.length += size
        while left:  # a nearly full disk takes a part of it, and says so at the next call
            left = left[super().write(left) :]
        return size


# --- directories and what may be wrong with them -------------------------------------------------


def check_writable(path: Path) -> None:
    """Refuse a directory that this process cannot make or write to; touches nothing."""
    with typed(path):
        while not path.exists() and path.parent != path:
            path = path.parent
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise OutputReadOnly(path=str(path), why="it is not writable")


def check_scratch(home: Path) -> None:
    """On an executor: refuse an output whose scratch directory, which the ledger service made, is not here or cannot
    be written to."""
    scratch = home / SCRATCH
    if not scratch.is_dir():
        raise OutputNotShared(path=str(home))
    probe = scratch / f"writable-{os.getpid()}-{SYSTEM.entropy(4).hex()}{TEMPORARY}"
    with typed(home):
        probe.touch()
        probe.unlink()


def make_directory(path: Path) -> None:
    """`path` and its parents, each of them durable."""
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


def replace_file(path: Path, data: bytes, *, scratch: Path, step: Step = no_step) -> None:
    """`path` holds its former bytes or `data`, never a mixture."""
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


def drop_temporaries(scratch: Path) -> None:
    """What a killed process left behind."""
    for found in scratch.glob(f"*{TEMPORARY}"):
        found.unlink(missing_ok=True)


def is_scratch_only(path: Path) -> bool:
    """Nothing is in `path` but what a `begin` that was killed can leave."""
    scratch = path / SCRATCH
    if os.listdir(path) not in ([], [SCRATCH]) or scratch.is_symlink() or scratch.is_file():
        return False
    return not scratch.exists() or all(n.endswith(TEMPORARY) for n in os.listdir(scratch))


_FULL = {errno.ENOSPC, errno.EDQUOT}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBERED = re.compile(r"os error (\d+)|code: (\d+)")  # how Rust tells of it


@contextmanager
def typed(path: Path | str) -> Iterator[None]:
    """An error of the system becomes one that says which output it is, and what to do."""
    try:
        yield
    except OSError as error:
        raise of_system(path, error.errno, str(error)) from error


def of_system(path: Path | str, number: int | None, why: str) -> OutputError:
    if number is None and (told := _NUMBERED.search(why)):
        number = int(told[1] or told[2])
    where, why = str(path), readable(why)
    if number in _FULL:
        return OutputFull(path=where, why=why)
    if number in _READ_ONLY:
        return OutputReadOnly(path=where, why=why)
    return OutputError(path=where, why=why)


def readable(why: str) -> str:
    """On one line and without the colours in which the Delta library tells of errors."""
    return " ".join(_COLOUR.sub("", why).split())
