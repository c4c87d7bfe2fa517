"""The claim demand of a runner as tables: state of the runner in, claim and sleep out."""

from __future__ import annotations

import pytest

from holdfast.clock import MS, S
from holdfast.runner.demand import (
    BACKOFF_FIRST_MS,
    ClaimDemand,
    ClaimPlan,
    claim_capacity,
    idle_ns,
)
from holdfast.runner.policy import RunnerPolicy

MODULES = ("holdfast.runner.demand",)

NOW_NS = 100 * S
LONGEST_NS = 1 * S
FIRST_NS = BACKOFF_FIRST_MS * MS

# -- how many --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocked", "rate_limited", "executor_capacity", "concurrency", "expected"),
    [
        # Handlers run in the tick: a batch.
        (False, None, None, None, 32),
        # Before the executor is created, and with it.
        (False, None, None, 4, 4),
        (False, None, 7, 4, 7),
        (False, None, 0, 4, 0),
        (False, None, -2, 4, -2),
        # Rate-limited items wait outside the executor and are part of the batch.
        (False, 0, 7, 4, 32),
        (False, 30, 7, 4, 2),
        (False, 32, None, None, 0),
        # While isolation is requested nothing is claimed.
        (True, None, None, None, 0),
        (True, None, 7, 4, 0),
        (True, 0, 7, 4, 0),
    ],
)
def test_capacity_of_a_runner(
    blocked: bool,
    rate_limited: int | None,
    executor_capacity: int | None,
    concurrency: int | None,
    expected: int,
) -> None:
    found = claim_capacity(
        blocked=blocked,
        max_batch=32,
        rate_limited=rate_limited,
        executor_capacity=executor_capacity,
        concurrency=concurrency,
    )
    assert found == expected


@pytest.mark.parametrize(
    ("limit", "share", "reserved"),
    [
        (32, 0.25, [8, 8, 8, 8]),
        (4, 0.25, [1, 1, 1, 1]),
        # Fractions add up over successive claims.
        (1, 0.25, [0, 0, 1, 0]),
        (2, 0.25, [1, 0, 1, 0]),
        (1, 0.5, [1, 0, 1, 0]),
    ],
)
def test_successive_claims_reserve_slots_for_timers(
    limit: int, share: float, reserved: list[int]
) -> None:
    demand, policy = ClaimDemand(), RunnerPolicy(timer_share=share)
    plans = [demand.plan(limit, policy, 3) for _ in reserved]
    assert plans == [ClaimPlan(limit, count, 3) for count in reserved]


# -- how long --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("due_ns", "throttled_ns", "expected"),
    [
        (None, None, LONGEST_NS),
        (None, 5 * MS, LONGEST_NS),
        # 0 means due now.
        (0, None, 0),
        (NOW_NS - 1, None, 0),
        (NOW_NS, None, 0),
        (NOW_NS + 5 * MS, None, 5 * MS),
        (NOW_NS + 5 * S, None, LONGEST_NS),
        # A due item waits for the rate limit.
        (0, 7 * MS, 7 * MS),
        (NOW_NS + 5 * MS, 7 * MS, 7 * MS),
        (NOW_NS + 5 * MS, 2 * MS, 5 * MS),
        (NOW_NS, 0, 0),
        (NOW_NS, 5 * S, LONGEST_NS),
    ],
)
def test_time_until_an_item_can_start(
    due_ns: int | None, throttled_ns: int | None, expected: int
) -> None:
    found = idle_ns(NOW_NS, due_ns=due_ns, throttled_ns=throttled_ns, longest_ns=LONGEST_NS)
    assert found == expected


@pytest.mark.parametrize("made_progress", [False, True])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("can_claim", [False, True])
def test_tick_with_progress_and_room_is_repeated_at_once(
    made_progress: bool, busy: bool, can_claim: bool
) -> None:
    found = ClaimDemand().repeats_at_once(
        made_progress=made_progress, busy=busy, can_claim=can_claim
    )
    assert found is (made_progress and not busy and can_claim)


# Each step: (busy, time until the next item) and the sleep that follows.
IDLE = (False, 300 * MS)
DUE = (False, 0)
BUSY = (True, 300 * MS)


@pytest.mark.parametrize(
    ("ticks", "sleeps_ns"),
    [
        ([IDLE, IDLE], [300 * MS, 300 * MS]),
        # An item fell due after the tick: one tick without a sleep, then the backoff.
        ([DUE, IDLE], [0, 300 * MS]),
        ([DUE, DUE, DUE, DUE], [0, FIRST_NS, 0, 2 * FIRST_NS]),
        ([DUE, IDLE, DUE], [0, 300 * MS, 0]),
        # The backoff doubles up to the longest sleep.
        ([BUSY] * 4, [FIRST_NS, 2 * FIRST_NS, 4 * FIRST_NS, 8 * FIRST_NS]),
        ([(True, 0)] * 2, [FIRST_NS, 2 * FIRST_NS]),
        ([BUSY] * 40, [min(FIRST_NS << n, LONGEST_NS) for n in range(40)]),
        ([BUSY, BUSY, IDLE, BUSY], [FIRST_NS, 2 * FIRST_NS, 300 * MS, FIRST_NS]),
        ([DUE, BUSY, DUE], [0, FIRST_NS, 0]),
    ],
)
def test_sleep_after_fruitless_ticks(ticks: list[tuple[bool, int]], sleeps_ns: list[int]) -> None:
    demand = ClaimDemand()
    found = [
        demand.sleep_ns(busy=busy, idle_ns=until_due_ns, longest_ns=LONGEST_NS)
        for busy, until_due_ns in ticks
    ]
    assert found == sleeps_ns


def test_repeated_tick_resets_the_backoff() -> None:
    demand = ClaimDemand()
    for _ in range(3):
        demand.sleep_ns(busy=True, idle_ns=0, longest_ns=LONGEST_NS)
    assert demand.repeats_at_once(made_progress=True, busy=False, can_claim=True)
    assert demand.sleep_ns(busy=True, idle_ns=0, longest_ns=LONGEST_NS) == FIRST_NS
