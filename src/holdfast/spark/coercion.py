"""Coercion of results to the declared columns, without loss.

`column_converter(field)` compiles the check of one column. It returns the value itself or an equal value
of the column's type, or raises `WrongSchema`, which names the column. The rules:

| column | accepted | as |
|---|---|---|
| any | a NumPy scalar, a 0-dimensional array | its `.item()` |
| any | an `Enum` member | its value, by these rules |
| any nullable | None, `pandas.NA`, `NaT` | null |
| integers | int; float and Decimal that are integral | int |
| float, double | float; int that the type holds exactly | float |
| decimal | Decimal, int | Decimal |
| string | str | |
| boolean | bool | |
| date, timestamp, interval | date, datetime, timedelta | |
| binary | bytes, bytearray, memoryview | bytes |
| array | list, tuple, `array.array`, ndarray, Series, tensor | list |
| map | dict | |
| struct | dict, Row, named tuple, dataclass, pydantic model, by name; tuple or list, by position | dict |

Nothing is parsed and nothing is rounded: "1" is not an int, 1 is not a string, 1.5 is not an int, 2**53 + 1
is not a double. One exception: a float column accepts any float that does not overflow and rounds it to
32 bits. Extra fields are dropped. A missing field is an error. Classes of other libraries are recognized
by name, so this module imports none of them.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
from array import array
from collections.abc import Callable
from enum import Enum
from typing import Any

from pyspark.sql import types as T
from pyspark.sql.types import Row, StructType

FLOAT_MAX = 3.4028235677973366e38
# Libraries with arrays that have `tolist()`.
_ARRAY_LIBRARIES = frozenset({"numpy", "pandas", "torch", "jax", "jaxlib", "cupy"})
_REPR_CHARS = 80

ColumnConverter = Callable[[Any], Any]


class WrongSchema(Exception):
    """A result does not fit the declared schema of its stage."""


_EXACT_TYPES: dict[type[T.DataType], tuple[type, ...]] = {
    T.BooleanType: (bool,),
    T.ByteType: (int,),
    T.ShortType: (int,),
    T.IntegerType: (int,),
    T.LongType: (int,),
    # 32 bits: every value is checked for overflow.
    T.FloatType: (),
    T.DoubleType: (float,),
    T.StringType: (str,),
    T.DecimalType: (decimal.Decimal,),
    T.DateType: (datetime.date,),
    T.TimestampType: (datetime.datetime,),
    T.TimestampNTZType: (datetime.datetime,),
    T.DayTimeIntervalType: (datetime.timedelta,),
    T.BinaryType: (bytes, bytearray),
}
# Kind and maximum size of the NumPy dtypes that fit the type in every value.
_DTYPES: dict[type[T.DataType], tuple[str, int]] = {
    T.ByteType: ("i", 1),
    T.ShortType: ("i", 2),
    T.IntegerType: ("i", 4),
    T.LongType: ("i", 8),
    T.FloatType: ("f", 4),
    T.DoubleType: ("f", 8),
}


def exact_types(kind: T.DataType, nullable: bool) -> tuple[type, ...]:
    """Return the Python types that need no conversion for the column."""
    return _EXACT_TYPES.get(type(kind), ()) + ((type(None),) if nullable else ())


def column_converter(name: str, kind: T.DataType, nullable: bool) -> ColumnConverter:
    """Compile the check of one column, nested types included."""
    convert = _type_converter(name, kind)

    def checked(value: Any) -> Any:
        if value is None or _is_missing(value):
            if nullable:
                return None
            raise WrongSchema(f"column {name} is None, and is declared NOT NULL")
        return convert(value)

    return checked


def named_fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a value with named fields (Row, named tuple, dataclass, model); else
    None.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, Row):
        return value.asDict() if hasattr(value, "__fields__") else None
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        return dict(zip(names, value, strict=True)) if names else None
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if hasattr(kind, "model_dump"):  # pydantic
        return dict(value.model_dump())
    return None


def unwrap_scalar(value: Any) -> Any:
    """Unwrap a NumPy scalar or an Enum member. Return any other value unchanged."""
    if isinstance(value, Enum):
        return value.value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        item = value.item()
        if type(item) is int and value.dtype.kind in "mM":
            # NumPy returns times finer than microseconds as integers.
            coarse = value.astype(f"{value.dtype.kind}8[us]")
            return coarse.item() if coarse == value else value
        return item
    return value


def array_items(value: Any) -> list[Any] | None:
    """Return the items of an array of another library; None for any other value."""
    if type(value).__module__.partition(".")[0] in _ARRAY_LIBRARIES and hasattr(value, "tolist"):
        items = value.tolist()
        return items if isinstance(items, list) else None
    return None


def short_repr(value: Any) -> str:
    """Format a value for an error text. An unprintable value is replaced by a placeholder."""
    try:
        return f"{value!r:.{_REPR_CHARS}}"
    except Exception:
        return "not printable"


def _is_missing(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ in ("NAType", "NaTType") and kind.__module__.startswith("pandas.")


def _type_converter(name: str, kind: T.DataType) -> ColumnConverter:
    if isinstance(kind, T.ArrayType):
        return _array_converter(name, kind)
    if isinstance(kind, T.MapType):
        return _map_converter(name, kind)
    if isinstance(kind, StructType):
        return _struct_converter(name, kind)
    kinds = _EXACT_TYPES.get(type(kind))
    if kinds is None:
        return lambda value: value
    convert = _CONVERTERS.get(type(kind), _convert_same_type)

    def checked(value: Any) -> Any:
        if type(value) in kinds:
            return value
        found = convert(unwrap_scalar(value), kinds)
        if found is None:
            raise WrongSchema(_mismatch_text(name, value))
        return found

    return checked


def _array_converter(name: str, kind: T.ArrayType) -> ColumnConverter:
    item = column_converter(f"{name}[]", kind.elementType, kind.containsNull)
    kinds = frozenset(exact_types(kind.elementType, kind.containsNull))

    def checked(value: Any) -> Any:
        if not isinstance(value, list | tuple | array):
            items = array_items(value)
            if items is None:
                raise WrongSchema(f"{_mismatch_text(name, value)}; an array is a list")
            if _dtype_fits(kind.elementType, value):
                return items
            value = items
        return [one if type(one) in kinds else item(one) for one in value]

    return checked


def _dtype_fits(element: T.DataType, values: Any) -> bool:
    """Whether the dtype of a NumPy array guarantees that every item has the element type."""
    if type(values).__module__ != "numpy" or type(values).__name__ != "ndarray" or values.ndim != 1:
        return False
    kind, width = _DTYPES.get(type(element), ("", 0))
    return bool(values.dtype.kind == kind and values.dtype.itemsize <= width)


def _map_converter(name: str, kind: T.MapType) -> ColumnConverter:
    key = column_converter(f"{name} key", kind.keyType, False)
    item = column_converter(f"{name}[]", kind.valueType, kind.valueContainsNull)

    def checked(value: Any) -> Any:
        if not isinstance(value, dict):
            raise WrongSchema(f"{_mismatch_text(name, value)}; a map is a dict")
        found = {key(one): item(two) for one, two in value.items()}
        if len(found) < len(value):
            raise WrongSchema(
                f"{_mismatch_text(name, value)}; two of its keys are one of the column's type"
            )
        return found

    return checked


def _struct_converter(name: str, kind: StructType) -> ColumnConverter:
    fits = [
        (field.name, column_converter(f"{name}.{field.name}", field.dataType, field.nullable))
        for field in kind.fields
    ]

    def checked(value: Any) -> Any:
        fields = named_fields(value)
        if fields is not None:
            if not all(one in fields for one, _ in fits):
                raise WrongSchema(f"{_mismatch_text(name, value)}; its fields are {kind.names}")
            return {one: fit(fields[one]) for one, fit in fits}
        if not isinstance(value, tuple | list):
            raise WrongSchema(
                f"{_mismatch_text(name, value)}; a struct is a dict, a Row or a tuple"
            )
        if len(value) != len(fits):
            raise WrongSchema(
                f"{_mismatch_text(name, value)}; its fields are {kind.names}, in this order"
            )
        return {one: fit(item) for (one, fit), item in zip(fits, value, strict=True)}

    return checked


def _mismatch_text(name: str, value: Any) -> str:
    return f"column {name} is a {type(value).__name__}: {short_repr(value)}"


# Each returns the value in the column's type, or None when that would lose information. --------


def _convert_same_type(value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, bool) and bool not in kinds:
        return None
    return value if isinstance(value, kinds) else None


def _convert_integer(value: Any, kinds: tuple[type, ...]) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else None
    return None


def _convert_double(value: Any, kinds: tuple[type, ...]) -> float | None:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if int(result) == value else None


def _convert_float(value: Any, kinds: tuple[type, ...]) -> float | None:
    if isinstance(value, float):
        return None if FLOAT_MAX <= abs(value) < float("inf") else value
    exact = _convert_double(value, kinds)
    # A 32-bit float has 24 significant bits.
    if exact is None or abs(exact) >= FLOAT_MAX or (value and _significant_bits(value) > 24):
        return None
    return exact


def _significant_bits(value: int) -> int:
    value = abs(value)
    return value.bit_length() - ((value & -value).bit_length() - 1)


def _convert_decimal(value: Any, kinds: tuple[type, ...]) -> decimal.Decimal | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return decimal.Decimal(value)
    return value if isinstance(value, decimal.Decimal) else None


def _convert_date(value: Any, kinds: tuple[type, ...]) -> datetime.date | None:
    is_date = isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    return value if is_date else None


def _convert_timestamp(value: Any, kinds: tuple[type, ...]) -> datetime.datetime | None:
    # A pandas Timestamp is a datetime with nanoseconds. The column has microseconds.
    if not isinstance(value, datetime.datetime) or getattr(value, "nanosecond", None):
        return None
    return value


def _convert_binary(value: Any, kinds: tuple[type, ...]) -> bytes | None:
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None


_CONVERTERS: dict[type[T.DataType], Callable[[Any, tuple[type, ...]], Any]] = {
    T.ByteType: _convert_integer,
    T.ShortType: _convert_integer,
    T.IntegerType: _convert_integer,
    T.LongType: _convert_integer,
    T.FloatType: _convert_float,
    T.DoubleType: _convert_double,
    T.DecimalType: _convert_decimal,
    T.DateType: _convert_date,
    T.TimestampType: _convert_timestamp,
    T.TimestampNTZType: _convert_timestamp,
    T.BinaryType: _convert_binary,
}
