"""Delta data files, written by the ledger service or by an executor.

A part is one Parquet file, or one per partition, with its metadata for the table's log. In an
object store the library's own handler writes the file, with the options of the table. It holds the
GIL while it waits for the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.spark.sinks.api import Part, part_with_schema
from holdfast.spark.sinks.object_store import options_of
from holdfast.spark.sinks.parquet_files import StepHook, in_utc, put_part, write_groups
from holdfast.spark.sinks.part_files import PartFile, WrittenFile, empty_part_file, part_name
from holdfast.spark.sinks.partitions import delta_partition_value, partition_parts, split_by_values


class DeltaFileFacts(msgspec.Struct, frozen=True):
    """Metadata of a file for the table's log: its partition values and column statistics."""

    values: dict[str, str | None]
    statistics: dict[str, Any]


class DeltaFiles:
    """`local` is the table's directory, None in an object store."""

    def __init__(self, url: str, local: Path | None, step: StepHook) -> None:
        self._url = url
        self._local = local
        self._step = step

    def write_part(
        self, part: Part, run_id: str, schema: pa.Schema, columns: Sequence[str]
    ) -> list[WrittenFile]:
        """Write the files of a part, partitioned by `columns`. A part without rows is a file
        without a name.
        """
        in_utc_part = part._replace(rows=lambda: (in_utc(group) for group in part.groups()))
        fitting = part_with_schema(in_utc_part, schema, path=self._url)
        if not columns:
            return [self._write_file(fitting, f"-{run_id}", schema, {})]
        groups = list(fitting.groups())
        table = pa.concat_tables(groups) if groups else schema.empty_table()
        files = []
        for suffix, piece in partition_parts(
            part, split_by_values(table, [table.column(n) for n in columns])
        ):
            first = piece.table.slice(0, 1)
            values = {
                name: delta_partition_value(first.column(name)[0].as_py()) for name in columns
            }
            files.append(self._write_file(piece, f"-{run_id}{suffix}", schema, values))
        return files or [WrittenFile(empty_part_file(part.lo, part.hi))]

    def check_writable(self, name: str) -> None:
        """In an object store: write a small object and delete it."""
        with self.open_object(name) as stream:
            stream.write(b"writable")
        self.remote_filesystem().delete_file(name)

    @contextlib.contextmanager
    def open_object(self, name: str) -> Iterator[Any]:
        """Open an object for writing. The library accepts bytes only, and Arrow passes buffers."""
        raw = self.remote_filesystem().handler._handler.open_output_stream(name)
        yield pa.PythonFile(_ByteStream(raw), "w")
        raw.close()  # an object that is not closed is not created

    def remote_filesystem(self) -> Any:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self._url, options_of(self._url) or None))

    def _write_file(
        self, part: Part, suffix: str, schema: pa.Schema, values: dict[str, str | None]
    ) -> WrittenFile:
        statistics = _FileStatistics()
        counted = part._replace(rows=lambda: (statistics.add(group) for group in part.groups()))
        name = part_name(part.lo, part.hi, suffix)
        if self._local is not None:
            file = put_part(self._local, name, counted, schema, step=self._step)
        else:
            file = self._upload(name, counted, schema)
        if not file.path:
            return WrittenFile(file)
        return WrittenFile(
            file, facts=msgspec.json.encode(DeltaFileFacts(values, statistics.as_json())).decode()
        )

    def _upload(self, name: str, part: Part, schema: pa.Schema) -> PartFile:
        groups = part.groups()
        first = next(groups, None)
        if first is None:
            return empty_part_file(part.lo, part.hi)
        with self.open_object(name) as stream:
            rows = write_groups(schema, chain([first], groups), stream)
            length = stream.tell()
        return PartFile(name, part.lo, part.hi, rows, length, "")


def add_action(written: WrittenFile) -> Any:
    """Return the action that adds a file to the table; None for a part without rows."""
    if not written.file.path:
        return None
    from deltalake.transaction import AddAction

    facts = msgspec.json.decode(written.facts, type=DeltaFileFacts)
    statistics = msgspec.json.encode(facts.statistics).decode()
    return AddAction(written.file.path, written.file.bytes, facts.values, 0, True, statistics)


class _ByteStream:
    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._raw.write(bytes(view))
        return view.nbytes

    def flush(self) -> None: ...

    def close(self) -> None:
        """Do nothing: Arrow closes its file, but the `with` block ends the object and handles
        errors.
        """


class _FileStatistics:
    """Statistics that let a reader skip files: counts, and bounds of integers."""

    def __init__(self) -> None:
        self.rows = 0
        self.nulls: dict[str, int] = {}
        self.bounds: dict[str, tuple[int, int]] = {}

    def add(self, table: pa.Table) -> pa.Table:
        """Add `table` to the statistics and return it."""
        self.rows += table.num_rows
        for field, column in zip(table.schema, table.columns, strict=True):
            name = field.name
            if not pa.types.is_nested(field.type):
                self.nulls[name] = self.nulls.get(name, 0) + column.null_count
            if pa.types.is_integer(field.type) and column.null_count < len(column):
                found = pc.min_max(column).as_py()
                low, high = self.bounds.get(name, (found["min"], found["max"]))
                self.bounds[name] = (min(low, found["min"]), max(high, found["max"]))
        return table

    def as_json(self) -> dict[str, Any]:
        low = {name: bounds[0] for name, bounds in self.bounds.items()}
        high = {name: bounds[1] for name, bounds in self.bounds.items()}
        counts = {"numRecords": self.rows, "nullCount": self.nulls}
        return {**counts, "minValues": low, "maxValues": high}
