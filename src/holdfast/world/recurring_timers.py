"""Recurring timers: the next occurrence, and the policy for missed occurrences.

An occurrence is *missed* if it is more than a minute late, which is the resolution of a cron rule.

    skip   missed occurrences are not delivered
    one    one event is delivered for all missed occurrences
    all    each missed occurrence is delivered, in order

Each occurrence is a separate intent. Its id derives from the previous occurrence and its time, so
it is delivered once no matter which worker computes it. Times are computed when the timer is
scheduled, not in the reducer. So a new time zone database changes future occurrences and no replay.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.messages import Intent, TimerSet
from holdfast.world import cron

MISSED_POLICIES = ("skip", "one", "all")
MISSED_AFTER_NS = 60 * 1_000_000_000


class DueOccurrence(NamedTuple):
    """The decision for a due occurrence: whether it is delivered, and the time of the next one."""

    deliver: bool
    next_ns: int


class TimerOccurrence(NamedTuple):
    """The action for a due recurring timer: whether to deliver it, and the next occurrence to
    schedule."""

    deliver: bool
    next: Intent
    next_ns: int


def check_rule(rule: str, missed: str, zone: str) -> None:
    """Raise Invalid unless the cron rule, the policy and the time zone are valid."""
    cron.parse(rule)
    cron.zone_of(zone)
    if missed not in MISSED_POLICIES:
        raise Invalid(what="missed", found=str(missed)[:64], expected=list(MISSED_POLICIES))


def first_occurrence(intent: Intent, timer: TimerSet) -> tuple[Intent, int]:
    """Return the timer with its first occurrence after the time at which it was requested."""
    at_ns = cron.parse(timer.cron).next_ns(intent.enqueued_at_ns, timer.zone)
    return _with_wall_time(intent, timer, at_ns), at_ns


def next_occurrence(intent: Intent, timer: TimerSet, wall_ns: int) -> TimerOccurrence:
    """Return the action for a timer that is due at this wall clock time."""
    assert timer.wall_ns is not None
    deliver, at_ns = judge_due(
        timer.cron, timer.zone, timer.missed, due_ns=timer.wall_ns, wall_ns=wall_ns
    )
    next_hash = codec.digest(b"every", intent.intent_hash, at_ns.to_bytes(8, "big"))
    next_intent = replace(_with_wall_time(intent, timer, at_ns), intent_hash=next_hash)
    return TimerOccurrence(deliver, next_intent, at_ns)


def judge_due(rule: str, zone: str, missed: str, *, due_ns: int, wall_ns: int) -> DueOccurrence:
    """Apply the policy for missed occurrences to an occurrence that is due at this wall clock time."""
    late = wall_ns - due_ns > MISSED_AFTER_NS
    after_ns = wall_ns if late and missed != "all" else due_ns
    return DueOccurrence(not (late and missed == "skip"), cron.parse(rule).next_ns(after_ns, zone))


def _with_wall_time(intent: Intent, timer: TimerSet, at_ns: int) -> Intent:
    return replace(intent, params=codec.pack(replace(timer, wall_ns=at_ns)))
