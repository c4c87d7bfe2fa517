"""Conversion of arguments and results. Values of the exact annotated type skip the conversion. For every
annotation and value the result or error equals that of a full conversion."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, NewType, Optional, TypedDict, Union, Unpack

import msgspec
import pytest

import holdfast as hf
from holdfast import codec, failpoints
from holdfast.app.parameter_types import BadArgument
from holdfast.errors import Invalid
from holdfast.workers.tasks.attempt import BadTaskResult
from tests.case_ids import stable_repr

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


def make_task(argument_type: Any, returned: Any = Any) -> hf.Task[Any, Any]:
    def fn(value: Any, *more: Any, named: Any = None) -> Any:
        return [value, *more, named]

    fn.__annotations__ = {"value": argument_type, "named": argument_type, "return": returned}
    return hf.task(fn)


def call_outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """Result or error of a call in comparable form: -0.0 differs from 0.0 and 1 from True."""
    try:
        return "got", repr(call(*args))
    except BadArgument as error:  # names the argument of the error of msgspec
        return type(error.__context__), error.why
    except Exception as error:
        return type(error), str(error)


def convert_all(hints: list[Any], values: list[Any]) -> list[Any]:
    """Convert every value with msgspec."""
    kinds = [type(None) if hint is None else hint for hint in hints]
    return [
        value if kind is Any else msgspec.convert(value, kind)
        for kind, value in zip(kinds, values, strict=True)
    ]


def store_and_load(value: Any) -> Any:
    return codec.unpack(codec.pack(value))


def is_packable(value: Any) -> bool:
    return bool(call_outcome(codec.pack, value)[0] == "got")


@pytest.mark.parametrize("hint", HINTS, ids=stable_repr)
def test_positional_arguments_equal_fully_converted_arguments(hint: Any) -> None:
    task = make_task(hint)
    for value in filter(is_packable, VALUES):
        actual = call_outcome(task.invoke, codec.pack([[value], {}]))
        assert actual == call_outcome(convert_all, [hint, Any], [store_and_load(value), None]), (
            value
        )
        # Arguments without an annotation are not converted.
        actual = call_outcome(task.invoke, codec.pack([[value, value], {}]))
        loaded = store_and_load(value)
        assert actual == call_outcome(convert_all, [hint, Any, Any], [loaded, loaded, None]), value


@pytest.mark.parametrize("hint", HINTS, ids=stable_repr)
def test_keyword_arguments_equal_fully_converted_arguments(hint: Any) -> None:
    task = make_task(hint)
    for value in filter(is_packable, VALUES):
        actual = call_outcome(task.invoke, codec.pack([[], {"value": value, "named": value}]))
        assert actual == call_outcome(convert_all, [hint, hint], [store_and_load(value)] * 2), value


@pytest.mark.parametrize("hint", HINTS, ids=stable_repr)
def test_pack_rejects_arguments_that_cannot_be_converted(hint: Any) -> None:
    task = make_task(hint)
    for value in VALUES:
        if (
            is_packable(value)
            and call_outcome(convert_all, [hint], [store_and_load(value)])[0] == "got"
        ):
            assert task.pack([value], {}) == codec.pack([[value], {}]), value
        else:
            with pytest.raises(Invalid):
                task.pack([value], {})


@pytest.mark.parametrize("hint", HINTS, ids=stable_repr)
def test_dump_rejects_a_result_that_cannot_be_converted(hint: Any) -> None:
    task = make_task(Any, hint)
    for value in VALUES:
        if (
            is_packable(value)
            and call_outcome(convert_all, [hint], [store_and_load(value)])[0] == "got"
        ):
            assert task.dump(value) == codec.pack(value), value
        else:
            with pytest.raises(BadTaskResult):
                task.dump(value)


def test_each_argument_is_converted_by_its_own_annotation() -> None:
    @hf.task
    def fn(a: int, b: float, c: str | None = None) -> Any:
        return [a, b, c]

    for count in (2, 3):
        for values in itertools.product([None, True, 1, 1.5, "a"], repeat=count):
            all_values = [*values, *[None] * (3 - count)]
            actual = call_outcome(fn.invoke, codec.pack([list(values), {}]))
            assert actual == call_outcome(convert_all, [int, float, str | None], all_values), values


def test_values_of_the_exact_type_skip_conversion() -> None:
    """Proves that the other tests compare two different code paths."""

    @hf.task
    def fn(a: int, b: str, c: bytes, d: float, e: bool, f: int | None) -> None:
        assert (a, b, c, d, e, f) == (1, "b", b"c", 1.5, True, None)

    with failpoints.on("codec.convert") as convert:
        data = fn.pack([1, "b", b"c", 1.5, True, None], {})
        assert fn.dump(fn.invoke(data)) == codec.pack(None)
    assert convert.hits == 0


class TaggedPoint(msgspec.Struct):
    x: int
    tag: str = ""


class PointFields(TypedDict, total=False):
    left: TaggedPoint
    name: str


def test_arguments_in_args_and_kwargs_have_their_annotated_types() -> None:
    @hf.task
    def draw(first: int, *points: TaggedPoint, named: int = 0, **more: TaggedPoint) -> list[Any]:
        return [first, *points, named, *more.values()]

    packed = draw.pack((1, TaggedPoint(2), {"x": 3}), {"named": 4, "right": TaggedPoint(5)})
    assert draw.invoke(packed) == [1, TaggedPoint(2), TaggedPoint(3), 4, TaggedPoint(5)]
    for args, kwargs, argument in (
        ((1, TaggedPoint(2), "3"), {}, 3),
        ((1,), {"right": 5}, "right"),
        ((1,), {"named": "x"}, "named"),
        (("1",), {}, "first"),
    ):
        with pytest.raises(Invalid) as caught:
            draw.pack(args, kwargs)
        assert (caught.value.what, caught.value.argument) == ("task arguments", argument)


def test_named_arguments_have_the_types_of_a_typed_dict() -> None:
    @hf.task
    def draw(*items: Any, **fields: Unpack[PointFields]) -> list[Any]:
        return [*items, fields["left"]]

    packed = draw.pack(([1],), {"left": TaggedPoint(1)})
    assert draw.invoke(packed) == [[1], TaggedPoint(1)]
    with pytest.raises(Invalid) as caught:
        draw.pack((), {"left": 1})
    assert caught.value.argument == "left"


def test_surplus_arguments_of_an_effect_have_their_annotated_type() -> None:
    @hf.effect("conversion.draw")
    def draw(call: hf.Call, first: int, *points: TaggedPoint) -> None: ...

    params = draw.call((1, TaggedPoint(2), TaggedPoint(3)), {}).params
    assert draw._decode_arguments(params) == [1, TaggedPoint(2), TaggedPoint(3)]
    with pytest.raises(Invalid):
        draw.call((1, TaggedPoint(2), 3), {})
