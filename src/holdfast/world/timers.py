"""Timers of worlds: one slot per timer key, and two delayed queues, one per clock.

    delay queue      timers of `after`: due by store time, which ignores wall clock changes
    calendar queue   timers of `at` and `every`: due by the wall clock, including its changes

- A timer's key is its slot. Setting the key again replaces the timer, cancelling clears the slot,
  and the slot is free after its timer has fired.
- Due timers fire in the order of their due times, also after an outage.
- Setting, replacing and cancelling touch the rows of one timer only, at a cost independent of the
  number of timers.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import delayed, queue
from holdfast.durable.validation import TIME_NS_MAX
from holdfast.messages import Intent, TimerSet
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.world import recurring_timers


class TimerSlot(Record, frozen=True):
    """The contents of a timer slot: the pending timer and its position in one of the queues."""

    intent_hash: bytes
    seq: int
    calendar: bool = False
    # The originally requested due time, which orders due timers even if the timer was rescheduled.
    original_due_ns: int = 0

    def queue(self, universe: str) -> str:
        return calendar_queue(universe) if self.calendar else delay_queue(universe)


class DueTimerRef(Record, frozen=True):
    """A reference to a due timer: its queue position, its slot, and the wall clock time."""

    queue: str
    seq: int
    slot: str
    wall_ns: int


def delay_queue(universe: str) -> str:
    """The name of the queue that is ordered by store time."""
    return f"{universe}/timers"


def calendar_queue(universe: str) -> str:
    """The name of the queue that is ordered by wall clock time."""
    return f"{universe}/timers/calendar"


def set_timer(txn: Txn, intent: Intent, wanted_ns: int = 0) -> None:
    """Apply a `timer.set` intent. A delay counts from `emitted_ns`, the store time at which its
    reducer ran, or else from this commit."""
    timer = codec.unpack_as(TimerSet, intent.params)
    clear_slot(txn, intent.universe_id, intent.world_id, timer.key)
    if timer.cron:
        intent, at_ns = recurring_timers.first_occurrence(intent, timer)
        schedule(txn, intent, timer.key, at_ns, on_calendar=True)
    elif timer.wall_ns is not None:
        schedule(txn, intent, timer.key, timer.wall_ns, on_calendar=True)
    else:
        since_ns = min(wanted_ns, txn.now_ns) if wanted_ns else txn.now_ns
        schedule(txn, intent, timer.key, since_ns + (timer.delay_ns or 0))


def cancel_timer(txn: Txn, intent: Intent) -> None:
    """Apply a `timer.cancel` intent. An empty slot stays as it is."""
    slot: str = codec.unpack(intent.params)
    clear_slot(txn, intent.universe_id, intent.world_id, slot)


def schedule(
    txn: Txn,
    intent: Intent,
    slot: str,
    due_ns: int,
    *,
    on_calendar: bool = False,
    original_due_ns: int | None = None,
) -> None:
    """Schedule a timer in its slot, due at a time of its clock.

    `original_due_ns` is the requested due time of a timer that is rescheduled.
    """
    universe = intent.universe_id
    # A long delay on a store clock that runs ahead is capped at the maximum time.
    due_ns = min(due_ns, TIME_NS_MAX)
    name = calendar_queue(universe) if on_calendar else delay_queue(universe)
    original_due_ns = due_ns if original_due_ns is None else original_due_ns
    seq = delayed.schedule(txn, name, codec.pack(intent), due_ns, original_due_ns)
    timer_slot = TimerSlot(intent.intent_hash, seq, on_calendar, original_due_ns)
    txn.put(_key(universe, intent.world_id, slot), codec.pack(timer_slot))


def consume(txn: Txn, intent: Intent, slot: str) -> TimerSlot | None:
    """Clear the slot if it still holds this timer. Return None if the timer was replaced or
    cancelled."""
    key = _key(intent.universe_id, intent.world_id, slot)
    row = txn.get(key)
    timer_slot = None if row is None else codec.unpack_as(TimerSlot, row)
    if timer_slot is None or timer_slot.intent_hash != intent.intent_hash:
        return None
    txn.delete(key)
    return timer_slot


def is_due(txn: Txn, universe: str, world_id: str, intent_hash: bytes, timer: DueTimerRef) -> bool:
    """Whether a timer is due and its slot still holds it."""
    timer_slot = find_slot(txn, universe, world_id, timer.slot)
    if timer_slot is None or (timer_slot.intent_hash, timer_slot.seq) != (intent_hash, timer.seq):
        return False
    return timer_slot.queue(universe) == timer.queue and delayed.is_due(
        txn, timer.queue, timer.seq, _now_ns(txn, universe, timer)
    )


def complete(txn: Txn, universe: str, world_id: str, timer: DueTimerRef) -> None:
    """Complete a due timer after its delivery to the world."""
    txn.delete(_key(universe, world_id, timer.slot))
    delayed.complete(txn, timer.queue, timer.seq, _now_ns(txn, universe, timer))


def _now_ns(txn: Txn, universe: str, timer: DueTimerRef) -> int:
    return timer.wall_ns if timer.queue == calendar_queue(universe) else txn.now_ns


def find_slot(txn: Txn, universe: str, world_id: str, key: str) -> TimerSlot | None:
    """Return the contents of a timer slot."""
    row = txn.get(_key(universe, world_id, key))
    return None if row is None else codec.unpack_as(TimerSlot, row)


def list_slots(
    txn: Txn, universe: str, world_id: str, limit: int, after: str = ""
) -> list[tuple[str, TimerSlot]]:
    """Return the pending timers of a world by slot, after a slot."""
    prefix = _slots_prefix(universe, world_id)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [
        (str(tuples.unpack(key[len(prefix) :])[0]), codec.unpack_as(TimerSlot, row))
        for key, row in rows
    ]


# -- inside --------------------------------------------------------------------------------------


def clear_slot(txn: Txn, universe: str, world_id: str, slot: str) -> None:
    """Remove the timer of a slot from its queue and clear the slot."""
    key = _key(universe, world_id, slot)
    row = txn.get(key)
    if row is not None:
        timer_slot = codec.unpack_as(TimerSlot, row)
        queue.cancel.fn(txn, timer_slot.queue(universe), timer_slot.seq)
        txn.delete(key)


def _key(universe: str, world_id: str, slot: str) -> bytes:
    return _slots_prefix(universe, world_id) + tuples.pack((slot,))


@lru_cache(maxsize=65536)
def _slots_prefix(universe: str, world_id: str) -> bytes:
    return schema.key_prefix(schema.Space.WORLD, universe, "t", world_id)
