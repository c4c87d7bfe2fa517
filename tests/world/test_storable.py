"""What cannot be stored is refused when the app is built, and what can be is not."""

from __future__ import annotations

import collections
import decimal
import enum
import pathlib
import re
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Generic, Literal, NewType, TypedDict, TypeVar

import msgspec
import pytest

import holdfast as hf
from holdfast.app.storable import NotStorable, check_fields
from holdfast.errors import Invalid

MODULES = ("holdfast.app.storable",)

T = TypeVar("T")


class Model:
    """A class of another library's making: it has fields, and msgspec knows nothing of it."""

    def __init__(self, name: str = "") -> None:
        self.name = name


class Money(int):
    pass


class Colour(enum.Enum):
    RED = "red"


class Unit(enum.StrEnum):
    EURO = "EUR"


class Access(enum.IntFlag):
    READ = 1


class Point(msgspec.Struct):
    x: int = 0


class Box(msgspec.Struct, Generic[T]):
    inside: T


class Pair(typing.NamedTuple):
    left: int = 0


class Address(TypedDict, total=False):
    street: str


class Node(msgspec.Struct):
    """It names itself."""

    below: list[Node] = msgspec.field(default_factory=list)
    up: Node | None = None


@dataclass
class Plain:
    items: list[str] = field(default_factory=list)


@dataclass
class Holding:
    model: Model


Id = NewType("Id", int)

REFUSED = {
    "a class": Model,
    "a class or nothing": Model | None,
    "a list of a class": list[Model],
    "a dict of a class": dict[str, Model],
    "a tuple with a class": tuple[int, Model],
    "a dataclass that holds a class": Holding,
    "a generic of a class": Box[Model],
    "a subclass of int": Money,
    "a deque": collections.deque,
    "a counter": collections.Counter[str],
    "a path": pathlib.Path,
    "a pattern": re.Pattern[str],
    "a function": Callable[[], int],
    "a complex number": complex,
    "an exception": Exception,
    "a union that cannot be told apart": int | Model,
    "a dict by number": dict[int, str],
    "a dict by id, within a list": list[dict[uuid.UUID, str]],
    "a dict by enum": dict[Colour, int],
    "a dict by text or number": dict[str | int, int],
    "a dict by text or nothing": dict[str | None, int],
    "a dict by a word or a number": dict[Literal["a", 1], int],
}

KEPT = {
    "any": Any,
    "object": object,
    "an int": int,
    "text or nothing": str | None,
    "bytes": bytes,
    "bytearray": bytearray,
    "a union": int | str | list[float] | None,
    "a list": list,
    "nested": dict[str, list[tuple[int, str]]],
    "a mapping": Mapping[str, int],
    "a dict by some words": dict[Literal["a", "b"], int],
    "a dict by an enum of text": dict[Unit, int],
    "a dict by anything": dict[Any, Any],
    "a dict by any object": dict[object, int],
    "an iterable": Iterable[int],
    "a struct": Point,
    "a struct that names itself": Node,
    "a generic": Box[int],
    "an open generic": Box,
    "a dataclass": Plain,
    "a named tuple": Pair,
    "a typed dict": Address,
    "an enum": Colour,
    "a flag": Access,
    "a literal": Literal["a", "b"],
    "a new type": Id,
    "an annotated type": Annotated[int, msgspec.Meta(ge=0)],
    "a date": datetime,
    "a duration": timedelta,
    "an id": uuid.UUID,
    "a decimal": decimal.Decimal,
    "raw": msgspec.Raw,
}


def world_of(hint: Any) -> type[hf.World]:
    made: Any = msgspec.defstruct("Keeper", [("held", hint, None)], bases=(hf.World,))
    return typing.cast(type[hf.World], made)


def event_of(hint: Any) -> type[hf.Event]:
    made: Any = msgspec.defstruct("Kept", [("held", hint)], bases=(hf.Event,), frozen=True)
    return typing.cast(type[hf.Event], made)


@pytest.mark.parametrize("hint", REFUSED.values(), ids=list(REFUSED))
def test_a_world_or_event_that_cannot_be_stored_is_refused_by_name(hint: Any) -> None:
    with pytest.raises(NotStorable) as raised:
        hf.App("a", worlds=[world_of(hint)])
    fields = raised.value.fields
    assert (fields["what"], fields["type"]) == ("world", "Keeper")
    assert fields["field"].startswith("held")
    assert fields["found"]
    assert "msgspec.Struct or a dataclass" in str(raised.value.hint)
    with pytest.raises(NotStorable) as raised:
        hf.App("a", events=[event_of(hint)])
    assert (raised.value.fields["what"], raised.value.fields["type"]) == ("event", "Kept")


@pytest.mark.parametrize("hint", KEPT.values(), ids=list(KEPT))
def test_what_can_be_stored_is_not_refused(hint: Any) -> None:
    hf.App("a", worlds=[world_of(hint)], events=[event_of(hint)])


def test_the_error_leads_to_the_field_and_names_the_type() -> None:
    @dataclass
    class Order:
        lines: list[Holding]

    with pytest.raises(NotStorable) as raised:
        check_fields("event", Order)
    assert raised.value.fields["field"] == "lines[].model"
    assert raised.value.fields["found"].endswith("test_storable.Model")
    assert isinstance(raised.value, Invalid)


def test_arguments_and_results_of_effects_and_tasks_are_refused_too() -> None:
    @hf.effect("a.takes")
    def takes(call: hf.Call, model: Model) -> int:
        return 1

    @hf.effect("a.gives")
    async def gives(call: hf.Call) -> Model:
        return Model()

    @hf.effect("a.costs")
    def costs(call: hf.Call) -> hf.Costed[Model]:
        return hf.Costed(Model(), 1.0)

    @hf.task
    def takes_one(model: Model) -> int:
        return 1

    @hf.task
    def gives_one() -> list[Model]:
        return []

    for effect, where in ((takes, "model"), (gives, "return"), (costs, "return")):
        with pytest.raises(NotStorable) as raised:
            hf.App("a", effects=[effect])
        assert raised.value.fields["field"] == where
        assert raised.value.fields["type"] == effect.kind
    for task in (takes_one, gives_one):
        with pytest.raises(NotStorable) as raised:
            hf.App("a", tasks=[task])
        assert raised.value.fields["what"] == "task"


def test_a_payload_of_an_inbox_that_cannot_be_read_is_refused() -> None:
    class Shop(hf.World):
        @hf.on(hf.inbox("orders", Model))
        def ordered(self, mail: hf.Mail[Model], cx: hf.Context) -> None:
            raise AssertionError

    with pytest.raises(NotStorable) as raised:
        hf.App("a", worlds=[Shop])
    assert raised.value.fields["type"] == "orders"


def test_an_argument_that_need_not_be_given_and_odd_annotations_are_no_reason_to_refuse() -> None:
    @hf.task
    def works(n: int, log: Callable[[str], None] | None = None, *rest: Any, **more: Any) -> None:
        return None

    @hf.task
    def open_ended(*files: typing.IO[str], **options: complex) -> None:
        return None

    @hf.task
    def never() -> typing.NoReturn:
        raise ValueError

    @hf.task
    def untyped(a, b=1):  # type: ignore[no-untyped-def]
        return a

    @hf.effect("a.plain")
    def plain(call: hf.Call, path: pathlib.Path | None = None) -> None:
        return None

    hf.App("a", tasks=[works, open_ended, never, untyped], effects=[plain])


def test_shipped_effects_are_storable() -> None:
    hf.App("a", effects=[hf.http.request, hf.llm.chat, hf.email.send, hf.agent.dispatch])
