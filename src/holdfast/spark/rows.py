"""Arrow on the wire, Spark Rows in the function: the two ways between them.

`rows_of` gives the Rows that Spark itself would give. `Encoder` turns what a function returned into
columns of the stage's schema and is stricter than Arrow, which would cut 1.5 to the integer 1: a
value of another type is a failure of its row (class `schema`) that says which column it is.
"""

from __future__ import annotations

import datetime
import decimal
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
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


def message_of(batch: pa.RecordBatch) -> bytes:
    """A batch without its schema, which all results of a run share."""
    return bytes(batch.serialize())


def batch_of(data: Any, schema: pa.Schema) -> pa.RecordBatch:
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema)


class WrongSchema(Exception):
    """What a function returned is not what its stage declared."""


class Encoder:
    def __init__(self, schema: StructType) -> None:
        self.schema = schema
        self.arrow = arrow_schema(schema)
        self.names = list(self.arrow.names)
        self._known = frozenset(self.names)
        self._plain = all(_is_plain(field.type) for field in self.arrow)
        self._kinds = [_kinds_of(field) for field in schema.fields]

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
        for field, kinds, value in zip(self.schema.fields, self._kinds, values, strict=True):
            if type(value) not in kinds:
                if _plainly(value) is not value:
                    # Models answer in NumPy's scalars; what is meant is the number.
                    return self.values([_plainly(one) for one in values])
                if why := _strange(field, value):
                    raise WrongSchema(f"column {why}")
        return values

    def batch(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Rows of values as one batch. Raises what Arrow or Spark raises; ask `fits` then."""
        if not rows:
            return pa.RecordBatch.from_pylist([], schema=self.arrow)
        if not self._plain:
            table = LocalDataToArrowConversion.convert(list(rows), self.schema, False)
            return _one_batch(table.cast(self.arrow))
        columns: Iterable[Any] = zip(*rows, strict=True)
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
        if sorted(found.column_names) != sorted(self.names):
            missing = sorted(self._known - set(found.column_names))
            unknown = sorted(set(found.column_names) - self._known)
            raise WrongSchema(f"columns missing: {missing}, unknown: {unknown}, or repeated")
        for field in self.arrow:
            column = found.column(field.name)
            if not _is_alike(column.type, field.type):
                raise WrongSchema(f"column {field.name} is of {column.type}, not of {field.type}")
            if column.null_count and not field.nullable:
                raise WrongSchema(f"column {field.name} has nulls, and is declared NOT NULL")
        try:
            return _one_batch(found.select(self.names).cast(self.arrow))
        except pa.ArrowException as error:
            raise WrongSchema(str(error)) from None


def _plainly(value: Any) -> Any:
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if is_scalar else value


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


_KINDS: dict[type[T.DataType], tuple[type, ...]] = {
    T.BooleanType: (bool,),
    T.ByteType: (int,),
    T.ShortType: (int,),
    T.IntegerType: (int,),
    T.LongType: (int,),
    T.FloatType: (float, int),
    T.DoubleType: (float, int),
    T.StringType: (str,),
    T.DecimalType: (decimal.Decimal,),
    T.DateType: (datetime.date,),
    T.TimestampType: (datetime.datetime,),
    T.TimestampNTZType: (datetime.datetime,),
    T.DayTimeIntervalType: (datetime.timedelta,),
    T.BinaryType: (bytes, bytearray),
}


def _kinds_of(field: T.StructField) -> tuple[type, ...]:
    """Types whose values need no second look."""
    nothing = (type(None),) if field.nullable else ()
    return _KINDS.get(type(field.dataType), ()) + nothing


def _strange(field: T.StructField, value: Any) -> str:
    """Why a value is no value of the field, inside and out; empty when it is one."""
    name, kind = field.name, field.dataType
    if value is None:
        return "" if field.nullable else f"{name} is None, and is declared NOT NULL"
    told = f"{name} is a {type(value).__name__}: {value!r:.80}"
    if isinstance(kind, T.ArrayType):
        if not isinstance(value, list | tuple | array):
            return f"{told}; an array is a list"
        item = T.StructField(f"{name}[]", kind.elementType, kind.containsNull)
        return next((why for one in value if (why := _strange(item, one))), "")
    if isinstance(kind, T.MapType):
        if not isinstance(value, dict):
            return f"{told}; a map is a dict"
        key = T.StructField(f"{name} key", kind.keyType, False)
        item = T.StructField(f"{name}[]", kind.valueType, kind.valueContainsNull)
        pairs = ((key, one) for one in value), ((item, one) for one in value.values())
        return next((why for side in pairs for f, one in side if (why := _strange(f, one))), "")
    if isinstance(kind, StructType):
        return _strange_struct(name, kind, value, told)
    kinds = _KINDS.get(type(kind), (object,))
    if isinstance(value, bool) and bool not in kinds and object not in kinds:
        return told
    if isinstance(value, datetime.datetime) and isinstance(kind, T.DateType):
        return f"{told}; a date has no time"
    return "" if isinstance(value, kinds) else told


def _strange_struct(name: str, kind: StructType, value: Any, told: str) -> str:
    if isinstance(value, dict):
        if value.keys() != set(kind.names):
            return f"{told}; its fields are {kind.names}"
        values: Iterable[Any] = [value[one] for one in kind.names]
    elif isinstance(value, tuple | list):
        # Spark takes the fields of a Row inside a Row by their place, whatever their names.
        names = getattr(value, "__fields__", None) or kind.names
        if len(value) != len(kind.names) or list(names) != kind.names:
            return f"{told}; its fields are {kind.names}, in this order"
        values = value
    else:
        return f"{told}; a struct is a dict, a Row or a tuple"
    for field, one in zip(kind.fields, values, strict=True):
        inner = T.StructField(f"{name}.{field.name}", field.dataType, field.nullable)
        if why := _strange(inner, one):
            return why
    return ""


def _is_alike(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether a cast keeps the meaning: another width or unit, not another kind of value."""
    if found == declared or pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(found):
        return _is_alike(found.value_type, declared)
    if pa.types.is_floating(declared):
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    if pa.types.is_struct(found) and pa.types.is_struct(declared):
        return [one.name for one in found] == [one.name for one in declared] and all(
            _is_alike(one.type, two.type) for one, two in zip(found, declared, strict=True)
        )
    if pa.types.is_map(found) and pa.types.is_map(declared):
        return _is_alike(found.key_type, declared.key_type) and _is_alike(
            found.item_type, declared.item_type
        )
    if any(pa.types.is_map(one) for one in (found, declared)):
        return False
    if _is_list(found) and _is_list(declared):
        return _is_alike(found.value_type, declared.value_type)
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
