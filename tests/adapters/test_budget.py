"""The budget ledger: reserved before, settled after, never overspent by whoever asks at once."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.effects import budget
from holdfast.effects.budget import EACH, MONEY, TOKENS, UNIVERSE, Account, Answer, Charge
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


def limit(store: Store, amount: int | None, scope: str = UNIVERSE, unit: str = TOKENS) -> None:
    store.transact(budget.limit, U, scope, unit, amount)


def reserve(store: Store, key: str, amount: int, world: str = "w", unit: str = TOKENS) -> Answer:
    answer: Answer = store.transact(budget.reserve, U, world, key, [Charge(unit, amount)])
    return answer


def settle(store: Store, key: str, number: int, amount: int, unit: str = TOKENS) -> bool:
    settled: bool = store.transact(budget.settle, U, key, number, [Charge(unit, amount)])
    return settled


def standing(store: Store, scope: str = UNIVERSE, unit: str = TOKENS) -> Account:
    return store.read(budget.account, U, scope, unit)


def test_without_a_limit_all_is_granted_and_counted(store: Store) -> None:
    answer = reserve(store, "a", 100)
    assert standing(store) == standing(store, "w") == Account(0, 100, None)
    assert settle(store, "a", answer.number, 40)
    assert standing(store) == standing(store, "w") == Account(40, 0, None)


def test_what_does_not_fit_is_refused_and_reserves_nothing(store: Store) -> None:
    limit(store, 100)
    assert reserve(store, "a", 60).granted
    refused = reserve(store, "b", 41)
    assert (refused.granted, refused.scope, refused.unit) == (False, UNIVERSE, TOKENS)
    assert refused.account == standing(store) == Account(0, 60, 100)
    assert reserve(store, "c", 40).granted


def test_a_refusal_says_whether_settlements_could_make_room(store: Store) -> None:
    limit(store, 100)
    reserve(store, "a", 60)
    assert reserve(store, "b", 100).later
    assert not reserve(store, "c", 101).later


def test_settling_gives_back_what_was_not_spent(store: Store) -> None:
    limit(store, 100)
    settle(store, "a", reserve(store, "a", 100).number, 30)
    assert standing(store) == Account(30, 0, 100)
    assert reserve(store, "b", 70).granted


def test_a_call_that_was_never_made_is_released_by_settling_nothing(store: Store) -> None:
    settle(store, "a", reserve(store, "a", 100).number, 0)
    assert standing(store) == Account(0, 0, None)


def test_asking_again_while_it_is_open_reserves_nothing_twice(store: Store) -> None:
    limit(store, 100)
    first, again = reserve(store, "a", 100), reserve(store, "a", 100)
    assert first == again
    assert standing(store).reserved == 100


def reserve_for(store: Store, claim: int, expiries: int = 0, amount: int = 100) -> Answer:
    charges = [Charge(TOKENS, amount)]
    answer: Answer = store.transact(budget.reserve, U, "w", "a", charges, claim, expiries)
    return answer


def test_asked_for_again_after_its_claim_was_given_back_it_is_the_same(store: Store) -> None:
    limit(store, 100)
    assert reserve_for(store, 1) == reserve_for(store, 2)
    assert standing(store) == Account(0, 100, 100)


def test_asked_for_again_after_its_claim_expired_it_is_booked_in_full_and_made_anew(
    store: Store,
) -> None:
    first, second = reserve_for(store, 1), reserve_for(store, 2, expiries=1)
    assert second.granted
    assert second.number > first.number
    assert standing(store) == Account(100, 100, None)
    assert not settle(store, "a", first.number, 30)
    assert settle(store, "a", second.number, 30)
    assert standing(store) == Account(130, 0, None)


def test_what_the_dead_have_spent_may_leave_no_room_for_another_call(store: Store) -> None:
    limit(store, 199)
    reserve_for(store, 1)
    refused = reserve_for(store, 2, expiries=1)
    assert (refused.granted, refused.later) == (False, False)
    assert standing(store) == Account(100, 0, 199)


@pytest.mark.parametrize(("bill", "booked"), [([Charge(TOKENS, 30)], 30), ([], 0), (None, 100)])
def test_whoever_lost_a_claim_settles_what_is_still_open_for_it(
    store: Store, bill: list[Charge] | None, booked: int
) -> None:
    reserve_for(store, 1)
    assert store.transact(budget.book_late, U, "a", 1, bill)
    assert not store.transact(budget.book_late, U, "a", 1, bill)
    assert standing(store) == Account(booked, 0, None)


@pytest.mark.parametrize("bill", [[Charge(TOKENS, 30)], None])
@pytest.mark.parametrize("expiries", [0, 1])
def test_whoever_lost_a_claim_settles_nothing_that_is_anothers(
    store: Store, bill: list[Charge] | None, expiries: int
) -> None:
    reserve_for(store, 1)
    reserve_for(store, 2, expiries)
    assert not store.transact(budget.book_late, U, "a", 1, bill)
    assert standing(store) == Account(100 * expiries, 100, None)


def test_settling_twice_books_once(store: Store) -> None:
    answer = reserve(store, "a", 100)
    assert settle(store, "a", answer.number, 30)
    assert not settle(store, "a", answer.number, 30)
    assert standing(store).spent == 30


def test_a_repeated_call_is_another_bill_and_a_late_answer_settles_only_its_own(
    store: Store,
) -> None:
    first = reserve(store, "a", 100)
    settle(store, "a", first.number, 30)
    second = reserve(store, "a", 100)
    assert not settle(store, "a", first.number, 30)
    assert standing(store) == Account(30, 100, None)
    assert settle(store, "a", second.number, 20)
    assert standing(store) == Account(50, 0, None)


def test_a_call_that_cost_more_than_its_bound_is_booked_in_full(store: Store) -> None:
    limit(store, 100)
    settle(store, "a", reserve(store, "a", 100).number, 130)
    assert standing(store) == Account(130, 0, 100)
    assert not reserve(store, "b", 0).granted


def test_a_world_has_its_own_limit_or_that_of_each(store: Store) -> None:
    limit(store, 10, EACH)
    limit(store, 50, "rich")
    assert not reserve(store, "a", 11, world="poor").granted
    assert reserve(store, "b", 10, world="poor").granted
    assert reserve(store, "c", 50, world="rich").granted
    refused = reserve(store, "d", 1, world="poor")
    assert refused.scope == "poor"


def test_worlds_share_the_limit_of_their_universe(store: Store) -> None:
    limit(store, 100)
    assert reserve(store, "a", 60, world="one").granted
    assert not reserve(store, "b", 60, world="two").granted
    assert standing(store, "two") == Account(0, 0, None)


def test_money_and_tokens_are_reserved_together_or_not_at_all(store: Store) -> None:
    limit(store, 5, unit=MONEY)
    both = [Charge(TOKENS, 10), Charge(MONEY, 6)]
    answer = store.transact(budget.reserve, U, "w", "a", both)
    assert (answer.granted, answer.unit) == (False, MONEY)
    assert standing(store) == Account(0, 0, None)


def test_universes_have_nothing_to_do_with_each_other(store: Store) -> None:
    limit(store, 1)
    assert store.transact(budget.reserve, "other", "w", "a", [Charge(TOKENS, 9)]).granted


def test_a_limit_can_be_lowered_below_what_is_spent_and_lifted(store: Store) -> None:
    settle(store, "a", reserve(store, "a", 100).number, 100)
    limit(store, 50)
    assert not reserve(store, "b", 1).granted
    limit(store, None)
    assert reserve(store, "b", 1).granted


def test_a_reservation_that_nobody_settled_lapses_into_spent(store: Store, clock: SimClock) -> None:
    reserve(store, "old", 30)
    clock.advance(9 * S)
    young = reserve(store, "young", 5)
    assert store.transact(budget.lapse, U, 10 * S, 100) == 0
    clock.advance(2 * S)
    assert store.transact(budget.lapse, U, 10 * S, 100) == 1
    assert standing(store) == Account(30, 5, None)
    assert settle(store, "young", young.number, 5)


def test_what_is_settled_leaves_no_row_of_its_own(store: Store) -> None:
    def rows() -> int:
        prefix = schema.prefix(schema.Space.APP_STATE, "budget", U)
        return len(store.read(lambda txn: txn.scan(prefix, tuples.after(prefix))))

    settle(store, "a", reserve(store, "a", 1).number, 1)
    before = rows()
    for n in range(20):
        settle(store, f"k{n}", reserve(store, f"k{n}", 1).number, 1)
    assert rows() == before


@pytest.mark.parametrize(
    "charges",
    [[], [Charge("shells", 1)], [Charge(TOKENS, -1)], [Charge(TOKENS, 1 << 61)],
     [Charge(TOKENS, 1), Charge(TOKENS, 1)]],
)  # fmt: skip
def test_charges_that_are_none_are_invalid(store: Store, charges: list[Charge]) -> None:
    with pytest.raises(Invalid):
        store.transact(budget.reserve, U, "w", "a", charges)
    assert standing(store) == Account(0, 0, None)


def test_clients_of_the_embedded_store_share_a_budget(tmp_path: Path) -> None:
    with stores.open(str(tmp_path)) as store, stores.open(str(tmp_path)) as other:
        limit(store, 10)
        futures = [
            (store, other)[n % 2].submit(budget.reserve, U, "w", f"k{n}", [Charge(TOKENS, 3)])
            for n in range(20)
        ]
        granted = [answer for answer in (future.result(30) for future in futures) if answer.granted]
        assert len(granted) == 3
        assert standing(other) == Account(0, 9, 10)


STEP = st.tuples(
    st.sampled_from(["reserve", "settle", "release", "lapse", "again"]),
    st.sampled_from(["one", "two"]),
    st.integers(0, 9),
    st.integers(0, 60),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 120), st.integers(0, 80), st.lists(STEP, max_size=60))
def test_no_order_of_steps_exceeds_a_budget(
    total: int, each: int, steps: list[tuple[str, str, int, int]]
) -> None:
    """Against a model: the sums of what is open and of what was settled, per scope."""
    with stores.open("memory:", clock=SimClock()) as store:
        limit(store, total)
        limit(store, each, EACH)
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
                world, number, most = opened.pop(key)
                actual = min(amount, most) if what == "settle" else 0
                assert settle(store, key, number, actual)
                spent[world] += actual
            elif what == "lapse" and n == 0:
                store.transact(budget.lapse, U, 0, 100)
                # Store time may not have moved: what was reserved now is not older than that.
                left = {k: v for k, v in opened.items() if _open(store, k)}
                for gone in opened.keys() - left.keys():
                    spent[opened[gone][0]] += opened[gone][2]
                opened = left
            reserved = {w: sum(a for x, _, a in opened.values() if x == w) for w in spent}
            for scope in spent:
                assert standing(store, scope) == Account(spent[scope], reserved[scope], each)
                assert spent[scope] + reserved[scope] <= each
            assert standing(store) == Account(sum(spent.values()), sum(reserved.values()), total)
            assert sum(spent.values()) + sum(reserved.values()) <= total


def _open(store: Store, key: str) -> bool:
    return store.read(budget.reservation, U, key) is not None


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 300), st.lists(st.integers(1, 40), min_size=8, max_size=40))
def test_callers_at_the_same_time_never_exceed_the_budget(total: int, costs: list[int]) -> None:
    with stores.open("memory:") as store:
        limit(store, total)
        over: list[Account] = []
        granted: list[int] = []

        def spend(mine: list[tuple[int, int]]) -> None:
            for at, cost in mine:
                answer = reserve(store, f"k{at}", cost, world=f"w{at % 3}")
                seen = standing(store)
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
        assert standing(store) == Account(sum(granted), 0, total)
