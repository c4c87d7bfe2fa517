"""Timers of worlds: slots that hold one each, and two queues in which they wait, each by its clock.

    delays     what `after` sets: due by store time, which no step of the wall clock moves
    calendar   what `at` and `every` set: due when the clock on the wall says so, wherever it was set to

- A timer's key is a slot: setting it again replaces what waits there, cancelling empties it, and it is
  free again once its timer has fired.
- What is due fires in the order of its times, however long nobody was there to fire it.
- Setting, replacing and cancelling touch the rows of one timer: none costs more for a million others.
"""

from __future__ import annotations

from functools import lru_cache

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import due, queue
from holdfast.durable.bounds import TIME_NS_MAX
from holdfast.messages import Intent, TimerSet
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.world import every


class Slot(Record, frozen=True):
    """What a timer's key holds: the pending timer, and its place in which queue."""

    intent_hash: bytes
    seq: int
    calendar: bool = False
    # The time it was set for, whatever it waits for now: its place among those that are due.
    turn_ns: int = 0

    def queue(self, universe: str) -> str:
        return calendar(universe) if self.calendar else delays(universe)


class Alarm(Record, frozen=True):
    """A timer that is due: where it waits, its slot, and what the clock on the wall showed."""

    queue: str
    seq: int
    slot: str
    wall_ns: int


def delays(universe: str) -> str:
    """The queue whose times are store time."""
    return f"{universe}/timers"


def calendar(universe: str) -> str:
    """The queue whose times are those of the wall clock."""
    return f"{universe}/timers/calendar"


def set_timer(txn: Txn, intent: Intent, wanted_ns: int = 0) -> None:
    """Do what a `timer.set` wants. A delay counts from `wanted_ns`, the store time at which its
    reducer ran, or else from this commit."""
    timer = codec.unpack_as(TimerSet, intent.params)
    empty(txn, intent.universe_id, intent.world_id, timer.key)
    if timer.cron:
        intent, at_ns = every.first(intent, timer)
        hang(txn, intent, timer.key, at_ns, on_calendar=True)
    elif timer.wall_ns is not None:
        hang(txn, intent, timer.key, timer.wall_ns, on_calendar=True)
    else:
        since_ns = min(wanted_ns, txn.now_ns) if wanted_ns else txn.now_ns
        hang(txn, intent, timer.key, since_ns + (timer.delay_ns or 0))


def cancel_timer(txn: Txn, intent: Intent) -> None:
    """Do what a `timer.cancel` wants. An empty slot, and one whose timer has fired, stay as they are."""
    slot: str = codec.unpack(intent.params)
    empty(txn, intent.universe_id, intent.world_id, slot)


def hang(
    txn: Txn,
    intent: Intent,
    slot: str,
    due_ns: int,
    *,
    on_calendar: bool = False,
    turn_ns: int | None = None,
) -> None:
    """Let a timer wait in its slot, for a time of its clock.

    `turn_ns` is what it was set for, if it waited for that before.
    """
    universe = intent.universe_id
    # A far delay on a store clock that runs ahead: the last time that there is.
    due_ns = min(due_ns, TIME_NS_MAX)
    name = calendar(universe) if on_calendar else delays(universe)
    turn_ns = due_ns if turn_ns is None else turn_ns
    seq = due.hang(txn, name, codec.pack(intent), due_ns, turn_ns)
    held = Slot(intent.intent_hash, seq, on_calendar, turn_ns)
    txn.put(_key(universe, intent.world_id, slot), codec.pack(held))


def take(txn: Txn, intent: Intent, slot: str) -> Slot | None:
    """Free a slot for the timer that it holds; None when that was replaced or cancelled meanwhile."""
    key = _key(intent.universe_id, intent.world_id, slot)
    row = txn.get(key)
    held = None if row is None else codec.unpack_as(Slot, row)
    if held is None or held.intent_hash != intent.intent_hash:
        return None
    txn.delete(key)
    return held


def rings(txn: Txn, universe: str, world_id: str, intent_hash: bytes, alarm: Alarm) -> bool:
    """Whether a timer is due, and its slot still holds it."""
    held = slot(txn, universe, world_id, alarm.slot)
    if held is None or (held.intent_hash, held.seq) != (intent_hash, alarm.seq):
        return False
    return held.queue(universe) == alarm.queue and due.is_due(
        txn, alarm.queue, alarm.seq, _now_ns(txn, universe, alarm)
    )


def end(txn: Txn, universe: str, world_id: str, alarm: Alarm) -> None:
    """A timer that rings has been told to its world."""
    txn.delete(_key(universe, world_id, alarm.slot))
    due.end(txn, alarm.queue, alarm.seq, _now_ns(txn, universe, alarm))


def _now_ns(txn: Txn, universe: str, alarm: Alarm) -> int:
    return alarm.wall_ns if alarm.queue == calendar(universe) else txn.now_ns


def slot(txn: Txn, universe: str, world_id: str, key: str) -> Slot | None:
    """What a timer's key holds."""
    row = txn.get(_key(universe, world_id, key))
    return None if row is None else codec.unpack_as(Slot, row)


def slots_of(txn: Txn, universe: str, world_id: str, limit: int) -> list[tuple[str, Slot]]:
    """The pending timers of a world."""
    prefix = _slots(universe, world_id)
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    return [
        (str(tuples.unpack(key[len(prefix) :])[0]), codec.unpack_as(Slot, row)) for key, row in rows
    ]


# -- inside --------------------------------------------------------------------------------------


def empty(txn: Txn, universe: str, world_id: str, slot: str) -> None:
    """Take the timer of a slot away."""
    key = _key(universe, world_id, slot)
    row = txn.get(key)
    if row is not None:
        held = codec.unpack_as(Slot, row)
        queue.withdraw.fn(txn, held.queue(universe), held.seq)
        txn.delete(key)


def _key(universe: str, world_id: str, slot: str) -> bytes:
    return _slots(universe, world_id) + tuples.pack((slot,))


@lru_cache(maxsize=65536)
def _slots(universe: str, world_id: str) -> bytes:
    return schema.prefix(schema.Space.WORLD, universe, "t", world_id)
