"""The reducer context: deterministic inputs, intent identities, limits, and errors raised at the
call."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.config import CYCLE_BYTES_MAX, EMISSIONS_MAX, MESSAGE_BYTES_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.messages import (
    FABRIC_SEND,
    TIMER_CANCEL,
    TIMER_SET,
    FabricSendParams,
    TimerSet,
    WorldName,
)
from holdfast.world.context import Context, ReducerInputs
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.context",)

INPUTS = ReducerInputs(
    "bank",
    "w1",
    "ada",
    7,
    wall_ns=1_700_000_000_000_000_000,
    entropy=b"e" * 16,
    generation=1,
    correlation_id="c-1",
)


@pytest.fixture
def cx() -> Context:
    return Context(INPUTS, bank.app)


def context_with(**fields: object) -> Context:
    import msgspec

    return Context(msgspec.structs.replace(INPUTS, **fields), bank.app)


# -- inputs --------------------------------------------------------------------------------------


def test_time_random_and_uuids_derive_from_reducer_inputs(cx: Context) -> None:
    again = Context(INPUTS, bank.app)
    assert cx.now == again.now == datetime.fromtimestamp(1_700_000_000, UTC)
    assert [cx.uuid(), cx.uuid()] == [again.uuid(), again.uuid()]
    assert cx.random.random() == again.random.random()


def test_uuids_of_one_step_differ_and_are_version_4(cx: Context) -> None:
    made = [cx.uuid() for _ in range(100)]
    assert len(set(made)) == 100
    assert {one.version for one in made} == {4}


def test_other_entropy_gives_other_uuids_and_numbers(cx: Context) -> None:
    other = context_with(entropy=b"f" * 16)
    assert cx.uuid() != other.uuid()
    assert cx.random.random() != other.random.random()


def test_uuids_do_not_depend_on_how_much_randomness_was_used(cx: Context) -> None:
    first = Context(INPUTS, bank.app)
    first.random.random()
    assert first.uuid() == cx.uuid()


def test_replay_gives_a_reducer_the_same_time_and_randomness(rig: WorldRig) -> None:
    ada = rig.world()
    for _ in range(3):
        ada.send(bank.Rolled())
    rig.run()
    seen = ada.state().notes
    assert len(set(seen)) == 3
    rig.advance_clock()
    assert ada.state().notes == seen


# -- identities ----------------------------------------------------------------------------------


def test_intent_hash_is_its_position_in_the_journal(cx: Context) -> None:
    first, second = cx.do(bank.quote, "EUR"), cx.do(bank.quote, "EUR")
    assert first.intent_hash != second.intent_hash
    assert Context(INPUTS, bank.app).do(bank.quote, "USD").intent_hash == first.intent_hash


@pytest.mark.parametrize("field", [{"height": 8}, {"world_id": "w2"}, {"generation": 2}])
def test_intent_hash_depends_on_height_world_and_generation(
    cx: Context, field: dict[str, object]
) -> None:
    assert (
        context_with(**field).do(bank.quote, "EUR").intent_hash
        != cx.do(bank.quote, "EUR").intent_hash
    )


def test_keyed_intent_hash_ignores_height_and_index(cx: Context) -> None:
    keyed = bank.quote.options(key="k")
    cx.do(bank.quote, "EUR")
    first = cx.do(keyed, "EUR")
    assert context_with(height=9).do(keyed, "EUR").intent_hash == first.intent_hash
    assert context_with(world_id="w2").do(keyed, "EUR").intent_hash != first.intent_hash


def test_keyed_intent_hash_ignores_parameters_but_digests_differ(cx: Context) -> None:
    euros = cx.do(bank.quote.options(key="k"), "EUR")
    dollars = Context(INPUTS, bank.app).do(bank.quote.options(key="k"), "USD")
    assert euros.intent_hash == dollars.intent_hash
    assert euros.idempotency_digest() != dollars.idempotency_digest()
    assert euros.replay_digest() != dollars.replay_digest()


def test_keyed_intent_hash_ignores_the_generation(cx: Context) -> None:
    keyed = bank.quote.options(key="k")
    again = context_with(generation=2).do(keyed, "EUR")
    assert again.intent_hash == cx.do(keyed, "EUR").intent_hash
    assert again.generation == 2


def test_positional_id_differs_for_each_use_of_a_key(cx: Context) -> None:
    keyed = bank.quote.options(key="k")
    uses = [cx.do(keyed, "EUR") for _ in range(2)] + [context_with(height=8).do(keyed, "EUR")]
    assert len({use.positional_id() for use in uses}) == 3
    assert cx.do(bank.quote, "EUR").positional_id() == cx.intents[2].intent_hash


def test_replay_digest_ignores_the_clock(cx: Context) -> None:
    later = context_with(wall_ns=INPUTS.wall_ns + 1)
    assert cx.do(bank.quote, "EUR").replay_digest() == later.do(bank.quote, "EUR").replay_digest()


def test_intent_carries_all_fields_for_its_dispatch(cx: Context) -> None:
    intent = cx.do(bank.quote.options(priority=3, timeout_s=5), "EUR", tag="t")
    assert (intent.universe_id, intent.world_id, intent.origin_name) == ("bank", "w1", "ada")
    assert (intent.effect_kind, codec.unpack(intent.params)) == ("fx.quote", ["EUR"])
    assert (intent.priority, intent.timeout_ns, intent.tag) == (3, 5_000_000_000, "t")
    assert (intent.correlation_id, intent.from_height) == ("c-1", 7)
    assert intent.enqueued_at_ns == INPUTS.wall_ns


# -- emitted intents -----------------------------------------------------------------------------


def test_timers_without_a_key_get_separate_slots(cx: Context) -> None:
    slots = [codec.unpack_as(TimerSet, cx.after(1, bank.Seen()).params).key for _ in range(2)]
    assert len(set(slots)) == 2


def test_timer_stores_a_delay_or_a_calendar_time(cx: Context) -> None:
    after = codec.unpack_as(TimerSet, cx.after(1.5, bank.Seen(), key="k").params)
    at = codec.unpack_as(TimerSet, cx.at(datetime(2030, 1, 1, tzinfo=UTC), bank.Seen()).params)
    assert (after.key, after.delay_ns, after.wall_ns) == ("k", 1_500_000_000, None)
    assert (at.delay_ns, at.wall_ns) == (None, 1_893_456_000_000_000_000)


def test_cancel_timer_names_the_timer_key(cx: Context) -> None:
    intent = cx.cancel_timer("k")
    assert (intent.effect_kind, codec.unpack(intent.params)) == (TIMER_CANCEL, "k")


def test_sent_message_carries_headers_and_correlation_id(cx: Context) -> None:
    intent = cx.send(bank.Audit, "main", bank.Seen(3), trace="t")
    mail = codec.unpack_as(FabricSendParams, intent.params)
    assert intent.effect_kind == FABRIC_SEND
    assert (mail.dest_world, mail.schema) == (WorldName("Audit", "main"), "Seen")
    assert (mail.headers, mail.correlation_id) == ({"trace": "t"}, "c-1")


def test_last_reply_wins(cx: Context) -> None:
    cx.reply(1)
    cx.reply({"b": 1, "a": 2})
    assert codec.unpack(cx.replied or b"") == {"a": 2, "b": 1}


def test_cancel_names_the_intent_hash(cx: Context) -> None:
    intent = cx.do(bank.quote, "EUR")
    assert cx.cancel(intent).params == intent.intent_hash


# -- limits --------------------------------------------------------------------------------------


def test_event_emissions_are_limited_in_number(cx: Context) -> None:
    for _ in range(EMISSIONS_MAX):
        cx.cancel_timer("k")
    with pytest.raises(Invalid):
        cx.cancel_timer("k")


def test_event_emissions_are_limited_in_bytes(cx: Context) -> None:
    large = "x" * (MESSAGE_BYTES_MAX - 100)
    for _ in range(CYCLE_BYTES_MAX // MESSAGE_BYTES_MAX):
        cx.do(bank.quote, large)
    with pytest.raises(ValueTooLarge):
        cx.do(bank.quote, large)


LARGE = "x" * (MESSAGE_BYTES_MAX + 1)
ContextCall = Callable[[Context], object]

INVALID_CALLS: dict[str, ContextCall] = {
    "an effect that is none": lambda cx: cx.do(print, "EUR"),
    "too few arguments": lambda cx: cx.do(bank.quote),
    "arguments that cannot be stored": lambda cx: cx.do(bank.quote, object()),
    "an unknown option": lambda cx: cx.do(bank.quote.options(colour=1), "EUR"),
    "an empty key": lambda cx: cx.do(bank.quote.options(key=""), "EUR"),
    "a key that is no text": lambda cx: cx.do(bank.quote.options(key=5), "EUR"),
    "a key that is not UTF-8": lambda cx: cx.do(bank.quote.options(key="\ud800"), "EUR"),
    "a tag that is no text": lambda cx: cx.do(bank.quote, "EUR", tag=5),  # type: ignore[arg-type]
    "a tag that is not UTF-8": lambda cx: cx.do(bank.quote, "EUR", tag="\ud800"),
    "a priority out of bounds": lambda cx: cx.do(bank.quote.options(priority=1 << 40), "EUR"),
    "a priority that is no number": lambda cx: cx.do(bank.quote.options(priority="x"), "EUR"),
    "a negative delay": lambda cx: cx.after(-1, bank.Seen()),
    "no number for a delay": lambda cx: cx.after(float("nan"), bank.Seen()),
    "an endless delay": lambda cx: cx.after(float("inf"), bank.Seen()),
    "a delay of a thousand years": lambda cx: cx.after(1000 * 366 * 86400, bank.Seen()),
    "a time without a zone": lambda cx: cx.at(datetime(2030, 1, 1), bank.Seen()),
    "a time before 1970": lambda cx: cx.at(datetime(1960, 1, 1, tzinfo=UTC), bank.Seen()),
    "a time in the year 2400": lambda cx: cx.at(datetime(2400, 1, 1, tzinfo=UTC), bank.Seen()),
    "a slot that is no text": lambda cx: cx.after(1, bank.Seen(), key=5),  # type: ignore[arg-type]
    "an event with a wrong field": lambda cx: cx.after(1, bank.Seen("x")),  # type: ignore[arg-type]
    "a world that is none": lambda cx: cx.send(int, "main", bank.Seen()),
    "an event that is none": lambda cx: cx.send(bank.Audit, "main", 5),
    "an empty name": lambda cx: cx.send(bank.Audit, "", bank.Seen()),
    "a name with NUL": lambda cx: cx.send(bank.Audit, "a\x00b", bank.Seen()),
    "a name that is not UTF-8": lambda cx: cx.send(bank.Audit, "\ud800", bank.Seen()),
    "a name that is too long": lambda cx: cx.send(bank.Audit, "x" * 201, bank.Seen()),
    "a header that is no text": lambda cx: cx.send(bank.Audit, "main", bank.Seen(), n=1),  # type: ignore[arg-type]
    "a reply that cannot be stored": lambda cx: cx.reply(object()),
    "a reply that is not UTF-8": lambda cx: cx.reply("\ud800"),
    "a number too large for a reply": lambda cx: cx.reply(1 << 70),
}


@pytest.mark.parametrize("wish", INVALID_CALLS.values(), ids=INVALID_CALLS.keys())
def test_invalid_context_call_raises_and_emits_nothing(cx: Context, wish: ContextCall) -> None:
    with pytest.raises(Invalid) as raised:
        wish(cx)
    assert "\n" not in str(raised.value)
    assert cx.intents == []
    assert cx.replied is None


@pytest.mark.parametrize(
    "wish",
    [
        lambda cx: cx.do(bank.quote, LARGE),
        lambda cx: cx.reply(LARGE),
        lambda cx: cx.send(bank.BankAccount, "ada", bank.Noted(LARGE, [])),
    ],
    ids=["parameters", "reply", "event"],
)
def test_oversized_context_call_raises_in_the_reducer(cx: Context, wish: ContextCall) -> None:
    with pytest.raises(ValueTooLarge):
        wish(cx)
    assert cx.intents == []


@pytest.mark.parametrize("wish", INVALID_CALLS.values(), ids=INVALID_CALLS.keys())
def test_invalid_context_call_fails_its_event_without_parking_the_world(wish: ContextCall) -> None:
    class NoticeSent(hf.Event):
        pass

    class Wishing(hf.World):
        n: int = 0

        @hf.on(NoticeSent)
        def sent(self, event: NoticeSent, cx: hf.Context) -> None:
            self.n += 1
            if self.n == 2:
                wish(cx)

    rig = WorldRig(hf.App("bank", worlds=[Wishing, bank.Audit]))
    world = rig.world(Wishing, "w")
    for _ in range(3):
        world.send(NoticeSent())
    rig.run()
    assert [one.outcome for one in world.journal()] == ["ok", "failed", "failed"]
    assert rig.blocker_code(world) == ""


def test_timer_ten_years_ahead_is_allowed(cx: Context) -> None:
    cx.at(datetime.now(UTC) + timedelta(days=3650), bank.Seen())
    assert cx.intents[0].effect_kind == TIMER_SET
