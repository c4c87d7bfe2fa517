"""Timers that are due become events of their worlds (document 004, protocol E).

The whole protocol is one commit: what is due is taken, its event put into the inbox, and the timer is
done. Its slot says whether it still counts. A world that is deleted gets nothing any more.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.config import RETRY_FULL_NS
from holdfast.durable import due
from holdfast.errors import NotFound, Overloaded
from holdfast.messages import Ingress, Intent, Kind, TimerSet
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, every, timers
from holdfast.world.ingress import deliver_to

# Missed occurrences of one repeating timer that are told in one commit.
CATCH_UP_MAX = 100


@operation
def fire_due(txn: Txn, universe: str, wall_ns: int, limit: int) -> int:
    """Fire up to `limit` timers that are due, the longest overdue first; how many were taken."""
    clocks = ((timers.delays(universe), txn.now_ns), (timers.calendar(universe), wall_ns))
    return due.work_off(txn, clocks, fire, wall_ns, limit=limit)


@operation
def fire(txn: Txn, payload: bytes, wall_ns: int) -> None:
    """Deliver a timer's event, once, if its slot still holds this timer.

    A calendar time that the wall clock has not reached (it was set back meanwhile), and a full
    inbox, are reasons to wait some more.
    """
    intent = codec.unpack_as(Intent, payload)
    timer = codec.unpack_as(TimerSet, intent.params)
    held = timers.take(txn, intent, timer.key)
    if held is None or not _reachable(txn, intent):
        return
    if timer.wall_ns is not None and wall_ns < timer.wall_ns:
        timers.hang(txn, intent, timer.key, timer.wall_ns, on_calendar=True)
    elif timer.cron:
        _repeat(txn, intent, timer, wall_ns)
    elif not _delivered(txn, intent, timer):
        _wait(txn, intent, timer, wall_ns, held.turn_ns)


def _repeat(txn: Txn, intent: Intent, timer: TimerSet, wall_ns: int) -> None:
    """Each occurrence that is due, as far as its policy wants them told, and then the next one."""
    for _ in range(CATCH_UP_MAX):
        now = every.due(intent, timer, wall_ns)
        if now.deliver and not _delivered(txn, intent, timer):
            _wait(txn, intent, timer, wall_ns, timer.wall_ns or 0)
            return
        intent, timer = now.next, codec.unpack_as(TimerSet, now.next.params)
        if now.next_ns > wall_ns:
            break
    timers.hang(txn, intent, timer.key, now.next_ns, on_calendar=True)


def _delivered(txn: Txn, intent: Intent, timer: TimerSet) -> bool:
    """Into the inbox of its world; False when that is full."""
    ingress = ingress_of(intent, timer)
    key = f"timer:{intent.intent_hash.hex()}"
    try:
        deliver_to(txn, intent.universe_id, intent.world_id, key, ingress)
    except Overloaded:
        return False
    return True


def ingress_of(intent: Intent, timer: TimerSet) -> Ingress:
    """What the world gets."""
    return Ingress(
        Kind.TIMER,
        timer.type,
        timer.value,
        codec.digest(timer.type.encode(), timer.value),
        intent_hash=intent.intent_hash,
        correlation_id=intent.correlation_id,
    )


def _wait(txn: Txn, intent: Intent, timer: TimerSet, wall_ns: int, turn_ns: int) -> None:
    """For room in the inbox. All that wait are tried at the same moments, so that they stay in the
    order in which they were due."""
    on_calendar = timer.wall_ns is not None
    now_ns = wall_ns if on_calendar else txn.now_ns
    again_ns = (now_ns // RETRY_FULL_NS + 1) * RETRY_FULL_NS
    timers.hang(txn, intent, timer.key, again_ns, on_calendar=on_calendar, turn_ns=turn_ns)


def _reachable(txn: Txn, intent: Intent) -> bool:
    try:
        record = catalog.record(txn, intent.universe_id, intent.world_id)
    except NotFound:
        return False
    return record.status is not catalog.Status.DELETED
