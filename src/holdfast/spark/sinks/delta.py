"""Rows as a Delta table; a commit is one Delta transaction that also carries the version.

- The version is Delta's own application transaction of the run id. It is read and raised on the same
  handle: if another process of this run commits in between, Delta refuses ours as concurrent, we read
  again and find the parts done. So a repeat after a lost answer adds nothing.
- A part is one file, `part-<lo>-<hi>-<run id>.parquet`, the same bytes as the Parquet sink writes, so
  that sorting the names of a run's files gives the order of seq.
- A table without a transaction of this run is not ours. `append=True` adds to it all the same, when
  its schema is the same and it asks nothing of a writer that writing plain files does not give.
- `partition_by` makes a part several files, one for each partition in it (`partitions`); the columns are in
  the files, too.
- `merge_schema=True` adds columns that the table lacks, before the first part is written, and leaves out
  columns of the table that the run does not have.
- On a local disk a part is synced before the transaction and the log after it. The library itself
  syncs nothing; a power cut in between may leave a last log entry without content.

Files are written by us and only the transaction by the library: its writer names files at random,
which loses the order, and its bytes are no function of the rows.
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
    pending,
    plain,
)
from holdfast.spark.sinks.delta_files import DeltaFiles, add_action
from holdfast.spark.sinks.files import (
    SCRATCH,
    Step,
    check_scratch,
    check_writable,
    drop_temporaries,
    in_utc,
    is_scratch_only,
    make_directory,
    no_step,
    of_system,
    readable,
    replace_file,
    sync_directory,
    typed,
)
from holdfast.spark.sinks.location import locate
from holdfast.spark.sinks.manifest import message_of, schema_from
from holdfast.spark.sinks.object_place import PROBE
from holdfast.spark.sinks.object_store import keep_options, options_of
from holdfast.spark.sinks.partitions import (
    check_partition_columns,
    names_of,
)
from holdfast.spark.sinks.written import PartFile, WrittenPart

TRIES_MAX = 5  # lost races of one commit against other writers of the table
LOG = "_delta_log"
MODES = ("upsert", "append")
OWNER = "holdfast.run"  # the run of a transaction, in the table's history
_PART = re.compile(r"part-(\d{12})-(\d{12})-")
PLAIN_FEATURES = frozenset({"appendOnly", "invariants", "timestampNtz"})
PLAIN_WRITER_VERSION = 2  # later ones ask for checks and mappings, unless they list features
LISTED_WRITER_VERSION = 7
_SAFE = re.compile(r"[A-Za-z0-9_.-]+")


class PartWriter(msgspec.Struct, frozen=True):
    """What an executor needs to write parts: the columns as an Arrow message, the run, the columns that partition."""

    schema: str
    run_id: str
    partition_by: list[str]


class DeltaSink:
    """`append=True` adds to a table that others write to as well.

    `mode` is for input that grew: "upsert" replaces files with changed or gone rows, in one commit at
    the end; "append" adds the new and changed rows. `storage_options` are the credentials and settings
    of an object store, if they are not in the environment. They stay in memory.
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
        step: Step = no_step,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="mode", found=mode, why=f"one of {MODES}")
        place = locate(path)
        if "%" in place.url:  # the library would decode it, and look for the table elsewhere
            why = "Delta tables cannot lie under a name with %"
            raise Invalid(what="path", path=place.url, why=why)
        keep_options(place.url, storage_options)
        self._local = place.local
        self.path = place.url
        self._files = DeltaFiles(place.url, place.local, step)
        self._append = append
        self._mode = mode
        self._partition_by = names_of(partition_by)
        self._merge_schema = merge_schema
        # Of a run that succeeds another one: that one's files by name, its own parts, their actions.
        self._succeeds: dict[str, list[PartFile]] | None = None
        self._staged: list[PartFile] = []
        self._actions: list[Any] = []
        self._step = step
        self._run_id = ""
        # The run whose rows the table holds: that before this one, until "append" is complete.
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
        with self._told():
            if self._local is not None and self._local.is_file():
                raise OutputNotOurs(path=self.path, found="a file")
            if not self._is_table():
                self._refuse_foreign()
            elif not self._append:
                raise OutputNotOurs(path=self.path, found="a Delta table")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema, a table or a place that the first commit would fail at."""
        self._schema = _delta_schema(plain(schema))
        check_partition_columns(self._partition_by, self._schema, path=self.path)
        with self._told():
            if self._is_table():
                self._table = self._open()
                self._check_schema()
            if self._local is not None:
                check_writable(self._local)
            else:
                self._files.check(PROBE)

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        if not _SAFE.fullmatch(run_id):
            raise Invalid(what="run id", run_id=run_id, why="it becomes part of file names")
        self._run_id, self._schema = run_id, _delta_schema(plain(schema))
        with self._told():
            if self._local is not None and self._local.is_file():
                raise OutputNotOurs(path=self.path, found="a file")
            if self._is_table():
                self._table = self._open()
            else:
                self._refuse_foreign()
                self._table = self._create(name)
            self._check_owner()
            self._evolve()
            self._complete = self._is_complete()
            if self._local is not None and not self._complete:
                make_directory(self._local / SCRATCH)
                drop_temporaries(self._local / SCRATCH)
        return self._version()

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        if self._succeeds is not None:
            with self._told():
                return self._stage(parts)
        for _ in range(TRIES_MAX):
            with self._told():
                self._table.update_incremental()
                version = self._version()
                wanted = pending(parts, version, path=self.path)
                if not wanted:
                    return version
                if self._complete:
                    raise PartOutOfOrder(path=self.path, lo=wanted[0].lo, why="it is complete")
                put = [
                    p for part in wanted if not isinstance(part, KeptPart) for p in self._put(part)
                ]
                actions = [action for _, action in put if action]
                if self._local is not None:
                    sync_directory(self._local)
                self._step("files")
                if self._commit(actions, self._run_id, wanted[-1].version):
                    return wanted[-1].version
        raise Conflict(path=self.path, tries=TRIES_MAX)

    def finish(self) -> None:
        for _ in range(TRIES_MAX):
            with self._told():
                self._table.update_incremental()
                self._complete = self._complete or self._is_complete()
                self._owner = ""
                if not self._complete and self._succeeds is not None:
                    self._complete = self._replace(self._succeeds)
                elif not self._complete:
                    self._complete = self._commit([], self._completed_id, self._version())
            if self._complete:
                return
        raise Conflict(path=self.path, tries=TRIES_MAX)

    def parts(self, run_id: str) -> list[str]:
        """The run's own files, as long as nobody compacted the table."""
        with self._told():
            if not self._is_table():
                raise OutputNotOurs(path=self.path, found="no Delta table")
            table = self._open()
            if table.transaction_version(run_id) is None:
                raise OutputNotOurs(path=self.path, found="a Delta table without this run")
            own = [part.path for part in self._files_of(table, run_id)]
        return [f"{self.path.rstrip('/')}/{name}" for name in own]

    # --- files that executors write -------------------------------------------------------------

    def part_writer(self) -> bytes:
        columns = list(self._table.metadata().partition_columns)
        return msgspec.json.encode(PartWriter(message_of(self._schema), self._run_id, columns))

    def check_writer(self, writer: bytes) -> None:
        if self._local is not None:
            check_scratch(self._local)
            return
        with self._told():
            self._files.check(f"{PROBE}-{SYSTEM.entropy(6).hex()}")

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        told = msgspec.json.decode(writer, type=PartWriter)
        schema = schema_from(told.schema)
        with self._told():
            files = self._files.write(part, told.run_id, schema, told.partition_by)
            if self._local is not None:
                sync_directory(self._local)
        return WrittenPart(part.lo, part.hi, files)

    # --- input that grew ------------------------------------------------------------------------

    def owner(self) -> str:
        """By the newest transaction that names a run."""
        return next(iter(self.owners()), "")

    @property
    def is_shared(self) -> bool:
        return self._append

    def owners(self) -> list[str]:
        with self._told():
            if not self._is_table():
                return []
            history = self._open().history()
        return list(dict.fromkeys(str(one[OWNER]) for one in history if one.get(OWNER)))

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        if not _SAFE.fullmatch(run_id):
            raise Invalid(what="run id", run_id=run_id, why="it becomes part of file names")
        self._run_id, self._schema = run_id, _delta_schema(plain(schema))
        with self._told():
            self._table = self._open()
            if self._table.transaction_version(base.run_id) is None:
                raise OutputNotOurs(path=self.path, found="a Delta table without its base run")
            self._check_schema()
            self._evolve()
            self._complete = self._is_complete()
            if self._complete:
                return Begun(self._version(), ())
            if self._local is not None:
                make_directory(self._local / SCRATCH)
                drop_temporaries(self._local / SCRATCH)
            if self._mode == "append":
                self._owner = base.run_id
                return Begun(self._version(), [KeptPart(one.lo, one.hi) for one in base.same])
            files = self._files_of(self._table, base.run_id)
        # By the first of the files that a part has.
        parts: dict[tuple[int, int], list[PartFile]] = {}
        for file in files:
            parts.setdefault((file.lo, file.hi), []).append(file)
        self._succeeds = {group[0].path: group for group in parts.values()}
        self._staged, self._actions = [], []
        found = [(group[0].path, group[0].lo, group[0].hi) for group in parts.values()]
        return Begun(NOTHING, kept_files(base, found))

    def _files_of(self, table: Any, run_id: str) -> list[PartFile]:
        """The files of a run that are in the table, with its seqs, in their order."""
        # The library quotes the directory in its URIs; the names are ours and need no quotes.
        names = {uri.rpartition("/")[2] for uri in table.file_uris()}
        listed = self._read_list(run_id)
        if listed is None:
            own = sorted(name for name in names if f"-{run_id}." in name or f"-{run_id}-" in name)
            found = ((name, _PART.match(name)) for name in own)
            return [PartFile(n, int(at[1]), int(at[2]), 1, 0, "") for n, at in found if at]
        parts = [part for part in listed if part.path]
        if gone := [part.path for part in parts if part.path not in names]:
            why = "another writer has rewritten its files; use run.write() into another table"
            raise OutputNotOurs(path=self.path, found=f"{gone[0]} is gone", why=why)
        return parts

    def _stage(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        """Put the files in place; `finish` adds them, in one transaction with all that leaves."""
        assert self._succeeds is not None
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        for part in pending(parts, version, path=self.path):
            if isinstance(part, KeptPart):
                self._staged += [
                    msgspec.structs.replace(held, lo=part.lo, hi=part.hi)
                    for held in self._succeeds[part.file]
                ]
                continue
            for file, action in self._put(part):
                self._staged.append(file)
                self._actions += [action] if action else []
        if self._local is not None:
            sync_directory(self._local)
        return self._staged[-1].hi - 1 if self._staged else NOTHING

    def _replace(self, former: dict[str, list[PartFile]]) -> bool:
        """One transaction: new files come, those with changed or gone rows leave."""
        try:
            from deltalake.transaction import RemoveAction
        except ImportError as error:
            why = "it cannot remove files: pip install -U deltalake"
            raise Invalid(what="sink", kind="delta", why=why) from error
        self._write_list()
        kept = {file.path for file in self._staged}
        present = {uri.rpartition("/")[2] for uri in self._table.file_uris()}
        names = {file.path for group in former.values() for file in group}
        leaving = sorted(names - kept)
        if gone := [name for name in names if name not in present]:
            raise OutputNotOurs(path=self.path, found=f"{gone[0]} is gone")
        now_ms = SYSTEM.wall_ns() // 1_000_000
        values: Any = None if self._table.metadata().partition_columns else {}
        removes = [RemoveAction(name, True, now_ms, None, values) for name in leaving]
        self._step("files")
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        ids = [(self._run_id, version), (self._completed_id, version)]
        return self._transact([*self._actions, *removes], ids)

    def _list_name(self, run_id: str) -> str:
        return f"{SCRATCH}/run-{run_id}.json"

    def _write_list(self) -> None:
        """The parts of this run with their seqs: names of kept files tell those of older runs."""
        data, name = msgspec.json.encode(self._staged), self._list_name(self._run_id)
        if self._local is not None:
            scratch = self._local / SCRATCH
            replace_file(self._local / name, data, scratch=scratch, step=self._step)
        else:
            with self._files.writing(name) as stream:
                stream.write(data)

    def _read_list(self, run_id: str) -> list[PartFile] | None:
        try:
            if self._local is not None:
                data = (self._local / self._list_name(run_id)).read_bytes()
            else:
                with self._files.remote().open_input_stream(self._list_name(run_id)) as stream:
                    data = stream.read()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=list[PartFile])

    # --- whose place it is ----------------------------------------------------------------------

    def _refuse_foreign(self) -> None:
        if self._local is None:
            found = [info.path for info in self._files.remote().get_file_info(_children())]
        elif not self._local.exists() or is_scratch_only(self._local):
            return
        else:
            found = sorted(os.listdir(self._local))
            # A table whose first entry was never written: killed in `begin`.
            log = self._local / LOG
            if set(found) <= {LOG, SCRATCH} and log.is_dir():
                found = [n for n in os.listdir(log) if n.endswith((".json", ".parquet"))]
        if found:
            raise OutputNotOurs(path=self.path, found=", ".join(found[:3]))

    def _is_table(self) -> bool:
        options = options_of(self.path)
        return bool(_library().DeltaTable.is_deltatable(self.path, storage_options=options or None))

    def _open(self) -> Any:
        return _library().DeltaTable(self.path, storage_options=options_of(self.path) or None)

    def _create(self, name: str) -> Any:
        if self._local is not None:
            make_directory(self._local)
        self._step("directory")
        # A second process of this run may create it first; whose it is, is asked afterwards.
        table = _library().DeltaTable.create(
            self.path,
            self._schema,
            mode="ignore",
            partition_by=list(self._partition_by) or None,
            name=name,
            storage_options=options_of(self.path) or None,
            commit_properties=_properties([(self._run_id, NOTHING)], self._run_id),
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
        found = [(f.name, str(f.type)) for f in _library().Schema.from_arrow(self._schema).fields]
        if not self._merge_schema and expected != found:
            raise Invalid(what="schema", path=self.path, expected=expected, found=found)
        known, ours = dict(expected), dict(found)
        if wrong := [name for name, kind in found if known.get(name, kind) != kind]:
            why = "the table has another type"
            raise Invalid(what="schema", path=self.path, columns=wrong, expected=expected,
                          found=found, why=why)  # fmt: skip
        if wrong := [f.name for f in table if f.name not in ours and not f.nullable]:
            raise Invalid(what="schema", path=self.path, columns=wrong, why="they may not be null")
        if demand := _demand(self._table):
            raise Invalid(what="delta table", path=self.path, why=f"it demands {demand}")
        parted = tuple(self._table.metadata().partition_columns)
        if self._partition_by and parted != self._partition_by:
            why = f"the table is partitioned by {', '.join(parted) or 'nothing'}"
            raise Invalid(what="partition_by", path=self.path, found=self._partition_by, why=why)
        if missing := [name for name in parted if name not in ours]:
            raise Invalid(
                what="schema", path=self.path, columns=missing, why="partitions need them"
            )

    def _evolve(self) -> None:
        """Add the columns that the table does not have, when it may be given them."""
        for _ in range(TRIES_MAX):
            known = {field.name for field in self._table.schema().fields}
            fields = _library().Schema.from_arrow(self._schema).fields
            new = [_library().Field(f.name, f.type, nullable=True) for f in fields if f.name not in known]  # fmt: skip
            if not new:
                return
            with contextlib.suppress(_library().exceptions.CommitFailedError):
                self._table.alter.add_columns(new)
            self._table.update_incremental()
            self._check_schema()
        raise Conflict(path=self.path, tries=TRIES_MAX)

    def _version(self) -> int:
        found = self._table.transaction_version(self._run_id)
        return NOTHING if found is None else int(found)

    def _is_complete(self) -> bool:
        return self._table.transaction_version(self._completed_id) is not None

    @property
    def _completed_id(self) -> str:
        return f"{self._run_id}/complete"

    # --- writing --------------------------------------------------------------------------------

    def _put(self, part: Part | WrittenPart) -> list[tuple[PartFile, Any]]:
        """The files of this part, which are written, and the actions that add them, if they have
        rows. A part without rows is a file without a name."""
        if isinstance(part, WrittenPart):
            files = part.files
        else:
            columns = self._table.metadata().partition_columns
            files = self._files.write(part, self._run_id, self._schema, columns)
        return [(one.file, add_action(one)) for one in files]

    def _commit(self, actions: list[Any], app_id: str, version: int) -> bool:
        return self._transact(actions, [(app_id, version)])

    def _transact(self, actions: list[Any], ids: Sequence[tuple[str, int]]) -> bool:
        """False: another writer was first, and nothing of this is in the table."""
        before = self._table.version()
        try:
            self._table.create_write_transaction(
                actions,
                mode="append",
                schema=self._table.schema(),
                commit_properties=_properties(ids, self._owner or self._run_id),
            )
        except _library().exceptions.CommitFailedError:
            return False
        self._step("transaction")
        self._sync_log(before + 1)
        return True

    def _sync_log(self, version: int) -> None:
        """The entries from `version` on survive a power cut."""
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
    def _told(self) -> Iterator[None]:
        """Errors of the library and the system, as ours."""
        wrong = _library().exceptions
        with typed(self.path):
            try:
                yield
            except wrong.DeltaProtocolError as error:
                raise OutputCorrupt(path=self.path, why=_told_by(error)) from error
            except wrong.DeltaError as error:
                raise of_system(self.path, None, _told_by(error)) from error
            except Exception as error:
                if (
                    type(error) is not Exception
                ):  # the library raises it bare for what else it knows
                    raise
                raise OutputError(path=self.path, why=_told_by(error)) from error


def _library() -> Any:
    try:
        import deltalake
        import deltalake.exceptions
    except ImportError as error:
        why = "install it: pip install 'holdfast[spark]'"
        raise Invalid(what="sink", kind="delta", missing="deltalake", why=why) from error
    return deltalake


def _properties(ids: Sequence[tuple[str, int]], run_id: str) -> Any:
    from deltalake import CommitProperties, Transaction

    transactions = [Transaction(app_id, version) for app_id, version in ids]
    return CommitProperties(app_transactions=transactions, custom_metadata={OWNER: run_id})


def _children() -> Any:
    from pyarrow.fs import FileSelector

    return FileSelector("", allow_not_found=True, recursive=False)


def _delta_schema(schema: pa.Schema) -> pa.Schema:
    """Delta keeps instants in UTC, and has no unsigned numbers and no nanoseconds."""
    for field in schema:
        kind = field.type
        if pa.types.is_unsigned_integer(kind) or (
            pa.types.is_timestamp(kind) and kind.unit == "ns"
        ):
            raise Invalid(what="schema", column=field.name, why=f"Delta does not hold {kind}")
    schema = in_utc(schema.empty_table()).schema
    delta = _library()
    try:
        delta.Schema.from_arrow(schema)
    except Exception as error:  # the library raises no narrower class here
        raise Invalid(what="schema", why=_told_by(error)) from error
    return schema


def _demand(table: Any) -> str:
    """What the table wants of its writers that plain files do not give; empty if nothing."""
    protocol = table.protocol()
    if protocol.min_writer_version == LISTED_WRITER_VERSION:
        if more := sorted(set(protocol.writer_features or []) - PLAIN_FEATURES):
            return f"the feature {', '.join(more)}"
    elif protocol.min_writer_version > PLAIN_WRITER_VERSION:
        return f"writer version {protocol.min_writer_version}"
    checked = [f.name for f in table.schema().fields if "delta.invariants" in f.metadata]
    return f"an invariant of {', '.join(checked)}" if checked else ""


def _told_by(error: BaseException) -> str:
    return readable(str(error).split("\n   0:")[0])  # a trace of addresses follows
