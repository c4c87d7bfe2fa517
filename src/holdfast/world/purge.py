"""Erasure of a world: its journal, snapshots, blobs, dead letters and keys.

There are two causes. The leader of the universe erases a deleted world some time after its
deletion. A purged world is erased at once and leaves a tombstone: its id, a hash and a date.

`begin_purge` fences: one commit deletes the world and revokes its lease, so no later write for it
is accepted. `erase_steps` then erases a bounded number of rows per commit. The catalog record is
removed last, so an interrupted erasure is found and continued. Data held elsewhere is not erased:
copies in forks, delivered mail, backups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import ERASE_ROWS_PER_COMMIT, SCAN_PAGE
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.durable import item as items
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Conflict, HoldfastError, Invalid, NotFound
from holdfast.messages import Intent
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn, operation
from holdfast.store.schema import Space
from holdfast.world import catalog, history, timers
from holdfast.world import intents as world_intents
from holdfast.world.catalog import WorldEvent, WorldRecord, WorldStatus, subject_of
from holdfast.world.redrive import FailedEventRow, failed_events_queue


class WorldInUse(Invalid):
    """The world has a live lease, or effects without a receipt."""

    code = "world_in_use"
    hint = "wait until it is released and its effects are done; --force fences it and drops them"


class Tombstone(Record, frozen=True):
    """The only row left of a purged world: the last hash of its journal, and the time of its
    erasure."""

    world_id: str
    hash: bytes
    height: int
    purged_ns: int


class WorldUse(NamedTuple):
    """The reasons against a purge, and the journal head at which they were read."""

    holder: str
    effects: int
    head: int


def tombstone(txn: Txn, universe: str, world_id: str) -> Tombstone | None:
    """Return the tombstone of a purged world."""
    row = txn.get(_tombstone_key(universe, world_id))
    return None if row is None else codec.unpack_as(Tombstone, row)


def find_use(store: Store, universe: str, world_id: str) -> WorldUse:
    """Return the lease holder of a world and the number of its effects without a receipt."""

    def holder(txn: Txn) -> tuple[str, int]:
        catalog.get_record(txn, universe, world_id)
        subject = subject_of(universe, world_id)
        found = leases.current_status(txn, subject)
        live = found is not None and found.is_live(txn.now_ns, txn.generation)
        return found.worker if live and found else "", journal.head(txn, subject).height

    held_by, head = store.read(holder)
    pages = _pending_effects(store, universe, {world_id})
    return WorldUse(held_by, sum(not is_dead for page in pages for _, is_dead in page), head)


@operation("purge.begin_purge")
def begin_purge(txn: Txn, universe: str, world_id: str, head: int, force: bool) -> WorldRecord:
    """Delete and fence a world that is to be purged. `head` is the journal head at which its
    effects were read."""
    record = catalog.get_record(txn, universe, world_id)
    subject = subject_of(universe, world_id)
    if record.status is not WorldStatus.DELETED:
        if not force:
            found = leases.current_status(txn, subject)
            if found is not None and found.is_live(txn.now_ns, txn.generation):
                raise WorldInUse(what="world", world_id=world_id, worker=found.worker)
            if journal.head(txn, subject).height != head:
                raise Conflict(world=world_id, why="the world has new journal entries")
        record = catalog.change_status.fn(txn, universe, world_id, WorldEvent.DELETE)
    catalog.mark_deleted(txn, record, 0, purged=True)
    return record


@operation("purge.note_deleted")
def note_deleted(txn: Txn, universe: str, world_id: str) -> None:
    """Record the deletion time of a world that an older release deleted without one."""
    try:
        record = catalog.get_record(txn, universe, world_id)
    except NotFound:
        return
    if record.status is WorldStatus.DELETED and not record.deleted_ns and not record.purged:
        catalog.mark_deleted(txn, record, max(txn.now_ns, 1))


def erase_steps(
    store: Store, universe: str, world_ids: list[str], guard: Lease | None = None
) -> Iterator[int]:
    """Erase deleted worlds, one read or commit per step. Yield the number of rows that each step
    removed.

    `guard` is the leader's lease; None if an operator runs the erasure.
    """

    def commit(fn: Any, *args: Any) -> int:
        return int(store.transact(_run_guarded, guard, fn, universe, *args))

    wanted = set(world_ids)
    for page in _pending_effects(store, universe, wanted):
        yield commit(drop_effects, [hash for hash, _ in page]) if page else 0
    for name in store.read(_queue_names, universe):
        for letters in _matching_seqs(store, name, wanted, _dead_page):
            yield commit(drop_dead_letters, name, letters) if letters else 0
    for waiting in _matching_seqs(store, failed_events_queue(universe), wanted, _item_page):
        yield commit(drop_items, waiting) if waiting else 0
    for world_id in world_ids:
        while more := commit(erase, world_id, ERASE_ROWS_PER_COMMIT):
            yield more


@operation("purge.erase")
def erase(txn: Txn, universe: str, world_id: str, limit: int) -> int:
    """Remove about `limit` rows of a deleted world. Return 0 if no rows are left."""
    try:
        record = catalog.get_record(txn, universe, world_id)
    except NotFound:
        return 0
    if record.status is not WorldStatus.DELETED:
        raise Invalid(what="world", why="it is not deleted", world_id=world_id)
    subject = subject_of(universe, world_id)
    head = journal.head(txn, subject)
    if not (
        snapshot.erase(txn, subject, limit)
        and _erase_timers(txn, universe, world_id, limit)
        and _erase_rows(txn, universe, world_id, limit)
        and inbox.erase(txn, subject, limit)
        and _erase_journal(txn, record, head, limit)
    ):
        return limit
    history.drop_plan(txn, universe, world_id)
    leases.delete_lease(txn, subject)
    catalog.remove_record(txn, record)
    return 0


@operation("purge.drop_effects")
def drop_effects(txn: Txn, universe: str, intents: list[bytes]) -> int:
    """Remove effects of an erased world from their queues, including claimed ones."""
    gone = 0
    for intent_hash in intents:
        found = world_intents.find_pending(txn, universe, intent_hash)
        if found is not None:
            # A dead effect is removed with the dead letters.
            world_intents.drop(txn, universe, intent_hash)
            if found.starts_flow:
                world_intents.withdraw(txn, universe, found)
            else:
                _withdraw(txn, found.queue(universe), found.seq)
            gone += 1
    return gone


@operation("purge.drop_dead_letters")
def drop_dead_letters(txn: Txn, universe: str, name: str, seqs: list[int]) -> int:
    """Remove dead letters of an erased world."""
    letters = [
        one for seq in seqs for one in queue.list_dead(txn, name, seq - 1, 1) if one.seq == seq
    ]
    queue.discard_dead.fn(txn, name, [one.seq for one in letters])
    for one in letters:
        if one.blob:
            blobs.erase_idle.fn(txn, one.blob)
    return len(letters)


@operation("purge.drop_items")
def drop_items(txn: Txn, universe: str, seqs: list[int]) -> int:
    """Remove redriven events of an erased world that are not delivered yet."""
    return sum(_withdraw(txn, failed_events_queue(universe), seq) for seq in seqs)


def descendants(store: Store, universe: str, world_id: str) -> list[str]:
    """Return the forks of a world and their forks: each has a copy of its state."""
    children: dict[str, list[str]] = {}
    after = ""
    while page := store.read(catalog.list_worlds, universe, after, SCAN_PAGE):
        for record in page:
            if record.lineage is not None:
                children.setdefault(record.lineage.parent_world_id, []).append(record.world_id)
        after = page[-1].world_id
    found, ahead = [], [world_id]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


# -- inside --------------------------------------------------------------------------------------


def _run_guarded(txn: Txn, guard: Lease | None, fn: Callable[..., Any], *args: Any) -> Any:
    if guard is not None:
        txn.require_live(guard)
    return fn(txn, *args)


def _withdraw(txn: Txn, name: str, seq: int) -> bool:
    row = txn.get(items.keys_of(name).items + tuples.pack_int(seq))
    gone = queue.cancel.fn(txn, name, seq, True)
    if gone and row is not None and (blob := items.decode_item(row).blob):
        blobs.erase_idle.fn(txn, blob)
    return gone


def _erase_timers(txn: Txn, universe: str, world_id: str, limit: int) -> bool:
    found = timers.list_slots(txn, universe, world_id, limit)
    for slot, _ in found:
        timers.clear_slot(txn, universe, world_id, slot)
    return len(found) < limit


def _erase_rows(txn: Txn, universe: str, world_id: str, limit: int) -> bool:
    """Erase inherited items, intent aliases and given-up items."""
    remaining = limit
    for kind in ("h", "r", "g"):
        prefix = schema.key_prefix(Space.WORLD, universe, kind, world_id)
        rows = txn.scan(prefix, tuples.prefix_end(prefix), remaining)
        for key, _ in rows:
            txn.delete(key)
        remaining -= len(rows)
    return remaining > 0


def _erase_journal(txn: Txn, record: WorldRecord, head: journal.JournalHead, limit: int) -> bool:
    if not journal.erase(txn, subject_of(record.universe, record.world_id), limit):
        return False
    if record.purged:
        tombstone = Tombstone(record.world_id, head.hash, head.height, txn.now_ns)
        txn.put(_tombstone_key(record.universe, record.world_id), codec.pack(tombstone))
    return True


def _pending_effects(
    store: Store, universe: str, world_ids: set[str]
) -> Iterator[list[tuple[bytes, bool]]]:
    """Yield pending and dead effects of these worlds, per page of the universe's effects: (intent
    hash, whether it is dead)."""
    after = b""
    while True:
        page: list[tuple[bytes, world_intents.PendingEffect]] = store.read(
            world_intents.pending_page, universe, after, SCAN_PAGE
        )
        if not page:
            return
        after = page[-1][0]
        yield [(hash, found.dead) for hash, found in page if found.world_id in world_ids]


def _matching_seqs(
    store: Store,
    name: str,
    world_ids: set[str],
    page_of: Callable[[Txn, str, int], tuple[int, list[tuple[int, str]]]],
) -> Iterator[list[int]]:
    """Yield the seqs of a queue's dead letters or items that belong to these worlds, per page."""
    last = 0
    while True:
        read, found = store.read(page_of, name, last)
        if not read:
            return
        last = read
        yield [seq for seq, world_id in found if world_id in world_ids]


def _dead_page(txn: Txn, name: str, after: int) -> tuple[int, list[tuple[int, str]]]:
    letters = queue.list_dead(txn, name, after, SCAN_PAGE)
    found = [(one.seq, one.group or _world_id_of(txn, one)) for one in letters]
    return (letters[-1].seq if letters else 0), found


def _item_page(txn: Txn, name: str, after: int) -> tuple[int, list[tuple[int, str]]]:
    keys = items.keys_of(name)
    lo = keys.items + tuples.pack_int(after + 1)
    rows = txn.scan(lo, tuples.prefix_end(keys.items), SCAN_PAGE)
    found = [
        (items.seq_of(key[len(keys.items) :]), _world_id_of(txn, items.decode_item(row)))
        for key, row in rows
    ]
    return (found[-1][0] if found else 0), found


def _world_id_of(txn: Txn, held: items.QueueItem | queue.DeadLetter) -> str:
    """Return the world of a failed event or an intent; empty for any other payload."""
    payload = queue.payload_of(txn, held)
    with contextlib.suppress(HoldfastError):
        return codec.unpack_as(FailedEventRow, payload).world_id
    with contextlib.suppress(HoldfastError):
        return codec.unpack_as(Intent, payload).world_id
    return ""


def _queue_names(txn: Txn, universe: str) -> list[str]:
    """Return the queues of a universe, by one seek per queue."""
    prefix = schema.key_prefix(Space.QUEUE)
    mine = f"{universe}/"
    found: list[str] = []
    at = prefix + tuples.pack((mine,))[:-1]
    end = tuples.prefix_end(at)
    while rows := txn.scan(at, end, 1):
        name = str(tuples.unpack(rows[0][0])[1])
        found.append(name)
        at = tuples.prefix_end(prefix + tuples.pack((name,)))
    return found


def _tombstone_key(universe: str, world_id: str) -> bytes:
    return schema.key_prefix(Space.WORLD, universe, "z", world_id)
