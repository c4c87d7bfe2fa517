"""Rows as a directory of Parquet files, with a manifest that says which of them are committed.

    part-<lo>-<hi>.parquet       the successes of [lo, hi)
    _holdfast/manifest.json      the head: whose output this is, its version, how much of the log counts
    _holdfast/parts.jsonl        the log: a line for each part, in seq order
    _SUCCESS                     made when the output is complete; an output without rows has one empty file

- A commit renames its parts into place, appends their lines, then replaces the head. The head is the
  commit: lines behind its `log_bytes` do not count and are overwritten, files without a counted line
  are not there for whoever asks `read_parts`, and the repeat of the commit writes the same bytes.
- A commit costs the same for the first part and the ten thousandth. One file that lists all parts,
  rewritten at each commit, would not.
- The lines are chained by hash and the head holds the last link: a changed or missing line is seen.
- Each `begin` raises `generation`. A former writer that was stopped, declared dead and continued finds
  another generation under the lock and is fenced, so it can never set the version back.

Who lists the directory instead of asking for the manifest may also see the parts of a commit that is
under way. Their rows are final; only their number is not.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa

from holdfast.errors import Invalid
from holdfast.spark.sinks.api import (
    NOTHING,
    OutputCorrupt,
    OutputHeld,
    OutputNotOurs,
    OutputTaken,
    Part,
    PartOutOfOrder,
    Spec,
    fitted_part,
    pending,
    plain,
)
from holdfast.spark.sinks.files import (
    SCRATCH,
    PartFile,
    Step,
    check_writable,
    drop_temporaries,
    is_scratch_only,
    make_directory,
    no_step,
    part_name,
    put_part,
    replace_file,
    sync_directory,
    typed,
    write_rows,
)
from holdfast.spark.sinks.location import locate

HEAD = "manifest.json"
LOG = "parts.jsonl"
SUCCESS = "_SUCCESS"
FORMAT = "holdfast-output-1"
LOCK_WAIT_S = 10.0
LOCK_POLL_S = 0.02


class Head(msgspec.Struct, frozen=True):
    format: str
    run_id: str
    name: str
    schema: str  # for people
    arrow_schema: str  # the same for programs: base64 of the Arrow message
    generation: int
    version: int
    complete: bool
    parts: int
    rows: int
    log_bytes: int
    log_chain: str


@dataclass(frozen=True)
class Manifest:
    """What is committed: `files` in seq order, paths absolute; parts without rows are left out."""

    path: str
    run_id: str
    name: str
    schema: pa.Schema
    version: int
    complete: bool
    rows: int
    parts: tuple[PartFile, ...]

    @property
    def files(self) -> list[str]:
        return [os.path.join(self.path, part.path) for part in self.parts if part.path]


def read_parts(path: str | os.PathLike[str]) -> Manifest:
    """The committed parts of the output at `path`, also while it is being written."""
    home = Path(path).absolute()
    with typed(home):
        head = read_head(home)
        if head is None:
            raise OutputNotOurs(path=str(home), found="no manifest")
        parts = _read_log(home, head)
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(head.arrow_schema)))
    return Manifest(
        path=str(home),
        run_id=head.run_id,
        name=head.name,
        schema=schema,
        version=head.version,
        complete=head.complete,
        rows=head.rows,
        parts=tuple(parts),
    )


class ParquetSink:
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: Step = no_step,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        place = locate(path)
        if place.local is None:
            raise Invalid(what="path", path=place.url, why="a directory; object stores take delta")
        self.path = place.local
        self._step = step
        self._lock_wait_s = lock_wait_s
        self._generation = 0
        self._schema = pa.schema([])

    def spec(self) -> Spec:
        return {"kind": "parquet", "path": str(self.path)}

    def check_vacant(self) -> None:
        with typed(self.path):
            self._look("", "")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema or a place that the first commit would fail at; touches nothing."""
        write_rows(plain(schema).empty_table(), pa.BufferOutputStream())
        check_writable(self.path)

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._schema = plain(schema)
        with typed(self.path):
            self._look(run_id, name)
            make_directory(self.path / SCRATCH)
            with self._lock():
                head = self._look(run_id, name) or self._first(run_id, name)
                self._generation = head.generation
                if head.complete:
                    return head.version
                drop_temporaries(self.path / SCRATCH)
                self._generation += 1
                self._write_head(msgspec.structs.replace(head, generation=self._generation))
        return head.version

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part]) -> int:
        with typed(self.path):
            head = self._own_head()
            wanted = pending(parts, head.version, path=str(self.path))
            if not wanted:
                return head.version
            if head.complete:
                raise PartOutOfOrder(path=str(self.path), lo=wanted[0].lo, why="it is complete")
            files = [self._put(part) for part in wanted]  # outside the lock: this takes long
            sync_directory(self.path)
            with self._lock():
                head = self._append(self._own_head(), files)
                self._write_head(head)
            return head.version

    def finish(self) -> None:
        with typed(self.path), self._lock():
            head = self._own_head()
            if not head.complete:
                if not head.rows:
                    head = self._append(head, [self._put_empty(head.version + 1)])
                self._write_head(msgspec.structs.replace(head, complete=True))
            self._mark_success()

    def parts(self, run_id: str) -> list[str]:
        manifest = read_parts(self.path)
        if manifest.run_id != run_id:
            raise OutputNotOurs(path=str(self.path), found=f"run {manifest.run_id}")
        return manifest.files

    # --- whose place it is ----------------------------------------------------------------------

    def _look(self, run_id: str, name: str) -> Head | None:
        """The head of this run, None where there is nothing yet. Changes nothing."""
        here = str(self.path)
        if not self.path.exists():
            return None
        if not self.path.is_dir():
            raise OutputNotOurs(path=here, found="a file")
        head = read_head(self.path)
        if head is None:
            if is_scratch_only(self.path):
                return None
            raise OutputNotOurs(path=here, found=_sample(self.path))
        if (head.run_id, head.name) != (run_id, name):
            raise OutputNotOurs(path=here, found=f"run {head.run_id} of {head.name}")
        if head.arrow_schema != _message(self._schema):
            raise Invalid(
                what="schema", path=here, expected=head.schema, found=self._schema.to_string()
            )
        for part in _read_log(self.path, head):
            file = self.path / part.path
            if part.path and not (file.is_file() and file.stat().st_size == part.bytes):
                raise OutputCorrupt(path=str(file), why="a committed part is missing or cut short")
        return head

    def _first(self, run_id: str, name: str) -> Head:
        text, message = self._schema.to_string(), _message(self._schema)
        return Head(FORMAT, run_id, name, text, message, 0, NOTHING, False, 0, 0, 0, "")

    def _own_head(self) -> Head:
        head = read_head(self.path)
        if head is None or head.generation != self._generation:
            current = 0 if head is None else head.generation
            raise OutputTaken(path=str(self.path), held=self._generation, current=current)
        return head

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """One writer at a time on this machine, while the head is read and replaced."""
        handle = os.open(self.path / SCRATCH, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._await_lock(handle)
            yield
        finally:
            os.close(handle)

    def _await_lock(self, handle: int) -> None:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OutputHeld(path=str(self.path), waited_s=self._lock_wait_s) from None
            time.sleep(LOCK_POLL_S)

    # --- writing --------------------------------------------------------------------------------

    def _put(self, part: Part) -> PartFile:
        name = part_name(part.lo, part.hi)
        part = fitted_part(part, self._schema, path=str(self.path))
        return put_part(self.path, name, part, self._schema, step=self._step)

    def _put_empty(self, at: int) -> PartFile:
        """A file without rows: readers of the directory find the columns in it."""
        part = Part(at, at, self._schema.empty_table())
        name = part_name(at, at)
        file = put_part(self.path, name, part, self._schema, step=self._step, empty=True)
        sync_directory(self.path)
        return file

    def _mark_success(self) -> None:
        """The empty file by which readers of a directory know that it is complete."""
        mark = self.path / SUCCESS
        if not mark.exists():
            mark.touch()
            sync_directory(self.path)

    def _append(self, head: Head, files: list[PartFile]) -> Head:
        """The head that counts `files`, whose lines are in the log when this returns."""
        lines = [msgspec.json.encode(file) + b"\n" for file in files]
        data, chain = b"".join(lines), head.log_chain
        for line in lines:
            chain = _link(chain, line)
        handle = os.open(self.path / SCRATCH / LOG, os.O_WRONLY | os.O_CREAT, 0o666)
        with open(handle, "wb") as log:
            log.truncate(head.log_bytes)
            log.seek(head.log_bytes)
            log.write(data)
            log.flush()
            self._step("log-write")
            os.fsync(log.fileno())
        self._step("log-fsync")
        return msgspec.structs.replace(
            head,
            version=files[-1].hi - 1,
            parts=head.parts + len(files),
            rows=head.rows + sum(file.rows for file in files),
            log_bytes=head.log_bytes + len(data),
            log_chain=chain,
        )

    def _write_head(self, head: Head) -> None:
        scratch = self.path / SCRATCH
        text = msgspec.json.format(msgspec.json.encode(head), indent=2) + b"\n"
        replace_file(scratch / HEAD, text, scratch=scratch, step=self._step)


# --- reading ------------------------------------------------------------------------------------


def read_head(home: Path) -> Head | None:
    """None where there is no manifest at all."""
    file = home / SCRATCH / HEAD
    try:
        head = msgspec.json.decode(file.read_bytes(), type=Head)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.MsgspecError as error:
        raise OutputCorrupt(path=str(file), why=str(error)) from None
    if head.format != FORMAT:
        raise OutputCorrupt(path=str(file), why=f"format {head.format}, not {FORMAT}")
    return head


def _read_log(home: Path, head: Head) -> list[PartFile]:
    """The lines that the head counts; all else behind them was never committed."""
    if not head.parts:
        return []
    file = home / SCRATCH / LOG
    try:
        with open(file, "rb") as log:
            lines = log.read(head.log_bytes).splitlines(keepends=True)
        parts = [msgspec.json.decode(line, type=PartFile) for line in lines]
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise OutputCorrupt(path=str(file), why=str(error)) from None
    chain = ""
    for line in lines:
        chain = _link(chain, line)
    if len(parts) != head.parts or chain != head.log_chain:
        raise OutputCorrupt(path=str(file), why="its lines are not those that were committed")
    return parts


def _link(chain: str, line: bytes) -> str:
    return hashlib.sha256(chain.encode() + line).hexdigest()


def _message(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _sample(path: Path, names_max: int = 3) -> str:
    names = sorted(os.listdir(path))
    more = ", …" if len(names) > names_max else ""
    return ", ".join(names[:names_max]) + more
