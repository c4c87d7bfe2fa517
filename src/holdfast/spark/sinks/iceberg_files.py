"""Files of an Iceberg table, written by the ledger service or by an executor, which needs no catalog for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.clock import SYSTEM
from holdfast.spark.sinks.api import Part, fitted_part
from holdfast.spark.sinks.files import (
    SCRATCH,
    Step,
    check_scratch,
    in_utc,
    put_part,
    sync_directory,
    write_groups,
)
from holdfast.spark.sinks.partitions import pieces, split
from holdfast.spark.sinks.written import PartFile, no_file, part_name


class PartWriter(msgspec.Struct, frozen=True):
    """What an executor needs to write parts, without a catalog: the columns as an Arrow message, the run, the place
    of the table, (column, unit of time or "identity") of its partitions, and the properties of its file system.
    These may be credentials: the ledger service sends them to executors and keeps them nowhere."""

    schema: str
    run_id: str
    location: str
    partition_by: list[tuple[str, str]]
    properties: dict[str, str]

    def __repr__(self) -> str:
        return f"PartWriter({self.location!r})"


class IcebergFiles:
    """`location` is that of the table; `home` its data directory, if it is on a disk."""

    def __init__(self, location: str, io: Any, table: str, step: Step) -> None:
        self._location = location.rstrip("/")
        self._io = io
        self._table = table
        self._step = step
        scheme, found, rest = self._location.partition("://")
        if not found:
            scheme, rest = "file", self._location.removeprefix("file:")
        self.home = Path(rest) / "data" if scheme == "file" else None

    def path(self, name: str) -> str:
        return f"{self._location}/data/{name}"

    def check(self) -> None:
        """Write a small object and delete it. On a disk the scratch directory must be there."""
        if self.home is not None:
            check_scratch(self.home)
            return
        path = self.path(f"{SCRATCH}/writable-{SYSTEM.entropy(6).hex()}")
        with self._io.new_output(path).create(overwrite=True) as stream:
            stream.write(b"writable")
        self._io.delete(path)

    def write(
        self, part: Part, run_id: str, schema: pa.Schema, partition_by: Sequence[tuple[str, str]]
    ) -> list[PartFile]:
        """Write the files of a part. A part without rows is a file without a name."""
        casted = part._replace(rows=lambda: (in_utc(g).cast(schema) for g in part.groups()))
        fitting = fitted_part(casted, schema, path=self._table)
        if not partition_by:
            return [self._write(fitting, f"-{run_id}", schema)]
        groups = list(fitting.groups())
        table = pa.concat_tables(groups) if groups else schema.empty_table()
        by = []
        for name, unit in partition_by:
            column = table.column(name)
            by.append(column if unit == "identity" else pc.floor_temporal(column, unit=unit))
        found = [
            self._write(piece, f"-{run_id}{suffix}", schema)
            for suffix, piece in pieces(part, split(table, by))
        ]
        return found or [no_file(part.lo, part.hi)]

    def _write(self, part: Part, suffix: str, schema: pa.Schema) -> PartFile:
        name = part_name(part.lo, part.hi, suffix)
        if self.home is not None:
            file = put_part(self.home, name, part, schema, step=self._step)
            sync_directory(self.home)
            return file
        groups = part.groups()
        first = next(groups, None)
        if first is None:
            return no_file(part.lo, part.hi)
        with self._io.new_output(self.path(name)).create(overwrite=True) as stream:
            rows = write_groups(schema, chain([first], groups), stream)
        return PartFile(name, part.lo, part.hi, rows, 0, "")


def files_of(writer: bytes, table: str, step: Step) -> tuple[IcebergFiles, PartWriter]:
    """On an executor: the files of a table, by what its sink told."""
    from pyiceberg.io import load_file_io

    told = msgspec.json.decode(writer, type=PartWriter)
    io = load_file_io(told.properties, told.location)
    return IcebergFiles(told.location, io, table, step), told
