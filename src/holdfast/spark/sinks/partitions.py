"""Partitioned parts: splits the rows of a part by partition, one file each.

The files of a part are ordered by the first appearance of their partitions in the rows, so they
depend on the rows alone. A partitioned part is held in memory while it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import Invalid
from holdfast.spark.sinks.api import Part

_CALL = re.compile(r"([a-z]+)\((?:(\d+), *)?(.+?)(?:, *(\d+))?\)")


class Transform(NamedTuple):
    """`day(ts)` is ("day", "ts", 0), `bucket(8, id)` ("bucket", "id", 8), a column "identity"."""

    name: str
    column: str
    width: int = 0


def parse_partition_by(partition_by: str | Sequence[str]) -> tuple[str, ...]:
    """Parse the `partition_by` argument: a name, names, or the text of a spec."""
    if isinstance(partition_by, str):
        names = json.loads(partition_by) if partition_by.startswith("[") else [partition_by]
    else:
        names = list(partition_by)
    if not all(isinstance(name, str) and name for name in names):
        raise Invalid(what="partition_by", found=partition_by, why="must be names of columns")
    if len(set(names)) < len(names):
        raise Invalid(what="partition_by", found=partition_by, why="a column is named twice")
    return tuple(names)


def parse_partition_transform(text: str) -> Transform:
    match = _CALL.fullmatch(text)
    if match is None:
        return Transform("identity", text)
    return Transform(match[1], match[3], int(match[2] or match[4] or 0))


def split_by_values(
    table: pa.Table, by: Sequence[pa.Array | pa.ChunkedArray]
) -> Iterator[pa.Table]:
    """Yield the rows of `table` by the values of `by`, in the order of first appearance."""
    if not table.num_rows:
        return
    codes = np.zeros(table.num_rows, np.int64)
    for column in by:
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
        encoded = pc.dictionary_encode(column, null_encoding="encode")
        indices = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        codes = codes * (int(indices.max()) + 1) + indices
        _, codes = np.unique(codes, return_inverse=True)
    _, firsts, codes = np.unique(codes, return_index=True, return_inverse=True)
    ranks = np.empty(len(firsts), np.int64)
    ranks[np.argsort(firsts)] = np.arange(len(firsts))
    order = np.argsort(ranks[codes], kind="stable")
    counts = np.bincount(ranks[codes])
    if len(counts) == 1:
        yield table
        return
    moved = table.take(pa.array(order))
    at = 0
    for count in counts.tolist():
        yield moved.slice(at, count)
        at += count


def partition_parts(part: Part, tables: Iterator[pa.Table]) -> Iterator[tuple[str, Part]]:
    """Yield a part per partition, with its file suffix."""
    for at, table in enumerate(tables):
        yield f"-{at:05d}", Part(part.lo, part.hi, table)


def delta_partition_value(value: Any) -> str | None:
    """Format a partition value for Delta's log. Delta reads an empty text as null."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")
    if isinstance(value, date):
        return value.isoformat()
    return str(value)


def check_partition_columns(names: Sequence[str], schema: pa.Schema, *, path: str) -> None:
    """Refuse missing columns and unsupported partition types."""
    for name in names:
        if name not in schema.names:
            why = "no such column in the output; carry= adds columns of the input"
            raise Invalid(what="partition_by", path=path, found=name, why=why)
        kind = schema.field(name).type
        if not (
            pa.types.is_string(kind)
            or pa.types.is_large_string(kind)
            or pa.types.is_integer(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_date32(kind)
            or pa.types.is_timestamp(kind)
            or pa.types.is_decimal(kind)
        ):
            why = f"{kind} is not a partition type"
            raise Invalid(what="partition_by", path=path, found=name, why=why)
    if names and len(set(names)) == len(schema.names):
        why = "at least one column must not be a partition column"
        raise Invalid(what="partition_by", path=path, found=list(names), why=why)
