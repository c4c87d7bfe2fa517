"""Timer delivery: due timers become events of their worlds (document 004, protocol E).

The protocol is one commit: it removes the due timer and puts its event into the inbox. The timer
slot shows whether the timer is still valid. A deleted world gets no event.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.config import FULL_INBOX_RETRY_NS
from holdfast.durable import delayed
from holdfast.errors import NotFound, Overloaded
from holdfast.messages import Ingress, IngressKind, Intent, TimerSet
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, recurring_timers, timers
from holdfast.world.ingress import put_ingress

# Missed occurrences of one recurring timer that one commit delivers.
CATCH_UP_MAX = 100


@operation("timers.deliver_due")
def deliver_due(txn: Txn, universe: str, wall_ns: int, limit: int) -> int:
    """Deliver up to `limit` due timers, most overdue first. Returns the number processed."""
    clocks = (
        (timers.delay_queue(universe), txn.now_ns),
        (timers.calendar_queue(universe), wall_ns),
    )
    return delayed.run_due(txn, clocks, deliver_timer, wall_ns, limit=limit)


@operation("timers.deliver_timer")
def deliver_timer(txn: Txn, payload: bytes, wall_ns: int) -> None:
    """Deliver a timer's event once, if its slot still holds this timer.

    The timer is rescheduled if the wall clock was set back before its calendar time, or if the
    inbox is full.
    """
    intent = codec.unpack_as(Intent, payload)
    timer = codec.unpack_as(TimerSet, intent.params)
    slot = timers.consume(txn, intent, timer.key)
    if slot is None or not _world_exists(txn, intent):
        return
    if timer.wall_ns is not None and wall_ns < timer.wall_ns:
        timers.schedule(txn, intent, timer.key, timer.wall_ns, on_calendar=True)
    elif timer.cron:
        _deliver_recurring(txn, intent, timer, wall_ns)
    elif not _try_deliver(txn, intent, timer):
        _retry_when_inbox_full(txn, intent, timer, wall_ns, slot.original_due_ns)


def _deliver_recurring(txn: Txn, intent: Intent, timer: TimerSet, wall_ns: int) -> None:
    """Deliver the due occurrences that the policy asks for, and schedule the next one."""
    for _ in range(CATCH_UP_MAX):
        occurrence = recurring_timers.next_occurrence(intent, timer, wall_ns)
        if occurrence.deliver and not _try_deliver(txn, intent, timer):
            _retry_when_inbox_full(txn, intent, timer, wall_ns, timer.wall_ns or 0)
            return
        intent, timer = occurrence.next, codec.unpack_as(TimerSet, occurrence.next.params)
        if occurrence.next_ns > wall_ns:
            break
    timers.schedule(txn, intent, timer.key, occurrence.next_ns, on_calendar=True)


def _try_deliver(txn: Txn, intent: Intent, timer: TimerSet) -> bool:
    """Put the event into the world's inbox. Returns False if the inbox is full."""
    ingress = timer_ingress(intent, timer)
    key = f"timer:{intent.intent_hash.hex()}"
    # A recurring timer starts a new trace each time, or its first trace would never end.
    trace = b"" if timer.cron else intent.trace
    try:
        put_ingress(txn, intent.universe_id, intent.world_id, key, ingress, trace)
    except Overloaded:
        return False
    return True


def timer_ingress(intent: Intent, timer: TimerSet) -> Ingress:
    """Build the inbox event of a timer."""
    return Ingress(
        IngressKind.TIMER,
        timer.type,
        timer.value,
        codec.digest(timer.type.encode(), timer.value),
        intent_hash=intent.intent_hash,
        correlation_id=intent.correlation_id,
    )


def _retry_when_inbox_full(
    txn: Txn, intent: Intent, timer: TimerSet, wall_ns: int, original_due_ns: int
) -> None:
    """Reschedule a timer until the inbox has space. All such timers retry at the same times, which
    keeps them in due order.
    """
    on_calendar = timer.wall_ns is not None
    now_ns = wall_ns if on_calendar else txn.now_ns
    retry_ns = (now_ns // FULL_INBOX_RETRY_NS + 1) * FULL_INBOX_RETRY_NS
    timers.schedule(
        txn, intent, timer.key, retry_ns, on_calendar=on_calendar, original_due_ns=original_due_ns
    )


def _world_exists(txn: Txn, intent: Intent) -> bool:
    try:
        record = catalog.get_record(txn, intent.universe_id, intent.world_id)
    except NotFound:
        return False
    return record.status is not catalog.WorldStatus.DELETED
