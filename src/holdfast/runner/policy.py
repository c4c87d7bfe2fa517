"""The settings of a runner, in one frozen value that can be replaced while it runs.

The queue enforces retry budgets on the item. The policy only sets their size. Its computations (shares,
delays) are pure functions, so that the same history gives the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from holdfast.clock import MS
from holdfast.config import BATCH_MAX, TTL_NS_MAX
from holdfast.durable.queue import RetryBudget
from holdfast.errors import Invalid
from holdfast.retry import Backoff, jitter
from holdfast.runner.error_policy import ErrorPolicy

OnFatal = Literal["stop", "raise", "go_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerPolicy:
    # TTL of a claim. A handler may extend it.
    lease_ttl_ms: int = 30_000
    # Settlement attempts while the store refuses. Then the claim is left to expire.
    requeue_max_attempts: int = 32
    # Failures of an item before it becomes a dead letter. 1 means no retry.
    retry_budget_max: int = 5
    # Expired claims of an item (its worker crashed or hung) before it becomes a dead letter.
    expiries_max: int = 3
    # Expired claims after which an item is claimed in isolation. 0: never.
    isolate_from_expiries: int = 0
    # Extend the claims of handlers in progress, and end handlers that exceed their time limit. A handler
    # sets its limit (`work.time_limit_ns`). Without a limit its claim is not extended and expires.
    extend_claims: bool = False
    # Time for handlers to finish after a stop. Then an executor with extended claims releases the rest.
    stop_grace_ms: int = 10_000
    # Maximum claims of one tick, from queue and timers together.
    max_batch: int = 32
    # Share of the batch that is reserved for due timers while the queue is full.
    timer_share: float = 0.25
    # Maximum sleep of an idle runner. A notification may be lost.
    idle_sleep_max_ms: int = 1_000
    # Maximum delay of the commit of finished items while a batch runs inline.
    settle_after_ms: int = 50
    # After a non-retryable error: stop the runner, raise the error from the tick, or continue.
    on_fatal: OnFatal = "go_on"
    backoff: Backoff = field(default_factory=Backoff)
    faults: ErrorPolicy = field(default_factory=ErrorPolicy)

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
        _require(
            "faults", self.faults, lambda found: isinstance(found, ErrorPolicy), "a Faults table"
        )

    @classmethod
    def default(cls) -> RunnerPolicy:
        return cls()

    @property
    def lease_ttl_ns(self) -> int:
        return self.lease_ttl_ms * MS

    @property
    def budget(self) -> RetryBudget:
        return RetryBudget(self.retry_budget_max, self.expiries_max, self.isolate_from_expiries)

    def reserved_for_timers(self, tick_no: int, limit: int) -> int:
        """Return the number of slots of a tick that are reserved for timers.

        Fractions accumulate over successive ticks, so that a batch of one still serves both.
        """
        return int((tick_no + 1) * limit * self.timer_share) - int(
            tick_no * limit * self.timer_share
        )

    def delay_ns(self, seq: int, failures: int) -> int:
        """Return the backoff of an item after a failure (1 is the first)."""
        return self.backoff.delay_ns(failures, jitter(seq, failures))


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


def _require(name: str, found: Any, is_valid: Any, expected: Any) -> None:
    if not is_valid(found):
        raise Invalid(what="policy", field=name, found=found, expected=expected)
