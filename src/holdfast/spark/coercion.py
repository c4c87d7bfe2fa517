"""Results of a function as values of the declared columns, without loss.

`column(field)` compiles the check of one column. It answers with the value itself, with an equal value
of the column's type, or raises `WrongSchema`, which names the column. The rules:

| column | is taken | as |
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
| struct | dict, Row, named tuple, dataclass, pydantic model, by name; tuple or list, by place | dict |

Nothing is parsed and nothing is rounded: "1" is no int, 1 is no string, 1.5 is no int, 2**53 + 1 is
no double. One exception: a float column takes any float that does not overflow, rounded to its 32
bits, for that is its declaration. Fields that the schema does not have are left out; a missing one
is an error. Classes of other libraries are known by name, so none of them is imported here.
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
# Libraries whose arrays answer `tolist()`.
_ARRAYS = frozenset({"numpy", "pandas", "torch", "jax", "jaxlib", "cupy"})
_SHOWN = 80

Fit = Callable[[Any], Any]


class WrongSchema(Exception):
    """What a function returned is not what its stage declared."""


_KINDS: dict[type[T.DataType], tuple[type, ...]] = {
    T.BooleanType: (bool,),
    T.ByteType: (int,),
    T.ShortType: (int,),
    T.IntegerType: (int,),
    T.LongType: (int,),
    # Of 32 bits: every value is looked at, for it may overflow.
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
# The kind and the most bytes of a NumPy dtype whose every value is one of the type.
_DTYPES: dict[type[T.DataType], tuple[str, int]] = {
    T.ByteType: ("i", 1),
    T.ShortType: ("i", 2),
    T.IntegerType: ("i", 4),
    T.LongType: ("i", 8),
    T.FloatType: ("f", 4),
    T.DoubleType: ("f", 8),
}


def kinds_of(kind: T.DataType, nullable: bool) -> tuple[type, ...]:
    """Types whose values are values of the column as they are."""
    return _KINDS.get(type(kind), ()) + ((type(None),) if nullable else ())


def column(name: str, kind: T.DataType, nullable: bool) -> Fit:
    """The check of one column, inside and out."""
    fit = _fit(name, kind)

    def checked(value: Any) -> Any:
        if value is None or _is_missing(value):
            if nullable:
                return None
            raise WrongSchema(f"column {name} is None, and is declared NOT NULL")
        return fit(value)

    return checked


def fields_of(found: Any) -> dict[str, Any] | None:
    """The fields of what has names for them: a Row, a named tuple, a dataclass, a model. Else None."""
    if isinstance(found, dict):
        return found
    if isinstance(found, Row):
        return found.asDict() if hasattr(found, "__fields__") else None
    if isinstance(found, tuple):
        names = getattr(found, "_fields", None)
        return dict(zip(names, found, strict=True)) if names else None
    kind = type(found)
    if dataclasses.is_dataclass(kind):
        return {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
    if hasattr(kind, "model_dump"):  # pydantic
        return dict(found.model_dump())
    return None


def plain(value: Any) -> Any:
    """What stands for a plain value: a scalar of NumPy, a member of an Enum. Itself otherwise."""
    if isinstance(value, Enum):
        return value.value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        found = value.item()
        if type(found) is int and value.dtype.kind in "mM":
            # Times finer than microseconds are numbers to NumPy.
            coarse = value.astype(f"{value.dtype.kind}8[us]")
            return coarse.item() if coarse == value else value
        return found
    return value


def listed(value: Any) -> list[Any] | None:
    """The items of an array of another library; None when it is none."""
    if type(value).__module__.partition(".")[0] in _ARRAYS and hasattr(value, "tolist"):
        found = value.tolist()
        return found if isinstance(found, list) else None
    return None


def shown(value: Any) -> str:
    """A value in an error. One that cannot be printed is shown by its type."""
    try:
        return f"{value!r:.{_SHOWN}}"
    except Exception:
        return "not printable"


def _is_missing(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ in ("NAType", "NaTType") and kind.__module__.startswith("pandas.")


def _fit(name: str, kind: T.DataType) -> Fit:
    if isinstance(kind, T.ArrayType):
        return _array(name, kind)
    if isinstance(kind, T.MapType):
        return _map(name, kind)
    if isinstance(kind, StructType):
        return _struct(name, kind)
    kinds = _KINDS.get(type(kind))
    if kinds is None:
        return lambda value: value
    convert = _CONVERT.get(type(kind), _as_it_is)

    def checked(value: Any) -> Any:
        if type(value) in kinds:
            return value
        found = convert(plain(value), kinds)
        if found is None:
            raise WrongSchema(_told(name, value))
        return found

    return checked


def _array(name: str, kind: T.ArrayType) -> Fit:
    item = column(f"{name}[]", kind.elementType, kind.containsNull)
    kinds = frozenset(kinds_of(kind.elementType, kind.containsNull))

    def checked(value: Any) -> Any:
        if not isinstance(value, list | tuple | array):
            items = listed(value)
            if items is None:
                raise WrongSchema(f"{_told(name, value)}; an array is a list")
            if _holds(kind.elementType, value):
                return items
            value = items
        return [one if type(one) in kinds else item(one) for one in value]

    return checked


def _holds(element: T.DataType, found: Any) -> bool:
    """Whether every item of a NumPy array is of the element's type, by its dtype alone."""
    if type(found).__module__ != "numpy" or type(found).__name__ != "ndarray" or found.ndim != 1:
        return False
    kind, width = _DTYPES.get(type(element), ("", 0))
    return bool(found.dtype.kind == kind and found.dtype.itemsize <= width)


def _map(name: str, kind: T.MapType) -> Fit:
    key = column(f"{name} key", kind.keyType, False)
    item = column(f"{name}[]", kind.valueType, kind.valueContainsNull)

    def checked(value: Any) -> Any:
        if not isinstance(value, dict):
            raise WrongSchema(f"{_told(name, value)}; a map is a dict")
        found = {key(one): item(two) for one, two in value.items()}
        if len(found) < len(value):
            raise WrongSchema(f"{_told(name, value)}; two of its keys are one of the column's type")
        return found

    return checked


def _struct(name: str, kind: StructType) -> Fit:
    fits = [
        (field.name, column(f"{name}.{field.name}", field.dataType, field.nullable))
        for field in kind.fields
    ]

    def checked(value: Any) -> Any:
        fields = fields_of(value)
        if fields is not None:
            if not all(one in fields for one, _ in fits):
                raise WrongSchema(f"{_told(name, value)}; its fields are {kind.names}")
            return {one: fit(fields[one]) for one, fit in fits}
        if not isinstance(value, tuple | list):
            raise WrongSchema(f"{_told(name, value)}; a struct is a dict, a Row or a tuple")
        if len(value) != len(fits):
            raise WrongSchema(f"{_told(name, value)}; its fields are {kind.names}, in this order")
        return {one: fit(item) for (one, fit), item in zip(fits, value, strict=True)}

    return checked


def _told(name: str, value: Any) -> str:
    return f"column {name} is a {type(value).__name__}: {shown(value)}"


# Each answers with the value in the column's type, or None when that would lose something. --------


def _as_it_is(value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, bool) and bool not in kinds:
        return None
    return value if isinstance(value, kinds) else None


def _integer(value: Any, kinds: tuple[type, ...]) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, decimal.Decimal) and value.is_finite():
        return int(value) if value == value.to_integral_value() else None
    return None


def _double(value: Any, kinds: tuple[type, ...]) -> float | None:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if int(found) == value else None


def _float(value: Any, kinds: tuple[type, ...]) -> float | None:
    if isinstance(value, float):
        return None if FLOAT_MAX <= abs(value) < float("inf") else value
    exact = _double(value, kinds)
    # Whole numbers of 32 bits: 24 significant ones.
    if exact is None or abs(exact) >= FLOAT_MAX or (value and _significant(value) > 24):
        return None
    return exact


def _significant(value: int) -> int:
    value = abs(value)
    return value.bit_length() - ((value & -value).bit_length() - 1)


def _decimal(value: Any, kinds: tuple[type, ...]) -> decimal.Decimal | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return decimal.Decimal(value)
    return value if isinstance(value, decimal.Decimal) else None


def _date(value: Any, kinds: tuple[type, ...]) -> datetime.date | None:
    is_date = isinstance(value, datetime.date) and not isinstance(value, datetime.datetime)
    return value if is_date else None


def _time(value: Any, kinds: tuple[type, ...]) -> datetime.datetime | None:
    # A Timestamp of pandas is a datetime with nanoseconds; the column has microseconds.
    if not isinstance(value, datetime.datetime) or getattr(value, "nanosecond", None):
        return None
    return value


def _binary(value: Any, kinds: tuple[type, ...]) -> bytes | None:
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else None


_CONVERT: dict[type[T.DataType], Callable[[Any, tuple[type, ...]], Any]] = {
    T.ByteType: _integer,
    T.ShortType: _integer,
    T.IntegerType: _integer,
    T.LongType: _integer,
    T.FloatType: _float,
    T.DoubleType: _double,
    T.DecimalType: _decimal,
    T.DateType: _date,
    T.TimestampType: _time,
    T.TimestampNTZType: _time,
    T.BinaryType: _binary,
}
