"""How much history a world keeps, and cutting what is below.

A world type may have a bound on its history: a number of entries, an age, or both; then whichever
keeps more counts. A journal is cut at a snapshot, never above the baseline, so every state from the
new floor on can be restored. What is removed leaves its chain hash in the head of the journal.

The commit that saves a snapshot notes when the history is to be cut next (`plan`). `trim` does it,
for whoever leads the universe: a bounded number of rows in a commit. The floor rises first and rows go
after it, so a reader never sees half a history, and an interrupted `trim` is continued by the next.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, ERASED_PER_COMMIT, KEEP_PARTS
from holdfast.durable import journal, snapshot
from holdfast.durable.bounds import check_limit
from holdfast.durable.snapshot import Window
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import Space
from holdfast.world import catalog
from holdfast.world.catalog import subject_of


class Bound(Record, frozen=True):
    """An entry stays while it is among the last `entries`, or younger than `ns`."""

    entries: int = 0
    ns: int = 0

    @property
    def window(self) -> Window:
        return Window(self.entries, self.ns, KEEP_PARTS)


class Plan(Record, frozen=True):
    """The bound of a world's history, and when there is something to cut; 0: not by time alone."""

    bound: Bound
    due_ns: int = 0


def plan(txn: Txn, universe: str, world_id: str, bound: Bound | None) -> None:
    """Note when a world's history is to be cut next, or that it has no bound.

    A history that is due stays due: `trim` may have removed a part of the rows. It notes the end itself.
    """
    was = planned(txn, universe, world_id)
    now = None
    if bound is not None:
        due_ns = 0 if was is None or was.due_ns > txn.now_ns else was.due_ns
        now = Plan(bound, due_ns or _due_ns(txn, universe, world_id, bound))
    _change(txn, universe, world_id, was, now)


def planned(txn: Txn, universe: str, world_id: str) -> Plan | None:
    row = txn.get(_plan_key(universe, world_id))
    return None if row is None else codec.unpack_as(Plan, row)


def forget(txn: Txn, universe: str, world_id: str) -> None:
    """The world goes: nothing is planned for it."""
    _unplan(txn, universe, world_id, planned(txn, universe, world_id))


def due(txn: Txn, universe: str) -> bool:
    """Whether the history of any world is to be cut now."""
    return bool(_due(txn, universe, 1))


@operation
def trim(txn: Txn, universe: str, limit: int = ERASED_PER_COMMIT) -> bool:
    """Cut histories that are due, about `limit` rows; whether there may be more."""
    check_limit(limit)
    left = limit
    for world_id in _due(txn, universe, limit):
        if left <= 0:
            return True
        left -= 1 + _trim(txn, universe, world_id, left)
    return left <= 0


# -- inside --------------------------------------------------------------------------------------


def _trim(txn: Txn, universe: str, world_id: str, limit: int) -> int:
    found = planned(txn, universe, world_id)
    if found is None or catalog.gone(txn, universe, world_id):
        forget(txn, universe, world_id)
        return 0
    subject = subject_of(universe, world_id)
    head = journal.head(txn, subject)
    to = snapshot.latest(
        txn,
        subject,
        head.floor,
        min(head.height - found.bound.entries, head.checkpoint) + 1,
        txn.now_ns - found.bound.ns + 1,
    )
    if to is not None:
        journal.cut(txn, subject, to)
    gone = journal.sweep(txn, subject, limit)
    if gone < limit:
        floor = journal.head(txn, subject).floor
        gone += snapshot.drop_below(txn, subject, floor - 1, min(limit - gone, BATCH_MAX))
    if gone < limit:
        now = Plan(found.bound, _due_ns(txn, universe, world_id, found.bound))
        _change(txn, universe, world_id, found, now)
    return gone


def _due_ns(txn: Txn, universe: str, world_id: str, bound: Bound) -> int:
    """When the lowest snapshot above the floor may be what the journal stands on."""
    subject = subject_of(universe, world_id)
    head = journal.head(txn, subject)
    lowest = snapshot.earliest(txn, subject, head.floor)
    if lowest is None or lowest[0] > min(head.height - bound.entries, head.checkpoint):
        return 0
    return lowest[1] + bound.ns


def _due(txn: Txn, universe: str, limit: int) -> list[str]:
    prefix = schema.prefix(Space.WORLD, universe, "d")
    rows = txn.scan(prefix, prefix + tuples.pack_int(txn.now_ns + 1), limit)
    return [str(tuples.unpack(key)[-1]) for key, _ in rows]


def _change(txn: Txn, universe: str, world_id: str, was: Plan | None, now: Plan | None) -> None:
    if now == was:
        return
    _unplan(txn, universe, world_id, was)
    if now is not None:
        txn.put(_plan_key(universe, world_id), codec.pack(now))
        if now.due_ns:
            txn.put(_due_key(universe, now.due_ns, world_id), b"")


def _unplan(txn: Txn, universe: str, world_id: str, was: Plan | None) -> None:
    if was is not None:
        txn.delete(_plan_key(universe, world_id))
        if was.due_ns:
            txn.delete(_due_key(universe, was.due_ns, world_id))


def _plan_key(universe: str, world_id: str) -> bytes:
    return schema.prefix(Space.WORLD, universe, "k", world_id)


def _due_key(universe: str, due_ns: int, world_id: str) -> bytes:
    return schema.prefix(Space.WORLD, universe, "d", due_ns, world_id)
