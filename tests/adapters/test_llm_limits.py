"""Limits and accounts of `llm`: by universe, by world, by unit."""

from collections.abc import Iterator

import pytest

import holdfast as hf
from holdfast.effects.budget import MONEY, TOKENS
from holdfast.errors import Invalid, NotFound

MODULES = ("holdfast.app.builtin_effects.llm",)


class ChatWorld(hf.World):
    pass


@pytest.fixture
def runtime() -> Iterator[hf.Runtime]:
    with hf.App("agents", worlds=[ChatWorld]).open("memory:", roles=()) as runtime:
        yield runtime


def limit_of(
    runtime: hf.Runtime, unit: str, world: str | hf.WorldHandle[ChatWorld] = ""
) -> int | None:
    account = hf.llm.account(runtime.store, universe=runtime.universe, unit=unit, world=world)
    return account.limit


def test_set_limit_keeps_limits_not_named(runtime: hf.Runtime) -> None:
    hf.llm.set_limit(runtime.store, universe="agents", tokens=1_000)
    hf.llm.set_limit(runtime.store, universe="agents", money=0.5)
    assert (limit_of(runtime, TOKENS), limit_of(runtime, MONEY)) == (1_000, 500_000)


def test_set_limit_none_removes_a_limit(runtime: hf.Runtime) -> None:
    hf.llm.set_limit(runtime.store, universe="agents", tokens=1_000, money=0.5)
    hf.llm.set_limit(runtime.store, universe="agents", tokens=None)
    assert (limit_of(runtime, TOKENS), limit_of(runtime, MONEY)) == (None, 500_000)


def test_world_limit_can_be_set_before_its_first_event(runtime: hf.Runtime) -> None:
    ada, bob = runtime.world(ChatWorld, "ada"), runtime.world(ChatWorld, "bob")
    hf.llm.set_limit(runtime.store, universe="agents", world=ada, tokens=7)
    bob.create()
    assert (limit_of(runtime, TOKENS, ada), limit_of(runtime, TOKENS, bob)) == (7, None)
    assert limit_of(runtime, TOKENS, ada.record().world_id) == 7


def test_own_world_limit_overrides_the_each_world_limit(runtime: hf.Runtime) -> None:
    ada, bob = runtime.world(ChatWorld, "ada"), runtime.world(ChatWorld, "bob")
    hf.llm.set_limit(runtime.store, universe="agents", each_world=True, tokens=7)
    hf.llm.set_limit(runtime.store, universe="agents", world=ada, tokens=70)
    bob.create()
    assert (limit_of(runtime, TOKENS, ada), limit_of(runtime, TOKENS, bob)) == (70, 7)


def test_set_limit_refuses_one_world_together_with_each_world(runtime: hf.Runtime) -> None:
    with pytest.raises(Invalid):
        hf.llm.set_limit(
            runtime.store,
            universe="agents",
            world=runtime.world(ChatWorld, "ada"),
            each_world=True,
            tokens=1,
        )


def test_account_of_a_missing_world_is_not_found(runtime: hf.Runtime) -> None:
    with pytest.raises(NotFound):
        limit_of(runtime, TOKENS, runtime.world(ChatWorld, "nobody"))
