"""Iceberg data files, written by the ledger service or, without a catalog, by an executor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.clock import SYSTEM
from holdfast.spark.sinks.api import Part, part_with_schema
from holdfast.spark.sinks.parquet_files import (
    SCRATCH,
    StepHook,
    check_scratch,
    in_utc,
    put_part,
    sync_directory,
    write_groups,
)
from holdfast.spark.sinks.part_files import PartFile, empty_part_file, part_name
from holdfast.spark.sinks.partitions import partition_parts, split_by_values


class IcebergWriterConfig(msgspec.Struct, frozen=True):
    """The configuration of an executor that writes parts without a catalog: the columns as an Arrow
    message, the run, the table location, (column, time unit or "identity") of its partitions, and
    the file system properties. These may be credentials. The ledger service sends them to executors
    and stores them nowhere.
    """

    schema: str
    run_id: str
    location: str
    partition_by: list[tuple[str, str]]
    properties: dict[str, str]

    def __repr__(self) -> str:
        return f"PartWriter({self.location!r})"


class IcebergFiles:
    """`location` is that of the table. `local_data` is its data directory on a local disk, else
    None.
    """

    def __init__(self, location: str, io: Any, table: str, step: StepHook) -> None:
        self._location = location.rstrip("/")
        self._io = io
        self._table = table
        self._step = step
        scheme, found, rest = self._location.partition("://")
        if not found:
            scheme, rest = "file", self._location.removeprefix("file:")
        self.local_data = Path(rest) / "data" if scheme == "file" else None

    def path(self, name: str) -> str:
        return f"{self._location}/data/{name}"

    def check_writable(self) -> None:
        """Write a small object and delete it. On a disk the scratch directory must exist."""
        if self.local_data is not None:
            check_scratch(self.local_data)
            return
        path = self.path(f"{SCRATCH}/writable-{SYSTEM.entropy(6).hex()}")
        with self._io.new_output(path).create(overwrite=True) as stream:
            stream.write(b"writable")
        self._io.delete(path)

    def write_part(
        self, part: Part, run_id: str, schema: pa.Schema, partition_by: Sequence[tuple[str, str]]
    ) -> list[PartFile]:
        """Write the files of a part. For a part without rows, return one with an empty path."""
        cast_part = part._replace(rows=lambda: (in_utc(g).cast(schema) for g in part.groups()))
        fitting = part_with_schema(cast_part, schema, path=self._table)
        if not partition_by:
            return [self._write_file(fitting, f"-{run_id}", schema)]
        groups = list(fitting.groups())
        table = pa.concat_tables(groups) if groups else schema.empty_table()
        by = []
        for name, unit in partition_by:
            column = table.column(name)
            by.append(column if unit == "identity" else pc.floor_temporal(column, unit=unit))
        files = [
            self._write_file(piece, f"-{run_id}{suffix}", schema)
            for suffix, piece in partition_parts(part, split_by_values(table, by))
        ]
        return files or [empty_part_file(part.lo, part.hi)]

    def _write_file(self, part: Part, suffix: str, schema: pa.Schema) -> PartFile:
        name = part_name(part.lo, part.hi, suffix)
        if self.local_data is not None:
            file = put_part(self.local_data, name, part, schema, step=self._step)
            sync_directory(self.local_data)
            return file
        groups = part.groups()
        first = next(groups, None)
        if first is None:
            return empty_part_file(part.lo, part.hi)
        with self._io.new_output(self.path(name)).create(overwrite=True) as stream:
            rows = write_groups(schema, chain([first], groups), stream)
        return PartFile(name, part.lo, part.hi, rows, 0, "")


def open_files(
    writer: bytes, table: str, step: StepHook
) -> tuple[IcebergFiles, IcebergWriterConfig]:
    """On an executor: open the files of a table with the sink's configuration."""
    from pyiceberg.io import load_file_io

    config = msgspec.json.decode(writer, type=IcebergWriterConfig)
    io = load_file_io(config.properties, config.location)
    return IcebergFiles(config.location, io, table, step), config
