"""What may be tuned on a runner, in one frozen value that can be replaced while it runs.

Budgets are judged by the queue, on the item itself; the policy only says how large they are. What it
computes (shares, delays) is pure, so that the same history always goes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from holdfast.clock import MS
from holdfast.config import BATCH_MAX, TTL_NS_MAX
from holdfast.durable.queue import Budget
from holdfast.errors import Invalid
from holdfast.retry import Backoff, spread
from holdfast.runner.faults import Faults

OnFatal = Literal["stop", "raise", "go_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    # How long a claim lasts unless its handler extends it.
    lease_ttl_ms: int = 30_000
    # How often a settlement is tried while the store refuses; then the claim is left to expire.
    requeue_max_attempts: int = 32
    # An item's failures; with the last of them it is a dead letter. 1 is no retry at all.
    retry_budget_max: int = 5
    # Claims of an item that may run out (its worker died or hung) before it is a dead letter.
    expiries_max: int = 3
    # An item is claimed by itself after so many claims of it ran out; 0: never.
    alone_from: int = 0
    # Extend the claims of a crew for as long as its handlers are within their time, and end those
    # that are not. A handler sets its own bound (`work.limit_ns`); without one its claim runs out.
    tend: bool = False
    # How long handlers have to finish after a stop; then what a tended crew is at is given back.
    stop_grace_ms: int = 10_000
    # What one tick claims at most, from queue and timers together ...
    max_batch: int = 32
    # ... and the part of it that is kept for due timers while the queue is full.
    timer_share: float = 0.25
    # A hint may be lost: an idle runner looks at least this often.
    idle_sleep_max_ms: int = 1_000
    # Between two handlers of a batch, finished work waits no longer than this for its commit.
    settle_after_ms: int = 50
    # After a non-retryable error: stop the runner, raise it out of the tick, or go on.
    on_fatal: OnFatal = "go_on"
    backoff: Backoff = field(default_factory=Backoff)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _require(name, getattr(self, name), _is_count, "a whole number, at least 1")
        _require(
            "max_batch", self.max_batch, lambda found: found <= BATCH_MAX, f"at most {BATCH_MAX}"
        )
        _require(
            "lease_ttl_ms",
            self.lease_ttl_ms,
            lambda found: found * MS <= TTL_NS_MAX,
            f"at most {TTL_NS_MAX // MS}",
        )
        _require("timer_share", self.timer_share, _is_share, "more than 0 and less than 1")
        _require("on_fatal", self.on_fatal, get_args(OnFatal).__contains__, get_args(OnFatal))
        _require(
            "settle_after_ms",
            self.settle_after_ms,
            lambda found: _is_count(found) and found < self.lease_ttl_ms,
            "at least 1 and less than lease_ttl_ms",
        )
        _require("backoff", self.backoff, _is_backoff, "a Backoff of 0 to TTL_NS_MAX, growing")
        _require("faults", self.faults, lambda found: isinstance(found, Faults), "a Faults table")

    @classmethod
    def default(cls) -> Policy:
        return cls()

    @property
    def lease_ttl_ns(self) -> int:
        return self.lease_ttl_ms * MS

    @property
    def budget(self) -> Budget:
        return Budget(self.retry_budget_max, self.expiries_max, self.alone_from)

    def reserved(self, tick: int, limit: int) -> int:
        """How many of a tick's places belong to timers first.

        Shares are dealt out over successive ticks, so that a batch of one still serves both.
        """
        return int((tick + 1) * limit * self.timer_share) - int(tick * limit * self.timer_share)

    def delay_ns(self, seq: int, failures: int) -> int:
        """How long an item waits after its latest failure (1 is the first)."""
        return self.backoff.delay_ns(failures, spread(seq, failures))


_COUNTS = (
    "lease_ttl_ms",
    "requeue_max_attempts",
    "retry_budget_max",
    "expiries_max",
    "max_batch",
    "idle_sleep_max_ms",
    "stop_grace_ms",
)


def _is_count(found: Any) -> bool:
    return type(found) is int and found >= 1


def _is_backoff(found: Any) -> bool:
    return (
        isinstance(found, Backoff)
        and found.first_ns >= 0
        and found.factor >= 1
        and 0 <= found.max_ns <= TTL_NS_MAX
    )


def _is_share(found: Any) -> bool:
    return isinstance(found, int | float) and 0 < found < 1


def _require(name: str, found: Any, fits: Any, expected: Any) -> None:
    if not fits(found):
        raise Invalid(what="policy", field=name, found=found, expected=expected)
