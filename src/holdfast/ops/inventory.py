"""What a store holds: its universes, their worlds and workers. Found by seeking, shown in pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.authority import authority, workers
from holdfast.authority.workers import WorkerRecord
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox, journal
from holdfast.durable import lease as leases
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Row, Txn
from holdfast.store.schema import Space
from holdfast.world import catalog
from holdfast.world.catalog import WorldRecord, subject_of


class WorldRow(NamedTuple):
    """A world as an operator sees it."""

    record: WorldRecord
    height: int
    # How much of its inbox is unread.
    depth: int
    # Who shall host it, and who does: empty for nobody.
    worker: str
    holder: str
    # The lowest entry that is kept.
    floor: int = 1


class WorkerRow(NamedTuple):
    universe: str
    record: WorkerRecord
    live: bool
    assigned: int


def universes(txn: Txn) -> list[str]:
    """Every universe that has worlds, workers or tasks, by name."""
    spaces = (Space.WORLD, Space.WORKER, Space.TASK)
    found = {name for space in spaces for name in names_after(txn, (int(space),))}
    return sorted(found)


def types(txn: Txn, universe: str) -> list[str]:
    """Types of which there are worlds that are not deleted."""
    return list(names_after(txn, (int(Space.WORLD), universe, "n")))


def worlds(txn: Txn, universe: str, type: str, after: str = "", limit: int = 100) -> list[WorldRow]:
    """Worlds of a type by name, after a name; those that are deleted have none."""
    prefix = schema.prefix(Space.WORLD, universe, "n", type)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [look(txn, catalog.record(txn, universe, row.decode())) for _, row in rows]


def look(txn: Txn, record: WorldRecord) -> WorldRow:
    subject = subject_of(record.universe, record.world_id)
    assigned = catalog.assignment(txn, record.universe, record.world_id)
    lease = leases.current(txn, subject)
    head = journal.head(txn, subject)
    return WorldRow(
        record,
        head.height,
        inbox.depth(txn, subject),
        "" if assigned is None else assigned.desired_worker_id or "",
        "" if lease is None or not lease.live(txn.now_ns, txn.generation) else lease.worker,
        head.floor,
    )


def resolve(txn: Txn, name: str, universe: str | None = None) -> WorldRecord:
    """The world that is meant by `Type/name`, or by an id. It must be in one universe only."""
    found: list[WorldRecord] = []
    for where in universes(txn) if universe is None else [universe]:
        type, slash, rest = name.partition("/")
        known = catalog.find(txn, where, type, rest) if slash and type and rest else name
        if known:
            try:
                found.append(catalog.record(txn, where, known))
            except NotFound:
                continue
    if not found:
        raise NotFound(what="world", found=name, expected="Type/name or an id")
    if len(found) > 1:
        where_all = [record.universe for record in found]
        raise Invalid(what="world", why="in several universes: say which", universes=where_all)
    return found[0]


def lineage(txn: Txn, record: WorldRecord) -> list[WorldRecord]:
    """The parent, its parent and so on, as far as their records go."""
    found: list[WorldRecord] = []
    while record.lineage is not None:
        try:
            record = catalog.record(txn, record.universe, record.lineage.parent_world_id)
        except NotFound:
            break
        found.append(record)
    return found


def crew(txn: Txn, ttl_ns: int = workers.TTL_NS) -> list[WorkerRow]:
    """Every worker of every universe, and whether it counts as live there."""
    found: list[WorkerRow] = []
    for universe in universes(txn):
        epoch = authority.epoch(txn, universe)
        for record in workers.known(txn, universe):
            live = record.live(txn.now_ns, ttl_ns, epoch)
            assigned = len(catalog.worlds_of(txn, universe, record.worker))
            found.append(WorkerRow(universe, record, live, assigned))
    return found


def names_after(txn: Txn, path: tuples.Key) -> Iterator[str]:
    """The names that stand in keys behind a path, one seek for each."""
    prefix = tuples.pack(path)
    at, end = prefix, tuples.after(prefix)
    while rows := txn.scan(at, end, 1):
        name = str(tuples.unpack(rows[0][0])[len(path)])
        yield name
        at = tuples.after(prefix + tuples.pack((name,)))


def rows_of(txn: Txn, prefix: bytes) -> Iterator[Row]:
    """All rows behind a prefix, a page at a time."""
    at, end = prefix, tuples.after(prefix)
    while page := txn.scan(at, end, SCAN_PAGE):
        yield from page
        at = page[-1][0] + b"\x00"
