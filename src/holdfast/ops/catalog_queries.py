"""Catalog queries: the universes of a store, their worlds and workers. Uses index seeks and pages."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.durable import inbox, journal
from holdfast.durable import lease as leases
from holdfast.errors import Invalid, NotFound
from holdfast.leadership import leader_lease, worker_registry
from holdfast.leadership.worker_registry import WorkerRecord
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space
from holdfast.world import catalog
from holdfast.world.catalog import WorldRecord, subject_of


class WorldRow(NamedTuple):
    """A world record with its operational state."""

    record: WorldRecord
    height: int
    # The number of unread inbox messages.
    depth: int
    # The assigned worker, and the worker that holds the lease; empty for none.
    worker: str
    holder: str
    # The height of the oldest kept entry.
    floor: int = 1
    # The fencing epoch of the last lease, 0 without any, and the end of a live lease.
    epoch: int = 0
    leased_until_ns: int = 0


class WorkerRow(NamedTuple):
    universe: str
    record: WorkerRecord
    live: bool
    assigned: int


def universes(txn: Txn) -> list[str]:
    """Return the names of all universes that have worlds, workers, tasks or schedules, sorted."""
    spaces = (Space.WORLD, Space.WORKER, Space.TASK, Space.SCHEDULE)
    names = {name for space in spaces for name in iter_names(txn, (int(space),))}
    return sorted(names)


def types(txn: Txn, universe: str) -> list[str]:
    """Return the types of all worlds that are not deleted."""
    return list(iter_names(txn, (int(Space.WORLD), universe, "n")))


def worlds(txn: Txn, universe: str, type: str, after: str = "", limit: int = 100) -> list[WorldRow]:
    """Return the worlds of a type by name, after a name. Deleted worlds have no name and are omitted."""
    prefix = schema.key_prefix(Space.WORLD, universe, "n", type)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [world(txn, catalog.get_record(txn, universe, row.decode())) for _, row in rows]


def world(txn: Txn, record: WorldRecord) -> WorldRow:
    subject = subject_of(record.universe, record.world_id)
    assigned = catalog.find_assignment(txn, record.universe, record.world_id)
    lease = leases.current_status(txn, subject)
    live = lease is not None and lease.is_live(txn.now_ns, txn.generation)
    head = journal.head(txn, subject)
    return WorldRow(
        record,
        head.height,
        inbox.depth(txn, subject),
        "" if assigned is None else assigned.desired_worker_id or "",
        lease.worker if live and lease else "",
        floor=head.floor,
        epoch=lease.epoch if lease else 0,
        leased_until_ns=lease.expires_ns if live and lease else 0,
    )


def resolve(txn: Txn, name: str, universe: str | None = None) -> WorldRecord:
    """Return the world named `Type/name` or by its id. Raise Invalid if several universes have it."""
    records: list[WorldRecord] = []
    for universe_name in universes(txn) if universe is None else [universe]:
        type, slash, world_name = name.partition("/")
        world_id = (
            catalog.find_id(txn, universe_name, type, world_name)
            if slash and type and world_name
            else name
        )
        if world_id:
            try:
                records.append(catalog.get_record(txn, universe_name, world_id))
            except NotFound:
                continue
    if not records:
        raise NotFound(what="world", found=name, expected="Type/name or an id")
    if len(records) > 1:
        universe_names = [record.universe for record in records]
        raise Invalid(
            what="world", why="in several universes: give --universe", universes=universe_names
        )
    return records[0]


def lineage(txn: Txn, record: WorldRecord) -> list[WorldRecord]:
    """Return the fork ancestors, the direct parent first, until a record is missing."""
    ancestors: list[WorldRecord] = []
    while record.lineage is not None:
        try:
            record = catalog.get_record(txn, record.universe, record.lineage.parent_world_id)
        except NotFound:
            break
        ancestors.append(record)
    return ancestors


def worker_rows(txn: Txn, ttl_ns: int = worker_registry.TTL_NS) -> list[WorkerRow]:
    """Return the workers of all universes, each with whether it is live."""
    rows: list[WorkerRow] = []
    for universe in universes(txn):
        epoch = leader_lease.epoch(txn, universe)
        rows += [
            worker_row(txn, universe, record, epoch, ttl_ns)
            for record in worker_registry.list_registered(txn, universe)
        ]
    return rows


def workers_after(txn: Txn, universe: str, after: str, limit: int) -> list[WorkerRow]:
    """Return the workers of a universe by id, after an id."""
    epoch = leader_lease.epoch(txn, universe)
    return [
        worker_row(txn, universe, record, epoch)
        for record in worker_registry.list_registered(txn, universe, after, limit)
    ]


def worker_row(
    txn: Txn,
    universe: str,
    record: WorkerRecord,
    epoch: int,
    ttl_ns: int = worker_registry.TTL_NS,
) -> WorkerRow:
    live = record.live(txn.now_ns, ttl_ns, epoch)
    assigned = len(catalog.list_assigned(txn, universe, record.worker))
    return WorkerRow(universe, record, live, assigned)
