"""Rows as an Iceberg table; a commit is one snapshot that also carries the version.

    IcebergSink("cat.db.labels", catalog={"type": "rest", "uri": …}, partition_by=["day(ts)"])

- The version is a property of the snapshot, beside the run id. Before a commit the table is read anew;
  a commit is refused by the catalog if another writer was first, then the table is read again and the
  parts are looked for. The library's own repeats are off: they would not look. So a repeat after a lost
  answer adds nothing. A table whose snapshots have expired is searched for the names of the run's files.
- A part is one file, `data/part-<lo>-<hi>-<run id>.parquet`, or one for each partition in it. Files are
  written by us and added to the table, as `add_files` does it: the bytes are a function of the rows.
- A table that does not exist is created, in a namespace that does. A table with rows and without a
  snapshot of this run is not ours; `append=True` adds to it all the same.
- "upsert" commits the new files of a grown input and the removal of those that have changed or gone rows
  in one snapshot, at the end. "replace" does the same and refuses a table that others have added to.
  "append" adds the new and changed rows.
- The catalog's properties may hold credentials: they stay in memory. A process that was not given them
  finds the catalog by its name, in `.pyiceberg.yaml` or the environment (`PYICEBERG_CATALOG__CAT__URI`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.errors import Conflict, HoldfastError, Invalid
from holdfast.spark.sinks.api import (
    NOTHING,
    Base,
    Begun,
    KeptPart,
    OutputCorrupt,
    OutputError,
    OutputNotOurs,
    OutputReadOnly,
    Part,
    PartOutOfOrder,
    Spec,
    kept_files,
    pending,
    plain,
)
from holdfast.spark.sinks.files import (
    SCRATCH,
    Step,
    check_writable,
    in_utc,
    make_directory,
    no_step,
    readable,
    typed,
)
from holdfast.spark.sinks.iceberg_files import IcebergFiles, PartWriter, files_of
from holdfast.spark.sinks.location import OutputUnknown
from holdfast.spark.sinks.manifest import message_of, schema_from
from holdfast.spark.sinks.object_store import keep_options, options_of
from holdfast.spark.sinks.partitions import names_of, transform_of
from holdfast.spark.sinks.written import PartFile, WrittenFile, WrittenPart

TRIES_MAX = 10  # lost races of one commit against other writers of the table
MODES = ("upsert", "replace", "append")
RUN = "holdfast.run"
VERSION = "holdfast.version"
COMPLETE = "holdfast.complete"
# The run whose rows the table holds: until it is complete, that is the one before.
OWNER = "holdfast.owner"
# Whether the parts of the run are listed in a file: names of kept files tell those of older runs.
LISTED = "holdfast.listed"
# What a file tells of its partition are the bounds of a column.
TRANSFORMS = ("identity", "year", "month", "day", "hour")
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*){2,}")
_PART = re.compile(r"part-(\d{12})-(\d{12})-")
_SAFE = re.compile(r"[A-Za-z0-9_.-]+")


class IcebergSink:
    """`catalog` are the properties of pyiceberg's catalog; the name of it is the first of the table's."""

    def __init__(
        self,
        table: str,
        *,
        catalog: Mapping[str, str] | None = None,
        append: bool = False,
        mode: str = "upsert",
        partition_by: str | Sequence[str] = (),
        merge_schema: bool = False,
        step: Step = no_step,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="mode", found=mode, why=f"one of {MODES}")
        if append and mode == "replace":
            raise Invalid(what="mode", found=mode, why="append=True shares the table with others")
        if not isinstance(table, str) or not _NAME.fullmatch(table):
            raise OutputUnknown(output=str(table), why="name a table: catalog.namespace.table")
        self.table = table
        self._catalog_name, *rest = table.split(".")
        self._identifier = tuple(rest)
        self._url = f"iceberg:{self._catalog_name}"
        keep_options(self._url, catalog)
        self._append = append
        self._mode = mode
        self._partition_by = names_of(partition_by)
        self._merge_schema = merge_schema
        self._step = step
        self._run_id = self._owner = ""
        self._schema = pa.schema([])
        self._held: Any = None
        self._complete = False
        # Of a run that succeeds another one: that one's files by the first of each part, its own
        # parts, and the files among them that are new.
        self._succeeds: dict[str, list[PartFile]] | None = None
        self._staged: list[PartFile] = []

    def spec(self) -> Spec:
        spec: Spec = {"kind": "iceberg", "table": self.table, "append": self._append}
        if self._mode != "upsert":
            spec["mode"] = self._mode
        if self._partition_by:
            spec["partition_by"] = json.dumps(self._partition_by)
        if self._merge_schema:
            spec["merge_schema"] = True
        return spec

    def check_vacant(self) -> None:
        with self._told():
            table = self._load()
            if table is None:
                self._check_namespace()
            elif not self._append and _has_rows(table):
                raise OutputNotOurs(path=self.table, found="an Iceberg table with rows")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema, a table or a place that the first commit would fail at."""
        with self._told():
            self._held = self._load()
            if self._held is None:
                self._check_namespace()
                self._partition_spec(self._iceberg_schema(schema))
                return
            self._fit(schema)
            home = self._files().home
            if home is not None:
                check_writable(home)
            else:
                self._files().check()

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._take(run_id)
        with self._told():
            self._held = self._load() or self._create(schema)
            version = self._version(run_id)
            if version is None and not self._append and _has_rows(self._held):
                raise OutputNotOurs(path=self.table, found="an Iceberg table without this run")
            self._fit(schema)
            self._evolve()
            self._prepare()
        if version is None:
            # The run is in the table before its first call: a table that cannot be written says so.
            return self._commit_version(lambda _: [], NOTHING)
        return version

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        if self._succeeds is not None:
            with self._told():
                return self._stage(parts)

        def files(version: int) -> list[PartFile] | None:
            wanted = pending(parts, version, path=self.table)
            if not wanted:
                return None
            if self._complete:
                raise PartOutOfOrder(path=self.table, lo=wanted[0].lo, why="it is complete")
            new = [part for part in wanted if not isinstance(part, KeptPart)]
            return [file for part in new for file in self._put(part)]

        return self._commit_version(files, parts[-1].version if parts else NOTHING)

    def finish(self) -> None:
        for _ in range(TRIES_MAX):
            with self._told():
                self._refresh()
                if self._complete:
                    return
                self._owner = self._run_id
                if self._succeeds is not None:
                    version = self._staged[-1].hi - 1 if self._staged else NOTHING
                    self._complete = self._replace(self._succeeds, version)
                else:
                    done = self._version(self._run_id)
                    version = NOTHING if done is None else done
                    self._complete = self._snapshot([], [], version, {COMPLETE: "true"})
            if self._complete:
                return
        raise Conflict(path=self.table, tries=TRIES_MAX)

    def parts(self, run_id: str) -> list[str]:
        """The run's own files, as long as no other writer has rewritten them."""
        with self._told():
            self._held = self._load()
            if self._held is None:
                raise OutputNotOurs(path=self.table, found="no such table")
            if self._version(run_id) is None:
                raise OutputNotOurs(path=self.table, found="an Iceberg table without this run")
            return [self._files().path(part.path) for part in self._files_of(run_id)]

    # --- files that executors write -------------------------------------------------------------

    def part_writer(self) -> bytes:
        properties = {name: str(value) for name, value in self._held.io.properties.items()}
        told = PartWriter(
            message_of(self._schema), self._run_id, self._held.location(), self._partitions(),
            properties,
        )  # fmt: skip
        return msgspec.json.encode(told)

    def check_writer(self, writer: bytes) -> None:
        files, told = files_of(writer, self.table, self._step)
        keep_options(self._url, told.properties)  # an error shows none of them
        with self._told():
            files.check()

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        files, told = files_of(writer, self.table, self._step)
        keep_options(self._url, told.properties)
        with self._told():
            put = files.write(part, told.run_id, schema_from(told.schema), told.partition_by)
        return WrittenPart(part.lo, part.hi, [WrittenFile(one) for one in put])

    # --- input that grew ------------------------------------------------------------------------

    def owner(self) -> str:
        """By the newest snapshot that names a run."""
        return next(iter(self.owners()), "")

    @property
    def is_shared(self) -> bool:
        return self._append

    def owners(self) -> list[str]:
        with self._told():
            table = self._load()
            return [] if table is None else _owners(table)

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        self._take(run_id)
        with self._told():
            self._held = self._load()
            if self._held is None or self._version(base.run_id) is None:
                raise OutputNotOurs(path=self.table, found="no Iceberg table with its base run")
            self._fit(schema)
            self._evolve()
            self._prepare()
            version = self._version(run_id)
            version = NOTHING if version is None else version
            if self._complete:
                return Begun(version, ())
            if self._mode == "append":
                self._owner = base.run_id
                return Begun(version, [KeptPart(one.lo, one.hi) for one in base.same])
            files = self._files_of(base.run_id)
            self._refuse_others(files)
        parts: dict[tuple[int, int], list[PartFile]] = {}
        for file in files:
            parts.setdefault((file.lo, file.hi), []).append(file)
        self._succeeds = {group[0].path: group for group in parts.values()}
        self._staged = []
        found = [(group[0].path, group[0].lo, group[0].hi) for group in parts.values()]
        return Begun(NOTHING, kept_files(base, found))

    def _stage(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        """Put the files in place; `finish` adds them, in one snapshot with all that leaves."""
        assert self._succeeds is not None
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        for part in pending(parts, version, path=self.table):
            if isinstance(part, KeptPart):
                held = self._succeeds[part.file]
                self._staged += [msgspec.structs.replace(f, lo=part.lo, hi=part.hi) for f in held]
            else:
                self._staged += self._put(part)
        return self._staged[-1].hi - 1 if self._staged else NOTHING

    def _replace(self, former: dict[str, list[PartFile]], version: int) -> bool:
        """One snapshot: new files come, those with changed or gone rows leave."""
        before = {file.path: file for group in former.values() for file in group}
        self._refuse_others(list(before.values()))
        self._write_list()
        kept = {file.path for file in self._staged}
        new = [file for file in self._staged if file.path and file.path not in before]
        leaving = [one for name, one in self._present().items() if name in before and name not in kept]  # fmt: skip
        if gone := set(before) - set(self._present()):
            raise OutputNotOurs(path=self.table, found=f"{min(gone)} is gone")
        return self._snapshot(new, leaving, version, {COMPLETE: "true", LISTED: "true"})

    def _refuse_others(self, files: Sequence[PartFile]) -> None:
        if self._mode == "replace" and (more := set(self._present()) - {f.path for f in files}):
            why = 'the table holds files of other writers; mode="upsert" leaves them'
            raise OutputNotOurs(path=self.table, found=min(more), why=why)

    def _files_of(self, run_id: str) -> list[PartFile]:
        """The files of a run that are in the table, with its seqs, in their order."""
        present = self._present()
        mine = [one for one in _summaries(self._held) if one.get(RUN) == run_id]
        if any(one.get(LISTED) for one in mine):
            listed = [part for part in self._read_list(run_id) if part.path]
            if gone := [part.path for part in listed if part.path not in present]:
                why = "another writer has rewritten its files; use run.write() into another table"
                raise OutputNotOurs(path=self.table, found=f"{gone[0]} is gone", why=why)
            return listed
        return _named(run_id, present)

    def _list_path(self, run_id: str) -> str:
        return f"{self._held.location().rstrip('/')}/{SCRATCH}/run-{run_id}.json"

    def _write_list(self) -> None:
        output = self._held.io.new_output(self._list_path(self._run_id))
        with output.create(overwrite=True) as stream:
            stream.write(msgspec.json.encode(self._staged))

    def _read_list(self, run_id: str) -> list[PartFile]:
        path = self._list_path(run_id)
        try:
            with self._held.io.new_input(path).open() as stream:
                return msgspec.json.decode(stream.read(), type=list[PartFile])
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise OutputCorrupt(path=path, why=f"the list of the run's files: {error}") from None

    # --- the table ------------------------------------------------------------------------------

    def _take(self, run_id: str) -> None:
        if not _SAFE.fullmatch(run_id):
            raise Invalid(what="run id", run_id=run_id, why="it becomes part of file names")
        self._run_id = self._owner = run_id

    def _catalog(self) -> Any:
        _library()
        from pyiceberg.catalog import load_catalog

        try:
            return load_catalog(self._catalog_name, **options_of(self._url))
        except ValueError as error:
            name = self._catalog_name.upper()
            why = f"give catalog=, or PYICEBERG_CATALOG__{name}__URI, or .pyiceberg.yaml"
            raise Invalid(what="catalog", name=self._catalog_name, why=why) from error

    def _load(self) -> Any:
        """The table, None if there is none. The library does not repeat a commit of it."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            table = self._catalog().load_table(self._identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        _repeat_nothing(table)
        return table

    def _refresh(self) -> None:
        self._held.refresh()
        _repeat_nothing(self._held)
        self._complete = self._is_complete()

    def _check_namespace(self) -> None:
        namespace = self._identifier[:-1]
        if not self._catalog().namespace_exists(namespace):
            why = "no such namespace in the catalog; create it"
            raise Invalid(what="table", table=self.table, namespace=".".join(namespace), why=why)

    def _create(self, schema: pa.Schema) -> Any:
        from pyiceberg.exceptions import TableAlreadyExistsError

        columns = self._iceberg_schema(schema)
        spec = self._partition_spec(columns)
        # A file's bounds tell its partition, however many columns there are.
        metric = {
            f"write.metadata.metrics.column.{transform_of(one).column}": "full"
            for one in self._partition_by
        }
        with contextlib.suppress(TableAlreadyExistsError):
            self._catalog().create_table(
                self._identifier, columns, partition_spec=spec, properties=metric
            )
        self._step("create")
        return self._load()

    def _iceberg_schema(self, schema: pa.Schema) -> Any:
        from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
        from pyiceberg.schema import assign_fresh_schema_ids

        try:
            # Identifiers are given by the catalog anew; here they only have to differ.
            found = _pyarrow_to_schema_without_ids(in_utc(plain(schema).empty_table()).schema)
            return assign_fresh_schema_ids(found)
        except Exception as error:  # the library raises no narrower class here
            raise Invalid(what="schema", table=self.table, why=_told_by(error)) from error

    def _partition_spec(self, schema: Any) -> Any:
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import parse_transform

        fields = []
        for number, text in enumerate(self._partition_by):
            name, column, _ = transform_of(text)
            why = f"one of {', '.join(TRANSFORMS)} of a column; carry= brings columns of the input"
            if name not in TRANSFORMS or column not in schema.column_names:
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
            source, transform = schema.find_field(column), parse_transform(name)
            if not source.field_type.is_primitive or not transform.can_transform(source.field_type):
                why = f"{source.field_type} is no type for it"
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
            called = column if name == "identity" else f"{column}_{name}"
            fields.append(PartitionField(source.field_id, 1000 + number, transform, called))
        return PartitionSpec(*fields)

    def _fit(self, schema: pa.Schema) -> None:
        """Compare the run's columns and partitions with those of the table; the columns as they are
        written are set."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        ours = schema_to_pyarrow(self._iceberg_schema(schema), include_field_ids=False)
        self._schema = plain(pa.schema(list(ours)))
        table = self._held.schema()
        there = schema_to_pyarrow(table, include_field_ids=False)
        expected = [(field.name, str(field.type)) for field in there]
        found = [(field.name, str(field.type)) for field in self._schema]
        known, mine = dict(expected), dict(found)
        wrong = [name for name, kind in found if known.get(name, kind) != kind]
        if wrong or (not self._merge_schema and set(known) != set(mine)):
            raise Invalid(what="schema", table=self.table, expected=expected, found=found)
        if needed := [f.name for f in table.fields if f.required and f.name not in mine]:
            raise Invalid(what="schema", table=self.table, columns=needed, why="they are required")
        self._check_partitions(mine)

    def _check_partitions(self, mine: Mapping[str, str]) -> None:
        from pyiceberg.io.pyarrow import MetricModeTypes, compute_statistics_plan

        schema, spec = self._held.schema(), self._held.spec()
        there = []
        plan = compute_statistics_plan(schema, self._held.metadata.properties)
        for field in spec.fields:
            column, name = schema.find_column_name(field.source_id), str(field.transform)
            text = column if name == "identity" else f"{name}({column})"
            there.append(text)
            metrics = plan.get(field.source_id)
            if name not in TRANSFORMS or column not in mine:
                raise Invalid(what="partition_by", table=self.table, found=text,
                              why="the table's partitions cannot be told from a file")  # fmt: skip
            if metrics is None or metrics.mode.type is MetricModeTypes.NONE:
                why = f"the table keeps no metrics of {column}: write.metadata.metrics.column.{column}=full"  # fmt: skip
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
        if self._partition_by and tuple(there) != self._partition_by:
            why = f"the table is partitioned by {', '.join(there) or 'nothing'}"
            raise Invalid(what="partition_by", table=self.table, found=self._partition_by, why=why)

    def _evolve(self) -> None:
        """Add the columns that the table does not have, when it may be given them."""
        from pyiceberg.exceptions import CommitFailedException

        for _ in range(TRIES_MAX):
            known = set(self._held.schema().column_names)
            if all(name in known for name in self._schema.names):
                return
            with contextlib.suppress(CommitFailedException), self._held.update_schema() as update:
                update.union_by_name(self._schema)
            self._refresh()
        raise Conflict(path=self.table, tries=TRIES_MAX)

    def _prepare(self) -> None:
        self._complete = self._is_complete()
        home = self._files().home
        if home is not None:
            make_directory(home / SCRATCH)

    def _version(self, run_id: str) -> int | None:
        """None: the run has no snapshot in the table's history, and no file."""
        found = [int(s[VERSION]) for s in _summaries(self._held) if s.get(RUN) == run_id]
        if found:
            return max(found)
        files = _named(run_id, self._present()) if _has_rows(self._held) else []
        return max((file.hi - 1 for file in files), default=None)

    def _is_complete(self) -> bool:
        mine = (one for one in _summaries(self._held) if one.get(RUN) == self._run_id)
        return any(one.get(COMPLETE) for one in mine)

    def _present(self) -> dict[str, Any]:
        """The data files of the table by the names under its data directory."""
        snapshot = self._held.current_snapshot()
        if snapshot is None:
            return {}
        begin = f"{self._held.location().rstrip('/')}/data/"
        return {
            entry.data_file.file_path.removeprefix(begin): entry.data_file
            for manifest in snapshot.manifests(self._held.io)
            for entry in manifest.fetch_manifest_entry(self._held.io, discard_deleted=True)
            if entry.data_file.content == 0
        }

    # --- writing --------------------------------------------------------------------------------

    def _put(self, part: Part | WrittenPart) -> list[PartFile]:
        """The files of this part, which are written. A part without rows is a file without a name."""
        if isinstance(part, WrittenPart):
            return [one.file for one in part.files]
        return self._files().write(part, self._run_id, self._schema, self._partitions())

    def _files(self) -> IcebergFiles:
        return IcebergFiles(self._held.location(), self._held.io, self.table, self._step)

    def _partitions(self) -> list[tuple[str, str]]:
        schema = self._held.schema()
        return [
            (schema.find_column_name(field.source_id), str(field.transform))
            for field in self._held.spec().fields
        ]

    def _commit_version(self, files: Any, target: int) -> int:
        """A snapshot of the files that `files` gives for the version that the table has, None for
        nothing to do; the version that is committed then."""
        for _ in range(TRIES_MAX):
            with self._told():
                self._refresh()
                version = self._version(self._run_id)
                found = files(NOTHING if version is None else version)
                if found is None or (version is not None and version >= target):
                    return NOTHING if version is None else version
                self._check_owner(begun=version is not None)
                self._step("files")
                if self._snapshot([file for file in found if file.path], [], target, {}):
                    return target
        raise Conflict(path=self.table, tries=TRIES_MAX)

    def _check_owner(self, *, begun: bool) -> None:
        """Of two runs that begin in an empty table the later one has it."""
        if self._append:
            return
        owner = _owner(self._held)
        if owner not in ("", self._owner) and (begun or _has_rows(self._held)):
            raise OutputNotOurs(path=self.table, found=f"the table of run {owner}")

    def _snapshot(
        self, new: Sequence[PartFile], leaving: Sequence[Any], version: int, more: dict[str, str]
    ) -> bool:
        """False: another writer was first, or the answer was lost: look at the table again."""
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
        from pyiceberg.io.pyarrow import parquet_file_to_data_file

        told = {RUN: self._run_id, VERSION: str(version), OWNER: self._owner, **more}
        transaction = self._held.transaction()
        if self._held.name_mapping() is None:  # files have names of columns, not their numbers
            mapping = self._held.schema().name_mapping.model_dump_json()
            transaction.set_properties({"schema.name-mapping.default": mapping})
        update = transaction.update_snapshot(snapshot_properties=told)
        try:
            with update.overwrite() if leaving else update.fast_append() as producer:
                for file in new:
                    metadata, path = transaction.table_metadata, self._files().path(file.path)
                    producer.append_data_file(
                        parquet_file_to_data_file(self._held.io, metadata, path)
                    )
                for one in leaving:
                    producer.delete_data_file(one)
            transaction.commit_transaction()
        except (CommitFailedException, CommitStateUnknownException):
            return False
        self._step("snapshot")
        return True

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the library and the system, as ours; without the catalog's credentials."""
        _library()
        from pyiceberg.exceptions import ForbiddenError, UnauthorizedError

        with typed(self.table):
            try:
                yield
            except (HoldfastError, OSError):
                raise
            except (ForbiddenError, UnauthorizedError) as error:
                raise OutputReadOnly(path=self.table, why=self._shown(error)) from None
            except Exception as error:  # catalogs have libraries of their own
                if type(error).__module__.partition(".")[0] in ("builtins", "holdfast"):
                    raise
                raise OutputError(path=self.table, why=self._shown(error)) from None

    def _shown(self, error: BaseException) -> str:
        told = _told_by(error)
        for value in options_of(self._url).values():
            if len(value) > 3:
                told = told.replace(value, "…")
        return told


def _library() -> Any:
    try:
        import pyiceberg
    except ImportError as error:
        why = "install it: pip install 'holdfast[iceberg]'"
        raise Invalid(what="sink", kind="iceberg", missing="pyiceberg", why=why) from error
    return pyiceberg


def _repeat_nothing(table: Any) -> None:
    """In this process alone: what is written to the catalog are changes, not these properties."""
    table.metadata.properties["commit.retry.num-retries"] = "0"


def _summaries(table: Any) -> Iterator[Mapping[str, Any]]:
    """What the snapshots of the table's history say, newest first."""
    from pyiceberg.table.snapshots import ancestors_of

    for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
        yield snapshot.summary.additional_properties if snapshot.summary else {}


def _owners(table: Any) -> list[str]:
    return list(dict.fromkeys(str(one[OWNER]) for one in _summaries(table) if one.get(OWNER)))


def _owner(table: Any) -> str:
    return next(iter(_owners(table)), "")


def _has_rows(table: Any) -> bool:
    newest = next(_summaries(table), None)
    return newest is not None and newest.get("total-data-files", "0") != "0"


def _named(run_id: str, present: Mapping[str, Any]) -> list[PartFile]:
    own = sorted(name for name in present if f"-{run_id}." in name or f"-{run_id}-" in name)
    found = ((name, _PART.match(name)) for name in own)
    return [PartFile(n, int(at[1]), int(at[2]), 1, 0, "") for n, at in found if at]


def _told_by(error: BaseException) -> str:
    return readable(str(error).split("\n")[0])[:300] or type(error).__name__
