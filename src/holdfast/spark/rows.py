"""Arrow on the wire, Spark Rows in the function: the two ways between them.

`rows_of` gives the Rows that Spark itself would give. `Encoder` turns what a function returned into
columns of the stage's schema, by the rules of `coercion`: no value loses anything on the way, where
Arrow would cut 1.5 to the integer 1. What does not fit is a failure of its row (class `schema`) that
says which column it is.
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

from holdfast.spark.coercion import WrongSchema, column, fields_of, kinds_of

# Rows of a grant are converted so many at a time: a grant may have 65,536, and all of them at once
# would be looked at by each collection of garbage until the last one is called.
AHEAD_ROWS = 1024
# Signatures of results that an encoder remembers.
SIGNATURES_MAX = 256


def rows_of(table: pa.Table) -> list[Row]:
    if all(_is_plain(field.type) for field in table.schema):
        names = table.schema.names
        columns = [_values_of(column) for column in table.columns]
        # As `Row.__new__` and `Row.__setattr__` do it, without their checks of each row.
        new = tuple.__new__
        rows = [new(Row, values) for values in zip(*columns, strict=True)]
        for row in rows:
            row.__dict__["__fields__"] = names
        return rows
    return list(ArrowTableToRowsConversion.convert(table, from_arrow_schema(table.schema)))


def _values_of(column: pa.ChunkedArray) -> list[Any]:
    if column.null_count == 0 and _is_number(column.type):
        return list(column.to_numpy().tolist())
    return list(column.to_pylist())


class RowReader:
    """Rows of a grant, converted from Arrow as they are taken, in order. A taken row is not kept."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        # Converted and not taken yet; the first of them is at `_at` in the table.
        self._ahead: list[Any] = []
        self._at = 0
        # By place: why a row cannot be converted. `take` gives None for it.
        self.unfit: dict[int, str] = {}

    def take(self, count: int) -> list[Any]:
        found = self.ahead(count)[:count]
        del self._ahead[:count]
        self._at += count
        return found

    def ahead(self, count: int) -> list[Any]:
        """The next rows, at least so many; they stay."""
        missing = count - len(self._ahead)
        if missing > 0:
            at = self._at + len(self._ahead)
            self._ahead += self._converted(at, self._table.slice(at, max(missing, AHEAD_ROWS)))
        return self._ahead

    def _converted(self, lo: int, table: pa.Table) -> list[Any]:
        try:
            return list(rows_of(table))
        except Exception:
            return [self._one(lo + at, table.slice(at, 1)) for at in range(table.num_rows)]

    def _one(self, at: int, table: pa.Table) -> Row | None:
        try:
            return rows_of(table)[0]
        except Exception as error:
            self.unfit[at] = f"{type(error).__name__}: {error}"
            return None


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


class Unfit(NamedTuple):
    """A row of a batch's result that does not fit: its place, why, and its value."""

    at: int
    why: str
    value: Any


class Encoder:
    def __init__(self, schema: StructType) -> None:
        self.schema = schema
        self.arrow = arrow_schema(schema)
        self.names = list(self.arrow.names)
        self._known = frozenset(self.names)
        self._plain = all(_is_plainly_written(field.type) for field in self.arrow)
        self._kinds = [kinds_of(field.dataType, field.nullable) for field in schema.fields]
        self._fits = [column(one.name, one.dataType, one.nullable) for one in schema.fields]
        self._pick = itemgetter(*self.names) if len(self.names) > 1 else None
        # Types of results that were taken as they are, column by column.
        self._signatures: set[tuple[type, ...]] = set()

    def exact(self, found: dict[Any, Any]) -> tuple[Any, ...] | None:
        """The values of a dict whose values are of the columns' own types. None: ask `values`, which
        says the same of such a dict, and takes or refuses any other result."""
        try:
            if self._pick is None:
                value = found[self.names[0]]
                return (value,) if type(value) in self._kinds[0] else None
            values: tuple[Any, ...] = self._pick(found)
        except KeyError:
            return None
        return values if tuple(map(type, values)) in self._signatures else None

    def values(self, found: Any) -> tuple[Any, ...]:
        """What one call returned, as the values of the columns; or WrongSchema."""
        fields = found if type(found) is dict else fields_of(found)
        if fields is not None:
            try:
                values = tuple([fields[name] for name in self.names])
            except KeyError:
                missing = sorted(self._known - fields.keys())
                unknown = sorted(map(str, fields.keys() - self._known))
                raise WrongSchema(f"columns missing: {missing}, unknown: {unknown}") from None
        elif isinstance(found, tuple | list):
            if len(found) != len(self.names):
                raise WrongSchema(f"{len(found)} values for the columns {self.names}")
            values = tuple(found)
        else:
            raise WrongSchema(
                f"a {type(found).__name__}; return a dict with {self.names}, or Skip, Retry, Fail"
            )
        for kinds, value in zip(self._kinds, values, strict=True):
            if type(value) not in kinds:
                return tuple([fit(one) for fit, one in zip(self._fits, values, strict=True)])
        if len(self._signatures) < SIGNATURES_MAX:
            self._signatures.add(tuple(map(type, values)))
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

    def fit_table(self, found: Any, rows: int) -> tuple[pa.RecordBatch, list[Unfit]]:
        """What a batch function returned, as the rows that fit and those that do not. WrongSchema when
        it cannot be told which of its rows belongs to which of the batch's."""
        table = tabulated(found)
        if isinstance(table, pa.Table):
            if table.num_rows != rows:
                raise WrongSchema(f"{table.num_rows} rows for a batch of {rows}")
            try:
                return self.check_table(table, rows), []
            except WrongSchema:
                if len(set(table.column_names)) < table.num_columns:
                    raise
                table = table.to_pylist(maps_as_pydicts="strict")
        if table is None:
            raise WrongSchema(f"a {type(found).__name__}; a batch function returns an Arrow table")
        if len(table) != rows:
            raise WrongSchema(f"{len(table)} rows for a batch of {rows}")
        return self._fit_rows(table)

    def _fit_rows(self, rows: list[Any]) -> tuple[pa.RecordBatch, list[Unfit]]:
        good: list[tuple[Any, ...]] = []
        unfit: list[Unfit] = []
        for at, row in enumerate(rows):
            try:
                values = self.values(row)
            except WrongSchema as error:
                unfit.append(Unfit(at, str(error), row))
                continue
            if why := self.fits(values):
                unfit.append(Unfit(at, why, row))
            else:
                good.append(values)
        return self.batch(good), unfit

    def check_table(self, found: pa.Table, rows: int) -> pa.RecordBatch:
        """A table as a batch of the schema: as many rows as were given, of the declared columns."""
        if found.num_rows != rows:
            raise WrongSchema(f"{found.num_rows} rows for a batch of {rows}")
        for name in self.names:
            if found.column_names.count(name) != 1:
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
            batch = _one_batch(found.select(self.names).cast(self.arrow))
        except pa.ArrowException as error:
            raise WrongSchema(str(error)) from None
        for field in self.arrow:
            if pa.types.is_float32(field.type) and _overflows(found, batch, field.name):
                raise WrongSchema(f"column {field.name} has a number beyond {field.type}")
        return batch


def tabulated(found: Any) -> pa.Table | list[Any] | None:
    """What a batch function returned as a table, or as its rows; None when it is neither."""
    if isinstance(found, pa.Table):
        return found
    if isinstance(found, pa.RecordBatch):
        return pa.Table.from_batches([found])
    if isinstance(found, list | tuple):
        return list(found)
    try:
        if hasattr(found, "columns") and hasattr(found, "to_dict"):  # a pandas DataFrame
            return _tabulated_pandas(found)
        if isinstance(found, dict):
            return pa.table({name: _listed(values) for name, values in found.items()})
        if hasattr(found, "__arrow_c_stream__"):
            return pa.table(found)
    except Exception:
        return None
    return None


def _tabulated_pandas(found: Any) -> pa.Table | list[Any]:
    try:
        return pa.Table.from_pandas(found, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError):
        # A column of values that Arrow has no one type for: row by row, then.
        return list(found.to_dict("records"))


def _listed(values: Any) -> Any:
    # Arrow takes no array of more dimensions; a list of arrays it takes.
    return list(values) if getattr(values, "ndim", 1) > 1 else values


def _overflows(found: pa.Table, batch: pa.RecordBatch, name: str) -> bool:
    if not pa.types.is_float64(found.column(name).type):
        return False
    return _infinite(batch.column(name)) != _infinite(found.column(name))


def _infinite(column: Any) -> int:
    return int(pc.sum(pc.is_inf(column)).as_py() or 0)


def _is_plainly_written(kind: pa.DataType) -> bool:
    """Whether Arrow makes a column of checked values by itself: vectors are lists of numbers."""
    return _is_plain(kind.value_type) if pa.types.is_list(kind) else _is_plain(kind)


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


def _is_number(kind: pa.DataType) -> bool:
    """Whether NumPy's Python values of a column without nulls are Arrow's, too."""
    return bool(pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind))


def _is_alike(found: pa.DataType, declared: pa.DataType) -> bool:
    """Whether a cast keeps the meaning: another width or unit, not another kind of value."""
    if found == declared or pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(found):
        return _is_alike(found.value_type, declared)
    if pa.types.is_floating(declared):
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    if pa.types.is_integer(declared) and pa.types.is_floating(found):
        # Arrow refuses to cut what is not integral.
        return True
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
