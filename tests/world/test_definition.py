"""The world definition: event validation at send, upcasts, and encoding of the state."""

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
from holdfast.world.definition import EventType
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.definition", "holdfast.app.app", "holdfast.app.definitions")


# -- checks at send ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        bank.DepositMade("5"),  # type: ignore[arg-type]
        bank.DepositMade(None),  # type: ignore[arg-type]
        bank.DepositMade(1.5),  # type: ignore[arg-type]
        bank.DepositMade(1 << 70),
        bank.Noted("\ud800", []),
        bank.Noted("a", "b"),  # type: ignore[arg-type]
        bank.Noted("a", [object()]),  # type: ignore[list-item]
    ],
    ids=["text", "none", "fraction", "huge", "surrogate", "text for list", "object"],
)
def test_event_with_wrong_fields_is_refused_at_send(rig: WorldRig, event: object) -> None:
    ada = rig.world()
    before = rig.rows()
    with pytest.raises(Invalid) as raised:
        ada.send(event)
    assert raised.value.type == type(event).__name__
    assert rig.rows() == before


def test_reducer_receives_the_event_as_sent(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("ü", ["b", "c"]))
    rig.run()
    assert ada.state().notes == ["ü", "b", "c"]
    assert ada.journal()[0].event == bank.Noted("ü", ["b", "c"])


def test_dataclass_can_be_an_event() -> None:
    name, value = bank.app.encode_event(bank.Noted("a", []))
    assert name == "Noted"
    assert bank.app.events["Noted"].decode(value) == bank.Noted("a", [])


def test_event_encoding_does_not_depend_on_dict_order() -> None:
    @dataclass
    class Mapped:
        of: dict[str, int]

    app = hf.App("a", events=[Mapped])
    assert app.encode_event(Mapped({"a": 1, "b": 2})) == app.encode_event(Mapped({"b": 2, "a": 1}))


def test_oversized_event_is_refused_by_encode_event() -> None:
    with pytest.raises(ValueTooLarge):
        bank.app.encode_event(bank.Noted("x" * MESSAGE_BYTES_MAX, []))


def test_largest_accepted_event_can_be_journaled(rig: WorldRig) -> None:
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


def event_bytes(version: int, **fields: object) -> bytes:
    return bytes([version]) + codec.pack(fields)


def test_an_event_with_two_upcasts_is_at_version_3() -> None:
    assert PRICED.version == 3
    assert PRICED.encode(Priced(5, "USD"))[0] == 3


def test_old_event_is_upcast_step_by_step() -> None:
    assert PRICED.decode(event_bytes(1, euros=3)) == Priced(300, "EUR")
    assert PRICED.decode(event_bytes(2, cents=3)) == Priced(3, "EUR")
    assert PRICED.decode(event_bytes(3, cents=3, currency="USD")) == Priced(3, "USD")


def test_upcast_function_can_still_be_called() -> None:
    assert in_cents({"euros": 2}) == {"cents": 200}


def test_upcasts_may_be_plain_tuples() -> None:
    app = hf.App("shop", worlds=[Shop], upcasts=[(Priced, 1, lambda fields: fields)])
    assert app.events["Priced"].version == 2


def test_old_event_in_an_inbox_is_upcast_by_new_code() -> None:
    rig = WorldRig(SHOP)
    shop = rig.world(Shop, "s")
    from holdfast.world.ingress import deliver

    rig.store.transact(
        deliver, shop.address(), None, event_ingress("Priced", event_bytes(1, euros=7))
    )
    rig.run()
    assert shop.state().sold == ["700 EUR"]
    assert shop.journal()[0].event == Priced(700, "EUR")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (event_bytes(4, cents=1), "newer than this code"),
        (event_bytes(0, cents=1), "no such version"),
        (b"", "no such version"),
        (event_bytes(1, other=1), "the upcast raised KeyError: 'euros'"),
        (event_bytes(2, cents="x"), "Expected `int`, got `str` - at `$.cents`"),
        (b"\x02junk", ""),
        (b"\x03junk", ""),
    ],
)
def test_undecodable_event_bytes_are_refused(value: bytes, why: str) -> None:
    with pytest.raises(Invalid) as raised:
        PRICED.decode(value)
    assert why in raised.value.why


def test_a_world_stops_before_an_event_newer_than_the_code() -> None:
    rig = WorldRig(SHOP)
    shop = rig.world(Shop, "s")
    from holdfast.world.ingress import deliver

    rig.store.transact(
        deliver, shop.address(), None, event_ingress("Priced", event_bytes(9, cents=7))
    )
    rig.run()
    assert shop.state().sold == []
    assert shop.journal() == []
    assert rig.failed_events() == []
    blocker = rig.record(shop).blocked_by
    assert blocker is not None
    assert "'Priced' of version 9" in blocker.text


@pytest.mark.parametrize(
    "upcasts",
    [[with_currency], [in_cents, in_cents], [(Priced, 1, dict), (Priced, 3, dict)]],
    ids=["from 2", "twice", "gap"],
)
def test_upcast_versions_start_at_1_without_gap_or_duplicate(upcasts: list[Any]) -> None:
    with pytest.raises(Invalid):
        hf.App("shop", worlds=[Shop], upcasts=upcasts)


def test_upcast_of_an_unknown_event_is_invalid() -> None:
    with pytest.raises(Invalid):
        hf.App("shop", worlds=[bank.Audit], upcasts=[in_cents])


@pytest.mark.parametrize("wrong", [(int, 1), (Priced, 0), (Priced, 255), (Priced, "1")])
def test_upcast_needs_an_event_type_and_a_version(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(Invalid):
        hf.upcast(*wrong)


def test_event_version_is_limited_to_255() -> None:
    with pytest.raises(Invalid):
        EventType("Priced", Priced, 256)


# -- state ---------------------------------------------------------------------------------------

ACCOUNT_DEFINITION = bank.app.programs["BankAccount"]


def test_state_dump_and_load_round_trip() -> None:
    state = bank.BankAccount(5, 1.5, ["a"], [])
    assert ACCOUNT_DEFINITION.load_state(ACCOUNT_DEFINITION.dump_state(state)) == state


def test_initial_states_share_no_mutable_default() -> None:
    ACCOUNT_DEFINITION.initial_state().notes.append("x")
    assert ACCOUNT_DEFINITION.initial_state().notes == []


@pytest.mark.parametrize(
    "state",
    [
        bank.BankAccount(balance=1 << 70),
        bank.BankAccount(notes=["\ud800"]),
        bank.BankAccount(notes=[object()]),  # type: ignore[list-item]
    ],
    ids=["huge", "surrogate", "object"],
)
def test_unstorable_state_is_refused_by_dump(state: bank.BankAccount) -> None:
    with pytest.raises(Invalid) as raised:
        ACCOUNT_DEFINITION.dump_state(state)
    assert raised.value.what == "state"


def test_state_of_the_wrong_type_is_refused_on_load() -> None:
    with pytest.raises(Invalid):
        ACCOUNT_DEFINITION.reload_state(bank.BankAccount(balance="much"))  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        ACCOUNT_DEFINITION.load_state(b"junk")


def test_default_factory_that_raises_becomes_invalid() -> None:
    def refuse() -> int:
        raise KeyError("no default today")

    class Odd(hf.World):
        n: int = msgspec.field(default_factory=refuse)

    program = hf.App("odd", worlds=[Odd]).programs["Odd"]
    with pytest.raises(Invalid, match="no default today"):
        program.initial_state()


def test_state_with_new_default_fields_loads_old_bytes() -> None:
    class Grown(hf.World):
        balance: int = 0
        extra: str = "new"

    program = hf.App("grown", worlds=[Grown]).programs["Grown"]
    assert program.load_state(ACCOUNT_DEFINITION.dump_state(bank.BankAccount(5))) == Grown(5, "new")
