"""A rate is kept over every stretch of time, whoever asks, how often and for how much."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ledger.service.pace import BURST_S, SAVED_SHARE, Limits, Pace, TokenPace

S = 1_000_000_000
START = 1_700_000_000 * S

rates = st.floats(min_value=0.01, max_value=50_000)
# (time that passes, calls that are asked for)
asked = st.lists(
    st.tuples(st.integers(min_value=0, max_value=3 * S), st.integers(min_value=1, max_value=500)),
    min_size=1,
    max_size=60,
)


@given(rates, asked)
def test_no_stretch_of_time_sees_more_calls_than_the_rate_and_one_burst(
    per_s: float, asks: list[tuple[int, int]]
) -> None:
    pace, now = Pace(per_s, START), START
    given_at: list[tuple[int, int]] = []
    for passed, count in asks:
        now += passed
        given_at.append((now, pace.take(count, now)[0]))
    burst = max(per_s * BURST_S, 1.0)
    for i, (first, _) in enumerate(given_at):
        total = 0
        for last, count in given_at[i:]:
            total += count
            assert total <= burst + (last - first) / S * per_s + 1e-6


@given(rates, st.integers(min_value=1, max_value=300))
def test_who_waits_as_long_as_told_is_given_something(per_s: float, count: int) -> None:
    pace, now = Pace(per_s, START), START
    for _ in range(20):
        got, wait_ms = pace.take(count, now)
        assert got or wait_ms >= 1
        # It may be told a millisecond early: then it is told again.
        now += (wait_ms + 1) * 1_000_000
        if not got:
            assert pace.take(count, now)[0] >= 1


@pytest.mark.parametrize("per_s", [0.5, 1, 7, 100, 10_000])
def test_over_a_long_time_nearly_all_of_the_rate_is_given(per_s: float) -> None:
    pace, now, total = Pace(per_s, START), START, 0
    while now < START + 100 * S:
        got, wait_ms = pace.take(1000, now)
        total += got
        now += max(wait_ms, 1) * 1_000_000
    assert 0.9 * per_s * 100 <= total <= per_s * 100 + max(per_s * BURST_S, 1)


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    pace = Pace(10, START)
    assert pace.take(100, START + S) == (2, 0)
    assert pace.take(100, START - 3600 * S)[0] == 0
    assert pace.take(100, START + S)[0] == 0


def test_nobody_is_given_more_than_is_asked_for() -> None:
    pace = Pace(1000, START)
    assert pace.take(3, START + S)[0] == 3
    assert pace.take(500, START + S)[0] == 197


# --- tokens a minute -------------------------------------------------------------------------------

limits = st.floats(min_value=100, max_value=10_000_000)
# (time that passes, the estimates of the calls that are asked for)
priced = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=20 * S),
        st.lists(st.integers(min_value=0, max_value=5000), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=40,
)


@given(limits, priced)
def test_by_estimates_no_minute_holds_more_than_its_tokens_and_one_large_call(
    per_min: float, asks: list[tuple[int, list[int]]]
) -> None:
    pace, now = TokenPace(per_min, START), START
    started: list[tuple[int, int]] = []
    for passed, prices in asks:
        now += passed
        count, wait_ms = pace.take(prices, now)
        assert 1 <= count <= len(prices)
        started.append((now + wait_ms * 1_000_000, sum(prices[:count])))
    # By the order of asking: none starts before an earlier one, but for the rounding of a wait.
    assert all(after - before >= -1_000_000 for (before, _), (after, _) in pairwise(started))
    largest = max(price for _, prices in asks for price in prices)
    bound = per_min + max(largest - per_min * SAVED_SHARE, 0) + 1
    for i, (first, _) in enumerate(started):
        assert sum(price for at, price in started[i:] if at - first < 60 * S) <= bound


def test_what_calls_really_used_holds_back_those_that_come() -> None:
    pace = TokenPace(60_000, START)
    now = START + 60 * S
    assert pace.take([1000], now) == (1, 0)
    pace.settle(priced=1000, used=60_000)
    _, wait_ms = pace.take([1000], now)
    # 58,000 are owed, and 1,000 are wanted, at 950 a second.
    assert wait_ms == math.ceil(58_000 / 950 * 1000)
    pace.settle(priced=1000, used=0)
    assert pace.take([1000], now)[1] == wait_ms


def test_a_restart_keeps_what_is_owed_and_nothing_that_was_saved() -> None:
    saved = TokenPace(60_000, START, (2500.0, START - 3600 * S))
    assert saved.take([1], START)[1] > 0
    owed = TokenPace(60_000, START + 2 * S, (-9500.0, START))
    assert owed.take([950], START + 2 * S) == (1, 9_000)


def test_a_long_line_of_calls_gets_nearly_all_of_the_limit() -> None:
    pace, now, total = TokenPace(60_000, START), START, 0
    while now < START + 600 * S:
        count, wait_ms = pace.take([700] * 8, now)
        now += wait_ms * 1_000_000
        total += 700 * count
    assert 0.93 * 600_000 <= total <= 600_000


def test_calls_beyond_the_tokens_keep_their_share_of_the_rate() -> None:
    both = Limits(100, 60_000, START)
    now = START + 60 * S
    # Of 20 calls that the rate has room for, the tokens have room for 3: 17 go back.
    assert both.take(50, [1000] * 50, now) == (3, 0)
    assert both.take(50, [0] * 50, now) == (17, 0)
