"""Outcome rules: the effect of a report and of a lost grant. They read the run state and change
nothing.

`check_report` finds the first row that a report may not move. `decide_outcomes` splits reported
failures into final ones and retries with their time. `decide_reclaim` does the same for begun rows
that were never reported. Retry budgets go to the lowest rows first, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast.config import BATCH_MAX, TTL_NS_MAX
from holdfast.errors import Invalid
from holdfast.ledger.events import FinishedRange, GrantReclaimed, RetriedRange
from holdfast.ledger.ranges import Range, RowRanges
from holdfast.ledger.run_policy import ErrorClass, RetryVerdict, backoff_ns, decide_retry
from holdfast.ledger.run_state import OpenGrant, RunState
from holdfast.ledger.states import EVENT_BY_REPORTED_CODE, RowState

# Retry times are rounded up to this, so that neighbouring failures share one entry.
RETRY_ROUNDING_NS = 10_000_000
_CLASS_MAX, _STATE_MAX = int(max(ErrorClass)), int(max(RowState))


class IllegalReport(NamedTuple):
    """A transition that the table or the ownership of the row forbids."""

    seq: int
    prior: str
    attempted: str
    why: str


def check_report(
    run: RunState, grant: OpenGrant, done: Sequence[FinishedRange], begin: Sequence[Range]
) -> IllegalReport | None:
    """Return None if every row belongs to the grant, has the required prior state and occurs once."""
    _check_ranges(run, done, begin)
    for finished in done:
        if finished.code not in EVENT_BY_REPORTED_CODE:
            return _violation_at(run, grant, finished.lo, state_name(finished.code))
        if not grant.begun.contains(finished.lo, finished.hi):
            return _violation_at(
                run,
                grant,
                _first_missing(grant.begun, finished.lo, finished.hi),
                state_name(finished.code),
            )
    for lo, hi in begin:
        if not grant.idle.contains(lo, hi):
            return _violation_at(
                run, grant, _first_missing(grant.idle, lo, hi), RowState.IN_FLIGHT.name
            )
    ends = sorted([(finished.lo, finished.hi, finished.code) for finished in done])
    for (_, end, code), (lo, _, again) in pairwise(ends):
        if lo < end:
            return IllegalReport(lo, state_name(code), state_name(again), "ended twice")
    for (_, end), (lo, _) in pairwise(sorted(begin)):
        if lo < end:
            return IllegalReport(
                lo, RowState.IN_FLIGHT.name, RowState.IN_FLIGHT.name, "begun twice"
            )
    return None


def request_mismatch(
    run: RunState, done: Sequence[FinishedRange], begin: Sequence[Range]
) -> IllegalReport:
    """Build the error for a repeated request number with different content."""
    seq = done[0].lo if done else begin[0][0] if begin else 0
    seq = min(max(seq, 0), run.size - 1)
    attempted = state_name(done[0].code) if done else RowState.IN_FLIGHT.name
    prior = run.ledger.state_of(seq).name
    return IllegalReport(seq, prior, attempted, "another request of this number")


def decide_outcomes(
    run: RunState, done: Sequence[FinishedRange], now_ns: int
) -> tuple[list[FinishedRange], list[RetriedRange]]:
    """Split reported rows into final outcomes and retries with their due time."""
    final: list[FinishedRange] = []
    retried: list[RetriedRange] = []
    used = run.retries
    for finished in done:
        if finished.code != RowState.TERMINAL_FAIL:
            final.append(finished)
            continue
        kind = ErrorClass(finished.error_class)
        for lo, hi, attempts in run.ledger.attempts_by_range(finished.lo, finished.hi):
            retry_end = lo + _retryable_rows(run, kind, attempts, used, hi - lo)
            if retry_end > lo:
                wait_ns = finished.delay_ns or backoff_ns(lo, attempts, run.policy)
                not_before_ns = (
                    -(-(now_ns + wait_ns) // RETRY_ROUNDING_NS) * RETRY_ROUNDING_NS
                    if wait_ns
                    else now_ns
                )
                _append_merged(
                    retried, RetriedRange(lo, retry_end, finished.error_class, not_before_ns)
                )
                used += retry_end - lo
            if retry_end < hi:
                final.append(FinishedRange(retry_end, hi, finished.code, finished.error_class))
    return final, retried


def decide_reclaim(run: RunState, epoch: int, why: str, now_ns: int) -> GrantReclaimed:
    """Decide the outcome of the begun rows of a lost grant."""
    begun = run.grants[epoch].begun
    if run.cancelling:
        return GrantReclaimed(now_ns, epoch, why, [], [], list(begun))
    suspects, failed = RowRanges(), RowRanges()
    used = run.retries
    for first, last in begun:
        for lo, hi, attempts in run.ledger.attempts_by_range(first, last):
            retry_end = lo + _retryable_rows(run, ErrorClass.LEASE_EXPIRED, attempts, used, hi - lo)
            used += retry_end - lo
            if retry_end > lo:
                suspects.add(lo, retry_end)
            if retry_end < hi:
                failed.add(retry_end, hi)
    return GrantReclaimed(now_ns, epoch, why, list(suspects), list(failed), [])


def state_name(code: int) -> str:
    """Return the name of a reported state code, or the code as text if it is unknown."""
    return RowState(code).name if 0 <= code <= _STATE_MAX else str(code)


# -- internals -----------------------------------------------------------------------------------


def _check_ranges(run: RunState, done: Sequence[FinishedRange], begin: Sequence[Range]) -> None:
    """Refuse a malformed report. It does not halt the run, because it names no row."""
    if len(done) > BATCH_MAX or len(begin) > BATCH_MAX:
        raise Invalid(what="report", why="too many ranges", max=BATCH_MAX)
    for lo, hi in (*((finished.lo, finished.hi) for finished in done), *begin):
        if not 0 <= lo < hi <= run.size:
            raise Invalid(what="range", why="not in the run", found=(lo, hi), size=run.size)
    for finished in done:
        if not 0 <= finished.error_class <= _CLASS_MAX:
            raise Invalid(what="error class", found=finished.error_class)
        if not 0 <= finished.delay_ns <= TTL_NS_MAX:
            raise Invalid(
                what="delay_ns", why="out of bounds", found=finished.delay_ns, max=TTL_NS_MAX
            )


def _first_missing(ranges: RowRanges, lo: int, hi: int) -> int:
    """Return the first row of [lo, hi) that is not in the ranges."""
    for first, last in ranges.within(lo, hi):
        if first > lo:
            break
        lo = last
    return lo


def _violation_at(run: RunState, grant: OpenGrant, seq: int, attempted: str) -> IllegalReport:
    why = "" if run.ledger.owner_epoch_of(seq) == grant.epoch else "not the owner"
    return IllegalReport(seq, run.ledger.state_of(seq).name, attempted, why)


def _retryable_rows(run: RunState, kind: ErrorClass, attempts: int, used: int, rows: int) -> int:
    """Return how many of `rows` rows may be retried, lowest first."""
    if run.cancelling:
        return 0
    verdict = decide_retry(kind, attempts=attempts, retries_used=used, policy=run.policy)
    if verdict is RetryVerdict.FAIL:
        return 0
    bound = run.policy.retries_max
    return min(rows, bound - used) if bound else rows


def _append_merged(retried: list[RetriedRange], more: RetriedRange) -> None:
    """Append a range, or extend the last one if it is adjacent with equal class and time."""
    if retried:
        last = retried[-1]
        if (last.hi, last.error_class, last.not_before_ns) == (
            more.lo,
            more.error_class,
            more.not_before_ns,
        ):
            retried[-1] = RetriedRange(last.lo, more.hi, more.error_class, more.not_before_ns)
            return
    retried.append(more)
