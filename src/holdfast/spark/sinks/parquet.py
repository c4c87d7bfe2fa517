"""The Parquet sink: Parquet files in a directory or an object store, with a manifest of the
committed ones.

    part-<lo>-<hi>.parquet          the successful rows of [lo, hi)
    part-<lo>-<hi>-<run>.parquet    the same, of a run that succeeds another one here
    _holdfast/manifest.json         the head: the owner of the output, its version, its parts
    _holdfast/parts.jsonl           on a disk the log: a line for each part, in seq order
    _SUCCESS                        created when the output is complete

- A commit puts its parts in place and then replaces the head, which is the commit point.
  `read_parts` ignores files that the head does not list. A repeated commit writes the same bytes.
- Each `begin` raises `generation` (a fencing token). A former writer that was paused and declared
  dead finds another generation and is fenced, so it cannot set the version back.
- A run over a changed input (`begin_after`) writes the changed parts beside those of the former
  run. `finish` replaces the manifest atomically. Files without changed rows stay. Files that the
  manifest no longer lists are deleted `grace_s` later, for readers that have just listed them.
- An output without rows has one empty file, so that readers find the columns.

A reader that lists the place instead of reading the manifest may also see parts of a commit in
progress, and in an object store files that executors wrote for an unfinished run. After the run the
listing equals the manifest.
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
    kept_files,
    part_with_schema,
    parts_after,
    without_metadata,
)
from holdfast.spark.sinks.location import Location, locate
from holdfast.spark.sinks.manifest import (
    Manifest,
    ManifestHead,
    decode_schema,
    encode_schema,
    first_head,
    head_schema,
)
from holdfast.spark.sinks.object_store import keep_options
from holdfast.spark.sinks.parquet_directory import LOCK_WAIT_S, LocalParquetStorage
from holdfast.spark.sinks.parquet_files import StepHook, ignore_step, write_rows
from holdfast.spark.sinks.parquet_objects import ObjectParquetStorage
from holdfast.spark.sinks.part_files import PartFile, WrittenFile, WrittenPart, part_name

__all__ = ["Manifest", "ManifestHead", "ParquetSink", "read_parts"]

MODES = ("replace", "append")
GRACE_S = 10
_PART_FILE_NAME = re.compile(r"part-\d{12}-\d{12}(-[A-Za-z0-9_.-]+)?\.parquet")


class ParquetStorage(Protocol):
    """The storage of parts and manifest: `LocalParquetStorage` or `ObjectParquetStorage`."""

    url: str

    def translate_errors(self) -> AbstractContextManager[None]: ...
    def check_writable(self) -> None: ...
    def list_existing(self) -> str: ...
    def refuse_file(self) -> None: ...
    def prepare(self) -> None: ...
    def remove_temporaries(self) -> None: ...
    def lock(self) -> AbstractContextManager[None]: ...
    def head(self) -> ManifestHead | None: ...
    def files(self, head: ManifestHead) -> list[PartFile]: ...
    def write_head(self, head: ManifestHead) -> None: ...
    def append_files(self, head: ManifestHead, files: Sequence[PartFile]) -> None: ...
    def replace_files(self, head: ManifestHead, files: Sequence[PartFile]) -> None: ...
    def log_name(self, generation: int) -> str: ...
    def put_part(
        self, name: str, part: Part, schema: pa.Schema, *, empty: bool = False
    ) -> PartFile: ...
    def write_uncommitted(
        self, name: str, run_id: str, part: Part, schema: pa.Schema
    ) -> WrittenFile: ...
    def accept_written(self, written: WrittenFile) -> PartFile: ...
    def check_writer(self) -> None: ...
    def sync(self) -> None: ...
    def is_intact(self, part: PartFile) -> bool: ...
    def list_names(self) -> list[str]: ...
    def remove_files(self, names: Sequence[str]) -> None: ...
    def mark_success(self) -> None: ...


class ParquetWriterConfig(msgspec.Struct, frozen=True):
    """The configuration of an executor that writes parts: the columns as an Arrow message, the run,
    the file name suffix.
    """

    schema: str
    run_id: str
    suffix: str


def read_parts(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None
) -> Manifest:
    """Return the committed parts of the output at `path`, also while it is being written."""
    location = locate(path)
    keep_options(location.url, storage_options)
    storage = _open_storage(location)
    with storage.translate_errors():
        head = storage.head()
        if head is None:
            raise OutputNotOurs(path=storage.url, found="no manifest")
        return _manifest_of(storage, head)


class ParquetSink:
    """The Parquet sink. `output="labels/"` is `ParquetSink("labels/")`.

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
        step: StepHook = ignore_step,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="mode", found=mode, why=f"must be one of {MODES}")
        if not isinstance(grace_s, int) or grace_s < 0:
            raise Invalid(what="grace_s", found=grace_s, why="must be whole seconds, at least 0")
        location = locate(path)
        keep_options(location.url, storage_options)
        self.path = location.local or location.url
        self._location = location
        self._storage = _open_storage(location, step=step, lock_wait_s=lock_wait_s)
        self._mode = mode
        self._grace_s = grace_s
        self._generation = 0
        self._schema = pa.schema([])
        self._run_id = self._suffix = ""
        # For a run that succeeds another one by `begin_after`: its id and name, and its parts so
        # far.
        self._successor: tuple[str, str] | None = None
        self._staged: list[PartFile] = []
        self._base_files: dict[str, PartFile] = {}

    def spec(self) -> Spec:
        spec: Spec = {"kind": "parquet", "path": self._location.url}
        if self._mode != "replace":
            spec["mode"] = self._mode
        if self._grace_s != GRACE_S:
            spec["grace_s"] = self._grace_s
        return spec

    def check_vacant(self) -> None:
        with self._storage.translate_errors():
            self._check_ownership("", "")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema or a place that the first commit would fail with."""
        write_rows(without_metadata(schema).empty_table(), pa.BufferOutputStream())
        with self._storage.translate_errors():
            self._storage.check_writable()

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._run_id = run_id
        self._schema = without_metadata(schema)
        storage = self._storage
        with storage.translate_errors():
            self._check_ownership(run_id, name)
            storage.prepare()
            with storage.lock():
                head = self._check_ownership(run_id, name) or first_head(run_id, name, self._schema)
                self._generation = head.generation
                if head.complete:
                    return head.version
                storage.remove_temporaries()
                self._generation += 1
                storage.write_head(msgspec.structs.replace(head, generation=self._generation))
        return head.version

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        storage = self._storage
        with storage.translate_errors():
            head = self._require_own_head()
            if self._successor is not None:
                return self._stage_parts(parts)
            remaining = parts_after(parts, head.version, path=storage.url)
            if not remaining:
                return head.version
            if head.complete:
                raise PartOutOfOrder(
                    path=storage.url, lo=remaining[0].lo, why="the output is complete"
                )
            # Without the lock, because this takes long.
            files = [self._put_part(part) for part in remaining if not isinstance(part, KeptPart)]
            storage.sync()
            with storage.lock():
                storage.append_files(self._require_own_head(), files)
            return files[-1].hi - 1

    def finish(self) -> None:
        storage = self._storage
        with storage.translate_errors():
            with storage.lock():
                head = self._require_own_head()
                if self._successor is not None and head.run_id != self._successor[0]:
                    head = self._replace_manifest(head)
                elif not head.complete:
                    if not head.rows:
                        storage.append_files(head, [self._put_empty_file(head.version + 1)])
                        head = self._require_own_head()
                    storage.write_head(msgspec.structs.replace(head, complete=True))
            storage.mark_success()
            storage.remove_temporaries()
            self._remove_superseded()

    def parts(self, run_id: str) -> list[str]:
        manifest = self._read_manifest()
        if manifest.run_id != run_id:
            raise OutputNotOurs(path=self._storage.url, found=f"run {manifest.run_id}")
        return manifest.files

    # --- executor side --------------------------------------------------------------------------

    def part_writer(self) -> bytes:
        config = ParquetWriterConfig(encode_schema(self._schema), self._run_id, self._suffix)
        return msgspec.json.encode(config)

    def check_writer(self, writer: bytes) -> None:
        with self._storage.translate_errors():
            self._storage.check_writer()

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        config = msgspec.json.decode(writer, type=ParquetWriterConfig)
        schema = decode_schema(config.schema)
        name = part_name(part.lo, part.hi, config.suffix)
        with self._storage.translate_errors():
            part = part_with_schema(part, schema, path=self._storage.url)
            file = self._storage.write_uncommitted(name, config.run_id, part, schema)
        return WrittenPart(part.lo, part.hi, [file])

    def _read_manifest(self) -> Manifest:
        with self._storage.translate_errors():
            head = self._storage.head()
            if head is None:
                raise OutputNotOurs(path=self._storage.url, found="no manifest")
            return _manifest_of(self._storage, head)

    # --- changed input --------------------------------------------------------------------------

    def owner(self) -> str:
        with self._storage.translate_errors():
            head = self._storage.head()
        return "" if head is None else head.run_id

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        storage = self._storage
        with storage.translate_errors():
            head = storage.head()
        if head is None or head.run_id == run_id:
            return Begun(self.begin(run_id, name, schema), ())
        self._schema = without_metadata(schema)
        self._run_id, self._suffix = run_id, f"-{run_id}"
        with storage.translate_errors(), storage.lock():
            # A replaced output may have other columns. Then no file of it is kept.
            head = self._check_ownership(base.run_id, name, check_columns=self._mode == "append")
            if head is None:
                raise OutputTaken(path=storage.url, why="the manifest of the output is missing")
            files = storage.files(head)
            storage.remove_temporaries()
            self._generation = head.generation + 1
            storage.write_head(msgspec.structs.replace(head, generation=self._generation))
        self._successor = (run_id, name)
        self._staged = []
        self._base_files = {file.path: file for file in files if file.rows}
        if self._mode == "append":
            return Begun(NOTHING, [KeptPart(one.lo, one.hi) for one in base.same])
        if head.arrow_schema != encode_schema(self._schema):
            return Begun(NOTHING, ())
        return Begun(
            NOTHING, kept_files(base, ((f.path, f.lo, f.hi) for f in self._base_files.values()))
        )

    def _stage_parts(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        """Put the parts in place. `finish` adds them to the manifest."""
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        for part in parts_after(parts, version, path=self._storage.url):
            if isinstance(part, KeptPart):
                base_file = self._base_files.get(
                    part.file, PartFile("", part.lo, part.hi, 0, 0, "")
                )
                self._staged.append(msgspec.structs.replace(base_file, lo=part.lo, hi=part.hi))
            else:
                self._staged.append(self._put_part(part))
        self._storage.sync()
        return self._staged[-1].hi - 1 if self._staged else NOTHING

    def _replace_manifest(self, head: ManifestHead) -> ManifestHead:
        """Replace the manifest by one that lists only the staged parts; with "append", after the
        former parts.
        """
        assert self._successor is not None
        before = self._base_files.values() if self._mode == "append" else ()
        files = [*before, *self._staged]
        if not any(file.rows for file in files):
            files.append(self._put_empty_file(files[-1].hi if files else 0))
        head = msgspec.structs.replace(
            first_head(*self._successor, self._schema),
            generation=self._generation,
            complete=True,
            log=self._storage.log_name(self._generation),
        )
        self._storage.replace_files(head, files)
        return head

    def _remove_superseded(self) -> None:
        """Delete part files that the manifest does not list, after `grace_s` for readers that
        listed them.
        """
        head = self._require_own_head()
        counted = {file.path for file in self._storage.files(head)}
        superseded = [
            n
            for n in self._storage.list_names()
            if n not in counted and _PART_FILE_NAME.fullmatch(n)
        ]
        if superseded:
            SYSTEM.sleep(self._grace_s)
            self._require_own_head()
            self._storage.remove_files(superseded)

    # --- ownership ------------------------------------------------------------------------------

    def _check_ownership(
        self, run_id: str, name: str, *, check_columns: bool = True
    ) -> ManifestHead | None:
        """Return the head of this run, or None for a vacant place. Refuses a foreign or corrupt
        one. Changes nothing.
        """
        storage = self._storage
        storage.refuse_file()
        head = storage.head()
        if head is None:
            if existing := storage.list_existing():
                raise OutputNotOurs(path=storage.url, found=existing)
            return None
        if (head.run_id, head.name) != (run_id, name):
            raise OutputNotOurs(path=storage.url, found=f"run {head.run_id} of {head.name}")
        if check_columns and head.arrow_schema != encode_schema(self._schema):
            raise Invalid(
                what="schema",
                path=storage.url,
                expected=head.schema,
                found=self._schema.to_string(),
            )
        for part in storage.files(head):
            if part.path and not storage.is_intact(part):
                why = "a committed part is missing or cut short"
                raise OutputCorrupt(path=f"{storage.url}/{part.path}", why=why)
        return head

    def _require_own_head(self) -> ManifestHead:
        head = self._storage.head()
        if head is None or head.generation != self._generation:
            current = 0 if head is None else head.generation
            raise OutputTaken(path=self._storage.url, held=self._generation, current=current)
        return head

    # --- writing --------------------------------------------------------------------------------

    def _put_part(self, part: Part | WrittenPart) -> PartFile:
        if isinstance(part, WrittenPart):
            [written] = part.files
            return self._storage.accept_written(written)
        name = part_name(part.lo, part.hi, self._suffix)
        part = part_with_schema(part, self._schema, path=self._storage.url)
        return self._storage.put_part(name, part, self._schema)

    def _put_empty_file(self, at: int) -> PartFile:
        """Write a file without rows, from which readers of the listing get the columns."""
        part = Part(at, at, self._schema.empty_table())
        name = part_name(at, at, self._suffix)
        file = self._storage.put_part(name, part, self._schema, empty=True)
        self._storage.sync()
        return file


def _open_storage(
    location: Location, *, step: StepHook = ignore_step, lock_wait_s: float = LOCK_WAIT_S
) -> ParquetStorage:
    if location.local is not None:
        return LocalParquetStorage(location.local, step=step, lock_wait_s=lock_wait_s)
    return ObjectParquetStorage(location, step=step)


def _manifest_of(storage: ParquetStorage, head: ManifestHead) -> Manifest:
    return Manifest(
        path=storage.url,
        run_id=head.run_id,
        name=head.name,
        schema=head_schema(head),
        version=head.version,
        complete=head.complete,
        rows=head.rows,
        parts=tuple(storage.files(head)),
    )
