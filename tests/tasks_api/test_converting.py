"""Arguments and results of plain types are not converted, and nobody can tell: whatever a function names
and whatever it is given, it gets the same, or is refused, as if everything were."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, NewType, Optional, Union

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.errors import Invalid
from holdfast.roles.task_run import BadTaskResult
from tests.naming import named

MODULES = ("holdfast.app.tasks",)

Number = NewType("Number", int)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Shouted(str):
    __slots__ = ()


HINTS: list[Any] = [
    Any, object, bool, int, float, str, bytes, None, list, dict, tuple, set, bytearray,
    int | None, Optional[str], Union[None, float], bool | None, bytes | None,  # noqa: UP007, UP045
    int | float, int | bool, str | bytes, int | str | None, float | str, bool | float,
    list[int], dict[str, int], tuple[int, str], list[int] | None, Literal["red", 1], Number,
    Colour, Level, Point, datetime,
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, 2**64 - 1, -(2**63), 2**64, 0.0, -0.0, 1.0, 1.5, math.inf, math.nan,
    "", "red", "1", "true", "aGk=", "half \ud800", b"", b"\x00\xff", bytearray(b"a"), [], [1], ["a"], (1, "a"),
    {}, {"a": 1}, {"x": 1}, {1: 2}, {3}, Colour.RED, Level.LOW, Point(1), Shouted("red"),
    datetime(2026, 1, 1, tzinfo=UTC), object(),
]  # fmt: skip


def declared(given: Any, returned: Any = Any) -> hf.Task[Any, Any]:
    def fn(value: Any, *more: Any, named: Any = None) -> Any:
        return [value, *more, named]

    fn.__annotations__ = {"value": given, "named": given, "return": returned}
    return hf.task(fn)


def outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """What comes of it, so that two of them can be compared: -0.0 is not 0.0, nor 1 True."""
    try:
        return "got", repr(call(*args))
    except Exception as error:
        return type(error), str(error)


def converted(hints: list[Any], values: list[Any]) -> list[Any]:
    """The plain way."""
    kinds = [type(None) if hint is None else hint for hint in hints]
    return [
        value if kind is Any else msgspec.convert(value, kind)
        for kind, value in zip(kinds, values, strict=True)
    ]


def stored(value: Any) -> Any:
    return codec.unpack(codec.pack(value))


def packable(value: Any) -> bool:
    return bool(outcome(codec.pack, value)[0] == "got")


@pytest.mark.parametrize("hint", HINTS, ids=named)
def test_a_function_gets_what_it_would_get_if_all_were_converted(hint: Any) -> None:
    task = declared(hint)
    for value in filter(packable, VALUES):
        found = outcome(task.invoke, codec.pack([[value], {}]))
        assert found == outcome(converted, [hint, Any], [stored(value), None]), value
        # What is more than it names is left as it is.
        found = outcome(task.invoke, codec.pack([[value, value], {}]))
        kept = stored(value)
        assert found == outcome(converted, [hint, Any, Any], [kept, kept, None]), value


@pytest.mark.parametrize("hint", HINTS, ids=named)
def test_arguments_by_name_are_converted_as_those_by_place(hint: Any) -> None:
    task = declared(hint)
    for value in filter(packable, VALUES):
        found = outcome(task.invoke, codec.pack([[], {"value": value, "named": value}]))
        assert found == outcome(converted, [hint, hint], [stored(value)] * 2), value


@pytest.mark.parametrize("hint", HINTS, ids=named)
def test_what_is_submitted_is_refused_if_it_could_not_be_converted(hint: Any) -> None:
    task = declared(hint)
    for value in VALUES:
        if packable(value) and outcome(converted, [hint], [stored(value)])[0] == "got":
            assert task.pack([value], {}) == codec.pack([[value], {}]), value
        else:
            with pytest.raises(Invalid):
                task.pack([value], {})


@pytest.mark.parametrize("hint", HINTS, ids=named)
def test_a_result_is_refused_if_it_could_not_be_converted(hint: Any) -> None:
    task = declared(Any, hint)
    for value in VALUES:
        if packable(value) and outcome(converted, [hint], [stored(value)])[0] == "got":
            assert task.dump(value) == codec.pack(value), value
        else:
            with pytest.raises(BadTaskResult):
                task.dump(value)


def test_of_several_arguments_each_is_what_its_own_annotation_says() -> None:
    @hf.task
    def fn(a: int, b: float, c: str | None = None) -> Any:
        return [a, b, c]

    for count in (2, 3):
        for values in itertools.product([None, True, 1, 1.5, "a"], repeat=count):
            given = [*values, *[None] * (3 - count)]
            found = outcome(fn.invoke, codec.pack([list(values), {}]))
            assert found == outcome(converted, [int, float, str | None], given), values


def test_what_is_of_the_very_type_is_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all that was compared here is one way, twice."""

    @hf.task
    def fn(a: int, b: str, c: bytes, d: float, e: bool, f: int | None) -> None:
        assert (a, b, c, d, e, f) == (1, "b", b"c", 1.5, True, None)

    monkeypatch.setattr(codec, "convert", None)
    data = fn.pack([1, "b", b"c", 1.5, True, None], {})
    assert fn.dump(fn.invoke(data)) == codec.pack(None)
