"""The hosting lease of a world: which worker may host it, in line with its assignment (protocols A
and B).

A worker requests many worlds in one call and gets one result per world. A world is not granted if
it is paused, parked, deleted or assigned to another worker, or if it waits for a worker that
declares its next item (`unknown_events`).

A lease that expires while its world has work counts as a loss at the next seq: a reducer that never
returns, or kills its process, loses the lease at the same seq each time. After `stuck_max` losses
the world is parked with the blocker `reducer_stuck`.

Such a poison event also affects other worlds of the worker: they lose their leases at their own
seqs. So from the second loss on a world is a poison suspect and runs in isolation. `mark_isolated`
records that before its reducer starts, and only a loss after that counts. The world with the poison
event reaches `stuck_max`, other worlds do not.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.durable import inbox, lease
from holdfast.durable.lease import Lease
from holdfast.durable.validation import check_limit
from holdfast.errors import Held, NotFound
from holdfast.store.api import Txn, operation
from holdfast.world import catalog
from holdfast.world.catalog import WorldBlocker, WorldEvent, WorldRecord, WorldStatus, subject_of

ASSIGNED_ELSEWHERE = "assigned_to_another"
LEASE_HELD = "held"
WORLD_NOT_FOUND = "unknown"
STOPPED = "stopped"
# The number of losses at one seq after which a world runs in isolation.
SUSPECT_AFTER_LOSSES = 2


class HostingGrant(Record, frozen=True):
    """A lease with the world's record, or the reason for the refusal."""

    world_id: str
    lease: Lease | None
    record: WorldRecord | None
    refusal: str = ""
    retry_at_ns: int = 0


@operation("hosting_lease.acquire")
def acquire(
    txn: Txn,
    universe: str,
    world_ids: list[str],
    worker: str,
    incarnation: str,
    ttl_ns: int,
    stuck_max: int = 5,
) -> list[HostingGrant]:
    """Request the hosting leases of worlds. Return one result per world."""
    check_limit(len(world_ids), "world_ids")
    return [
        _acquire(txn, universe, world_id, worker, incarnation, ttl_ns, stuck_max)
        for world_id in world_ids
    ]


@operation("hosting_lease.mark_isolated")
def mark_isolated(txn: Txn, universe: str, world_id: str, held: Lease) -> None:
    """Record that a poison suspect starts to run in isolation."""
    txn.require_live(held)
    record = catalog.get_record(txn, universe, world_id)
    catalog.save_record(txn, replace(record, stuck_alone=True))


@operation("hosting_lease.park")
def park(txn: Txn, universe: str, world_id: str, held: Lease, blocker: WorldBlocker) -> WorldRecord:
    """Park a world that must not continue, with the reason. Only the lease holder may."""
    txn.require_live(held)
    return catalog.change_status.fn(txn, universe, world_id, WorldEvent.PARK, blocker)


def is_poison_suspect(record: WorldRecord) -> bool:
    """Whether a world is a poison suspect."""
    return record.stuck_count >= SUSPECT_AFTER_LOSSES


def _acquire(
    txn: Txn,
    universe: str,
    world_id: str,
    worker: str,
    incarnation: str,
    ttl_ns: int,
    stuck_max: int,
) -> HostingGrant:
    try:
        record = catalog.get_record(txn, universe, world_id)
    except NotFound:
        # It was erased since its hint was read; others are asked for in the same call.
        return HostingGrant(world_id, None, None, WORLD_NOT_FOUND)
    if record.status is not WorldStatus.ACTIVE:
        return HostingGrant(world_id, None, record, record.status.value)
    if record.stopped:
        return HostingGrant(world_id, None, record, STOPPED)
    assigned = catalog.find_assignment(txn, universe, world_id)
    if assigned is not None and assigned.desired_worker_id not in (None, worker):
        return HostingGrant(world_id, None, record, ASSIGNED_ELSEWHERE)
    subject = subject_of(universe, world_id)
    previous = lease.current_status(txn, subject)
    try:
        granted = lease.acquire.fn(txn, subject, worker, incarnation, ttl_ns)
    except Held as held:
        return HostingGrant(world_id, None, record, LEASE_HELD, held.until_ns)
    was_lost = previous is not None and previous.state is not lease.LeaseState.FREE
    if was_lost and previous is not None and previous.epoch != granted.epoch:
        record = _record_loss(txn, record, subject, stuck_max)
        if record.status is WorldStatus.PARKED:
            return HostingGrant(world_id, None, record, record.status.value)
    return HostingGrant(world_id, granted, record)


def _record_loss(txn: Txn, record: WorldRecord, subject: str, stuck_max: int) -> WorldRecord:
    """Count a lost lease against the next seq of the world, and park the world at `stuck_max`."""
    if not inbox.depth(txn, subject):
        return record
    seq = inbox.cursor(txn, subject) + 1
    count = 1
    if record.stuck_seq == seq:
        counts = record.stuck_alone or record.stuck_count < SUSPECT_AFTER_LOSSES
        count = record.stuck_count + counts
    if count >= stuck_max:
        text = f"the lease was lost {count} times while handling inbox seq {seq}"
        blocker = WorldBlocker("reducer_stuck", text)
        return catalog.change_status.fn(
            txn, record.universe, record.world_id, WorldEvent.PARK, blocker
        )
    now = replace(record, stuck_seq=seq, stuck_count=count, stuck_alone=False)
    catalog.save_record(txn, now)
    return now
