"""The Delta sink: rows as a Delta table. A commit is one Delta transaction that also carries the
version.

- The version is Delta's application transaction of the run id. It is read and raised on the same
  handle. If another process of this run commits in between, Delta refuses ours as concurrent. The
  sink then reads again and finds the parts committed, so a repeat after a lost reply adds nothing.
- A part is one file, `part-<lo>-<hi>-<run id>.parquet`, with the same bytes as in the Parquet sink.
  Sorting the names of a run's files gives the seq order.
- A table without a transaction of this run is foreign. `append=True` adds to it if its schema is
  equal and it requires no writer feature beyond plain files.
- `partition_by` splits a part into one file per partition (`partitions`). The files contain the
  partition columns too.
- `merge_schema=True` adds missing columns to the table before the first part is written, and omits
  columns of the table that the run lacks.
- On a local disk a part is synced before the transaction and the log after it. The library syncs
  nothing. A power failure in between may leave an empty last log entry.

The sink writes the files and uses the library only for the transaction: the library's writer names
files at random, which loses the order, and its bytes are not determined by the rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.errors import Conflict, Invalid
from holdfast.spark.sinks.api import (
    NOTHING,
    Base,
    Begun,
    KeptPart,
    OutputCorrupt,
    OutputError,
    OutputNotOurs,
    Part,
    PartOutOfOrder,
    Spec,
    kept_files,
    parts_after,
    without_metadata,
)
from holdfast.spark.sinks.delta_files import DeltaFiles, add_action
from holdfast.spark.sinks.location import locate
from holdfast.spark.sinks.manifest import decode_schema, encode_schema
from holdfast.spark.sinks.object_store import keep_options, options_of
from holdfast.spark.sinks.parquet_files import (
    SCRATCH,
    StepHook,
    check_scratch,
    check_writable,
    ignore_step,
    in_utc,
    is_scratch_only,
    make_directory,
    one_line,
    output_error_of,
    remove_temporaries,
    replace_file,
    sync_directory,
    translate_os_errors,
)
from holdfast.spark.sinks.parquet_objects import WRITE_PROBE_NAME
from holdfast.spark.sinks.part_files import PartFile, WrittenPart
from holdfast.spark.sinks.partitions import check_partition_columns, parse_partition_by

COMMIT_TRIES_MAX = 5  # lost races of one commit against other writers
LOG = "_delta_log"
MODES = ("upsert", "append")
OWNER_KEY = "holdfast.run"  # the key of a transaction's run in the table's history
_PART_FILE_NAME = re.compile(r"part-(\d{12})-(\d{12})-")
PLAIN_FEATURES = frozenset({"appendOnly", "invariants", "timestampNtz"})
PLAIN_WRITER_VERSION = 2  # later versions require checks and mappings, unless they list features
LISTED_WRITER_VERSION = 7
_SAFE = re.compile(r"[A-Za-z0-9_.-]+")


class DeltaWriterConfig(msgspec.Struct, frozen=True):
    """The configuration of an executor that writes parts: the columns as an Arrow message, the run,
    the partition columns.
    """

    schema: str
    run_id: str
    partition_by: list[str]


class DeltaSink:
    """The Delta sink. `append=True` adds to a table with other writers.

    `mode` applies to a changed input. "upsert" replaces files with changed or removed rows in one
    commit at the end. "append" adds the new and changed rows. `storage_options` are the credentials
    and settings of an object store, if they are not in the environment. They stay in memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        append: bool = False,
        mode: str = "upsert",
        partition_by: str | Sequence[str] = (),
        merge_schema: bool = False,
        storage_options: Mapping[str, str] | None = None,
        step: StepHook = ignore_step,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="mode", found=mode, why=f"must be one of {MODES}")
        place = locate(path)
        if "%" in place.url:  # the library would decode it and open another path
            why = "the path of a Delta table must not contain %"
            raise Invalid(what="path", path=place.url, why=why)
        keep_options(place.url, storage_options)
        self._local = place.local
        self.path = place.url
        self._files = DeltaFiles(place.url, place.local, step)
        self._append = append
        self._mode = mode
        self._partition_by = parse_partition_by(partition_by)
        self._merge_schema = merge_schema
        # For a run that succeeds another one: the base's files by name, its own parts, their
        # actions.
        self._base_files: dict[str, list[PartFile]] | None = None
        self._staged: list[PartFile] = []
        self._actions: list[Any] = []
        self._step = step
        self._run_id = ""
        # The run whose rows the table holds. For "append" it is the base run until the output is
        # complete.
        self._owner = ""
        self._schema = pa.schema([])
        self._table: Any = None
        self._complete = False

    def spec(self) -> Spec:
        spec: Spec = {"kind": "delta", "path": self.path, "append": self._append}
        if self._mode != "upsert":
            spec["mode"] = self._mode
        if self._partition_by:
            spec["partition_by"] = json.dumps(self._partition_by)
        if self._merge_schema:
            spec["merge_schema"] = True
        return spec

    def check_vacant(self) -> None:
        with self._translate_errors():
            if self._local is not None and self._local.is_file():
                raise OutputNotOurs(path=self.path, found="a file")
            if not self._is_table():
                self._refuse_foreign()
            elif not self._append:
                raise OutputNotOurs(path=self.path, found="a Delta table")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema, a table or a place that the first commit would fail with."""
        self._schema = _delta_schema(without_metadata(schema))
        check_partition_columns(self._partition_by, self._schema, path=self.path)
        with self._translate_errors():
            if self._is_table():
                self._table = self._open()
                self._check_schema()
            if self._local is not None:
                check_writable(self._local)
            else:
                self._files.check_writable(WRITE_PROBE_NAME)

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        if not _SAFE.fullmatch(run_id):
            raise Invalid(what="run id", run_id=run_id, why="it becomes part of file names")
        self._run_id, self._schema = run_id, _delta_schema(without_metadata(schema))
        with self._translate_errors():
            if self._local is not None and self._local.is_file():
                raise OutputNotOurs(path=self.path, found="a file")
            if self._is_table():
                self._table = self._open()
            else:
                self._refuse_foreign()
                self._table = self._create(name)
            self._check_owner()
            self._add_missing_columns()
            self._complete = self._is_complete()
            if self._local is not None and not self._complete:
                make_directory(self._local / SCRATCH)
                remove_temporaries(self._local / SCRATCH)
        return self._version()

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        if self._base_files is not None:
            with self._translate_errors():
                return self._stage_parts(parts)
        for _ in range(COMMIT_TRIES_MAX):
            with self._translate_errors():
                self._table.update_incremental()
                version = self._version()
                remaining = parts_after(parts, version, path=self.path)
                if not remaining:
                    return version
                if self._complete:
                    raise PartOutOfOrder(
                        path=self.path, lo=remaining[0].lo, why="the output is complete"
                    )
                put = [
                    p
                    for part in remaining
                    if not isinstance(part, KeptPart)
                    for p in self._write_part(part)
                ]
                actions = [action for _, action in put if action]
                if self._local is not None:
                    sync_directory(self._local)
                self._step("files")
                if self._commit(actions, self._run_id, remaining[-1].version):
                    return remaining[-1].version
        raise Conflict(path=self.path, tries=COMMIT_TRIES_MAX)

    def finish(self) -> None:
        for _ in range(COMMIT_TRIES_MAX):
            with self._translate_errors():
                self._table.update_incremental()
                self._complete = self._complete or self._is_complete()
                self._owner = ""
                if not self._complete and self._base_files is not None:
                    self._complete = self._commit_replacement(self._base_files)
                elif not self._complete:
                    self._complete = self._commit([], self._completed_id, self._version())
            if self._complete:
                return
        raise Conflict(path=self.path, tries=COMMIT_TRIES_MAX)

    def parts(self, run_id: str) -> list[str]:
        """Return the run's own files, unless another writer compacted the table."""
        with self._translate_errors():
            if not self._is_table():
                raise OutputNotOurs(path=self.path, found="no Delta table")
            table = self._open()
            if table.transaction_version(run_id) is None:
                raise OutputNotOurs(path=self.path, found="a Delta table without this run")
            own = [part.path for part in self._files_of(table, run_id)]
        return [f"{self.path.rstrip('/')}/{name}" for name in own]

    # --- executor side --------------------------------------------------------------------------

    def part_writer(self) -> bytes:
        columns = list(self._table.metadata().partition_columns)
        return msgspec.json.encode(
            DeltaWriterConfig(encode_schema(self._schema), self._run_id, columns)
        )

    def check_writer(self, writer: bytes) -> None:
        if self._local is not None:
            check_scratch(self._local)
            return
        with self._translate_errors():
            self._files.check_writable(f"{WRITE_PROBE_NAME}-{SYSTEM.entropy(6).hex()}")

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        config = msgspec.json.decode(writer, type=DeltaWriterConfig)
        schema = decode_schema(config.schema)
        with self._translate_errors():
            files = self._files.write_part(part, config.run_id, schema, config.partition_by)
            if self._local is not None:
                sync_directory(self._local)
        return WrittenPart(part.lo, part.hi, files)

    # --- changed input --------------------------------------------------------------------------

    def owner(self) -> str:
        """Return the run of the newest transaction that names one."""
        return next(iter(self.owners()), "")

    @property
    def is_shared(self) -> bool:
        return self._append

    def owners(self) -> list[str]:
        with self._translate_errors():
            if not self._is_table():
                return []
            history = self._open().history()
        return list(dict.fromkeys(str(one[OWNER_KEY]) for one in history if one.get(OWNER_KEY)))

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        if not _SAFE.fullmatch(run_id):
            raise Invalid(what="run id", run_id=run_id, why="it becomes part of file names")
        self._run_id, self._schema = run_id, _delta_schema(without_metadata(schema))
        with self._translate_errors():
            self._table = self._open()
            if self._table.transaction_version(base.run_id) is None:
                raise OutputNotOurs(path=self.path, found="a Delta table without its base run")
            self._check_schema()
            self._add_missing_columns()
            self._complete = self._is_complete()
            if self._complete:
                return Begun(self._version(), ())
            if self._local is not None:
                make_directory(self._local / SCRATCH)
                remove_temporaries(self._local / SCRATCH)
            if self._mode == "append":
                self._owner = base.run_id
                return Begun(self._version(), [KeptPart(one.lo, one.hi) for one in base.same])
            files = self._files_of(self._table, base.run_id)
        # Keyed by the first file of each part.
        parts: dict[tuple[int, int], list[PartFile]] = {}
        for file in files:
            parts.setdefault((file.lo, file.hi), []).append(file)
        self._base_files = {group[0].path: group for group in parts.values()}
        self._staged, self._actions = [], []
        found = [(group[0].path, group[0].lo, group[0].hi) for group in parts.values()]
        return Begun(NOTHING, kept_files(base, found))

    def _files_of(self, table: Any, run_id: str) -> list[PartFile]:
        """Return the files of a run in the table, with their seqs, in order."""
        # The library quotes the directory in its URIs. The file names need no quoting.
        names = {uri.rpartition("/")[2] for uri in table.file_uris()}
        listed = self._read_part_list(run_id)
        if listed is None:
            own = sorted(name for name in names if f"-{run_id}." in name or f"-{run_id}-" in name)
            found = ((name, _PART_FILE_NAME.match(name)) for name in own)
            return [PartFile(n, int(at[1]), int(at[2]), 1, 0, "") for n, at in found if at]
        parts = [part for part in listed if part.path]
        if missing := [part.path for part in parts if part.path not in names]:
            why = "another writer has rewritten the files of this run; use run.write() into another table"
            raise OutputNotOurs(path=self.path, found=f"{missing[0]} is gone", why=why)
        return parts

    def _stage_parts(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        """Put the files in place. `finish` adds them and removes the replaced ones in one
        transaction.
        """
        assert self._base_files is not None
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        for part in parts_after(parts, version, path=self.path):
            if isinstance(part, KeptPart):
                self._staged += [
                    msgspec.structs.replace(base_file, lo=part.lo, hi=part.hi)
                    for base_file in self._base_files[part.file]
                ]
                continue
            for file, action in self._write_part(part):
                self._staged.append(file)
                self._actions += [action] if action else []
        if self._local is not None:
            sync_directory(self._local)
        return self._staged[-1].hi - 1 if self._staged else NOTHING

    def _commit_replacement(self, former: dict[str, list[PartFile]]) -> bool:
        """Add the new files and remove those with changed or removed rows in one transaction."""
        try:
            from deltalake.transaction import RemoveAction
        except ImportError as error:
            why = "this version of deltalake cannot remove files: pip install -U deltalake"
            raise Invalid(what="sink", kind="delta", why=why) from error
        self._write_part_list()
        kept = {file.path for file in self._staged}
        present = {uri.rpartition("/")[2] for uri in self._table.file_uris()}
        names = {file.path for group in former.values() for file in group}
        leaving = sorted(names - kept)
        if missing := [name for name in names if name not in present]:
            raise OutputNotOurs(path=self.path, found=f"{missing[0]} is gone")
        now_ms = SYSTEM.wall_ns() // 1_000_000
        values: Any = None if self._table.metadata().partition_columns else {}
        removes = [RemoveAction(name, True, now_ms, None, values) for name in leaving]
        self._step("files")
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        ids = [(self._run_id, version), (self._completed_id, version)]
        return self._transact([*self._actions, *removes], ids)

    def _part_list_name(self, run_id: str) -> str:
        return f"{SCRATCH}/run-{run_id}.json"

    def _write_part_list(self) -> None:
        """Store the parts of this run with their seqs, because kept files carry seqs of older runs
        in their names.
        """
        data, name = msgspec.json.encode(self._staged), self._part_list_name(self._run_id)
        if self._local is not None:
            scratch = self._local / SCRATCH
            replace_file(self._local / name, data, scratch=scratch, step=self._step)
        else:
            with self._files.open_object(name) as stream:
                stream.write(data)

    def _read_part_list(self, run_id: str) -> list[PartFile] | None:
        try:
            if self._local is not None:
                data = (self._local / self._part_list_name(run_id)).read_bytes()
            else:
                with self._files.remote_filesystem().open_input_stream(
                    self._part_list_name(run_id)
                ) as stream:
                    data = stream.read()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=list[PartFile])

    # --- ownership ------------------------------------------------------------------------------

    def _refuse_foreign(self) -> None:
        if self._local is None:
            found = [
                info.path
                for info in self._files.remote_filesystem().get_file_info(_children_selector())
            ]
        elif not self._local.exists() or is_scratch_only(self._local):
            return
        else:
            found = sorted(os.listdir(self._local))
            # A table without a first entry: `begin` was interrupted.
            log = self._local / LOG
            if set(found) <= {LOG, SCRATCH} and log.is_dir():
                found = [n for n in os.listdir(log) if n.endswith((".json", ".parquet"))]
        if found:
            raise OutputNotOurs(path=self.path, found=", ".join(found[:3]))

    def _is_table(self) -> bool:
        options = options_of(self.path)
        return bool(
            _delta_library().DeltaTable.is_deltatable(self.path, storage_options=options or None)
        )

    def _open(self) -> Any:
        return _delta_library().DeltaTable(self.path, storage_options=options_of(self.path) or None)

    def _create(self, name: str) -> Any:
        if self._local is not None:
            make_directory(self._local)
        self._step("directory")
        # A second process of this run may create it first. The owner is checked afterwards.
        table = _delta_library().DeltaTable.create(
            self.path,
            self._schema,
            mode="ignore",
            partition_by=list(self._partition_by) or None,
            name=name,
            storage_options=options_of(self.path) or None,
            commit_properties=_commit_properties([(self._run_id, NOTHING)], self._run_id),
        )
        self._sync_log(0)
        self._step("create")
        table.update_incremental()
        return table

    def _check_owner(self) -> None:
        ours = self._table.transaction_version(self._run_id) is not None
        if not ours and not self._append:
            raise OutputNotOurs(path=self.path, found="a Delta table without this run")
        self._check_schema()

    def _check_schema(self) -> None:
        table = self._table.schema().fields
        expected = [(field.name, str(field.type)) for field in table]
        found = [
            (f.name, str(f.type)) for f in _delta_library().Schema.from_arrow(self._schema).fields
        ]
        if not self._merge_schema and expected != found:
            raise Invalid(what="schema", path=self.path, expected=expected, found=found)
        known, ours = dict(expected), dict(found)
        if wrong := [name for name, kind in found if known.get(name, kind) != kind]:
            why = "these columns have another type in the table"
            raise Invalid(what="schema", path=self.path, columns=wrong, expected=expected,
                          found=found, why=why)  # fmt: skip
        if wrong := [f.name for f in table if f.name not in ours and not f.nullable]:
            raise Invalid(
                what="schema",
                path=self.path,
                columns=wrong,
                why="these columns of the table must not be null",
            )
        if demand := _unsupported_feature(self._table):
            raise Invalid(what="delta table", path=self.path, why=f"the table requires {demand}")
        parted = tuple(self._table.metadata().partition_columns)
        if self._partition_by and parted != self._partition_by:
            why = f"the table is partitioned by {', '.join(parted) or 'nothing'}"
            raise Invalid(what="partition_by", path=self.path, found=self._partition_by, why=why)
        if missing := [name for name in parted if name not in ours]:
            raise Invalid(
                what="schema",
                path=self.path,
                columns=missing,
                why="the table is partitioned by these columns",
            )

    def _add_missing_columns(self) -> None:
        """Add the missing columns to the table."""
        for _ in range(COMMIT_TRIES_MAX):
            known = {field.name for field in self._table.schema().fields}
            fields = _delta_library().Schema.from_arrow(self._schema).fields
            new = [_delta_library().Field(f.name, f.type, nullable=True) for f in fields if f.name not in known]  # fmt: skip
            if not new:
                return
            with contextlib.suppress(_delta_library().exceptions.CommitFailedError):
                self._table.alter.add_columns(new)
            self._table.update_incremental()
            self._check_schema()
        raise Conflict(path=self.path, tries=COMMIT_TRIES_MAX)

    def _version(self) -> int:
        found = self._table.transaction_version(self._run_id)
        return NOTHING if found is None else int(found)

    def _is_complete(self) -> bool:
        return self._table.transaction_version(self._completed_id) is not None

    @property
    def _completed_id(self) -> str:
        return f"{self._run_id}/complete"

    # --- writing --------------------------------------------------------------------------------

    def _write_part(self, part: Part | WrittenPart) -> list[tuple[PartFile, Any]]:
        """Return the written files of this part and the actions that add them. For a part without rows, return one file
        with an empty path.
        """
        if isinstance(part, WrittenPart):
            files = part.files
        else:
            columns = self._table.metadata().partition_columns
            files = self._files.write_part(part, self._run_id, self._schema, columns)
        return [(one.file, add_action(one)) for one in files]

    def _commit(self, actions: list[Any], app_id: str, version: int) -> bool:
        return self._transact(actions, [(app_id, version)])

    def _transact(self, actions: list[Any], ids: Sequence[tuple[str, int]]) -> bool:
        """Commit a transaction. Returns False if another writer was first and nothing was written."""
        before = self._table.version()
        try:
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                commit_properties=_commit_properties(ids, self._owner or self._run_id),
            )
        except _delta_library().exceptions.CommitFailedError:
            return False
        self._step("transaction")
        self._sync_log(before + 1)
        return True

    def _sync_log(self, version: int) -> None:
        """Sync the log entries from `version` on."""
        if self._local is None:
            return
        log = self._local / LOG
        while (entry := log / f"{version:020d}.json").exists():
            with open(entry, "rb") as file:
                os.fsync(file.fileno())
            version += 1
        sync_directory(log)
        sync_directory(self._local)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors of the library and the system."""
        wrong = _delta_library().exceptions
        with translate_os_errors(self.path):
            try:
                yield
            except wrong.DeltaProtocolError as error:
                raise OutputCorrupt(path=self.path, why=_error_text(error)) from error
            except wrong.DeltaError as error:
                raise output_error_of(self.path, None, _error_text(error)) from error
            except Exception as error:
                if (
                    type(error) is not Exception
                ):  # the library raises a plain Exception for other errors
                    raise
                raise OutputError(path=self.path, why=_error_text(error)) from error


def _delta_library() -> Any:
    try:
        import deltalake
        import deltalake.exceptions
    except ImportError as error:
        why = "install it: pip install 'holdfast[spark]'"
        raise Invalid(what="sink", kind="delta", missing="deltalake", why=why) from error
    return deltalake


def _commit_properties(ids: Sequence[tuple[str, int]], run_id: str) -> Any:
    from deltalake import CommitProperties, Transaction

    transactions = [Transaction(app_id, version) for app_id, version in ids]
    return CommitProperties(app_transactions=transactions, custom_metadata={OWNER_KEY: run_id})


def _children_selector() -> Any:
    from pyarrow.fs import FileSelector

    return FileSelector("", allow_not_found=True, recursive=False)


def _delta_schema(schema: pa.Schema) -> pa.Schema:
    """Convert to a Delta schema: instants in UTC, no unsigned integers, no nanoseconds."""
    for field in schema:
        kind = field.type
        if pa.types.is_unsigned_integer(kind) or (
            pa.types.is_timestamp(kind) and kind.unit == "ns"
        ):
            raise Invalid(what="schema", column=field.name, why=f"Delta cannot store {kind}")
    schema = in_utc(schema.empty_table()).schema
    delta = _delta_library()
    try:
        delta.Schema.from_arrow(schema)
    except Exception as error:  # the library raises no narrower class here
        raise Invalid(what="schema", why=_error_text(error)) from error
    return schema


def _unsupported_feature(table: Any) -> str:
    """Return the writer feature that the table requires beyond plain files, or ""."""
    protocol = table.protocol()
    if protocol.min_writer_version == LISTED_WRITER_VERSION:
        if more := sorted(set(protocol.writer_features or []) - PLAIN_FEATURES):
            return f"the feature {', '.join(more)}"
    elif protocol.min_writer_version > PLAIN_WRITER_VERSION:
        return f"writer version {protocol.min_writer_version}"
    checked = [f.name for f in table.schema().fields if "delta.invariants" in f.metadata]
    return f"an invariant of {', '.join(checked)}" if checked else ""


def _error_text(error: BaseException) -> str:
    return one_line(str(error).split("\n   0:")[0])  # without the stack trace
