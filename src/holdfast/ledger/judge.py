"""What a report and a lost grant come to. Looks at a position and changes nothing.

`misfit` finds the first row that a report may not move; `judge` says which of the reported failures
are final and which are tried again, and when; `reclaim` says the same of rows that were begun and
never reported. Budgets go to the lowest rows first, so the same situation ends the same way always.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast.config import BATCH_MAX, TTL_NS_MAX
from holdfast.errors import Invalid
from holdfast.ledger.classes import ErrorClass, Verdict, decide, delay_ns
from holdfast.ledger.position import Holding, Position
from holdfast.ledger.ranges import Range, Ranges
from holdfast.ledger.records import Done, Reclaimed, Retried
from holdfast.ledger.states import REPORTED, State

# Times of retries are rounded up to this, so that neighbours which fail together rest together.
REST_NS = 10_000_000
_CLASS_MAX, _STATE_MAX = int(max(ErrorClass)), int(max(State))


class Misfit(NamedTuple):
    """A move that the table, or its owner, does not allow."""

    seq: int
    prior: str
    attempted: str
    why: str


def misfit(
    at: Position, held: Holding, done: Sequence[Done], begin: Sequence[Range]
) -> Misfit | None:
    """None when every row of it is the grant's, in the state that it must leave, and named once."""
    _check(at, done, begin)
    for each in done:
        if each.code not in REPORTED:
            return _at_row(at, held, each.lo, name_of(each.code))
        if not held.begun.holds(each.lo, each.hi):
            return _at_row(at, held, _gap(held.begun, each.lo, each.hi), name_of(each.code))
    for lo, hi in begin:
        if not held.idle.holds(lo, hi):
            return _at_row(at, held, _gap(held.idle, lo, hi), State.IN_FLIGHT.name)
    ends = sorted([(each.lo, each.hi, each.code) for each in done])
    for (_, end, code), (lo, _, again) in pairwise(ends):
        if lo < end:
            return Misfit(lo, name_of(code), name_of(again), "ended twice")
    for (_, end), (lo, _) in pairwise(sorted(begin)):
        if lo < end:
            return Misfit(lo, State.IN_FLIGHT.name, State.IN_FLIGHT.name, "begun twice")
    return None


def other_request(at: Position, done: Sequence[Done], begin: Sequence[Range]) -> Misfit:
    """A request that has the number of one that was taken, and is another."""
    seq = done[0].lo if done else begin[0][0] if begin else 0
    seq = min(max(seq, 0), at.size - 1)
    attempted = name_of(done[0].code) if done else State.IN_FLIGHT.name
    prior = at.ledger.state_of(seq).name
    return Misfit(seq, prior, attempted, "another request of this number")


def judge(at: Position, done: Sequence[Done], now_ns: int) -> tuple[list[Done], list[Retried]]:
    """Which of the reported rows are final, and which are tried again, and when."""
    final: list[Done] = []
    retried: list[Retried] = []
    used = at.retries
    for each in done:
        if each.code != State.TERMINAL_FAIL:
            final.append(each)
            continue
        kind = ErrorClass(each.error_class)
        for lo, hi, tries in at.ledger.tries(each.lo, each.hi):
            cut = lo + _allowed(at, kind, tries, used, hi - lo)
            if cut > lo:
                wait_ns = each.delay_ns or delay_ns(lo, tries, at.policy)
                rested_ns = -(-(now_ns + wait_ns) // REST_NS) * REST_NS if wait_ns else now_ns
                _join(retried, Retried(lo, cut, each.error_class, rested_ns))
                used += cut - lo
            if cut < hi:
                final.append(Done(cut, hi, each.code, each.error_class))
    return final, retried


def reclaim(at: Position, epoch: int, why: str, now_ns: int) -> Reclaimed:
    """What becomes of the begun rows of a grant that is lost."""
    begun = at.grants[epoch].begun
    if at.cancelling:
        return Reclaimed(now_ns, epoch, why, [], [], list(begun))
    suspects, failed = Ranges(), Ranges()
    used = at.retries
    for first, last in begun:
        for lo, hi, tries in at.ledger.tries(first, last):
            cut = lo + _allowed(at, ErrorClass.LEASE_EXPIRED, tries, used, hi - lo)
            used += cut - lo
            if cut > lo:
                suspects.add(lo, cut)
            if cut < hi:
                failed.add(cut, hi)
    return Reclaimed(now_ns, epoch, why, list(suspects), list(failed), [])


def name_of(code: int) -> str:
    """The name of a state that somebody reported, which need not be one."""
    return State(code).name if 0 <= code <= _STATE_MAX else str(code)


# -- inside --------------------------------------------------------------------------------------


def _check(at: Position, done: Sequence[Done], begin: Sequence[Range]) -> None:
    """Refuse what makes no sense for any row. It halts nothing: no row was meant."""
    if len(done) > BATCH_MAX or len(begin) > BATCH_MAX:
        raise Invalid(what="report", why="too many ranges", max=BATCH_MAX)
    for lo, hi in (*((each.lo, each.hi) for each in done), *begin):
        if not 0 <= lo < hi <= at.size:
            raise Invalid(what="range", why="not in the run", found=(lo, hi), size=at.size)
    for each in done:
        if not 0 <= each.error_class <= _CLASS_MAX:
            raise Invalid(what="error class", found=each.error_class)
        if not 0 <= each.delay_ns <= TTL_NS_MAX:
            raise Invalid(what="delay_ns", why="out of bounds", found=each.delay_ns, max=TTL_NS_MAX)


def _gap(ranges: Ranges, lo: int, hi: int) -> int:
    """The first row of [lo, hi) that is not in the ranges."""
    for first, last in ranges.within(lo, hi):
        if first > lo:
            break
        lo = last
    return lo


def _at_row(at: Position, held: Holding, seq: int, attempted: str) -> Misfit:
    why = "" if at.ledger.owner_of(seq) == held.epoch else "not the owner"
    return Misfit(seq, at.ledger.state_of(seq).name, attempted, why)


def _allowed(at: Position, kind: ErrorClass, tries: int, used: int, rows: int) -> int:
    """How many of so many rows may be tried again, lowest first."""
    if at.cancelling:
        return 0
    verdict = decide(kind, attempts=tries, retries_used=used, policy=at.policy)
    if verdict is Verdict.FAIL:
        return 0
    bound = at.policy.retries_max
    return min(rows, bound - used) if bound else rows


def _join(retried: list[Retried], more: Retried) -> None:
    """Add a range, to the last one when it lies beside it and rests as long."""
    if retried:
        last = retried[-1]
        if (last.hi, last.error_class, last.not_before_ns) == (
            more.lo,
            more.error_class,
            more.not_before_ns,
        ):
            retried[-1] = Retried(last.lo, more.hi, more.error_class, more.not_before_ns)
            return
    retried.append(more)
