"""The budget ledger: reservations before a call, settlement after it, no overspending by concurrent
callers."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.effects import budget
from holdfast.effects.budget import (
    DEFAULT_SCOPE,
    MONEY,
    TOKENS,
    UNIVERSE_SCOPE,
    BudgetAccount,
    Cost,
    ReservationResult,
)
from holdfast.errors import Invalid
from holdfast.store import schema, tuples
from holdfast.store.api import Store

MODULES = ("holdfast.effects.budget",)

U = "u"


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def store(clock: SimClock) -> Iterator[Store]:
    with stores.open("memory:", clock=clock) as store:
        yield store


def set_limit(
    store: Store, amount: int | None, scope: str = UNIVERSE_SCOPE, unit: str = TOKENS
) -> None:
    store.transact(budget.set_limit, U, scope, unit, amount)


def reserve(
    store: Store, key: str, amount: int, world: str = "w", unit: str = TOKENS
) -> ReservationResult:
    answer: ReservationResult = store.transact(budget.reserve, U, world, key, [Cost(unit, amount)])
    return answer


def settle(store: Store, key: str, number: int, amount: int, unit: str = TOKENS) -> bool:
    settled: bool = store.transact(budget.settle, U, key, number, [Cost(unit, amount)])
    return settled


def account_of(store: Store, scope: str = UNIVERSE_SCOPE, unit: str = TOKENS) -> BudgetAccount:
    return store.read(budget.account, U, scope, unit)


def test_reservation_without_a_limit_is_granted_and_counted(store: Store) -> None:
    answer = reserve(store, "a", 100)
    assert account_of(store) == account_of(store, "w") == BudgetAccount(0, 100, None)
    assert settle(store, "a", answer.number, 40)
    assert account_of(store) == account_of(store, "w") == BudgetAccount(40, 0, None)


def test_reservation_above_the_limit_is_refused(store: Store) -> None:
    set_limit(store, 100)
    assert reserve(store, "a", 60).granted
    refused = reserve(store, "b", 41)
    assert (refused.granted, refused.scope, refused.unit) == (False, UNIVERSE_SCOPE, TOKENS)
    assert refused.account == account_of(store) == BudgetAccount(0, 60, 100)
    assert reserve(store, "c", 40).granted


def test_refused_reservation_reports_whether_settlements_can_free_budget(store: Store) -> None:
    set_limit(store, 100)
    reserve(store, "a", 60)
    assert reserve(store, "b", 100).retry_later
    assert not reserve(store, "c", 101).retry_later


def test_settle_releases_the_unspent_amount(store: Store) -> None:
    set_limit(store, 100)
    settle(store, "a", reserve(store, "a", 100).number, 30)
    assert account_of(store) == BudgetAccount(30, 0, 100)
    assert reserve(store, "b", 70).granted


def test_settle_with_zero_releases_the_reservation(store: Store) -> None:
    settle(store, "a", reserve(store, "a", 100).number, 0)
    assert account_of(store) == BudgetAccount(0, 0, None)


def test_repeated_reservation_is_idempotent_while_open(store: Store) -> None:
    set_limit(store, 100)
    first, again = reserve(store, "a", 100), reserve(store, "a", 100)
    assert first == again
    assert account_of(store).reserved == 100


def reserve_for(
    store: Store, claim: int, expiries: int = 0, amount: int = 100
) -> ReservationResult:
    charges = [Cost(TOKENS, amount)]
    answer: ReservationResult = store.transact(
        budget.reserve, U, "w", "a", charges, claim, expiries
    )
    return answer


def test_reservation_survives_release_of_its_claim(store: Store) -> None:
    set_limit(store, 100)
    assert reserve_for(store, 1) == reserve_for(store, 2)
    assert account_of(store) == BudgetAccount(0, 100, 100)


def test_reservation_of_an_expired_claim_is_written_off_and_renewed(
    store: Store,
) -> None:
    first, second = reserve_for(store, 1), reserve_for(store, 2, expiries=1)
    assert second.granted
    assert second.number > first.number
    assert account_of(store) == BudgetAccount(100, 100, None)
    assert not settle(store, "a", first.number, 30)
    assert settle(store, "a", second.number, 30)
    assert account_of(store) == BudgetAccount(130, 0, None)


def test_written_off_reservation_may_exhaust_the_limit(store: Store) -> None:
    set_limit(store, 199)
    reserve_for(store, 1)
    refused = reserve_for(store, 2, expiries=1)
    assert (refused.granted, refused.retry_later) == (False, False)
    assert account_of(store) == BudgetAccount(100, 0, 199)


@pytest.mark.parametrize(("bill", "booked"), [([Cost(TOKENS, 30)], 30), ([], 0), (None, 100)])
def test_settle_after_loss_settles_an_open_reservation(
    store: Store, bill: list[Cost] | None, booked: int
) -> None:
    reserve_for(store, 1)
    assert store.transact(budget.settle_after_loss, U, "a", 1, bill)
    assert not store.transact(budget.settle_after_loss, U, "a", 1, bill)
    assert account_of(store) == BudgetAccount(booked, 0, None)


@pytest.mark.parametrize("bill", [[Cost(TOKENS, 30)], None])
@pytest.mark.parametrize("expiries", [0, 1])
def test_settle_after_loss_ignores_a_reservation_of_another_claim(
    store: Store, bill: list[Cost] | None, expiries: int
) -> None:
    reserve_for(store, 1)
    reserve_for(store, 2, expiries)
    assert not store.transact(budget.settle_after_loss, U, "a", 1, bill)
    assert account_of(store) == BudgetAccount(100 * expiries, 100, None)


def test_settle_twice_books_once(store: Store) -> None:
    answer = reserve(store, "a", 100)
    assert settle(store, "a", answer.number, 30)
    assert not settle(store, "a", answer.number, 30)
    assert account_of(store).spent == 30


def test_late_settle_does_not_settle_the_next_reservation(
    store: Store,
) -> None:
    first = reserve(store, "a", 100)
    settle(store, "a", first.number, 30)
    second = reserve(store, "a", 100)
    assert not settle(store, "a", first.number, 30)
    assert account_of(store) == BudgetAccount(30, 100, None)
    assert settle(store, "a", second.number, 20)
    assert account_of(store) == BudgetAccount(50, 0, None)


def test_cost_above_its_bound_is_booked_in_full(store: Store) -> None:
    set_limit(store, 100)
    settle(store, "a", reserve(store, "a", 100).number, 130)
    assert account_of(store) == BudgetAccount(130, 0, 100)
    assert not reserve(store, "b", 0).granted


def test_world_uses_its_own_limit_or_the_default(store: Store) -> None:
    set_limit(store, 10, DEFAULT_SCOPE)
    set_limit(store, 50, "rich")
    assert not reserve(store, "a", 11, world="poor").granted
    assert reserve(store, "b", 10, world="poor").granted
    assert reserve(store, "c", 50, world="rich").granted
    refused = reserve(store, "d", 1, world="poor")
    assert refused.scope == "poor"


def test_worlds_share_the_limit_of_their_universe(store: Store) -> None:
    set_limit(store, 100)
    assert reserve(store, "a", 60, world="one").granted
    assert not reserve(store, "b", 60, world="two").granted
    assert account_of(store, "two") == BudgetAccount(0, 0, None)


def test_money_and_tokens_are_reserved_atomically(store: Store) -> None:
    set_limit(store, 5, unit=MONEY)
    both = [Cost(TOKENS, 10), Cost(MONEY, 6)]
    answer = store.transact(budget.reserve, U, "w", "a", both)
    assert (answer.granted, answer.unit) == (False, MONEY)
    assert account_of(store) == BudgetAccount(0, 0, None)


def test_budgets_of_universes_are_independent(store: Store) -> None:
    set_limit(store, 1)
    assert store.transact(budget.reserve, "other", "w", "a", [Cost(TOKENS, 9)]).granted


def test_limit_can_be_lowered_below_the_spent_amount_and_removed(store: Store) -> None:
    settle(store, "a", reserve(store, "a", 100).number, 100)
    set_limit(store, 50)
    assert not reserve(store, "b", 1).granted
    set_limit(store, None)
    assert reserve(store, "b", 1).granted


def test_unsettled_reservation_is_written_off_as_spent(store: Store, clock: SimClock) -> None:
    reserve(store, "old", 30)
    clock.advance(9 * S)
    young = reserve(store, "young", 5)
    assert store.transact(budget.write_off, U, 10 * S, 100) == 0
    clock.advance(2 * S)
    assert store.transact(budget.write_off, U, 10 * S, 100) == 1
    assert account_of(store) == BudgetAccount(30, 5, None)
    assert settle(store, "young", young.number, 5)


def test_settled_reservation_leaves_no_row(store: Store) -> None:
    def rows() -> int:
        prefix = schema.key_prefix(schema.Space.APP_STATE, "budget", U)
        return len(store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))

    settle(store, "a", reserve(store, "a", 1).number, 1)
    before = rows()
    for n in range(20):
        settle(store, f"k{n}", reserve(store, f"k{n}", 1).number, 1)
    assert rows() == before


@pytest.mark.parametrize(
    "charges",
    [[], [Cost("shells", 1)], [Cost(TOKENS, -1)], [Cost(TOKENS, 1 << 61)],
     [Cost(TOKENS, 1), Cost(TOKENS, 1)]],
)  # fmt: skip
def test_invalid_costs_are_refused(store: Store, charges: list[Cost]) -> None:
    with pytest.raises(Invalid):
        store.transact(budget.reserve, U, "w", "a", charges)
    assert account_of(store) == BudgetAccount(0, 0, None)


def test_clients_of_the_embedded_store_share_a_budget(tmp_path: Path) -> None:
    with stores.open(str(tmp_path)) as store, stores.open(str(tmp_path)) as other:
        set_limit(store, 10)
        futures = [
            (store, other)[n % 2].submit(budget.reserve, U, "w", f"k{n}", [Cost(TOKENS, 3)])
            for n in range(20)
        ]
        granted = [answer for answer in (future.result(30) for future in futures) if answer.granted]
        assert len(granted) == 3
        assert account_of(other) == BudgetAccount(0, 9, 10)


STEP = st.tuples(
    st.sampled_from(["reserve", "settle", "release", "lapse", "again"]),
    st.sampled_from(["one", "two"]),
    st.integers(0, 9),
    st.integers(0, 60),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 120), st.integers(0, 80), st.lists(STEP, max_size=60))
def test_no_order_of_operations_exceeds_the_budget(
    total: int, each: int, steps: list[tuple[str, str, int, int]]
) -> None:
    """Compare with a model: the sums of open and settled reservations per scope."""
    with stores.open("memory:", clock=SimClock()) as store:
        set_limit(store, total)
        set_limit(store, each, DEFAULT_SCOPE)
        opened: dict[str, tuple[str, int, int]] = {}
        spent = {"one": 0, "two": 0}
        for what, world, n, amount in steps:
            key = f"{world}-{n}"
            if what == "reserve":
                answer = reserve(store, key, amount, world)
                if answer.granted and key not in opened:
                    opened[key] = (world, answer.number, amount)
            elif what == "again" and key in opened:
                assert reserve(store, key, amount, world).number == opened[key][1]
            elif what in ("settle", "release") and key in opened:
                world, number, reserved_amount = opened.pop(key)
                actual = min(amount, reserved_amount) if what == "settle" else 0
                assert settle(store, key, number, actual)
                spent[world] += actual
            elif what == "lapse" and n == 0:
                store.transact(budget.write_off, U, 0, 100)
                # Store time may not have advanced, so a reservation made now may not be old enough.
                left = {k: v for k, v in opened.items() if _is_open(store, k)}
                for gone in opened.keys() - left.keys():
                    spent[opened[gone][0]] += opened[gone][2]
                opened = left
            reserved = {w: sum(a for x, _, a in opened.values() if x == w) for w in spent}
            for scope in spent:
                assert account_of(store, scope) == BudgetAccount(
                    spent[scope], reserved[scope], each
                )
                assert spent[scope] + reserved[scope] <= each
            assert account_of(store) == BudgetAccount(
                sum(spent.values()), sum(reserved.values()), total
            )
            assert sum(spent.values()) + sum(reserved.values()) <= total


def _is_open(store: Store, key: str) -> bool:
    return store.read(budget.reservation, U, key) is not None


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 300), st.lists(st.integers(1, 40), min_size=8, max_size=40))
def test_concurrent_reservations_never_exceed_the_budget(total: int, costs: list[int]) -> None:
    with stores.open("memory:") as store:
        set_limit(store, total)
        over: list[BudgetAccount] = []
        granted: list[int] = []

        def spend(mine: list[tuple[int, int]]) -> None:
            for at, cost in mine:
                answer = reserve(store, f"k{at}", cost, world=f"w{at % 3}")
                seen = account_of(store)
                if seen.spent + seen.reserved > total:
                    over.append(seen)
                if answer.granted:
                    granted.append(cost - 1)
                    settle(store, f"k{at}", answer.number, cost - 1)

        shares = [list(enumerate(costs))[n::4] for n in range(4)]
        threads = [threading.Thread(target=spend, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert over == []
        assert account_of(store) == BudgetAccount(sum(granted), 0, total)
