"""Files of a Delta table, written by the ledger service or by an executor.

A part is one Parquet file, or one for each partition in it, with what the table's log is to say of it. In an object
store the library's own handler writes: it takes the same options as the table. It holds the interpreter while it
waits for the store.
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

from holdfast.spark.sinks.api import Part, fitted_part
from holdfast.spark.sinks.files import Step, in_utc, put_part, write_groups
from holdfast.spark.sinks.object_store import options_of
from holdfast.spark.sinks.partitions import delta_value, pieces, split
from holdfast.spark.sinks.written import PartFile, WrittenFile, no_file, part_name


class Facts(msgspec.Struct, frozen=True):
    """What the table's log says of a file: the values of its partition, and statistics of its columns."""

    values: dict[str, str | None]
    statistics: dict[str, Any]


class DeltaFiles:
    """`local` is the table's directory, None in an object store."""

    def __init__(self, url: str, local: Path | None, step: Step) -> None:
        self._url = url
        self._local = local
        self._step = step

    def write(
        self, part: Part, run_id: str, schema: pa.Schema, columns: Sequence[str]
    ) -> list[WrittenFile]:
        """Write the files of a part; `columns` partition the table. A part without rows is a file without a name."""
        zoned = part._replace(rows=lambda: (in_utc(group) for group in part.groups()))
        fitting = fitted_part(zoned, schema, path=self._url)
        if not columns:
            return [self._write(fitting, f"-{run_id}", schema, {})]
        groups = list(fitting.groups())
        table = pa.concat_tables(groups) if groups else schema.empty_table()
        found = []
        for suffix, piece in pieces(part, split(table, [table.column(n) for n in columns])):
            first = piece.table.slice(0, 1)
            values = {name: delta_value(first.column(name)[0].as_py()) for name in columns}
            found.append(self._write(piece, f"-{run_id}{suffix}", schema, values))
        return found or [WrittenFile(no_file(part.lo, part.hi))]

    def check(self, name: str) -> None:
        """In an object store: write a small object and delete it."""
        with self.writing(name) as stream:
            stream.write(b"writable")
        self.remote().delete_file(name)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """An object under way. The library takes bytes alone, and Arrow hands it buffers."""
        raw = self.remote().handler._handler.open_output_stream(name)
        yield pa.PythonFile(_Bytes(raw), "w")
        raw.close()  # left open, it comes to nothing

    def remote(self) -> Any:
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self._url, options_of(self._url) or None))

    def _write(
        self, part: Part, suffix: str, schema: pa.Schema, values: dict[str, str | None]
    ) -> WrittenFile:
        told = _Statistics()
        counted = part._replace(rows=lambda: (told.add(group) for group in part.groups()))
        name = part_name(part.lo, part.hi, suffix)
        if self._local is not None:
            file = put_part(self._local, name, counted, schema, step=self._step)
        else:
            file = self._upload(name, counted, schema)
        if not file.path:
            return WrittenFile(file)
        return WrittenFile(file, facts=msgspec.json.encode(Facts(values, told.found())).decode())

    def _upload(self, name: str, part: Part, schema: pa.Schema) -> PartFile:
        groups = part.groups()
        first = next(groups, None)
        if first is None:
            return no_file(part.lo, part.hi)
        with self.writing(name) as stream:
            rows = write_groups(schema, chain([first], groups), stream)
            length = stream.tell()
        return PartFile(name, part.lo, part.hi, rows, length, "")


def add_action(written: WrittenFile) -> Any:
    """The action that adds a file to the table; None for a part without rows."""
    if not written.file.path:
        return None
    from deltalake.transaction import AddAction

    facts = msgspec.json.decode(written.facts, type=Facts)
    statistics = msgspec.json.encode(facts.statistics).decode()
    return AddAction(written.file.path, written.file.bytes, facts.values, 0, True, statistics)


class _Bytes:
    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._raw.write(bytes(view))
        return view.nbytes

    def flush(self) -> None: ...

    def close(self) -> None:
        """Arrow closes its file; the object ends with the `with` block, which knows of errors."""


class _Statistics:
    """What lets a reader pass over files: counts, and the bounds of whole numbers."""

    def __init__(self) -> None:
        self.rows = 0
        self.nulls: dict[str, int] = {}
        self.bounds: dict[str, tuple[int, int]] = {}

    def add(self, table: pa.Table) -> pa.Table:
        """Count `table` in, and hand it on."""
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

    def found(self) -> dict[str, Any]:
        low = {name: bounds[0] for name, bounds in self.bounds.items()}
        high = {name: bounds[1] for name, bounds in self.bounds.items()}
        counts = {"numRecords": self.rows, "nullCount": self.nulls}
        return {**counts, "minValues": low, "maxValues": high}
