"""Error classes, the policy of a run, and whether a failed row is tried again.

`decide` and `delay_ns` are pure: the class, what was used up so far and the policy are all they look
at, so two reclaims of the same situation come out the same, on any machine and in any replay.

`attempts` counts retries: it is 0 during the first try. `attempts_max` counts tries, as people do.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from holdfast.codec import Record
from holdfast.errors import Invalid
from holdfast.ledger.stop_rules import StopRules
from holdfast.retry import Backoff, spread

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


class Verdict(Enum):
    RETRY = "retry"
    FAIL = "fail"


class Policy(Record, frozen=True):
    """What a run's decisions depend on besides its log. Fixed when the run is opened."""

    # Tries of one row.
    attempts_max: int = 3
    # Retries of a whole run; 0 is no bound.
    retries_max: int = 0
    lease_ns: int = 15 * S
    # What begun rows are given to end by themselves after a cancellation.
    grace_ns: int = 10 * S
    page_rows: int = PAGE_ROWS
    # Above 0, claims are made of whole batches [k*B, (k+1)*B).
    batch_rows: int = 0
    # Rows are not dispatched while they are farther than this ahead of the commit; 0 is no bound.
    ahead_rows_max: int = 0
    backoff_first_ns: int = S // 10
    backoff_factor: float = 2.0
    backoff_max_ns: int = 60 * S
    # When the run stops handing out by itself.
    stop: StopRules = StopRules()

    def __post_init__(self) -> None:
        _check("attempts_max", self.attempts_max, 1, ATTEMPTS_MAX)
        _check("retries_max", self.retries_max, 0)
        _check("lease_ns", self.lease_ns, 1)
        _check("grace_ns", self.grace_ns, 0)
        _check("page_rows", self.page_rows, 1, PAGE_ROWS_MAX)
        _check("batch_rows", self.batch_rows, 0, self.page_rows)
        _check("ahead_rows_max", self.ahead_rows_max, 0)
        _check("backoff_first_ns", self.backoff_first_ns, 0)
        _check("backoff_max_ns", self.backoff_max_ns, 0)
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
    def unit(self) -> int:
        """The rows that are begun, and fail, together."""
        return self.batch_rows or 1


def decide(error_class: ErrorClass, *, attempts: int, retries_used: int, policy: Policy) -> Verdict:
    """Whether a row that failed is tried again: its class, its own budget, the run's budget."""
    if error_class not in RETRYABLE or attempts + 1 >= policy.attempts_max:
        return Verdict.FAIL
    if policy.retries_max and retries_used >= policy.retries_max:
        return Verdict.FAIL
    return Verdict.RETRY


def delay_ns(seq: int, attempts: int, policy: Policy) -> int:
    """How long a row rests after it failed with `attempts` retries behind it."""
    backoff = Backoff(policy.backoff_first_ns, policy.backoff_factor, policy.backoff_max_ns)
    return backoff.delay_ns(attempts + 1, spread(seq, attempts))


def _check(what: str, found: int, low: int, high: int | None = None) -> None:
    if found < low or (high is not None and found > high):
        raise Invalid(what=what, why="out of bounds", found=found, min=low, max=high)
