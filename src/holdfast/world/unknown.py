"""Worlds that stopped before an item that their code does not know (invariant I7), or at an entry that
their code repeats otherwise than the code that made it (J6).

    mark      its host knows no such type: the world waits, and is listed by what it needs
    place     a worker that knows the type has it now, or its time is over and the item is given up
    park      the code that made an entry did not come: the world is parked with `replay_diverged`
    clear     the item is behind the cursor
    item      what became of an accepted item: it waits, is handled, is dead, or its entry was removed

- A world that waits is assigned to no worker, unless it is pinned, and leaves no hint. The orchestrator
  finds it here: by the type that it needs, the one that waits longest first.
- The time begins when the world stops before the item, and goes on if it stops there again. Items of
  one need that wait behind each other wait at the same time: a thousand are given up in one such time.
- An item that is given up is journaled as `unknown`, so that each number of the inbox has its entry,
  and is a dead letter `unknown_event`. Its number leads to the letter, and to the number that it got
  when it was redriven: its key is never answered as handled meanwhile.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import inbox, journal
from holdfast.durable.bounds import check_limit
from holdfast.errors import NotFound, ReplayDiverged
from holdfast.messages import Ingress
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.world import catalog, entry
from holdfast.world.catalog import Blocker, Event, Unknown, WorldRecord
from holdfast.world.entry import Outcome
from holdfast.world.need import Need, rows, rows_of
from holdfast.world.program import cause_of

# Redrives of one item that are followed to find out what became of it.
REDRIVES_MAX = 1000

State = Literal["waiting", "handled", "failed", "removed", "dead"]


class GivenUp(Record, frozen=True):
    """An item that no code knew in time: its dead letter, and its number after a redrive."""

    type: str
    letter: int
    again: int = 0


class Item(Record, frozen=True):
    """What became of an accepted item. `type` is what it, or the item before it, waits for or died
    of; `letter` is the number of the dead letter."""

    state: State
    seq: int
    type: str = ""
    letter: int = 0


def need_of(world: str, ingress: Ingress) -> Need:
    (side, type), version = cause_of(ingress)
    return Need(world, side, type, version)


# -- stopping and going on -----------------------------------------------------------------------


def mark(
    txn: Txn,
    record: WorldRecord,
    need: Need,
    seq: int,
    since_ns: int = 0,
    height: int = 0,
    why: str = "",
) -> None:
    """Stop a world before an item. Its host gives it back in the same commit. The item waits from now
    on, or since an earlier time that is known. `height` is the entry that other code made, and `why`
    how this code differs there."""
    universe, world_id = record.universe, record.world_id
    was = record.unknown
    again = was is not None and (was.seq, was.side, was.type, was.height) == (
        seq,
        need.side,
        need.type,
        height,
    )
    if was is not None and again:
        since_ns = was.since_ns
    else:
        since_ns = min(since_ns or txn.now_ns, txn.now_ns)
    assigned = catalog.assignment(txn, universe, world_id)
    priority = 0 if assigned is None else assigned.priority
    stopped = Unknown(
        need.side,
        need.type,
        need.version,
        seq,
        since_ns,
        priority=priority,
        height=height,
        why=why,
    )
    if record.stopped:
        _unlist(txn, record)
    catalog.save(txn, replace(record, unknown=stopped))
    txn.put(stopped.row_key(universe, record.type, world_id), codec.pack(need))
    if assigned is not None and not assigned.pinned:
        catalog.unplace(txn, universe, world_id)
    catalog.settle.fn(txn, universe, world_id, _worker(assigned))
    txn.notify(catalog.topic(universe, catalog.NOBODY))


def place(txn: Txn, record: WorldRecord, worker: str, reason: str, *, give_up: bool) -> None:
    """Let a world go on: with a worker that knows its next item, or with any, to give that up."""
    unknown = record.unknown
    if unknown is None or not unknown.waits:
        return
    _unlist(txn, record)
    catalog.save(txn, replace(record, unknown=replace(unknown, waits=False, given_up=give_up)))
    assigned = catalog.assignment(txn, record.universe, record.world_id)
    if assigned is not None and assigned.pinned:
        catalog.hint(txn, record.universe, record.world_id)
    else:
        catalog.assign(txn, record.universe, record.world_id, worker, unknown.priority, reason)


def park(txn: Txn, record: WorldRecord) -> None:
    """Park a stopped world: the code that made an entry did not come, and other code differs there."""
    unknown = record.unknown
    if unknown is None or not unknown.waits or not unknown.by_code:
        return
    blocker = Blocker(ReplayDiverged.code, unknown.why, unknown.height)
    catalog.change(txn, record.universe, record.world_id, Event.PARK, blocker)


def clear(txn: Txn, universe: str, world_id: str) -> None:
    """The item that a world stopped before is behind its cursor."""
    record = catalog.record(txn, universe, world_id)
    if record.stopped:
        _unlist(txn, record)
    catalog.save(txn, replace(record, unknown=None))


# -- what waits ----------------------------------------------------------------------------------


def needs(txn: Txn, universe: str, limit: int) -> list[tuple[Need, int]]:
    """What stopped worlds need, and since when the first of them waits: one seek for each."""
    prefix = rows(universe)
    found: list[tuple[Need, int]] = []
    at = prefix
    while len(found) < limit and (first := txn.scan(at, tuples.after(prefix), 1)):
        key, row = first[0]
        need = codec.unpack_as(Need, row)
        of = rows_of(universe, need)
        found.append((need, _place_in(key, of)[0]))
        at = tuples.after(of)
    return found


def waiting(
    txn: Txn, universe: str, need: Need, after: bytes, limit: int
) -> list[tuple[bytes, int, str]]:
    """(position, since when, world) of worlds that need this, the one that waits longest first."""
    check_limit(limit)
    prefix = rows_of(universe, need)
    found = txn.scan(after + b"\x00" if after else prefix, tuples.after(prefix), limit)
    return [(key, *_place_in(key, prefix)) for key, _ in found]


def stopped(txn: Txn, universe: str, limit: int) -> list[str]:
    """Worlds that wait, whatever for."""
    check_limit(limit)
    prefix = rows(universe)
    found = txn.scan(prefix, tuples.after(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[2]) for key, _ in found]


# -- what became of an item ----------------------------------------------------------------------


def keep(txn: Txn, universe: str, world_id: str, seq: int, type: str, letter: int) -> None:
    """An item was given up: its number leads to its dead letter."""
    txn.put(_given_key(universe, world_id, seq), codec.pack(GivenUp(type, letter)))


def redriven(txn: Txn, universe: str, world_id: str, seq: int, again: int) -> None:
    """An item that was given up is in the inbox again, under this number."""
    found = given_up(txn, universe, world_id, seq)
    if found is not None:
        row = codec.pack(replace(found, again=again))
        txn.put(_given_key(universe, world_id, seq), row)


def given_up(txn: Txn, universe: str, world_id: str, seq: int) -> GivenUp | None:
    row = txn.get(_given_key(universe, world_id, seq))
    return None if row is None else codec.unpack_as(GivenUp, row)


def item(txn: Txn, universe: str, world_id: str, seq: int) -> Item:
    """What became of an item that was accepted under this number."""
    record = catalog.record(txn, universe, world_id)
    subject = catalog.subject_of(universe, world_id)
    cursor = inbox.cursor(txn, subject)
    for _ in range(REDRIVES_MAX):
        if seq > cursor:
            need = record.unknown.need(record.type) if record.unknown and record.stopped else None
            blocked = "" if need is None else need.cause if need.by_code else need.type
            return Item("waiting", seq, blocked)
        found = given_up(txn, universe, world_id, seq)
        if found is None:
            return Item(_ended(txn, record, seq), seq)
        if not found.again:
            return Item("dead", seq, found.type, found.letter)
        seq = found.again
    return Item("waiting", seq)


# -- inside --------------------------------------------------------------------------------------


def _ended(txn: Txn, record: WorldRecord, seq: int) -> State:
    """How the entry of a number ended. `removed`: its journal was cut above it, and nothing tells."""
    height = seq + (0 if record.lineage is None else record.lineage.forked_at_height)
    subject = catalog.subject_of(record.universe, record.world_id)
    try:
        found = journal.read(txn, subject, height, height + 1, 1)
    except NotFound:
        return "removed"
    if found and entry.decode(found[0].body).outcome is Outcome.FAILED:
        return "failed"
    return "handled"


def _worker(assigned: catalog.Assignment | None) -> str:
    return catalog.NOBODY if assigned is None else assigned.desired_worker_id or catalog.NOBODY


def _unlist(txn: Txn, record: WorldRecord) -> None:
    unknown = record.unknown
    assert unknown is not None
    txn.delete(unknown.row_key(record.universe, record.type, record.world_id))


def _place_in(key: bytes, prefix: bytes) -> tuple[int, str]:
    since_ns, world_id = tuples.unpack(key[len(prefix) :])
    assert isinstance(since_ns, int)
    return since_ns, str(world_id)


def _given_key(universe: str, world_id: str, seq: int) -> bytes:
    prefix = schema.prefix(schema.Space.WORLD, universe, "g", world_id)
    return prefix + tuples.pack((seq,))
