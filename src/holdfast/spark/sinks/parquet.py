"""Rows as Parquet files of a directory or an object store, with a manifest of those that count.

    part-<lo>-<hi>.parquet          the successes of [lo, hi)
    part-<lo>-<hi>-<run>.parquet    the same, of a run that succeeds another one here
    _holdfast/manifest.json         the head: whose output this is, its version, its parts
    _holdfast/parts.jsonl           on a disk the log: a line for each part, in seq order
    _SUCCESS                        made when the output is complete

- A commit puts its parts in place and then replaces the head, which is the commit. Files that it does
  not count are not there for a reader of `read_parts`, and the repeat of a commit writes the same bytes.
- Each `begin` raises `generation`. A former writer that was stopped, declared dead and continued finds
  another generation and is fenced, so it can never set the version back.
- A run over input that grew (`begin_after`) writes the parts that changed beside those of the former
  run, and `finish` replaces the manifest in one step: files of which no row changed stay. The files
  that no manifest counts any more go `grace_s` later, for readers that have just listed them.
- An output without rows has one empty file, so that readers find the columns.

A reader that lists the place instead of asking for the manifest may also see the parts of a commit that
is under way; in an object store also files that executors wrote for a run which is not over. When the run is over
the listing is the manifest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.errors import Invalid
from holdfast.spark.sinks.api import (
    NOTHING,
    Base,
    Begun,
    KeptPart,
    OutputCorrupt,
    OutputNotOurs,
    OutputTaken,
    Part,
    PartOutOfOrder,
    Spec,
    fitted_part,
    kept_files,
    pending,
    plain,
)
from holdfast.spark.sinks.files import Step, no_step, write_rows
from holdfast.spark.sinks.local_place import LOCK_WAIT_S, LocalPlace
from holdfast.spark.sinks.location import Location, locate
from holdfast.spark.sinks.manifest import (
    Head,
    Manifest,
    first_head,
    message_of,
    schema_from,
    schema_of,
)
from holdfast.spark.sinks.object_place import ObjectPlace
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.sinks.written import PartFile, WrittenFile, WrittenPart, part_name

__all__ = ["Head", "Manifest", "ParquetSink", "read_parts"]

MODES = ("replace", "append")
GRACE_S = 10
_PART = re.compile(r"part-\d{12}-\d{12}(-[A-Za-z0-9_.-]+)?\.parquet")


class Place(Protocol):
    """Where parts and the manifest lie: `LocalPlace`, `ObjectPlace`."""

    url: str

    def typed(self) -> AbstractContextManager[None]: ...
    def check_writable(self) -> None: ...
    def found(self) -> str: ...
    def refuse_file(self) -> None: ...
    def prepare(self) -> None: ...
    def sweep(self) -> None: ...
    def lock(self) -> AbstractContextManager[None]: ...
    def head(self) -> Head | None: ...
    def files(self, head: Head) -> list[PartFile]: ...
    def write_head(self, head: Head) -> None: ...
    def append(self, head: Head, files: Sequence[PartFile]) -> None: ...
    def swap(self, head: Head, files: Sequence[PartFile]) -> None: ...
    def new_log(self, generation: int) -> str: ...
    def put(self, name: str, part: Part, schema: pa.Schema, *, empty: bool = False) -> PartFile: ...
    def write(self, name: str, run_id: str, part: Part, schema: pa.Schema) -> WrittenFile: ...
    def accept(self, written: WrittenFile) -> PartFile: ...
    def check_writer(self) -> None: ...
    def settle(self) -> None: ...
    def is_whole(self, part: PartFile) -> bool: ...
    def names(self) -> list[str]: ...
    def remove(self, names: Sequence[str]) -> None: ...
    def mark_success(self) -> None: ...


class PartWriter(msgspec.Struct, frozen=True):
    """What an executor needs to write parts: the columns as an Arrow message, the run, the suffix of file names."""

    schema: str
    run_id: str
    suffix: str


def read_parts(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None
) -> Manifest:
    """The committed parts of the output at `path`, also while it is being written."""
    where = locate(path)
    keep_options(where.url, storage_options)
    place = _place_of(where)
    with place.typed():
        head = place.head()
        if head is None:
            raise OutputNotOurs(path=place.url, found="no manifest")
        return _manifest(place, head)


class ParquetSink:
    """`output="labels/"` is `ParquetSink("labels/")`.

    `storage_options` are the credentials and settings of an object store, if they are not in the
    environment. They stay in memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: str = "replace",
        grace_s: int = GRACE_S,
        storage_options: Mapping[str, str] | None = None,
        step: Step = no_step,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="mode", found=mode, why=f"one of {MODES}")
        if not isinstance(grace_s, int) or grace_s < 0:
            raise Invalid(what="grace_s", found=grace_s, why="whole seconds, 0 or more")
        where = locate(path)
        keep_options(where.url, storage_options)
        self.path = where.local or where.url
        self._where = where
        self._place = _place_of(where, step=step, lock_wait_s=lock_wait_s)
        self._mode = mode
        self._grace_s = grace_s
        self._generation = 0
        self._schema = pa.schema([])
        self._run_id = self._suffix = ""
        # Of a run that succeeds another one by `begin_after`: its id and name, and its parts so far.
        self._successor: tuple[str, str] | None = None
        self._staged: list[PartFile] = []
        self._kept: dict[str, PartFile] = {}

    def spec(self) -> Spec:
        spec: Spec = {"kind": "parquet", "path": self._where.url}
        if self._mode != "replace":
            spec["mode"] = self._mode
        if self._grace_s != GRACE_S:
            spec["grace_s"] = self._grace_s
        return spec

    def check_vacant(self) -> None:
        with self._place.typed():
            self._look("", "")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema or a place that the first commit would fail at."""
        write_rows(plain(schema).empty_table(), pa.BufferOutputStream())
        with self._place.typed():
            self._place.check_writable()

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._run_id = run_id
        self._schema = plain(schema)
        place = self._place
        with place.typed():
            self._look(run_id, name)
            place.prepare()
            with place.lock():
                head = self._look(run_id, name) or first_head(run_id, name, self._schema)
                self._generation = head.generation
                if head.complete:
                    return head.version
                place.sweep()
                self._generation += 1
                place.write_head(msgspec.structs.replace(head, generation=self._generation))
        return head.version

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        place = self._place
        with place.typed():
            head = self._own_head()
            if self._successor is not None:
                return self._stage(parts)
            wanted = pending(parts, head.version, path=place.url)
            if not wanted:
                return head.version
            if head.complete:
                raise PartOutOfOrder(path=place.url, lo=wanted[0].lo, why="it is complete")
            # Outside the lock: this takes long.
            files = [self._put(part) for part in wanted if not isinstance(part, KeptPart)]
            place.settle()
            with place.lock():
                place.append(self._own_head(), files)
            return files[-1].hi - 1

    def finish(self) -> None:
        place = self._place
        with place.typed():
            with place.lock():
                head = self._own_head()
                if self._successor is not None and head.run_id != self._successor[0]:
                    head = self._swap(head)
                elif not head.complete:
                    if not head.rows:
                        place.append(head, [self._put_empty(head.version + 1)])
                        head = self._own_head()
                    place.write_head(msgspec.structs.replace(head, complete=True))
            place.mark_success()
            place.sweep()
            self._remove_superseded()

    def parts(self, run_id: str) -> list[str]:
        manifest = self._read()
        if manifest.run_id != run_id:
            raise OutputNotOurs(path=self._place.url, found=f"run {manifest.run_id}")
        return manifest.files

    # --- files that executors write -------------------------------------------------------------

    def part_writer(self) -> bytes:
        told = PartWriter(message_of(self._schema), self._run_id, self._suffix)
        return msgspec.json.encode(told)

    def check_writer(self, writer: bytes) -> None:
        with self._place.typed():
            self._place.check_writer()

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        told = msgspec.json.decode(writer, type=PartWriter)
        schema = schema_from(told.schema)
        name = part_name(part.lo, part.hi, told.suffix)
        with self._place.typed():
            part = fitted_part(part, schema, path=self._place.url)
            file = self._place.write(name, told.run_id, part, schema)
        return WrittenPart(part.lo, part.hi, [file])

    def _read(self) -> Manifest:
        with self._place.typed():
            head = self._place.head()
            if head is None:
                raise OutputNotOurs(path=self._place.url, found="no manifest")
            return _manifest(self._place, head)

    # --- input that grew ------------------------------------------------------------------------

    def owner(self) -> str:
        with self._place.typed():
            head = self._place.head()
        return "" if head is None else head.run_id

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        place = self._place
        with place.typed():
            head = place.head()
        if head is None or head.run_id == run_id:
            return Begun(self.begin(run_id, name, schema), ())
        self._schema = plain(schema)
        self._run_id, self._suffix = run_id, f"-{run_id}"
        with place.typed(), place.lock():
            # A replaced output may have other columns: then no file of it stays.
            head = self._look(base.run_id, name, columns_too=self._mode == "append")
            if head is None:
                raise OutputTaken(path=place.url, why="its manifest is gone")
            files = place.files(head)
            place.sweep()
            self._generation = head.generation + 1
            place.write_head(msgspec.structs.replace(head, generation=self._generation))
        self._successor = (run_id, name)
        self._staged = []
        self._kept = {file.path: file for file in files if file.rows}
        if self._mode == "append":
            return Begun(NOTHING, [KeptPart(one.lo, one.hi) for one in base.same])
        if head.arrow_schema != message_of(self._schema):
            return Begun(NOTHING, ())
        return Begun(NOTHING, kept_files(base, ((f.path, f.lo, f.hi) for f in self._kept.values())))

    def _stage(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        """Put the parts in place; `finish` makes them count."""
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        for part in pending(parts, version, path=self._place.url):
            if isinstance(part, KeptPart):
                held = self._kept.get(part.file, PartFile("", part.lo, part.hi, 0, 0, ""))
                self._staged.append(msgspec.structs.replace(held, lo=part.lo, hi=part.hi))
            else:
                self._staged.append(self._put(part))
        self._place.settle()
        return self._staged[-1].hi - 1 if self._staged else NOTHING

    def _swap(self, head: Head) -> Head:
        """The manifest counts the staged parts and no others."""
        assert self._successor is not None
        before = self._kept.values() if self._mode == "append" else ()
        files = [*before, *self._staged]
        if not any(file.rows for file in files):
            files.append(self._put_empty(files[-1].hi if files else 0))
        head = msgspec.structs.replace(
            first_head(*self._successor, self._schema),
            generation=self._generation,
            complete=True,
            log=self._place.new_log(self._generation),
        )
        self._place.swap(head, files)
        return head

    def _remove_superseded(self) -> None:
        """Part files that the manifest does not count: a reader that listed them has `grace_s`."""
        head = self._own_head()
        counted = {file.path for file in self._place.files(head)}
        spare = [n for n in self._place.names() if n not in counted and _PART.fullmatch(n)]
        if spare:
            SYSTEM.sleep(self._grace_s)
            self._own_head()
            self._place.remove(spare)

    # --- whose place it is ----------------------------------------------------------------------

    def _look(self, run_id: str, name: str, *, columns_too: bool = True) -> Head | None:
        """The head of this run, None where there is nothing yet. Changes nothing."""
        place = self._place
        place.refuse_file()
        head = place.head()
        if head is None:
            if found := place.found():
                raise OutputNotOurs(path=place.url, found=found)
            return None
        if (head.run_id, head.name) != (run_id, name):
            raise OutputNotOurs(path=place.url, found=f"run {head.run_id} of {head.name}")
        if columns_too and head.arrow_schema != message_of(self._schema):
            raise Invalid(
                what="schema",
                path=place.url,
                expected=head.schema,
                found=self._schema.to_string(),
            )
        for part in place.files(head):
            if part.path and not place.is_whole(part):
                why = "a committed part is missing or cut short"
                raise OutputCorrupt(path=f"{place.url}/{part.path}", why=why)
        return head

    def _own_head(self) -> Head:
        head = self._place.head()
        if head is None or head.generation != self._generation:
            current = 0 if head is None else head.generation
            raise OutputTaken(path=self._place.url, held=self._generation, current=current)
        return head

    # --- writing --------------------------------------------------------------------------------

    def _put(self, part: Part | WrittenPart) -> PartFile:
        if isinstance(part, WrittenPart):
            [written] = part.files
            return self._place.accept(written)
        name = part_name(part.lo, part.hi, self._suffix)
        part = fitted_part(part, self._schema, path=self._place.url)
        return self._place.put(name, part, self._schema)

    def _put_empty(self, at: int) -> PartFile:
        """A file without rows: readers of the listing find the columns in it."""
        part = Part(at, at, self._schema.empty_table())
        name = part_name(at, at, self._suffix)
        file = self._place.put(name, part, self._schema, empty=True)
        self._place.settle()
        return file


def _place_of(where: Location, *, step: Step = no_step, lock_wait_s: float = LOCK_WAIT_S) -> Place:
    if where.local is not None:
        return LocalPlace(where.local, step=step, lock_wait_s=lock_wait_s)
    return ObjectPlace(where, step=step)


def _manifest(place: Place, head: Head) -> Manifest:
    return Manifest(
        path=place.url,
        run_id=head.run_id,
        name=head.name,
        schema=schema_of(head),
        version=head.version,
        complete=head.complete,
        rows=head.rows,
        parts=tuple(place.files(head)),
    )
