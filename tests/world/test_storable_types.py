"""Storable types: `hf.App` refuses worlds, events, effects and tasks whose types cannot be
stored."""

from __future__ import annotations

import collections
import decimal
import enum
import pathlib
import re
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, Generic, Literal, NewType, TypedDict, TypeVar

import msgspec
import pytest

import holdfast as hf
from holdfast.app.storable_types import NotStorable, check_fields
from holdfast.errors import Invalid

MODULES = ("holdfast.app.storable_types",)

T = TypeVar("T")


class ForeignModel:
    """A plain class, as a foreign library defines it. msgspec cannot encode it."""

    def __init__(self, name: str = "") -> None:
        self.name = name


class IntMoney(int):
    pass


class ColourEnum(enum.Enum):
    RED = "red"


class CurrencyUnit(enum.StrEnum):
    EURO = "EUR"


class Access(enum.IntFlag):
    READ = 1


class PointStruct(msgspec.Struct):
    x: int = 0


class Box(msgspec.Struct, Generic[T]):
    inside: T


class NamedPair(typing.NamedTuple):
    left: int = 0


class AddressDict(TypedDict, total=False):
    street: str


class RecursiveNode(msgspec.Struct):
    """A recursive struct."""

    below: list[RecursiveNode] = msgspec.field(default_factory=list)
    up: RecursiveNode | None = None


@dataclass
class ListDataclass:
    items: list[str] = field(default_factory=list)


@dataclass
class ForeignModelHolder:
    model: ForeignModel


Id = NewType("Id", int)

UNSTORABLE = {
    "a class": ForeignModel,
    "a class or nothing": ForeignModel | None,
    "a list of a class": list[ForeignModel],
    "a dict of a class": dict[str, ForeignModel],
    "a tuple with a class": tuple[int, ForeignModel],
    "a dataclass that holds a class": ForeignModelHolder,
    "a generic of a class": Box[ForeignModel],
    "a subclass of int": IntMoney,
    "a deque": collections.deque,
    "a counter": collections.Counter[str],
    "a path": pathlib.Path,
    "a pattern": re.Pattern[str],
    "a function": Callable[[], int],
    "a complex number": complex,
    "an exception": Exception,
    "a union that cannot be told apart": int | ForeignModel,
    "a dict by number": dict[int, str],
    "a dict by id, within a list": list[dict[uuid.UUID, str]],
    "a dict by enum": dict[ColourEnum, int],
    "a dict by text or number": dict[str | int, int],
    "a dict by text or nothing": dict[str | None, int],
    "a dict by a word or a number": dict[Literal["a", 1], int],
}

STORABLE = {
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
    "a dict by an enum of text": dict[CurrencyUnit, int],
    "a dict by anything": dict[Any, Any],
    "a dict by any object": dict[object, int],
    "an iterable": Iterable[int],
    "a struct": PointStruct,
    "a struct that names itself": RecursiveNode,
    "a generic": Box[int],
    "an open generic": Box,
    "a dataclass": ListDataclass,
    "a named tuple": NamedPair,
    "a typed dict": AddressDict,
    "an enum": ColourEnum,
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
    world_type: Any = msgspec.defstruct("Keeper", [("held", hint, None)], bases=(hf.World,))
    return typing.cast(type[hf.World], world_type)


def event_of(hint: Any) -> type[hf.Event]:
    event_type: Any = msgspec.defstruct("Kept", [("held", hint)], bases=(hf.Event,), frozen=True)
    return typing.cast(type[hf.Event], event_type)


@pytest.mark.parametrize("hint", UNSTORABLE.values(), ids=list(UNSTORABLE))
def test_unstorable_world_or_event_type_is_refused_by_name(hint: Any) -> None:
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


@pytest.mark.parametrize("hint", STORABLE.values(), ids=list(STORABLE))
def test_storable_types_are_accepted(hint: Any) -> None:
    hf.App("a", worlds=[world_of(hint)], events=[event_of(hint)])


# msgspec does not support such a union. The reply is checked when it is decoded, as a result of a task.
UNSTORABLE_REPLIES = {
    name: hint for name, hint in UNSTORABLE.items() if "cannot be told apart" not in name
}


@pytest.mark.parametrize("hint", UNSTORABLE_REPLIES.values(), ids=list(UNSTORABLE_REPLIES))
def test_unstorable_type_of_a_reply_is_refused_by_the_name_of_its_event(hint: Any) -> None:
    with pytest.raises(NotStorable) as raised:
        hf.App("a", events=[event_with_reply(hint)])
    fields = raised.value.fields
    assert (fields["what"], fields["type"]) == ("event", "Asked")
    assert fields["field"].startswith("reply")


@pytest.mark.parametrize("hint", STORABLE.values(), ids=list(STORABLE))
def test_storable_type_of_a_reply_is_accepted(hint: Any) -> None:
    hf.App("a", events=[event_with_reply(hint)])


def event_with_reply(hint: Any) -> Any:
    bases: Any = (hf.Event[hint],)
    return types.new_class("Asked", bases, {"frozen": True})


def test_not_storable_error_names_field_path_and_type() -> None:
    @dataclass
    class OrderWithLines:
        lines: list[ForeignModelHolder]

    with pytest.raises(NotStorable) as raised:
        check_fields("event", OrderWithLines)
    assert raised.value.fields["field"] == "lines[].model"
    assert raised.value.fields["found"].endswith("test_storable_types.ForeignModel")
    assert isinstance(raised.value, Invalid)


def test_unstorable_arguments_and_results_of_effects_and_tasks_are_refused() -> None:
    @hf.effect("a.takes")
    def takes(call: hf.Call, model: ForeignModel) -> int:
        return 1

    @hf.effect("a.gives")
    async def gives(call: hf.Call) -> ForeignModel:
        return ForeignModel()

    @hf.effect("a.costs")
    def costs(call: hf.Call) -> hf.Costed[ForeignModel]:
        return hf.Costed(ForeignModel(), 1.0)

    @hf.task
    def takes_one(model: ForeignModel) -> int:
        return 1

    @hf.task
    def gives_one() -> list[ForeignModel]:
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


def test_unstorable_inbox_payload_is_refused() -> None:
    class OrderInbox(hf.World):
        @hf.on(hf.inbox("orders", ForeignModel))
        def ordered(self, mail: hf.Mail[ForeignModel], cx: hf.Context) -> None:
            raise AssertionError

    with pytest.raises(NotStorable) as raised:
        hf.App("a", worlds=[OrderInbox])
    assert raised.value.fields["type"] == "orders"


def test_optional_arguments_and_loose_annotations_are_accepted() -> None:
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


def test_builtin_effects_are_storable() -> None:
    hf.App("a", effects=[hf.http.request, hf.llm.chat, hf.email.send, hf.agent.dispatch])
