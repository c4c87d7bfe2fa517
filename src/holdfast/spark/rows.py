"""Arrow on the wire, Spark Rows in the function: the two ways between them.

`rows_of` gives the Rows that Spark itself would give. `Encoder` turns what a function returned into
columns of the stage's schema and is stricter than Arrow, which would cut 1.5 to the integer 1: a
value of another type is a failure of its row (class `schema`) that says which column it is.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.conversion import ArrowTableToRowsConversion, LocalDataToArrowConversion
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import Row, StructType, _create_row


def rows_of(table: pa.Table) -> list[Row]:
    if all(_is_plain(field.type) for field in table.schema):
        names = table.schema.names
        columns = [column.to_pylist() for column in table.columns]
        return [_create_row(names, values) for values in zip(*columns, strict=True)]
    return list(ArrowTableToRowsConversion.convert(table, from_arrow_schema(table.schema)))


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow form of a Spark schema, as it is stored and written to the sink."""
    return to_arrow_schema(schema, timezone="UTC")


def table_of(data: Any) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()


def stream_of(table: pa.Table | pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


class WrongSchema(Exception):
    """What a function returned is not what its stage declared."""


class Encoder:
    def __init__(self, schema: StructType) -> None:
        self.schema = schema
        self.arrow = arrow_schema(schema)
        self.names = list(self.arrow.names)
        self._known = frozenset(self.names)
        self._plain = all(_is_plain(field.type) for field in self.arrow)
        self._kinds = [_kinds_of(field.type) for field in self.arrow]

    def values(self, found: Any) -> tuple[Any, ...]:
        """What one call returned, as the values of the columns; or WrongSchema."""
        if isinstance(found, Row) and hasattr(found, "__fields__"):
            found = found.asDict()
        if isinstance(found, dict):
            if found.keys() != self._known:
                missing = sorted(self._known - found.keys())
                unknown = sorted(map(str, found.keys() - self._known))
                raise WrongSchema(f"columns missing: {missing}, unknown: {unknown}")
            values = tuple(found[name] for name in self.names)
        elif isinstance(found, tuple | list):
            if len(found) != len(self.names):
                raise WrongSchema(f"{len(found)} values for the columns {self.names}")
            values = tuple(found)
        else:
            raise WrongSchema(
                f"a {type(found).__name__}; return a dict with {self.names}, or Skip, Retry, Fail"
            )
        for name, kinds, value in zip(self.names, self._kinds, values, strict=True):
            if value is None or kinds is None or type(value) in kinds:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise WrongSchema(f"column {name} is a {type(value).__name__}: {value!r:.80}")
        return values

    def batch(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Rows of values as one batch. Raises what Arrow or Spark raises; ask `fits` then."""
        if not self._plain:
            table = LocalDataToArrowConversion.convert(rows, self.schema, False)
            return _one_batch(table.cast(self.arrow))
        columns: Iterable[Any] = zip(*rows, strict=True) if rows else [()] * len(self.names)
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, self.arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def fits(self, row: tuple[Any, ...]) -> str:
        """Why one row of values is no row of this schema; empty when it is one."""
        try:
            self.batch([row])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def check_table(self, found: Any, rows: int) -> pa.RecordBatch:
        """What a batch function returned: as many rows as it was given, of the declared columns."""
        if isinstance(found, pa.RecordBatch):
            found = pa.Table.from_batches([found])
        if not isinstance(found, pa.Table):
            raise WrongSchema(f"a {type(found).__name__}; a batch function returns an Arrow table")
        if found.num_rows != rows:
            raise WrongSchema(f"{found.num_rows} rows for a batch of {rows}")
        if set(found.column_names) != self._known:
            missing = sorted(self._known - set(found.column_names))
            unknown = sorted(set(found.column_names) - self._known)
            raise WrongSchema(f"columns missing: {missing}, unknown: {unknown}")
        try:
            return _one_batch(found.select(self.names).cast(self.arrow))
        except pa.ArrowException as error:
            raise WrongSchema(str(error)) from None


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=table.schema)
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's own Python values are Spark's, too (times, for one, are not)."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_decimal128(kind)
    )


def _kinds_of(kind: pa.DataType) -> tuple[type, ...] | None:
    if pa.types.is_boolean(kind):
        return (bool,)
    if pa.types.is_integer(kind):
        return (int,)
    if pa.types.is_floating(kind):
        return (float, int)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return (str,)
    if pa.types.is_decimal(kind):
        return (decimal.Decimal,)
    if pa.types.is_date(kind):
        return (datetime.date,)
    return None
