"""The claim demand of a runner: how many items it claims, from the queue and from timers, and how long it
sleeps.

`ClaimDemand` is pure. It reads no store, no clock and no executor. The runner and its loop pass their
state in.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.clock import MS
from holdfast.runner.policy import RunnerPolicy

# First backoff after a fruitless tick. It doubles up to the idle maximum.
BACKOFF_FIRST_MS = 10


class ClaimPlan(NamedTuple):
    """The next claim: up to `limit` items, `reserved` of them from timers first. At most
    `expired_before_max` of them have an expired claim."""

    limit: int
    reserved: int
    expired_before_max: int | None


class ClaimDemand:
    def __init__(self) -> None:
        self._claim_no = 0
        self._fruitless_ticks = 0
        # Whether the last tick was a recheck for an item that fell due right after the tick before.
        self._rechecked = False

    def plan(
        self, limit: int, policy: RunnerPolicy, expired_before_max: int | None = None
    ) -> ClaimPlan:
        """Return the next claim. Successive claims share their slots between queue and timers."""
        self._claim_no += 1
        reserved = policy.reserved_for_timers(self._claim_no, limit)
        return ClaimPlan(limit, reserved, expired_before_max)

    def repeats_at_once(self, *, made_progress: bool, busy: bool, can_claim: bool) -> bool:
        """Whether the loop ticks again without a sleep, because more items may be due."""
        repeats = made_progress and not busy and can_claim
        if repeats:
            self._fruitless_ticks, self._rechecked = 0, False
        return repeats

    def sleep_ns(self, *, busy: bool, idle_ns: int, longest_ns: int) -> int:
        """Return how long the loop sleeps. `idle_ns` is the time until the next item is due.

        After a store error, or when an item is due that the tick did not get, the sleep is a backoff. An
        item that fell due after the tick gets one tick without a sleep (0) before.
        """
        if not busy and idle_ns:
            self._fruitless_ticks, self._rechecked = 0, False
            return idle_ns
        if not busy and not self._rechecked:
            self._rechecked = True
            return 0
        backoff_ns = (BACKOFF_FIRST_MS * MS) << min(self._fruitless_ticks, 20)
        self._fruitless_ticks += 1
        self._rechecked = False
        return min(backoff_ns, longest_ns)


def claim_capacity(
    *,
    blocked: bool,
    max_batch: int,
    rate_limited: int | None,
    executor_capacity: int | None,
    concurrency: int | None,
) -> int:
    """Return how many further items may be claimed now.

    `blocked` means that isolation is held or requested. `rate_limited` counts the claimed items that wait
    for the rate limit (None without one), `executor_capacity` the free capacity of the executor (None before
    its creation). Without a `concurrency` the handlers run in the tick, one batch at a time.
    """
    if blocked:
        return 0
    if rate_limited is not None:
        return max_batch - rate_limited
    if executor_capacity is not None:
        return executor_capacity
    return max_batch if concurrency is None else concurrency


def idle_ns(now_ns: int, *, due_ns: int | None, throttled_ns: int | None, longest_ns: int) -> int:
    """Return the time until an item can start, at most `longest_ns`.

    `due_ns` is the time of the next due item (None if there is none), `throttled_ns` the time until the
    rate limit allows a start (None without one).
    """
    if due_ns is None:
        return longest_ns
    wait_ns = due_ns - now_ns
    if throttled_ns is not None:
        wait_ns = max(wait_ns, throttled_ns)
    return max(0, min(wait_ns, longest_ns))
