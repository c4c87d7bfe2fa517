"""A timer that repeats: its next occurrence, and what becomes of those that nobody was there for.

An occurrence is *missed* when it comes more than a minute late, for that is how fine a rule is.

    skip   missed ones are not delivered
    one    one is delivered for all that were missed
    all    each is delivered, in order

Each occurrence is an intent of its own, named after the one that was set and its instant: delivered
once, whoever computes it. Instants are found when the timer is hung, not in the reducer, so that a
new edition of the time zones changes the future and no replay.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.messages import Intent, TimerSet
from holdfast.world import cron

POLICIES = ("skip", "one", "all")
LATE_NS = 60 * 1_000_000_000


class Occurrence(NamedTuple):
    """What to do when a repeating timer is due: deliver it or not, and what to hang next."""

    deliver: bool
    next: Intent
    next_ns: int


def check(rule: str, missed: str, zone: str) -> None:
    cron.parse(rule)
    cron.zone_of(zone)
    if missed not in POLICIES:
        raise Invalid(what="missed", found=str(missed)[:64], expected=list(POLICIES))


def first(intent: Intent, timer: TimerSet) -> tuple[Intent, int]:
    """The timer with its first instant, counted from when it was wanted."""
    at_ns = cron.parse(timer.cron).next_ns(intent.enqueued_at_ns, timer.zone)
    return _at(intent, timer, at_ns), at_ns


def due(intent: Intent, timer: TimerSet, wall_ns: int) -> Occurrence:
    """What a due timer does now, by the clock on the wall."""
    assert timer.wall_ns is not None
    missed = wall_ns - timer.wall_ns > LATE_NS
    after_ns = wall_ns if missed and timer.missed != "all" else timer.wall_ns
    at_ns = cron.parse(timer.cron).next_ns(after_ns, timer.zone)
    name = codec.digest(b"every", intent.intent_hash, at_ns.to_bytes(8, "big"))
    following = replace(_at(intent, timer, at_ns), intent_hash=name)
    return Occurrence(not (missed and timer.missed == "skip"), following, at_ns)


def _at(intent: Intent, timer: TimerSet, at_ns: int) -> Intent:
    return replace(intent, params=codec.pack(replace(timer, wall_ns=at_ns)))
