"""History bounds: how much of its journal a world keeps, and trimming of older entries.

A world type may have a history bound: a number of entries, an age, or both. With both, the bound
that keeps more applies. A journal is cut at a snapshot, never above the baseline, so every state
from the new floor on can be restored. The journal head keeps the chain hash of the removed entries.

The commit that saves a snapshot schedules the next trim (`schedule_trim`). The leader of the
universe runs `trim`, which removes a bounded number of rows per commit. The floor rises first and
the rows are removed afterwards. So a reader never sees a partial history, and the next `trim`
continues an interrupted one.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, ERASE_ROWS_PER_COMMIT, SNAPSHOTS_PER_WINDOW
from holdfast.durable import journal, snapshot
from holdfast.durable.snapshot import RetentionWindow
from holdfast.durable.validation import check_limit
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import Space
from holdfast.world import catalog
from holdfast.world.catalog import subject_of


class HistoryBound(Record, frozen=True):
    """An entry is kept while it is among the last `entries`, or younger than `ns`."""

    entries: int = 0
    ns: int = 0

    @property
    def window(self) -> RetentionWindow:
        return RetentionWindow(self.entries, self.ns, SNAPSHOTS_PER_WINDOW)


class TrimPlan(Record, frozen=True):
    """The history bound of a world, and the time of its next trim; 0 if no trim is due by time
    alone."""

    bound: HistoryBound
    due_ns: int = 0


def schedule_trim(txn: Txn, universe: str, world_id: str, bound: HistoryBound | None) -> None:
    """Schedule the next trim of a world's history, or record that it has no bound.

    A trim that is already due stays due, because it may be incomplete. `trim` itself records its
    end.
    """
    was = find_plan(txn, universe, world_id)
    now = None
    if bound is not None:
        due_ns = 0 if was is None or was.due_ns > txn.now_ns else was.due_ns
        now = TrimPlan(bound, due_ns or _due_ns(txn, universe, world_id, bound))
    _replace_plan(txn, universe, world_id, was, now)


def find_plan(txn: Txn, universe: str, world_id: str) -> TrimPlan | None:
    """Return the trim plan of a world."""
    row = txn.get(_plan_key(universe, world_id))
    return None if row is None else codec.unpack_as(TrimPlan, row)


def drop_plan(txn: Txn, universe: str, world_id: str) -> None:
    """Delete the trim plan of a world that is removed."""
    _delete_plan(txn, universe, world_id, find_plan(txn, universe, world_id))


def is_trim_due(txn: Txn, universe: str) -> bool:
    """Whether the history of any world is due for a trim."""
    return bool(_due_worlds(txn, universe, 1))


@operation("history.trim")
def trim(txn: Txn, universe: str, limit: int = ERASE_ROWS_PER_COMMIT) -> bool:
    """Trim histories that are due, about `limit` rows. Return whether there may be more."""
    check_limit(limit)
    remaining = limit
    for world_id in _due_worlds(txn, universe, limit):
        if remaining <= 0:
            return True
        remaining -= 1 + _trim_world(txn, universe, world_id, remaining)
    return remaining <= 0


# -- inside --------------------------------------------------------------------------------------


def _trim_world(txn: Txn, universe: str, world_id: str, limit: int) -> int:
    trim_plan = find_plan(txn, universe, world_id)
    if trim_plan is None or catalog.is_deleted(txn, universe, world_id):
        drop_plan(txn, universe, world_id)
        return 0
    subject = subject_of(universe, world_id)
    head = journal.head(txn, subject)
    to = snapshot.latest_before(
        txn,
        subject,
        head.floor,
        min(head.height - trim_plan.bound.entries, head.checkpoint) + 1,
        txn.now_ns - trim_plan.bound.ns + 1,
    )
    if to is not None:
        journal.raise_floor(txn, subject, to)
    removed = journal.delete_below_floor(txn, subject, limit)
    if removed < limit:
        floor = journal.head(txn, subject).floor
        removed += snapshot.drop_below(txn, subject, floor - 1, min(limit - removed, BATCH_MAX))
    if removed < limit:
        now = TrimPlan(trim_plan.bound, _due_ns(txn, universe, world_id, trim_plan.bound))
        _replace_plan(txn, universe, world_id, trim_plan, now)
    return removed


def _due_ns(txn: Txn, universe: str, world_id: str, bound: HistoryBound) -> int:
    """Return the time at which the lowest snapshot above the floor may become the start of the
    journal."""
    subject = subject_of(universe, world_id)
    head = journal.head(txn, subject)
    lowest = snapshot.first_from(txn, subject, head.floor)
    if lowest is None or lowest[0] > min(head.height - bound.entries, head.checkpoint):
        return 0
    return lowest[1] + bound.ns


def _due_worlds(txn: Txn, universe: str, limit: int) -> list[str]:
    prefix = schema.key_prefix(Space.WORLD, universe, "d")
    rows = txn.scan(prefix, prefix + tuples.pack_int(txn.now_ns + 1), limit)
    return [str(tuples.unpack(key)[-1]) for key, _ in rows]


def _replace_plan(
    txn: Txn, universe: str, world_id: str, was: TrimPlan | None, now: TrimPlan | None
) -> None:
    if now == was:
        return
    _delete_plan(txn, universe, world_id, was)
    if now is not None:
        txn.put(_plan_key(universe, world_id), codec.pack(now))
        if now.due_ns:
            txn.put(_due_key(universe, now.due_ns, world_id), b"")


def _delete_plan(txn: Txn, universe: str, world_id: str, was: TrimPlan | None) -> None:
    if was is not None:
        txn.delete(_plan_key(universe, world_id))
        if was.due_ns:
            txn.delete(_due_key(universe, was.due_ns, world_id))


def _plan_key(universe: str, world_id: str) -> bytes:
    return schema.key_prefix(Space.WORLD, universe, "k", world_id)


def _due_key(universe: str, due_ns: int, world_id: str) -> bytes:
    return schema.key_prefix(Space.WORLD, universe, "d", due_ns, world_id)
