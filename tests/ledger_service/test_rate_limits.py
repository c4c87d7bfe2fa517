"""The rate limiters of the ledger service: calls per second and tokens per minute."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ledger.service.rate_limits import (
    BURST_S,
    SAVED_SHARE,
    CallRateLimiter,
    RunRateLimits,
    TokenRateLimiter,
)

S = 1_000_000_000
START = 1_700_000_000 * S

rates = st.floats(min_value=0.01, max_value=50_000)
# (elapsed ns, requested calls)
call_requests = st.lists(
    st.tuples(st.integers(min_value=0, max_value=3 * S), st.integers(min_value=1, max_value=500)),
    min_size=1,
    max_size=60,
)


@given(rates, call_requests)
def test_call_rate_limit_holds_over_every_interval_plus_one_burst(
    per_s: float, requests: list[tuple[int, int]]
) -> None:
    limiter, now = CallRateLimiter(per_s, START), START
    granted: list[tuple[int, int]] = []
    for passed, count in requests:
        now += passed
        granted.append((now, limiter.acquire(count, now)[0]))
    burst = max(per_s * BURST_S, 1.0)
    for i, (first, _) in enumerate(granted):
        total = 0
        for last, count in granted[i:]:
            total += count
            assert total <= burst + (last - first) / S * per_s + 1e-6


@given(rates, st.integers(min_value=1, max_value=300))
def test_acquire_grants_a_call_after_the_returned_wait(per_s: float, count: int) -> None:
    limiter, now = CallRateLimiter(per_s, START), START
    for _ in range(20):
        got, wait_ms = limiter.acquire(count, now)
        assert got or wait_ms >= 1
        # The wait is rounded to milliseconds and may be one too short.
        now += (wait_ms + 1) * 1_000_000
        if not got:
            assert limiter.acquire(count, now)[0] >= 1


@pytest.mark.parametrize("per_s", [0.5, 1, 7, 100, 10_000])
def test_call_rate_limiter_grants_at_least_90_percent_of_the_rate(per_s: float) -> None:
    limiter, now, total = CallRateLimiter(per_s, START), START, 0
    while now < START + 100 * S:
        got, wait_ms = limiter.acquire(1000, now)
        total += got
        now += max(wait_ms, 1) * 1_000_000
    assert 0.9 * per_s * 100 <= total <= per_s * 100 + max(per_s * BURST_S, 1)


def test_call_rate_limiter_grants_no_extra_calls_on_a_backward_clock() -> None:
    limiter = CallRateLimiter(10, START)
    assert limiter.acquire(100, START + S) == (2, 0)
    assert limiter.acquire(100, START - 3600 * S)[0] == 0
    assert limiter.acquire(100, START + S)[0] == 0


def test_acquire_grants_at_most_the_requested_calls() -> None:
    limiter = CallRateLimiter(1000, START)
    assert limiter.acquire(3, START + S)[0] == 3
    assert limiter.acquire(500, START + S)[0] == 197


# --- tokens per minute -----------------------------------------------------------------------------

limits = st.floats(min_value=100, max_value=10_000_000)
# (elapsed ns, token estimates of the requested calls)
token_requests = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=20 * S),
        st.lists(st.integers(min_value=0, max_value=5000), min_size=1, max_size=20),
    ),
    min_size=1,
    max_size=40,
)


@given(limits, token_requests)
def test_token_rate_limit_holds_per_minute_plus_one_large_call(
    per_min: float, requests: list[tuple[int, list[int]]]
) -> None:
    limiter, now = TokenRateLimiter(per_min, START), START
    started: list[tuple[int, int]] = []
    for passed, estimates in requests:
        now += passed
        count, wait_ms = limiter.acquire(estimates, now)
        assert 1 <= count <= len(estimates)
        started.append((now + wait_ms * 1_000_000, sum(estimates[:count])))
    # Calls start in the order of their requests, apart from the rounding of waits.
    assert all(after - before >= -1_000_000 for (before, _), (after, _) in pairwise(started))
    largest = max(estimate for _, estimates in requests for estimate in estimates)
    bound = per_min + max(largest - per_min * SAVED_SHARE, 0) + 1
    for i, (first, _) in enumerate(started):
        assert sum(estimate for at, estimate in started[i:] if at - first < 60 * S) <= bound


def test_settle_delays_later_calls_by_the_tokens_used() -> None:
    limiter = TokenRateLimiter(60_000, START)
    now = START + 60 * S
    assert limiter.acquire([1000], now) == (1, 0)
    limiter.settle(estimated=1000, used=60_000)
    _, wait_ms = limiter.acquire([1000], now)
    # The debt is 58,000 tokens, including this call. The refill is 950 tokens per second.
    assert wait_ms == math.ceil(58_000 / 950 * 1000)
    limiter.settle(estimated=1000, used=0)
    assert limiter.acquire([1000], now)[1] == wait_ms


def test_token_limiter_restart_keeps_debt_and_drops_savings() -> None:
    saved = TokenRateLimiter(60_000, START, (2500.0, START - 3600 * S))
    assert saved.acquire([1], START)[1] > 0
    owed = TokenRateLimiter(60_000, START + 2 * S, (-9500.0, START))
    assert owed.acquire([950], START + 2 * S) == (1, 9_000)


def test_token_limiter_grants_at_least_93_percent_of_the_limit() -> None:
    limiter, now, total = TokenRateLimiter(60_000, START), START, 0
    while now < START + 600 * S:
        count, wait_ms = limiter.acquire([700] * 8, now)
        now += wait_ms * 1_000_000
        total += 700 * count
    assert 0.93 * 600_000 <= total <= 600_000


def test_calls_refused_for_tokens_are_refunded_to_the_call_rate() -> None:
    both = RunRateLimits(100, 60_000, START)
    now = START + 60 * S
    # The call rate allows 20 calls, the token rate 3. The limiter refunds 17 calls.
    assert both.acquire(50, [1000] * 50, now) == (3, 0)
    assert both.acquire(50, [0] * 50, now) == (17, 0)
