"""A world's code as the host sees it: events checked at the door, versions, state in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.config import MESSAGE_BYTES_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.messages import event_ingress
from holdfast.world.program import EventType
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.world.program", "holdfast.app.app", "holdfast.app.declare")


# -- at the door ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        bank.Deposited("5"),  # type: ignore[arg-type]
        bank.Deposited(None),  # type: ignore[arg-type]
        bank.Deposited(1.5),  # type: ignore[arg-type]
        bank.Deposited(1 << 70),
        bank.Noted("\ud800", []),
        bank.Noted("a", "b"),  # type: ignore[arg-type]
        bank.Noted("a", [object()]),  # type: ignore[list-item]
    ],
    ids=["text", "none", "fraction", "huge", "surrogate", "text for list", "object"],
)
def test_an_event_whose_fields_do_not_fit_is_refused(rig: Rig, event: object) -> None:
    ada = rig.world()
    before = rig.rows()
    with pytest.raises(Invalid) as raised:
        ada.send(event)
    assert raised.value.type == type(event).__name__
    assert rig.rows() == before


def test_what_was_sent_is_what_the_reducer_gets(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("ü", ["b", "c"]))
    rig.run()
    assert ada.state().notes == ["ü", "b", "c"]
    assert ada.journal()[0].event == bank.Noted("ü", ["b", "c"])


def test_a_dataclass_is_an_event_like_any_other() -> None:
    name, value = bank.app.encode_event(bank.Noted("a", []))
    assert name == "Noted"
    assert bank.app.events["Noted"].decode(value) == bank.Noted("a", [])


def test_equal_events_have_equal_bytes_whatever_the_order_of_their_dicts() -> None:
    @dataclass
    class Mapped:
        of: dict[str, int]

    app = hf.App("a", events=[Mapped])
    assert app.encode_event(Mapped({"a": 1, "b": 2})) == app.encode_event(Mapped({"b": 2, "a": 1}))


def test_a_large_event_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueTooLarge):
        bank.app.encode_event(bank.Noted("x" * MESSAGE_BYTES_MAX, []))


def test_the_largest_event_that_is_accepted_is_also_journaled(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("x" * (MESSAGE_BYTES_MAX - 100), []))
    rig.run()
    assert [one.outcome for one in ada.journal()] == ["ok"]


# -- versions ------------------------------------------------------------------------------------


class Priced(hf.Event):
    cents: int
    currency: str


@hf.upcast(Priced, 1)
def in_cents(fields: dict[str, Any]) -> dict[str, Any]:
    return {"cents": fields["euros"] * 100}


@hf.upcast(Priced, 2)
def with_currency(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "currency": "EUR"}


class Shop(hf.World):
    sold: list[str] = msgspec.field(default_factory=list)

    @hf.on(Priced)
    def priced(self, event: Priced, cx: hf.Context) -> None:
        self.sold.append(f"{event.cents} {event.currency}")


SHOP = hf.App("shop", worlds=[Shop], upcasts=[in_cents, with_currency])
PRICED = SHOP.events["Priced"]


def stored(version: int, **fields: object) -> bytes:
    return bytes([version]) + codec.pack(fields)


def test_an_event_with_two_upcasts_is_at_version_3() -> None:
    assert PRICED.version == 3
    assert PRICED.encode(Priced(5, "USD"))[0] == 3


def test_an_old_event_is_brought_up_step_by_step() -> None:
    assert PRICED.decode(stored(1, euros=3)) == Priced(300, "EUR")
    assert PRICED.decode(stored(2, cents=3)) == Priced(3, "EUR")
    assert PRICED.decode(stored(3, cents=3, currency="USD")) == Priced(3, "USD")


def test_an_upcast_can_be_called_like_the_function_it_was() -> None:
    assert in_cents({"euros": 2}) == {"cents": 200}


def test_upcasts_may_be_given_as_plain_tuples_too() -> None:
    app = hf.App("shop", worlds=[Shop], upcasts=[(Priced, 1, lambda fields: fields)])
    assert app.events["Priced"].version == 2


def test_an_old_event_in_an_inbox_is_handled_by_new_code() -> None:
    rig = Rig(SHOP)
    shop = rig.world(Shop, "s")
    from holdfast.world.ingress import deliver

    rig.store.transact(deliver, shop.address(), None, event_ingress("Priced", stored(1, euros=7)))
    rig.run()
    assert shop.state().sold == ["700 EUR"]
    assert shop.journal()[0].event == Priced(700, "EUR")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (stored(4, cents=1), "newer than this code"),
        (stored(0, cents=1), "no such version"),
        (b"", "no such version"),
        (stored(1, other=1), "the upcast raised KeyError: 'euros'"),
        (stored(2, cents="x"), "Expected `int`, got `str` - at `$.cents`"),
        (b"\x02junk", ""),
        (b"\x03junk", ""),
    ],
)
def test_bytes_that_are_no_event_of_this_code_are_refused(value: bytes, why: str) -> None:
    with pytest.raises(Invalid) as raised:
        PRICED.decode(value)
    assert why in raised.value.why


def test_a_world_stops_before_an_event_newer_than_the_code() -> None:
    rig = Rig(SHOP)
    shop = rig.world(Shop, "s")
    from holdfast.world.ingress import deliver

    rig.store.transact(deliver, shop.address(), None, event_ingress("Priced", stored(9, cents=7)))
    rig.run()
    assert shop.state().sold == []
    assert shop.journal() == []
    assert rig.dead() == []
    blocker = rig.record(shop).blocked_by
    assert blocker is not None
    assert "'Priced' of version 9" in blocker.text


@pytest.mark.parametrize(
    "upcasts",
    [[with_currency], [in_cents, in_cents], [(Priced, 1, dict), (Priced, 3, dict)]],
    ids=["from 2", "twice", "gap"],
)
def test_upcasts_count_from_1_without_gap_or_double(upcasts: list[Any]) -> None:
    with pytest.raises(Invalid):
        hf.App("shop", worlds=[Shop], upcasts=upcasts)


def test_an_upcast_of_an_event_that_nobody_knows_is_a_mistake() -> None:
    with pytest.raises(Invalid):
        hf.App("shop", worlds=[bank.Audit], upcasts=[in_cents])


@pytest.mark.parametrize("wrong", [(int, 1), (Priced, 0), (Priced, 255), (Priced, "1")])
def test_an_upcast_names_an_event_and_a_version(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(Invalid):
        hf.upcast(*wrong)


def test_versions_are_few() -> None:
    with pytest.raises(Invalid):
        EventType("Priced", Priced, 256)


# -- state ---------------------------------------------------------------------------------------

PROGRAM = bank.app.programs["Account"]


def test_a_state_is_read_as_it_was_written() -> None:
    state = bank.Account(5, 1.5, ["a"], [])
    assert PROGRAM.load(PROGRAM.dump(state)) == state


def test_initial_states_share_nothing() -> None:
    PROGRAM.initial().notes.append("x")
    assert PROGRAM.initial().notes == []


@pytest.mark.parametrize(
    "state",
    [
        bank.Account(balance=1 << 70),
        bank.Account(notes=["\ud800"]),
        bank.Account(notes=[object()]),  # type: ignore[list-item]
    ],
    ids=["huge", "surrogate", "object"],
)
def test_a_state_that_cannot_be_kept_is_refused(state: bank.Account) -> None:
    with pytest.raises(Invalid) as raised:
        PROGRAM.dump(state)
    assert raised.value.what == "state"


def test_a_state_of_the_wrong_type_is_refused_when_it_is_read() -> None:
    with pytest.raises(Invalid):
        PROGRAM.fresh(bank.Account(balance="much"))  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        PROGRAM.load(b"junk")


def test_a_default_that_raises_is_typed() -> None:
    def refuse() -> int:
        raise KeyError("no default today")

    class Odd(hf.World):
        n: int = msgspec.field(default_factory=refuse)

    program = hf.App("odd", worlds=[Odd]).programs["Odd"]
    with pytest.raises(Invalid, match="no default today"):
        program.initial()


def test_new_fields_with_defaults_read_an_old_state() -> None:
    class Grown(hf.World):
        balance: int = 0
        extra: str = "new"

    program = hf.App("grown", worlds=[Grown]).programs["Grown"]
    assert program.load(PROGRAM.dump(bank.Account(5))) == Grown(5, "new")
