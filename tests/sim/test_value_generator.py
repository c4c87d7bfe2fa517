"""The value generator: values have their declared type, and a type without a generator is named."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import OrderedDict
from datetime import date, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest
from msgspec import Meta

from holdfast.sim.value_generator import Ungenerable, ValueGenerator

VALUES = 200


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: float = 0.5


class PrintOptions(TypedDict, total=False):
    loud: bool


@dataclasses.dataclass
class Item:
    name: str
    price: Decimal | None = None


class Tree(msgspec.Struct):
    value: int
    children: list[Tree] = []
    parent: Tree | None = None


class Even(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")


class Never(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        raise ValueError("no number fits")


class Endless(msgspec.Struct):
    next: Endless


def generate(kind: Any, seed: int = 0) -> list[Any]:
    generator = ValueGenerator(Random(seed), ["ada"])
    return [generator.value(kind, "event E") for _ in range(VALUES)]


@pytest.mark.parametrize(
    "kind",
    [
        bool, int, float, str, bytes, bytearray, None, Color, Point, PrintOptions, Item, Tree, Even, datetime, date,
        timedelta, Decimal, UUID, Literal["a", 3], list[int], tuple[int, ...], tuple[int, str],
        dict[str, list[Item]], int | str | None,
        Annotated[int, Meta(ge=3, lt=7)], Annotated[int, Meta(gt=-5, multiple_of=4)],
        Annotated[int, Meta(le=-1000)], Annotated[float, Meta(gt=0, le=0.25)],
        Annotated[float, Meta(ge=0, multiple_of=0.5)],
        Annotated[str, Meta(min_length=4, max_length=6)], Annotated[bytes, Meta(max_length=2)],
        Annotated[list[int], Meta(min_length=2, max_length=2)], Annotated[dict[str, int], Meta(min_length=1)],
        Annotated[datetime, Meta(tz=True)], Annotated[datetime, Meta(tz=False)],
    ],
)  # fmt: skip
def test_generated_values_are_decoded_as_their_type(kind: Any) -> None:
    for value in generate(kind):
        packed = msgspec.msgpack.encode(value)
        assert msgspec.msgpack.decode(packed, type=kind) == value


def test_the_same_seed_generates_the_same_values() -> None:
    assert generate(Tree, 5) == generate(Tree, 5)
    assert generate(Tree, 5) != generate(Tree, 6)


def test_generated_strings_include_the_given_names() -> None:
    assert "ada" in generate(str)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Annotated[str, Meta(pattern="^a")], r"str\(pattern='\^a'\)"),
        (list[re.Pattern], "re.Pattern"),
        (set[int], "set"),
        (msgspec.Raw, "raw"),
        (Never, "Never"),
        (Endless, "Endless, which is recursive"),
        (OrderedDict[str, int], "OrderedDict"),
        (Annotated[int, Meta(gt=4, lt=5)], "int"),
    ],
)
def test_type_without_a_generator_is_named(kind: Any, name: str) -> None:
    with pytest.raises(Ungenerable) as caught:
        generate(kind)
    assert caught.value.what == "event E"
    assert re.search(name, caught.value.type)
