"""Conversion between Arrow tables and Spark Rows.

`to_rows` returns the Rows that Spark itself would create. `ResultEncoder` converts results of a function
into columns of the stage's schema, by the rules of `coercion`: no value loses information, where Arrow
would truncate 1.5 to the integer 1. A result that does not fit fails its row (class `schema`) with the
name of the column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.conversion import ArrowTableToRowsConversion, LocalDataToArrowConversion
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import Row, StructType

from holdfast.spark.coercion import WrongSchema, column_converter, exact_types, named_fields

# Rows of a grant are converted in batches of this size. A grant may have 65,536 rows, and every
# garbage collection would scan all of them until the last one is called.
CONVERT_ROWS = 1024
# Maximum number of cached type signatures.
SIGNATURES_MAX = 256


def to_rows(table: pa.Table) -> list[Row]:
    if all(_has_equal_python_values(field.type) for field in table.schema):
        names = table.schema.names
        columns = [_python_values(column) for column in table.columns]
        # Does the work of `Row.__new__` and `Row.__setattr__` without their checks per row.
        new = tuple.__new__
        rows = [new(Row, values) for values in zip(*columns, strict=True)]
        for row in rows:
            row.__dict__["__fields__"] = names
        return rows
    return list(ArrowTableToRowsConversion.convert(table, from_arrow_schema(table.schema)))


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    if column.null_count == 0 and _is_number(column.type):
        return list(column.to_numpy().tolist())
    return list(column.to_pylist())


class RowReader:
    """Rows of a grant, converted from Arrow on demand, in order. It does not retain taken rows."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        # Converted rows that are not taken yet. The first one is at `_at` in the table.
        self._converted: list[Any] = []
        self._at = 0
        # By position: why a row cannot be converted. `take` returns None for it.
        self.conversion_errors: dict[int, str] = {}

    def take(self, count: int) -> list[Any]:
        rows = self.peek(count)[:count]
        del self._converted[:count]
        self._at += count
        return rows

    def peek(self, count: int) -> list[Any]:
        """Return at least the next `count` rows without removing them."""
        missing = count - len(self._converted)
        if missing > 0:
            at = self._at + len(self._converted)
            self._converted += self._convert(at, self._table.slice(at, max(missing, CONVERT_ROWS)))
        return self._converted

    def _convert(self, lo: int, table: pa.Table) -> list[Any]:
        try:
            return list(to_rows(table))
        except Exception:
            return [self._convert_one(lo + at, table.slice(at, 1)) for at in range(table.num_rows)]

    def _convert_one(self, at: int, table: pa.Table) -> Row | None:
        try:
            return to_rows(table)[0]
        except Exception as error:
            self.conversion_errors[at] = f"{type(error).__name__}: {error}"
            return None


def to_arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow form of a Spark schema, as it is stored and written to the sink."""
    return to_arrow_schema(schema, timezone="UTC")


def decode_table(data: Any) -> pa.Table:
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        return reader.read_all()


def encode_stream(table: pa.Table | pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    return bytes(sink.getvalue())


def encode_batch(batch: pa.RecordBatch) -> bytes:
    """Encode a batch without its schema, which all results of a run share."""
    return bytes(batch.serialize())


def decode_batch(data: Any, schema: pa.Schema) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema)


class UnfitRow(NamedTuple):
    """A row of a batch result that does not fit: its position, the reason, and its value."""

    position: int
    why: str
    value: Any


class ResultEncoder:
    def __init__(self, schema: StructType) -> None:
        self.schema = schema
        self.arrow = to_arrow(schema)
        self.names = list(self.arrow.names)
        self._name_set = frozenset(self.names)
        self._is_plain = all(_is_directly_writable(field.type) for field in self.arrow)
        self._exact_types = [exact_types(field.dataType, field.nullable) for field in schema.fields]
        self._converters = [
            column_converter(one.name, one.dataType, one.nullable) for one in schema.fields
        ]
        self._pick = itemgetter(*self.names) if len(self.names) > 1 else None
        # Type signatures of results that needed no conversion.
        self._signatures: set[tuple[type, ...]] = set()

    def encode_exact(self, result: dict[Any, Any]) -> tuple[Any, ...] | None:
        """Return the values of a dict that already have the columns' types. None: call
        `encode_values`, which gives the same result for such a dict and converts or refuses any
        other.
        """
        try:
            if self._pick is None:
                value = result[self.names[0]]
                return (value,) if type(value) in self._exact_types[0] else None
            values: tuple[Any, ...] = self._pick(result)
        except KeyError:
            return None
        return values if tuple(map(type, values)) in self._signatures else None

    def encode_values(self, result: Any) -> tuple[Any, ...]:
        """Convert the result of one call to column values; or raise WrongSchema."""
        fields = result if type(result) is dict else named_fields(result)
        if fields is not None:
            try:
                values = tuple([fields[name] for name in self.names])
            except KeyError:
                missing = sorted(self._name_set - fields.keys())
                unknown = sorted(map(str, fields.keys() - self._name_set))
                raise WrongSchema(f"columns missing: {missing}, unknown: {unknown}") from None
        elif isinstance(result, tuple | list):
            if len(result) != len(self.names):
                raise WrongSchema(f"{len(result)} values for the columns {self.names}")
            values = tuple(result)
        else:
            raise WrongSchema(
                f"a {type(result).__name__}; return a dict with {self.names}, or Skip, Retry, Fail"
            )
        for kinds, value in zip(self._exact_types, values, strict=True):
            if type(value) not in kinds:
                return tuple(
                    [convert(one) for convert, one in zip(self._converters, values, strict=True)]
                )
        if len(self._signatures) < SIGNATURES_MAX:
            self._signatures.add(tuple(map(type, values)))
        return values

    def to_batch(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Build one batch of rows. Raises errors of Arrow or Spark; then `encode_error` finds the
        row.
        """
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=self.arrow)
        if not self._is_plain:
            table = LocalDataToArrowConversion.convert(list(rows), self.schema, False)
            return _one_batch(table.cast(self.arrow))
        columns: Iterable[Any] = zip(*rows, strict=True)
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, self.arrow, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.arrow)

    def encode_error(self, row: tuple[Any, ...]) -> str:
        """Return why a row does not fit the schema; empty if it fits."""
        try:
            self.to_batch([row])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def encode_table(self, result: Any, rows: int) -> tuple[pa.RecordBatch, list[UnfitRow]]:
        """Convert the result of a batch function into a batch of the fitting rows and a list of the
        others. Raise WrongSchema if result rows cannot be assigned to input rows.
        """
        table = to_table(result)
        if isinstance(table, pa.Table):
            if table.num_rows != rows:
                raise WrongSchema(f"{table.num_rows} rows for a batch of {rows}")
            try:
                return self.cast_table(table, rows), []
            except WrongSchema:
                if len(set(table.column_names)) < table.num_columns:
                    raise
                table = table.to_pylist(maps_as_pydicts="strict")
        if table is None:
            raise WrongSchema(f"a {type(result).__name__}; a batch function returns an Arrow table")
        if len(table) != rows:
            raise WrongSchema(f"{len(table)} rows for a batch of {rows}")
        return self._encode_rows(table)

    def _encode_rows(self, rows: list[Any]) -> tuple[pa.RecordBatch, list[UnfitRow]]:
        good: list[tuple[Any, ...]] = []
        unfit: list[UnfitRow] = []
        for at, row in enumerate(rows):
            try:
                values = self.encode_values(row)
            except WrongSchema as error:
                unfit.append(UnfitRow(at, str(error), row))
                continue
            if why := self.encode_error(values):
                unfit.append(UnfitRow(at, why, row))
            else:
                good.append(values)
        return self.to_batch(good), unfit

    def cast_table(self, table: pa.Table, rows: int) -> pa.RecordBatch:
        """Cast a table to the schema. It must have the expected number of rows and the declared
        columns.
        """
        if table.num_rows != rows:
            raise WrongSchema(f"{table.num_rows} rows for a batch of {rows}")
        for name in self.names:
            if table.column_names.count(name) != 1:
                missing = sorted(self._name_set - set(table.column_names))
                unknown = sorted(set(table.column_names) - self._name_set)
                raise WrongSchema(f"columns missing: {missing}, unknown: {unknown}, or repeated")
        for field in self.arrow:
            column = table.column(field.name)
            if not _is_same_kind(column.type, field.type):
                raise WrongSchema(f"column {field.name} is of {column.type}, not of {field.type}")
            if column.null_count and not field.nullable:
                raise WrongSchema(f"column {field.name} has nulls, and is declared NOT NULL")
        try:
            batch = _one_batch(table.select(self.names).cast(self.arrow))
        except pa.ArrowException as error:
            raise WrongSchema(str(error)) from None
        for field in self.arrow:
            if pa.types.is_float32(field.type) and _overflows(table, batch, field.name):
                raise WrongSchema(f"column {field.name} has a number beyond {field.type}")
        return batch


def to_table(result: Any) -> pa.Table | list[Any] | None:
    """Convert the result of a batch function to a table or to a list of rows; None if it is
    neither.
    """
    if isinstance(result, pa.Table):
        return result
    if isinstance(result, pa.RecordBatch):
        return pa.Table.from_batches([result])
    if isinstance(result, list | tuple):
        return list(result)
    try:
        if hasattr(result, "columns") and hasattr(result, "to_dict"):  # a pandas DataFrame
            return _pandas_to_table(result)
        if isinstance(result, dict):
            return pa.table({name: _rows_of_matrix(values) for name, values in result.items()})
        if hasattr(result, "__arrow_c_stream__"):
            return pa.table(result)
    except Exception:
        return None
    return None


def _pandas_to_table(frame: Any) -> pa.Table | list[Any]:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError):
        # Arrow has no single type for a column: convert row by row.
        return list(frame.to_dict("records"))


def _rows_of_matrix(values: Any) -> Any:
    # Arrow rejects multi-dimensional arrays, but accepts a list of arrays.
    return list(values) if getattr(values, "ndim", 1) > 1 else values


def _overflows(table: pa.Table, batch: pa.RecordBatch, name: str) -> bool:
    if not pa.types.is_float64(table.column(name).type):
        return False
    return _count_infinite(batch.column(name)) != _count_infinite(table.column(name))


def _count_infinite(column: Any) -> int:
    return int(pc.sum(pc.is_inf(column)).as_py() or 0)


def _is_directly_writable(kind: pa.DataType) -> bool:
    """Whether Arrow builds a column from checked values directly: vectors are lists of numbers."""
    return (
        _has_equal_python_values(kind.value_type)
        if pa.types.is_list(kind)
        else _has_equal_python_values(kind)
    )


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=table.schema)
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _has_equal_python_values(kind: pa.DataType) -> bool:
    """Whether Arrow's Python values equal Spark's (for times they differ)."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_decimal128(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    """Whether NumPy's Python values of a column without nulls equal Arrow's."""
    return bool(pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind))


def _is_same_kind(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether a cast keeps the meaning: another width or unit, not another kind of value."""
    if found == declared or pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(found):
        return _is_same_kind(found.value_type, declared)
    if pa.types.is_floating(declared):
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    if pa.types.is_integer(declared) and pa.types.is_floating(found):
        # Arrow refuses to truncate a value that is not integral.
        return True
    if pa.types.is_struct(found) and pa.types.is_struct(declared):
        return [one.name for one in found] == [one.name for one in declared] and all(
            _is_same_kind(one.type, two.type) for one, two in zip(found, declared, strict=True)
        )
    if pa.types.is_map(found) and pa.types.is_map(declared):
        return _is_same_kind(found.key_type, declared.key_type) and _is_same_kind(
            found.item_type, declared.item_type
        )
    if any(pa.types.is_map(one) for one in (found, declared)):
        return False
    if _is_list(found) and _is_list(declared):
        return _is_same_kind(found.value_type, declared.value_type)
    return any(is_one(found) and is_one(declared) for is_one in _FAMILIES)


def _is_list(kind: pa.DataType) -> bool:
    return any(
        is_one(kind)
        for is_one in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    )


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_one(kind)
        for is_one in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return any(
        is_one(kind)
        for is_one in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
            pa.types.is_binary_view,
        )
    )


_FAMILIES = (
    pa.types.is_integer,
    pa.types.is_decimal,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_duration,
    _is_text,
    _is_bytes,
)
