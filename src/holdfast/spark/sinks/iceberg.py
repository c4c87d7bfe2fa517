"""The Iceberg sink: rows as an Iceberg table. A commit is one snapshot that also carries the
version.

    IcebergSink("cat.db.labels", catalog={"type": "rest", "uri": …}, partition_by=["day(ts)"])

- The version is a property of the snapshot, beside the run id. The table is refreshed before a
  commit. If another writer was first, the catalog refuses the commit, and the sink refreshes and
  looks for the parts again. The library's own retries are off, because they would not look. A
  repeat after a lost reply therefore adds nothing. If snapshots have expired, the sink searches the
  table for the run's file names.
- A part is one file, `data/part-<lo>-<hi>-<run id>.parquet`, or one per partition. The sink writes
  the files and adds them to the table like `add_files`, so the bytes are a function of the rows.
- A missing table is created in an existing namespace. A table with rows and without a snapshot of
  this run is foreign. `append=True` adds to it.
- "upsert" commits the new files of a changed input and the removal of files with changed or removed
  rows in one snapshot at the end. "replace" does the same and refuses a table with files of other
  writers. "append" adds the new and changed rows.
- The catalog's properties may contain credentials and stay in memory. A process without them finds
  the catalog by name in `.pyiceberg.yaml` or the environment (`PYICEBERG_CATALOG__CAT__URI`).
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
    parts_after,
    without_metadata,
)
from holdfast.spark.sinks.iceberg_files import IcebergFiles, IcebergWriterConfig, open_files
from holdfast.spark.sinks.location import OutputUnknown
from holdfast.spark.sinks.manifest import decode_schema, encode_schema
from holdfast.spark.sinks.object_store import keep_options, options_of
from holdfast.spark.sinks.parquet_files import (
    SCRATCH,
    StepHook,
    check_writable,
    ignore_step,
    in_utc,
    make_directory,
    one_line,
    translate_os_errors,
)
from holdfast.spark.sinks.part_files import PartFile, WrittenFile, WrittenPart
from holdfast.spark.sinks.partitions import parse_partition_by, parse_partition_transform

COMMIT_TRIES_MAX = 10  # lost races of one commit against other writers
MODES = ("upsert", "replace", "append")
RUN_KEY = "holdfast.run"
VERSION_KEY = "holdfast.version"
COMPLETE_KEY = "holdfast.complete"
# The run whose rows the table holds. It is the base run until the output is complete.
OWNER_KEY = "holdfast.owner"
# Whether a file lists the run's parts, because kept files carry seqs of older runs in their names.
LISTED_KEY = "holdfast.listed"
# Partition transforms that the column bounds of a file determine.
TRANSFORMS = ("identity", "year", "month", "day", "hour")
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*){2,}")
_PART_FILE_NAME = re.compile(r"part-(\d{12})-(\d{12})-")
_SAFE = re.compile(r"[A-Za-z0-9_.-]+")


class IcebergSink:
    """The Iceberg sink. `catalog` has the properties of pyiceberg's catalog. Its name is the first
    part of the table name.
    """

    def __init__(
        self,
        table: str,
        *,
        catalog: Mapping[str, str] | None = None,
        append: bool = False,
        mode: str = "upsert",
        partition_by: str | Sequence[str] = (),
        merge_schema: bool = False,
        step: StepHook = ignore_step,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="mode", found=mode, why=f"must be one of {MODES}")
        if append and mode == "replace":
            raise Invalid(
                what="mode",
                found=mode,
                why='append=True excludes mode="replace": other writers use the table',
            )
        if not isinstance(table, str) or not _NAME.fullmatch(table):
            raise OutputUnknown(output=str(table), why="name a table: catalog.namespace.table")
        self.table = table
        self._catalog_name, *rest = table.split(".")
        self._identifier = tuple(rest)
        self._url = f"iceberg:{self._catalog_name}"
        keep_options(self._url, catalog)
        self._append = append
        self._mode = mode
        self._partition_by = parse_partition_by(partition_by)
        self._merge_schema = merge_schema
        self._step = step
        self._run_id = self._owner = ""
        self._schema = pa.schema([])
        self._iceberg_table: Any = None
        self._complete = False
        # For a run that succeeds another one: the base's files by the first file of each part, and
        # its own parts.
        self._base_files: dict[str, list[PartFile]] | None = None
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
        with self._translate_errors():
            table = self._load_table()
            if table is None:
                self._check_namespace()
            elif not self._append and _has_rows(table):
                raise OutputNotOurs(path=self.table, found="an Iceberg table with rows")

    def check(self, schema: pa.Schema) -> None:
        """Refuse a schema, a table or a place that the first commit would fail with."""
        with self._translate_errors():
            self._iceberg_table = self._load_table()
            if self._iceberg_table is None:
                self._check_namespace()
                self._partition_spec(self._iceberg_schema(schema))
                return
            self._check_schema(schema)
            home = self._files().local_data
            if home is not None:
                check_writable(home)
            else:
                self._files().check_writable()

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._set_run(run_id)
        with self._translate_errors():
            self._iceberg_table = self._load_table() or self._create(schema)
            version = self._version(run_id)
            if version is None and not self._append and _has_rows(self._iceberg_table):
                raise OutputNotOurs(path=self.table, found="an Iceberg table without this run")
            self._check_schema(schema)
            self._add_missing_columns()
            self._prepare_directory()
        if version is None:
            # Register the run in the table before its first call, so that a read-only table fails
            # early.
            return self._commit_version(lambda _: [], NOTHING)
        return version

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        if self._base_files is not None:
            with self._translate_errors():
                return self._stage_parts(parts)

        def files(version: int) -> list[PartFile] | None:
            wanted = parts_after(parts, version, path=self.table)
            if not wanted:
                return None
            if self._complete:
                raise PartOutOfOrder(path=self.table, lo=wanted[0].lo, why="the output is complete")
            new = [part for part in wanted if not isinstance(part, KeptPart)]
            return [file for part in new for file in self._write_part(part)]

        return self._commit_version(files, parts[-1].version if parts else NOTHING)

    def finish(self) -> None:
        for _ in range(COMMIT_TRIES_MAX):
            with self._translate_errors():
                self._refresh()
                if self._complete:
                    return
                self._owner = self._run_id
                if self._base_files is not None:
                    version = self._staged[-1].hi - 1 if self._staged else NOTHING
                    self._complete = self._commit_replacement(self._base_files, version)
                else:
                    done = self._version(self._run_id)
                    version = NOTHING if done is None else done
                    self._complete = self._commit_snapshot([], [], version, {COMPLETE_KEY: "true"})
            if self._complete:
                return
        raise Conflict(path=self.table, tries=COMMIT_TRIES_MAX)

    def parts(self, run_id: str) -> list[str]:
        """Return the run's own files, unless another writer has rewritten them."""
        with self._translate_errors():
            self._iceberg_table = self._load_table()
            if self._iceberg_table is None:
                raise OutputNotOurs(path=self.table, found="no such table")
            if self._version(run_id) is None:
                raise OutputNotOurs(path=self.table, found="an Iceberg table without this run")
            return [self._files().path(part.path) for part in self._files_of(run_id)]

    # --- executor side --------------------------------------------------------------------------

    def part_writer(self) -> bytes:
        properties = {name: str(value) for name, value in self._iceberg_table.io.properties.items()}
        config = IcebergWriterConfig(
            encode_schema(self._schema), self._run_id, self._iceberg_table.location(), self._partitions(),
            properties,
        )  # fmt: skip
        return msgspec.json.encode(config)

    def check_writer(self, writer: bytes) -> None:
        files, config = open_files(writer, self.table, self._step)
        keep_options(self._url, config.properties)  # so that errors are redacted
        with self._translate_errors():
            files.check_writable()

    def write_part(self, writer: bytes, part: Part) -> WrittenPart:
        files, config = open_files(writer, self.table, self._step)
        keep_options(self._url, config.properties)
        with self._translate_errors():
            put = files.write_part(
                part, config.run_id, decode_schema(config.schema), config.partition_by
            )
        return WrittenPart(part.lo, part.hi, [WrittenFile(one) for one in put])

    # --- changed input --------------------------------------------------------------------------

    def owner(self) -> str:
        """Return the run of the newest snapshot that names one."""
        return next(iter(self.owners()), "")

    @property
    def is_shared(self) -> bool:
        return self._append

    def owners(self) -> list[str]:
        with self._translate_errors():
            table = self._load_table()
            return [] if table is None else _owners(table)

    def begin_after(self, base: Base, run_id: str, name: str, schema: pa.Schema) -> Begun:
        self._set_run(run_id)
        with self._translate_errors():
            self._iceberg_table = self._load_table()
            if self._iceberg_table is None or self._version(base.run_id) is None:
                raise OutputNotOurs(path=self.table, found="no Iceberg table with its base run")
            self._check_schema(schema)
            self._add_missing_columns()
            self._prepare_directory()
            version = self._version(run_id)
            version = NOTHING if version is None else version
            if self._complete:
                return Begun(version, ())
            if self._mode == "append":
                self._owner = base.run_id
                return Begun(version, [KeptPart(one.lo, one.hi) for one in base.same])
            files = self._files_of(base.run_id)
            self._refuse_foreign_files(files)
        parts: dict[tuple[int, int], list[PartFile]] = {}
        for file in files:
            parts.setdefault((file.lo, file.hi), []).append(file)
        self._base_files = {group[0].path: group for group in parts.values()}
        self._staged = []
        found = [(group[0].path, group[0].lo, group[0].hi) for group in parts.values()]
        return Begun(NOTHING, kept_files(base, found))

    def _stage_parts(self, parts: Sequence[Part | KeptPart | WrittenPart]) -> int:
        """Put the files in place. `finish` adds them and removes the replaced ones in one snapshot."""
        assert self._base_files is not None
        version = self._staged[-1].hi - 1 if self._staged else NOTHING
        for part in parts_after(parts, version, path=self.table):
            if isinstance(part, KeptPart):
                base_files = self._base_files[part.file]
                self._staged += [
                    msgspec.structs.replace(f, lo=part.lo, hi=part.hi) for f in base_files
                ]
            else:
                self._staged += self._write_part(part)
        return self._staged[-1].hi - 1 if self._staged else NOTHING

    def _commit_replacement(self, former: dict[str, list[PartFile]], version: int) -> bool:
        """Add the new files and remove those with changed or removed rows in one snapshot."""
        before = {file.path: file for group in former.values() for file in group}
        self._refuse_foreign_files(list(before.values()))
        self._write_part_list()
        kept = {file.path for file in self._staged}
        new = [file for file in self._staged if file.path and file.path not in before]
        leaving = [one for name, one in self._data_files().items() if name in before and name not in kept]  # fmt: skip
        if missing := set(before) - set(self._data_files()):
            raise OutputNotOurs(path=self.table, found=f"{min(missing)} is gone")
        return self._commit_snapshot(
            new, leaving, version, {COMPLETE_KEY: "true", LISTED_KEY: "true"}
        )

    def _refuse_foreign_files(self, files: Sequence[PartFile]) -> None:
        if self._mode == "replace" and (more := set(self._data_files()) - {f.path for f in files}):
            why = 'the table holds files of other writers; mode="upsert" keeps them'
            raise OutputNotOurs(path=self.table, found=min(more), why=why)

    def _files_of(self, run_id: str) -> list[PartFile]:
        """Return the files of a run in the table, with their seqs, in order."""
        present = self._data_files()
        mine = [
            one for one in _snapshot_summaries(self._iceberg_table) if one.get(RUN_KEY) == run_id
        ]
        if any(one.get(LISTED_KEY) for one in mine):
            listed = [part for part in self._read_part_list(run_id) if part.path]
            if missing := [part.path for part in listed if part.path not in present]:
                why = "another writer has rewritten the files of this run; use run.write() into another table"
                raise OutputNotOurs(path=self.table, found=f"{missing[0]} is gone", why=why)
            return listed
        return _files_by_name(run_id, present)

    def _part_list_path(self, run_id: str) -> str:
        return f"{self._iceberg_table.location().rstrip('/')}/{SCRATCH}/run-{run_id}.json"

    def _write_part_list(self) -> None:
        output = self._iceberg_table.io.new_output(self._part_list_path(self._run_id))
        with output.create(overwrite=True) as stream:
            stream.write(msgspec.json.encode(self._staged))

    def _read_part_list(self, run_id: str) -> list[PartFile]:
        path = self._part_list_path(run_id)
        try:
            with self._iceberg_table.io.new_input(path).open() as stream:
                return msgspec.json.decode(stream.read(), type=list[PartFile])
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            raise OutputCorrupt(path=path, why=f"the list of the run's files: {error}") from None

    # --- table ----------------------------------------------------------------------------------

    def _set_run(self, run_id: str) -> None:
        if not _SAFE.fullmatch(run_id):
            raise Invalid(what="run id", run_id=run_id, why="it becomes part of file names")
        self._run_id = self._owner = run_id

    def _catalog(self) -> Any:
        _require_library()
        from pyiceberg.catalog import load_catalog

        try:
            return load_catalog(self._catalog_name, **options_of(self._url))
        except ValueError as error:
            name = self._catalog_name.upper()
            why = f"set catalog=, PYICEBERG_CATALOG__{name}__URI or .pyiceberg.yaml"
            raise Invalid(what="catalog", name=self._catalog_name, why=why) from error

    def _load_table(self) -> Any:
        """Load the table, or None if it does not exist. The library does not retry its commits."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            table = self._catalog().load_table(self._identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        _disable_library_retries(table)
        return table

    def _refresh(self) -> None:
        self._iceberg_table.refresh()
        _disable_library_retries(self._iceberg_table)
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
        # Keep full column bounds, which determine the partition of a file.
        metric = {
            f"write.metadata.metrics.column.{parse_partition_transform(one).column}": "full"
            for one in self._partition_by
        }
        with contextlib.suppress(TableAlreadyExistsError):
            self._catalog().create_table(
                self._identifier, columns, partition_spec=spec, properties=metric
            )
        self._step("create")
        return self._load_table()

    def _iceberg_schema(self, schema: pa.Schema) -> Any:
        from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
        from pyiceberg.schema import assign_fresh_schema_ids

        try:
            # The catalog assigns new ids. Here they only have to differ.
            found = _pyarrow_to_schema_without_ids(
                in_utc(without_metadata(schema).empty_table()).schema
            )
            return assign_fresh_schema_ids(found)
        except Exception as error:  # the library raises no narrower class here
            raise Invalid(what="schema", table=self.table, why=_error_text(error)) from error

    def _partition_spec(self, schema: Any) -> Any:
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.transforms import parse_transform

        fields = []
        for number, text in enumerate(self._partition_by):
            name, column, _ = parse_partition_transform(text)
            why = f"one of {', '.join(TRANSFORMS)} of a column; carry= adds columns of the input"
            if name not in TRANSFORMS or column not in schema.column_names:
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
            source, transform = schema.find_field(column), parse_transform(name)
            if not source.field_type.is_primitive or not transform.can_transform(source.field_type):
                why = f"{source.field_type} cannot be partitioned this way"
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
            called = column if name == "identity" else f"{column}_{name}"
            fields.append(PartitionField(source.field_id, 1000 + number, transform, called))
        return PartitionSpec(*fields)

    def _check_schema(self, schema: pa.Schema) -> None:
        """Compare the run's columns and partitions with the table, and set the schema to write."""
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        ours = schema_to_pyarrow(self._iceberg_schema(schema), include_field_ids=False)
        self._schema = without_metadata(pa.schema(list(ours)))
        table = self._iceberg_table.schema()
        table_schema = schema_to_pyarrow(table, include_field_ids=False)
        expected = [(field.name, str(field.type)) for field in table_schema]
        found = [(field.name, str(field.type)) for field in self._schema]
        known, mine = dict(expected), dict(found)
        wrong = [name for name, kind in found if known.get(name, kind) != kind]
        if wrong or (not self._merge_schema and set(known) != set(mine)):
            raise Invalid(what="schema", table=self.table, expected=expected, found=found)
        if needed := [f.name for f in table.fields if f.required and f.name not in mine]:
            raise Invalid(
                what="schema",
                table=self.table,
                columns=needed,
                why="the table requires these columns",
            )
        self._check_partitions(mine)

    def _check_partitions(self, mine: Mapping[str, str]) -> None:
        from pyiceberg.io.pyarrow import MetricModeTypes, compute_statistics_plan

        schema, spec = self._iceberg_table.schema(), self._iceberg_table.spec()
        table_partitions = []
        plan = compute_statistics_plan(schema, self._iceberg_table.metadata.properties)
        for field in spec.fields:
            column, name = schema.find_column_name(field.source_id), str(field.transform)
            text = column if name == "identity" else f"{name}({column})"
            table_partitions.append(text)
            metrics = plan.get(field.source_id)
            if name not in TRANSFORMS or column not in mine:
                raise Invalid(what="partition_by", table=self.table, found=text,
                              why="the partition of a file cannot be determined from its column bounds")  # fmt: skip
            if metrics is None or metrics.mode.type is MetricModeTypes.NONE:
                why = f"the table keeps no metrics of {column}: set write.metadata.metrics.column.{column}=full"  # fmt: skip
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
        if self._partition_by and tuple(table_partitions) != self._partition_by:
            why = f"the table is partitioned by {', '.join(table_partitions) or 'nothing'}"
            raise Invalid(what="partition_by", table=self.table, found=self._partition_by, why=why)

    def _add_missing_columns(self) -> None:
        """Add the missing columns to the table."""
        from pyiceberg.exceptions import CommitFailedException

        for _ in range(COMMIT_TRIES_MAX):
            known = set(self._iceberg_table.schema().column_names)
            if all(name in known for name in self._schema.names):
                return
            with (
                contextlib.suppress(CommitFailedException),
                self._iceberg_table.update_schema() as update,
            ):
                update.union_by_name(self._schema)
            self._refresh()
        raise Conflict(path=self.table, tries=COMMIT_TRIES_MAX)

    def _prepare_directory(self) -> None:
        self._complete = self._is_complete()
        home = self._files().local_data
        if home is not None:
            make_directory(home / SCRATCH)

    def _version(self, run_id: str) -> int | None:
        """Return the run's version; None if the run has no snapshot in the history and no file."""
        found = [
            int(s[VERSION_KEY])
            for s in _snapshot_summaries(self._iceberg_table)
            if s.get(RUN_KEY) == run_id
        ]
        if found:
            return max(found)
        files = _files_by_name(run_id, self._data_files()) if _has_rows(self._iceberg_table) else []
        return max((file.hi - 1 for file in files), default=None)

    def _is_complete(self) -> bool:
        mine = (
            one
            for one in _snapshot_summaries(self._iceberg_table)
            if one.get(RUN_KEY) == self._run_id
        )
        return any(one.get(COMPLETE_KEY) for one in mine)

    def _data_files(self) -> dict[str, Any]:
        """Return the data files of the table by their names below its data directory."""
        snapshot = self._iceberg_table.current_snapshot()
        if snapshot is None:
            return {}
        begin = f"{self._iceberg_table.location().rstrip('/')}/data/"
        return {
            entry.data_file.file_path.removeprefix(begin): entry.data_file
            for manifest in snapshot.manifests(self._iceberg_table.io)
            for entry in manifest.fetch_manifest_entry(self._iceberg_table.io, discard_deleted=True)
            if entry.data_file.content == 0
        }

    # --- writing --------------------------------------------------------------------------------

    def _write_part(self, part: Part | WrittenPart) -> list[PartFile]:
        """Return the written files of this part. For a part without rows, return one with an empty path."""
        if isinstance(part, WrittenPart):
            return [one.file for one in part.files]
        return self._files().write_part(part, self._run_id, self._schema, self._partitions())

    def _files(self) -> IcebergFiles:
        return IcebergFiles(
            self._iceberg_table.location(), self._iceberg_table.io, self.table, self._step
        )

    def _partitions(self) -> list[tuple[str, str]]:
        schema = self._iceberg_table.schema()
        return [
            (schema.find_column_name(field.source_id), str(field.transform))
            for field in self._iceberg_table.spec().fields
        ]

    def _commit_version(self, files: Any, target: int) -> int:
        """Commit a snapshot of the files that `files` returns for the table's version (None:
        nothing to do); return the committed version.
        """
        for _ in range(COMMIT_TRIES_MAX):
            with self._translate_errors():
                self._refresh()
                version = self._version(self._run_id)
                found = files(NOTHING if version is None else version)
                if found is None or (version is not None and version >= target):
                    return NOTHING if version is None else version
                self._check_owner(begun=version is not None)
                self._step("files")
                if self._commit_snapshot([file for file in found if file.path], [], target, {}):
                    return target
        raise Conflict(path=self.table, tries=COMMIT_TRIES_MAX)

    def _check_owner(self, *, begun: bool) -> None:
        """Refuse a table that another run owns. Of two runs that begin in an empty table the later
        one owns it.
        """
        if self._append:
            return
        owner = _owner(self._iceberg_table)
        if owner not in ("", self._owner) and (begun or _has_rows(self._iceberg_table)):
            raise OutputNotOurs(path=self.table, found=f"the table of run {owner}")

    def _commit_snapshot(
        self, new: Sequence[PartFile], leaving: Sequence[Any], version: int, more: dict[str, str]
    ) -> bool:
        """Commit a snapshot. Returns False if another writer was first or the reply was lost:
        refresh and check.
        """
        from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
        from pyiceberg.io.pyarrow import parquet_file_to_data_file

        properties = {
            RUN_KEY: self._run_id,
            VERSION_KEY: str(version),
            OWNER_KEY: self._owner,
            **more,
        }
        transaction = self._iceberg_table.transaction()
        if self._iceberg_table.name_mapping() is None:  # the files have column names, not field ids
            mapping = self._iceberg_table.schema().name_mapping.model_dump_json()
            transaction.set_properties({"schema.name-mapping.default": mapping})
        update = transaction.update_snapshot(snapshot_properties=properties)
        try:
            with update.overwrite() if leaving else update.fast_append() as producer:
                for file in new:
                    metadata, path = transaction.table_metadata, self._files().path(file.path)
                    producer.append_data_file(
                        parquet_file_to_data_file(self._iceberg_table.io, metadata, path)
                    )
                for one in leaving:
                    producer.delete_data_file(one)
            transaction.commit_transaction()
        except (CommitFailedException, CommitStateUnknownException):
            return False
        self._step("snapshot")
        return True

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate errors of the library and the system, without the catalog's credentials."""
        _require_library()
        from pyiceberg.exceptions import ForbiddenError, UnauthorizedError

        with translate_os_errors(self.table):
            try:
                yield
            except (HoldfastError, OSError):
                raise
            except (ForbiddenError, UnauthorizedError) as error:
                raise OutputReadOnly(
                    path=self.table, why=self._redacted_error_text(error)
                ) from None
            except Exception as error:  # catalogs use further libraries
                if type(error).__module__.partition(".")[0] in ("builtins", "holdfast"):
                    raise
                raise OutputError(path=self.table, why=self._redacted_error_text(error)) from None

    def _redacted_error_text(self, error: BaseException) -> str:
        text = _error_text(error)
        for value in options_of(self._url).values():
            if len(value) > 3:
                text = text.replace(value, "…")
        return text


def _require_library() -> Any:
    try:
        import pyiceberg
    except ImportError as error:
        why = "install it: pip install 'holdfast[iceberg]'"
        raise Invalid(what="sink", kind="iceberg", missing="pyiceberg", why=why) from error
    return pyiceberg


def _disable_library_retries(table: Any) -> None:
    """Disable the library's commit retries in this process. The property is not written to the
    catalog.
    """
    table.metadata.properties["commit.retry.num-retries"] = "0"


def _snapshot_summaries(table: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the summaries of the table's snapshots, newest first."""
    from pyiceberg.table.snapshots import ancestors_of

    for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
        yield snapshot.summary.additional_properties if snapshot.summary else {}


def _owners(table: Any) -> list[str]:
    return list(
        dict.fromkeys(
            str(one[OWNER_KEY]) for one in _snapshot_summaries(table) if one.get(OWNER_KEY)
        )
    )


def _owner(table: Any) -> str:
    return next(iter(_owners(table)), "")


def _has_rows(table: Any) -> bool:
    newest = next(_snapshot_summaries(table), None)
    return newest is not None and newest.get("total-data-files", "0") != "0"


def _files_by_name(run_id: str, present: Mapping[str, Any]) -> list[PartFile]:
    own = sorted(name for name in present if f"-{run_id}." in name or f"-{run_id}-" in name)
    found = ((name, _PART_FILE_NAME.match(name)) for name in own)
    return [PartFile(n, int(at[1]), int(at[2]), 1, 0, "") for n, at in found if at]


def _error_text(error: BaseException) -> str:
    return one_line(str(error).split("\n")[0])[:300] or type(error).__name__
