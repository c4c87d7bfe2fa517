"""Spending by day and model: the days of an account add up to its spent amount."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.effects import budget, daily_costs
from holdfast.effects.budget import MONEY, TOKENS, UNIVERSE_SCOPE, Cost
from holdfast.effects.daily_costs import DAY_NS, KEPT_DAYS, MODELS_MAX, OTHER_MODELS
from holdfast.store import tuples
from holdfast.store.api import Store, Txn
from tests.simulation.source_edits import Edit, Mutant

MODULES = ("holdfast.effects.daily_costs",)
U = "u"


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def store(clock: SimClock) -> Iterator[Store]:
    with stores.open("memory:", clock=clock) as store:
        yield store


def spend(
    store: Store, amount: int, model: str = "m", world: str = "w", unit: str = TOKENS
) -> None:
    reserved = [Cost(unit, amount + 1, model)]
    answer = store.transact(budget.reserve, U, world, "call", reserved)
    assert store.transact(budget.settle, U, "call", answer.number, [Cost(unit, amount, model)])


def days(store: Store, scope: str = UNIVERSE_SCOPE) -> list[tuple[int, str, str, int]]:
    """The spending of an account: days before today, model, unit and amount."""
    today = store.now_ns() // DAY_NS
    found = store.read(daily_costs.list_days, U, scope, today - KEPT_DAYS + 1, today)
    return [(today - one.day, one.model, one.unit, one.amount) for one in found]


def differences(store: Store) -> list[str]:
    return [one.what for one in store.read(lambda txn: list(daily_costs.find_differences(txn, U)))]


def test_settlement_adds_to_the_day_of_its_model(store: Store, clock: SimClock) -> None:
    spend(store, 5)
    spend(store, 7, model="n", world="v")
    spend(store, 900, unit=MONEY)
    clock.advance(DAY_NS)
    spend(store, 2)
    assert days(store) == [
        (1, "m", MONEY, 900), (1, "m", TOKENS, 5), (1, "n", TOKENS, 7), (0, "m", TOKENS, 2),
    ]  # fmt: skip
    assert days(store, "v") == [(1, "n", TOKENS, 7)]
    assert differences(store) == []


def test_call_that_was_not_made_and_a_repeated_settlement_add_nothing(store: Store) -> None:
    answer = store.transact(budget.reserve, U, "w", "call", [Cost(TOKENS, 9, "m")])
    assert store.transact(budget.settle, U, "call", answer.number, [Cost(TOKENS, 0, "m")])
    assert not store.transact(budget.settle, U, "call", answer.number, [Cost(TOKENS, 4, "m")])
    assert days(store) == []


def test_lost_call_is_booked_in_full_under_its_model(store: Store, clock: SimClock) -> None:
    store.transact(budget.reserve, U, "w", "call", [Cost(TOKENS, 9, "m")])
    clock.advance(2)
    assert store.transact(budget.write_off, U, 1, 10) == 1
    assert days(store) == [(0, "m", TOKENS, 9)]
    assert differences(store) == []


def test_expired_days_are_removed_and_stay_in_the_sum(store: Store, clock: SimClock) -> None:
    counts = []
    for _ in range(2 * KEPT_DAYS):
        spend(store, 3)
        clock.advance(DAY_NS)
        counts.append(len(store.read(rows)))
    assert max(counts) == counts[-1] <= 2 * (KEPT_DAYS + 1)
    assert store.read(budget.account, U, UNIVERSE_SCOPE, TOKENS).spent == 6 * KEPT_DAYS
    assert differences(store) == []


def rows(txn: Txn) -> list[tuple[bytes, bytes]]:
    prefix = daily_costs.day_prefix(U)
    return txn.scan(prefix, tuples.prefix_end(prefix))


def test_models_beyond_their_maximum_are_counted_together(store: Store) -> None:
    for n in range(MODELS_MAX + 3):
        spend(store, 1, model=f"model {n:03}")
    found = days(store)
    assert len(found) == MODELS_MAX + 1
    assert (0, OTHER_MODELS, TOKENS, 3) in found
    spend(store, 1, model="x" * 500)
    assert differences(store) == []


def test_amounts_of_an_older_version_belong_to_no_day(store: Store) -> None:
    spend(store, 5)

    def age(txn: Txn) -> None:
        """Make the rows that the version before wrote."""
        for prefix in (daily_costs.day_prefix(U), daily_costs.base_prefix(U)):
            for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
                txn.delete(key)

    store.transact(age)
    assert (days(store), differences(store)) == ([], [])
    spend(store, 2)
    assert (days(store), differences(store)) == ([(0, "m", TOKENS, 2)], [])


def test_lost_day_is_found_and_its_amount_kept_by_the_rebuild(store: Store) -> None:
    spend(store, 5)
    spend(store, 7, model="n")
    store.transact(lambda txn: txn.delete(rows(txn)[0][0]))
    assert len(differences(store)) == 1
    store.transact(daily_costs.rebuild, U)
    assert differences(store) == []
    assert len(days(store)) == 1


BUGS = {
    "adds nothing to the day": Edit("effects.daily_costs:add", "txn.add(key, amount)", "pass"),
    "adds only to the universe": Edit(
        "effects.budget:_add_to_days", "for scope in (owner.world, UNIVERSE_SCOPE):", "for scope in (UNIVERSE_SCOPE,):"
    ),
    "counts days twice at expiry": Edit("effects.daily_costs:_remove_expired", "txn.delete(key)", "pass"),
    "loses the amounts of expired days": Edit("effects.daily_costs:_remove_expired", "gone.amount)", "0)"),
    "starts from the wrong base": Edit("effects.daily_costs:add", "schema.encode_int(spent)", "schema.encode_int(spent + amount)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_of_the_days_is_killed(name: str) -> None:
    clock = SimClock()
    with Mutant(name, (BUGS[name],)).planted(), pytest.raises(AssertionError):  # noqa: PT012
        with stores.open("memory:", clock=clock) as store:
            test_settlement_adds_to_the_day_of_its_model(store, clock)
        with stores.open("memory:", clock=clock) as store:
            test_expired_days_are_removed_and_stay_in_the_sum(store, clock)
