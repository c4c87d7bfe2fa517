"""Nesting depth: events, arguments, results, replies and states nested too deep raise typed errors.
Lifetime of a reducer context, and the policy hash of effects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.codec import DEPTH_MAX
from holdfast.errors import HoldfastError, Invalid
from holdfast.world.definition import EventType
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.codec", "holdfast.world.definition")

# The encoder accepts the first depth and fails on the second.
TOO_DEEP = [DEPTH_MAX + 20, 100_000]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


class Anything(hf.Event):
    held: Any = None


class Tree(msgspec.Struct):
    below: list[Tree] = msgspec.field(default_factory=list)


class Grown(hf.Event):
    tree: Tree


class Replying(hf.World):
    held: Any = None

    @hf.on(Anything)
    def anything(self, event: Anything, cx: hf.Context) -> None:
        cx.reply(nested(event.held))

    @hf.on(Grown)
    def grown(self, event: Grown, cx: hf.Context) -> None:
        self.held = nested(100_000)


@hf.effect("a.deep")
def deep(call: hf.Call, value: Any) -> Any:
    return value


@hf.task
def work(value: Any) -> Any:
    return value


@pytest.mark.parametrize("depth", TOO_DEEP)
def test_event_nested_too_deep_is_invalid_at_send(depth: int) -> None:
    rig = WorldRig(hf.App("bank", worlds=[Replying]))
    world = rig.world(Replying, "w")
    before = rig.rows()
    with pytest.raises(Invalid):
        world.send(Anything(nested(depth)))
    tree = Tree()
    for _ in range(min(depth, 5_000)):
        tree = Tree([tree])
    with pytest.raises(Invalid):
        world.send(Grown(tree))
    assert rig.rows() == before
    world.send(Anything(nested(DEPTH_MAX - 10)))


@pytest.mark.parametrize("depth", TOO_DEEP)
def test_arguments_and_results_nested_too_deep_are_refused(depth: int) -> None:
    value = nested(depth)
    with pytest.raises(Invalid):
        deep.call((value,), {})
    with pytest.raises(Invalid):
        work.pack([value], {})
    with pytest.raises(Invalid):
        work.pack([], {"value": value})
    for dump in (deep.dump, work.dump):
        with pytest.raises(HoldfastError) as raised:
            dump(value)
        assert "result" in raised.value.code
    assert deep.dump(nested(50)) == work.dump(nested(50)) == codec.pack(nested(50))


def test_reply_or_state_nested_too_deep_fails_its_event() -> None:
    rig = WorldRig(hf.App("bank", worlds=[Replying]))
    world = rig.world(Replying, "w")
    world.send(Anything(DEPTH_MAX + 20))
    world.send(Grown(Tree()))
    world.send(Anything(3))
    rig.run()
    assert [one.outcome for one in world.journal()] == ["failed", "failed", "ok"]


def test_bytes_nested_too_deep_raise_invalid_not_recursion_error() -> None:
    body = b"\x91" * 100_000 + b"\x01"
    for read in (codec.unpack, lambda data: codec.unpack_as(list, data)):
        with pytest.raises(Invalid):
            read(body)
    with pytest.raises(Invalid):
        EventType("Anything", Anything).decode(b"\x01\x81\xa4held" + body)


def test_wide_value_passes_the_depth_check() -> None:
    codec.check_depth("event", codec.pack([[n] for n in range(5_000)]))


def test_context_raises_context_ended_after_its_handler() -> None:
    kept: list[hf.Context] = []

    class Keeping(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            kept.append(cx)

    rig = WorldRig(hf.App("bank", worlds=[Keeping, bank.Audit], effects=[bank.quote]))
    world = rig.world(Keeping, "k")
    world.send(bank.Seen())
    rig.run()
    [cx] = kept
    for late in (
        lambda: cx.do(bank.quote, "EUR"),
        lambda: cx.after(1, bank.Seen()),
        lambda: cx.send(bank.Audit, "a", bank.Seen()),
        lambda: cx.cancel_timer("t"),
        lambda: cx.cancel(b"x" * 32),
        lambda: cx.reply(1),
    ):
        with pytest.raises(Invalid) as raised:
            late()
        assert raised.value.code == "context_ended"
    assert cx.intents == []


def test_context_of_an_earlier_event_fails_the_event_using_it() -> None:
    kept: list[hf.Context] = []

    class Keeping(hf.World):
        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            kept.append(cx)

        @hf.on(bank.Rolled)
        def rolled(self, event: bank.Rolled, cx: hf.Context) -> None:
            kept[0].do(bank.quote, "EUR")

    rig = WorldRig(hf.App("bank", worlds=[Keeping], effects=[bank.quote]))
    world = rig.world(Keeping, "k")
    world.send(bank.Seen())
    world.send(bank.Rolled())
    rig.run()
    assert [one.outcome for one in world.journal()] == ["ok", "failed"]
    assert "context_ended" in rig.failed_events()[0].error


def test_effect_policy_hash_follows_its_options_and_is_in_the_intent() -> None:
    def declared(**options: Any) -> Any:
        @hf.effect("fx.policy", **options)
        def policy(call: hf.Call) -> None:
            return None

        return policy

    first = declared()
    hashes = {
        declared(**options).policy_hash
        for options in ({}, {"attempts": 2}, {"timeout_s": 5}, {"rate_per_s": 1.0})
    }
    assert len(hashes) == 4
    assert first.policy_hash == declared(timeout_s=60).policy_hash
    assert hf.llm.chat.policy_hash not in hashes
    assert first.call((), {}).policy == first.policy_hash
