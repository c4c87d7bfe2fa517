"""The run policy: error classes, budgets, and the decision to retry a failed row.

`decide_retry` and `backoff_ns` are pure functions of the error class, the budgets used and the
policy. The same situation therefore has the same result on every machine and in every replay.

`attempts` counts retries and is 0 during the first try. `attempts_max` counts tries.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from holdfast.codec import Record
from holdfast.errors import Invalid
from holdfast.ledger.stop_rules import StopRules
from holdfast.retry import Backoff, jitter

# `attempts` of a row is one byte.
ATTEMPTS_MAX = 255
PAGE_ROWS = 65_536
PAGE_ROWS_MAX = 1 << 24
S = 1_000_000_000


class ErrorClass(IntEnum):
    NONE = 0
    TRANSIENT = 1
    RESOURCE = 2
    LEASE_EXPIRED = 3
    INPUT = 4
    SCHEMA = 5
    CORRUPTION = 6
    CANCELLATION = 7


RETRYABLE = frozenset({ErrorClass.TRANSIENT, ErrorClass.RESOURCE, ErrorClass.LEASE_EXPIRED})


class RetryVerdict(Enum):
    RETRY = "retry"
    FAIL = "fail"


class RunPolicy(Record, frozen=True):
    """The parameters of a run's decisions. They are fixed when the run is opened."""

    # Maximum tries of one row.
    attempts_max: int = 3
    # Maximum retries of the whole run; 0 means unlimited.
    retries_max: int = 0
    lease_ns: int = 15 * S
    # The grace period in which begun rows may finish after a cancellation.
    grace_ns: int = 10 * S
    page_rows: int = PAGE_ROWS
    # Above 0: claims consist of whole batches [k*B, (k+1)*B).
    batch_rows: int = 0
    # Maximum distance between a dispatched row and the commit; 0 means unlimited.
    ahead_rows_max: int = 0
    backoff_first_ns: int = S // 10
    backoff_factor: float = 2.0
    backoff_max_ns: int = 60 * S
    # Conditions under which the run stops granting rows.
    stop_rules: StopRules = StopRules()

    def __post_init__(self) -> None:
        _check_bounds("attempts_max", self.attempts_max, 1, ATTEMPTS_MAX)
        _check_bounds("retries_max", self.retries_max, 0)
        _check_bounds("lease_ns", self.lease_ns, 1)
        _check_bounds("grace_ns", self.grace_ns, 0)
        _check_bounds("page_rows", self.page_rows, 1, PAGE_ROWS_MAX)
        _check_bounds("batch_rows", self.batch_rows, 0, self.page_rows)
        _check_bounds("ahead_rows_max", self.ahead_rows_max, 0)
        _check_bounds("backoff_first_ns", self.backoff_first_ns, 0)
        _check_bounds("backoff_max_ns", self.backoff_max_ns, 0)
        if self.backoff_factor < 1.0:
            raise Invalid(what="backoff_factor", why="below 1", found=self.backoff_factor)
        if self.batch_rows and self.page_rows % self.batch_rows:
            raise Invalid(
                what="batch_rows",
                why="a page is made of whole batches",
                found=self.batch_rows,
                page_rows=self.page_rows,
            )

    @property
    def atomic_rows(self) -> int:
        """The number of rows that begin and fail together."""
        return self.batch_rows or 1


def decide_retry(
    error_class: ErrorClass, *, attempts: int, retries_used: int, policy: RunPolicy
) -> RetryVerdict:
    """Decide whether to retry a failed row, from its class, its own budget and the run's budget."""
    if error_class not in RETRYABLE or attempts + 1 >= policy.attempts_max:
        return RetryVerdict.FAIL
    if policy.retries_max and retries_used >= policy.retries_max:
        return RetryVerdict.FAIL
    return RetryVerdict.RETRY


def backoff_ns(seq: int, attempts: int, policy: RunPolicy) -> int:
    """Return the backoff of a row that failed after `attempts` retries."""
    backoff = Backoff(policy.backoff_first_ns, policy.backoff_factor, policy.backoff_max_ns)
    return backoff.delay_ns(attempts + 1, jitter(seq, attempts))


def _check_bounds(what: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        raise Invalid(what=what, why="out of bounds", found=value, min=low, max=high)
