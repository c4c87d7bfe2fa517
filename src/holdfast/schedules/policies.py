"""The decisions of a schedule: its occurrences, and the policies for missed and overlapping ones. Pure: no clock.

The cron rule, its meaning in a time zone and the policy for missed occurrences are those of recurring timers
(`world.cron`, `world.recurring_timers`).

    overlap   the last occurrence has ended   it has not ended
    skip      start                           skip, with the reason `overlap`
    queue     start                           wait for its end
    allow     start                           start

A backfilled occurrence is never skipped: with `skip` it waits, as with `queue`.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.errors import Invalid
from holdfast.schedules.states import OccurrenceEvent
from holdfast.world import cron, recurring_timers
from holdfast.world.recurring_timers import DueOccurrence, judge_due

__all__ = ["DueOccurrence", "judge_due"]

OVERLAP_POLICIES = ("skip", "queue", "allow")
# Occurrences of one schedule that wait for the end of the last one.
QUEUED_MAX = 10_000
DUE, RUN_NOW, BACKFILL = CAUSES = ("due", "run_now", "backfill")
MISSED, OVERLAP, QUEUE_FULL, OVERLOADED = REASONS = (
    "missed",
    "overlap",
    "queue_full",
    "overloaded",
)


class OverlapDecision(NamedTuple):
    event: OccurrenceEvent
    # Why the occurrence is skipped.
    reason: str = ""


def check_rule(every: str, zone: str, missed: str, overlap: str) -> None:
    """Raise Invalid unless the rule, the time zone and the policies are valid."""
    recurring_timers.check_rule(every, missed, zone)
    if overlap not in OVERLAP_POLICIES:
        raise Invalid(what="overlap", found=str(overlap)[:64], expected=list(OVERLAP_POLICIES))


def judge_overlap(overlap: str, cause: str, *, last_is_open: bool, queued: int) -> OverlapDecision:
    """Decide about an occurrence by the state of the last one. Queued occurrences keep their order."""
    if overlap == "allow" or not (last_is_open or queued):
        return OverlapDecision(OccurrenceEvent.START)
    if overlap == "skip" and cause != BACKFILL:
        return OverlapDecision(OccurrenceEvent.SKIP, OVERLAP)
    if queued >= QUEUED_MAX:
        return OverlapDecision(OccurrenceEvent.SKIP, QUEUE_FULL)
    return OverlapDecision(OccurrenceEvent.QUEUE)


def next_occurrence_ns(every: str, zone: str, after_ns: int) -> int:
    return cron.parse(every).next_ns(after_ns, zone)


def occurrences_between(every: str, zone: str, from_ns: int, to_ns: int, limit: int) -> list[int]:
    """Return the occurrences from `from_ns` on and before `to_ns`, at most `limit`."""
    rule = cron.parse(every)
    found: list[int] = []
    at_ns = rule.next_ns(from_ns - 1, zone)
    while at_ns < to_ns and len(found) < limit:
        found.append(at_ns)
        at_ns = rule.next_ns(at_ns, zone)
    return found
