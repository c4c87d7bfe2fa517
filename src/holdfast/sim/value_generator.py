"""The value generator: random values of a declared type, drawn from a seeded `Random`.

It covers the types that an app can store, with their msgspec constraints. Small values are frequent. Strings
are often taken from a list of names, so that a generated event refers to a world that exists. A type that has
no generator raises Ungenerable with its name: a string with a pattern, a class that only user code creates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from random import Random
from typing import Any
from uuid import UUID

from msgspec import inspect as types

from holdfast.errors import Invalid

ITEMS_MAX = 3
# Below this depth optional parts are left out. Below the second one a type has no finite value.
DEPTH_SHORT, DEPTH_MAX = 4, 20
# A class may refuse values in `__post_init__`. This many refusals in a row end the generation.
REFUSALS_MAX = 50
TEXTS = ("", "a", "some text", "ünïcode ✓", "0")
PLAIN_VALUES: tuple[Any, ...] = (None, True, 0, 7, -1.5, "text", b"\x00", [1, 2], {"key": 1})
WHEN = datetime(2024, 2, 29, 12, tzinfo=UTC)


class Ungenerable(Invalid):
    """A type without a generator."""

    code = "ungenerable"
    hint = "no random value of this type can be generated; test this app with hf.simulate"


class ValueGenerator:
    """Generates values. The same seed and the same calls give the same values."""

    def __init__(self, random: Random, names: Sequence[str] = ()) -> None:
        self._random = random
        self._texts = (*names, *names, *TEXTS)

    def value(self, kind: Any, what: str) -> Any:
        """Return a value of an annotation. `what` names the declaration in an error."""
        try:
            info = types.type_info(kind)
        except TypeError as error:
            raise Ungenerable(what=what, type=_type_name(kind), why=str(error)) from None
        for _ in range(REFUSALS_MAX):
            try:
                return self._value(info, 0)
            except _Refused as error:
                refusal = error
            except _NoGenerator as error:
                raise Ungenerable(what=what, type=str(error)) from None
        raise Ungenerable(what=what, type=refusal.type, why=str(refusal.__cause__)[:200])

    def _value(self, info: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise _NoGenerator(f"{_describe(info)}, which is recursive")
        for kind, generate in _GENERATORS.items():
            if isinstance(info, kind):
                return generate(self, info, depth)
        raise _NoGenerator(_describe(info))

    # -- scalars -------------------------------------------------------------------------------

    def _any(self, info: Any, depth: int) -> Any:
        return self._random.choice(PLAIN_VALUES)

    def _none(self, info: Any, depth: int) -> None:
        return None

    def _bool(self, info: Any, depth: int) -> bool:
        return self._random.random() < 0.5

    def _int(self, info: Any, depth: int) -> int:
        step = info.multiple_of or 1
        low = _highest(info.ge, None if info.gt is None else info.gt + 1)
        high = _lowest(info.le, None if info.lt is None else info.lt - 1)
        low = low if low is not None else -10 if high is None else high - 100 * step
        high = high if high is not None else low + 110 * step
        if self._random.randrange(10) == 0 and info.le is info.lt is None:
            high += 1_000_000 * step
        first = -(-low // step)
        if first > high // step:
            raise _NoGenerator(_describe(info))
        return int(self._random.randint(first, high // step) * step)

    def _float(self, info: Any, depth: int) -> float:
        low, high = _highest(info.ge, info.gt), _lowest(info.le, info.lt)
        low = low if low is not None else -10.0 if high is None else high - 100.0
        high = high if high is not None else low + 110.0
        value = low + (high - low) * self._random.randint(1, 15) / 16
        if info.multiple_of is not None:
            value = value // info.multiple_of * info.multiple_of
            if value < low or value == info.gt:
                raise _NoGenerator(_describe(info))
        return float(value)

    def _str(self, info: Any, depth: int) -> str:
        if info.pattern is not None:
            raise _NoGenerator(_describe(info))
        text = self._random.choice(self._texts)
        return text.ljust(info.min_length or 0, "x")[: info.max_length]

    def _bytes(self, info: Any, depth: int) -> Any:
        data = self._random.randbytes(self._length(info, 8))
        return bytearray(data) if isinstance(info, types.ByteArrayType) else data

    def _datetime(self, info: Any, depth: int) -> datetime:
        moment = WHEN + timedelta(seconds=self._random.randint(-10_000_000, 10_000_000))
        aware = self._random.random() < 0.5 if info.tz is None else info.tz
        return moment if aware else moment.replace(tzinfo=None)

    def _time(self, info: Any, depth: int) -> time:
        moment = self._datetime(info, depth)
        return moment.timetz()

    def _date(self, info: Any, depth: int) -> date:
        return (WHEN + timedelta(days=self._random.randint(-1000, 1000))).date()

    def _timedelta(self, info: Any, depth: int) -> timedelta:
        return timedelta(seconds=self._random.randint(0, 100_000))

    def _uuid(self, info: Any, depth: int) -> UUID:
        return UUID(int=self._random.getrandbits(128))

    def _decimal(self, info: Any, depth: int) -> Decimal:
        return Decimal(self._random.randint(-1000, 100_000)) / 100

    def _enum(self, info: Any, depth: int) -> Any:
        return self._random.choice(list(info.cls))

    def _literal(self, info: Any, depth: int) -> Any:
        return self._random.choice(list(info.values))

    def _custom(self, info: Any, depth: int) -> Any:
        """A class of plain values, such as `object` or `collections.abc.Iterable`."""
        try:
            fitting = [value for value in PLAIN_VALUES if isinstance(value, info.cls)]
        except TypeError:
            fitting = []
        if not fitting:
            raise _NoGenerator(_describe(info))
        return self._random.choice(fitting)

    # -- containers ----------------------------------------------------------------------------

    def _union(self, info: Any, depth: int) -> Any:
        ends = [one for one in info.types if isinstance(one, types.NoneType)]
        choices = ends if ends and depth >= DEPTH_SHORT else info.types
        return self._value(self._random.choice(choices), depth + 1)

    def _list(self, info: Any, depth: int) -> Any:
        length = self._length(info, 0 if depth >= DEPTH_SHORT else ITEMS_MAX)
        items = [self._value(info.item_type, depth + 1) for _ in range(length)]
        return tuple(items) if isinstance(info, types.VarTupleType) else items

    def _tuple(self, info: Any, depth: int) -> tuple[Any, ...]:
        return tuple(self._value(item, depth + 1) for item in info.item_types)

    def _dict(self, info: Any, depth: int) -> dict[Any, Any]:
        length = self._length(info, 0 if depth >= DEPTH_SHORT else ITEMS_MAX)
        found: dict[Any, Any] = {}
        for _ in range(REFUSALS_MAX):
            if len(found) >= length:
                break
            found[self._value(info.key_type, depth + 1)] = self._value(info.value_type, depth + 1)
        if len(found) < (info.min_length or 0):
            raise _NoGenerator(_describe(info))
        return found

    def _fields(self, info: Any, depth: int) -> dict[str, Any]:
        left_out = 1.0 if depth >= DEPTH_SHORT else 0.25
        return {
            field.name: self._value(field.type, depth + 1)
            for field in info.fields
            if field.required or self._random.random() >= left_out
        }

    def _object(self, info: Any, depth: int) -> Any:
        fields = self._fields(info, depth)
        try:
            return info.cls(**fields)
        except Exception as error:
            # The constructor is user code, which may raise any exception.
            raise _Refused(_type_name(info.cls)) from error

    def _metadata(self, info: Any, depth: int) -> Any:
        return self._value(info.type, depth)

    def _length(self, info: Any, usual_max: int) -> int:
        low = info.min_length or 0
        high = low + usual_max if info.max_length is None else min(info.max_length, low + usual_max)
        return self._random.randint(low, max(low, high))


class _NoGenerator(Exception):
    """A nested type that has no generator. The text names it."""


class _Refused(Exception):
    """A constructor that raised for generated values."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name)
        self.type = type_name


_GENERATORS: dict[Any, Callable[[ValueGenerator, Any, int], Any]] = {
    types.AnyType: ValueGenerator._any,
    types.NoneType: ValueGenerator._none,
    types.BoolType: ValueGenerator._bool,
    types.IntType: ValueGenerator._int,
    types.FloatType: ValueGenerator._float,
    types.StrType: ValueGenerator._str,
    types.BytesType: ValueGenerator._bytes,
    types.ByteArrayType: ValueGenerator._bytes,
    types.DateTimeType: ValueGenerator._datetime,
    types.TimeType: ValueGenerator._time,
    types.DateType: ValueGenerator._date,
    types.TimeDeltaType: ValueGenerator._timedelta,
    types.UUIDType: ValueGenerator._uuid,
    types.DecimalType: ValueGenerator._decimal,
    types.EnumType: ValueGenerator._enum,
    types.LiteralType: ValueGenerator._literal,
    types.CustomType: ValueGenerator._custom,
    types.UnionType: ValueGenerator._union,
    types.ListType: ValueGenerator._list,
    types.VarTupleType: ValueGenerator._list,
    types.TupleType: ValueGenerator._tuple,
    types.DictType: ValueGenerator._dict,
    types.TypedDictType: ValueGenerator._fields,
    types.StructType: ValueGenerator._object,
    types.DataclassType: ValueGenerator._object,
    types.NamedTupleType: ValueGenerator._object,
    types.Metadata: ValueGenerator._metadata,
}


def _highest(*bounds: Any) -> Any:
    return max((bound for bound in bounds if bound is not None), default=None)


def _lowest(*bounds: Any) -> Any:
    return min((bound for bound in bounds if bound is not None), default=None)


def _describe(info: Any) -> str:
    """Name a type and its constraints: `Str(pattern='^a')`, or the name of its class."""
    if hasattr(info, "cls"):
        return _type_name(info.cls)
    limits = [
        f"{name}={value!r}"
        for name in ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")
        if (value := getattr(info, name, None)) is not None
    ]
    name = type(info).__name__.removesuffix("Type").lower()
    return f"{name}({', '.join(limits)})" if limits else name


def _type_name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)
