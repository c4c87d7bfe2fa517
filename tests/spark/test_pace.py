"""A rate is kept over every stretch of time, whoever asks, how often and for how much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark.pace import BURST_S, Pace

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
