"""Erasing a world: its journal, snapshots, blobs, dead letters and keys.

Two ways lead here. A deleted world is erased some time after its deletion, by the leader of the
universe. A purged world is erased at once, and leaves a tombstone: its id, a hash and a date.

`begin` fences: in one commit the world is deleted and its lease is taken away, so nothing is written
for it from then on. `steps` then erases, a bounded number of rows in a commit; the catalog's record goes
last, so an interrupted erasure is found again and continued. What others hold is theirs: copies in
forks, mail that was delivered, backups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import ERASED_PER_COMMIT, SCAN_PAGE
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.durable import item as items
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Conflict, HoldfastError, Invalid, NotFound
from holdfast.messages import Intent
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn, operation
from holdfast.store.schema import Space
from holdfast.world import catalog, history, publish, timers
from holdfast.world.catalog import Event, Status, WorldRecord, subject_of
from holdfast.world.redrive import Letter, failures


class InUse(Invalid):
    """The world has a lease, or effects without a receipt."""

    code = "world_in_use"
    hint = "wait until it is released and its effects are done; --force fences it and drops them"


class Tombstone(Record, frozen=True):
    """All that is left of a purged world: the hash its journal ended with, and when it was erased."""

    world_id: str
    hash: bytes
    height: int
    purged_ns: int


class Use(NamedTuple):
    """What stands in the way of a purge, and the head it was found at."""

    holder: str
    effects: int
    head: int


def tombstone(txn: Txn, universe: str, world_id: str) -> Tombstone | None:
    row = txn.get(_tombstone_key(universe, world_id))
    return None if row is None else codec.unpack_as(Tombstone, row)


def use_of(store: Store, universe: str, world_id: str) -> Use:
    """Whether a world is held, and how many effects of it have no receipt."""

    def holder(txn: Txn) -> tuple[str, int]:
        catalog.record(txn, universe, world_id)
        subject = subject_of(universe, world_id)
        found = leases.current(txn, subject)
        live = found is not None and found.live(txn.now_ns, txn.generation)
        return found.worker if live and found else "", journal.head(txn, subject).height

    held_by, head = store.read(holder)
    pages = _open_effects(store, universe, {world_id})
    return Use(held_by, sum(not is_dead for page in pages for _, is_dead in page), head)


@operation
def begin(txn: Txn, universe: str, world_id: str, head: int, force: bool) -> WorldRecord:
    """Delete and fence a world that is to be purged; `head` is where its effects were looked at."""
    record = catalog.record(txn, universe, world_id)
    subject = subject_of(universe, world_id)
    if record.status is not Status.DELETED:
        if not force:
            found = leases.current(txn, subject)
            if found is not None and found.live(txn.now_ns, txn.generation):
                raise InUse(what="world", world_id=world_id, worker=found.worker)
            if journal.head(txn, subject).height != head:
                raise Conflict(world=world_id, why="it went on meanwhile")
        record = catalog.change.fn(txn, universe, world_id, Event.DELETE)
    catalog.mark_deleted(txn, record, 0, purged=True)
    return record


@operation
def note_deleted(txn: Txn, universe: str, world_id: str) -> None:
    """Note that a world is deleted, from now on, where an older release did not."""
    try:
        record = catalog.record(txn, universe, world_id)
    except NotFound:
        return
    if record.status is Status.DELETED and not record.deleted_ns and not record.purged:
        catalog.mark_deleted(txn, record, max(txn.now_ns, 1))


def steps(
    store: Store, universe: str, world_ids: list[str], guard: Lease | None = None
) -> Iterator[int]:
    """Erase deleted worlds, one read or commit a step; the rows that each step removed.

    `guard` is the lease under which it is done, if it is not an operator who does it.
    """

    def commit(fn: Any, *args: Any) -> int:
        return int(store.transact(_guarded, guard, fn, universe, *args))

    wanted = set(world_ids)
    for page in _open_effects(store, universe, wanted):
        yield commit(drop_effects, [hash for hash, _ in page]) if page else 0
    for name in store.read(_queues, universe):
        for letters in _letters(store, name, wanted, _dead_page):
            yield commit(drop_letters, name, letters) if letters else 0
    for waiting in _letters(store, failures(universe), wanted, _item_page):
        yield commit(drop_items, waiting) if waiting else 0
    for world_id in world_ids:
        while more := commit(erase, world_id, ERASED_PER_COMMIT):
            yield more


@operation
def erase(txn: Txn, universe: str, world_id: str, limit: int) -> int:
    """Remove about `limit` rows of a deleted world; 0 when nothing is left of it."""
    try:
        record = catalog.record(txn, universe, world_id)
    except NotFound:
        return 0
    if record.status is not Status.DELETED:
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
    history.forget(txn, universe, world_id)
    leases.forget(txn, subject)
    catalog.remove(txn, record)
    return 0


@operation
def drop_effects(txn: Txn, universe: str, intents: list[bytes]) -> int:
    """Take effects of an erased world out of their queues, from whoever does them, too."""
    gone = 0
    for intent_hash in intents:
        found = publish.pending(txn, universe, intent_hash)
        if found is not None:
            # A dead one is a letter, and goes with those.
            _withdraw(txn, found.queue(universe), found.seq)
            publish.forget(txn, universe, intent_hash)
            gone += 1
    return gone


@operation
def drop_letters(txn: Txn, universe: str, name: str, seqs: list[int]) -> int:
    """Remove dead letters of an erased world."""
    letters = [one for seq in seqs for one in queue.dead(txn, name, seq - 1, 1) if one.seq == seq]
    queue.discard_dead.fn(txn, name, [one.seq for one in letters])
    for one in letters:
        if one.blob:
            blobs.wipe.fn(txn, one.blob)
    return len(letters)


@operation
def drop_items(txn: Txn, universe: str, seqs: list[int]) -> int:
    """Take failed events of an erased world back that were to be delivered again."""
    return sum(_withdraw(txn, failures(universe), seq) for seq in seqs)


def descendants(store: Store, universe: str, world_id: str) -> list[str]:
    """Worlds that were forked from this one, or from one of those: each has a copy of its state."""
    children: dict[str, list[str]] = {}
    after = ""
    while page := store.read(catalog.worlds, universe, after, SCAN_PAGE):
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


def _guarded(txn: Txn, guard: Lease | None, fn: Callable[..., Any], *args: Any) -> Any:
    if guard is not None:
        txn.require_live(guard)
    return fn(txn, *args)


def _withdraw(txn: Txn, name: str, seq: int) -> bool:
    row = txn.get(items.keys_of(name).items + tuples.pack_int(seq))
    gone = queue.withdraw.fn(txn, name, seq, True)
    if gone and row is not None and (blob := items.decode(row).blob):
        blobs.wipe.fn(txn, blob)
    return gone


def _erase_timers(txn: Txn, universe: str, world_id: str, limit: int) -> bool:
    found = timers.slots_of(txn, universe, world_id, limit)
    for slot, _ in found:
        timers.empty(txn, universe, world_id, slot)
    return len(found) < limit


def _erase_rows(txn: Txn, universe: str, world_id: str, limit: int) -> bool:
    """What it was given as a fork, and the names by which it knows that."""
    left = limit
    for kind in ("h", "r", "g"):
        prefix = schema.prefix(Space.WORLD, universe, kind, world_id)
        rows = txn.scan(prefix, tuples.after(prefix), left)
        for key, _ in rows:
            txn.delete(key)
        left -= len(rows)
    return left > 0


def _erase_journal(txn: Txn, record: WorldRecord, head: journal.Head, limit: int) -> bool:
    if not journal.erase(txn, subject_of(record.universe, record.world_id), limit):
        return False
    if record.purged:
        left = Tombstone(record.world_id, head.hash, head.height, txn.now_ns)
        txn.put(_tombstone_key(record.universe, record.world_id), codec.pack(left))
    return True


def _open_effects(
    store: Store, universe: str, world_ids: set[str]
) -> Iterator[list[tuple[bytes, bool]]]:
    """Effects of worlds that have no receipt, and those that are dead, a page of the universe's at a
    time: (intent, whether it is dead)."""
    after = b""
    while True:
        page: list[tuple[bytes, publish.Pending]] = store.read(
            publish.pending_page, universe, after, SCAN_PAGE
        )
        if not page:
            return
        after = page[-1][0]
        yield [(hash, found.dead) for hash, found in page if found.world_id in world_ids]


def _letters(
    store: Store,
    name: str,
    world_ids: set[str],
    page_of: Callable[[Txn, str, int], tuple[int, list[tuple[int, str]]]],
) -> Iterator[list[int]]:
    """The numbers of a queue's letters, or items, that are about worlds, a page of it at a time."""
    last = 0
    while True:
        read, found = store.read(page_of, name, last)
        if not read:
            return
        last = read
        yield [seq for seq, world_id in found if world_id in world_ids]


def _dead_page(txn: Txn, name: str, after: int) -> tuple[int, list[tuple[int, str]]]:
    letters = queue.dead(txn, name, after, SCAN_PAGE)
    found = [(one.seq, one.group or _world_in(txn, one)) for one in letters]
    return (letters[-1].seq if letters else 0), found


def _item_page(txn: Txn, name: str, after: int) -> tuple[int, list[tuple[int, str]]]:
    keys = items.keys_of(name)
    lo = keys.items + tuples.pack_int(after + 1)
    rows = txn.scan(lo, tuples.after(keys.items), SCAN_PAGE)
    found = [
        (items.seq_of(key[len(keys.items) :]), _world_in(txn, items.decode(row)))
        for key, row in rows
    ]
    return (found[-1][0] if found else 0), found


def _world_in(txn: Txn, held: items.Item | queue.Dead) -> str:
    """The world that a failed event, or an intent, is of; empty when it is neither."""
    payload = queue.payload_of(txn, held)
    with contextlib.suppress(HoldfastError):
        return codec.unpack_as(Letter, payload).world_id
    with contextlib.suppress(HoldfastError):
        return codec.unpack_as(Intent, payload).world_id
    return ""


def _queues(txn: Txn, universe: str) -> list[str]:
    """The queues of a universe, one seek for each."""
    prefix = schema.prefix(Space.QUEUE)
    mine = f"{universe}/"
    found: list[str] = []
    at = prefix + tuples.pack((mine,))[:-1]
    end = tuples.after(at)
    while rows := txn.scan(at, end, 1):
        name = str(tuples.unpack(rows[0][0])[1])
        found.append(name)
        at = tuples.after(prefix + tuples.pack((name,)))
    return found


def _tombstone_key(universe: str, world_id: str) -> bytes:
    return schema.prefix(Space.WORLD, universe, "z", world_id)
