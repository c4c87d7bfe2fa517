"""Who hosts a world: the lease on it, with the assignment's consent (protocols A and B).

A worker asks for many worlds at once and gets an answer for each. A world that is paused, parked or
deleted is not hosted, and neither is one that is assigned to another worker, nor one that waits for a
worker that knows its next item (`unknown`).

A lease that ran out while its world had work is held against the seq that was next: a reducer that
never returns, or kills its process, loses the lease there again and again. After `stuck_max` times
the world is parked with the blocker `reducer_stuck`.

But such a reducer takes its neighbours along: their leases are lost with its worker, at their seqs.
So from the second loss on a world is suspect, and is run by itself: `try_alone` says so before its
reducer starts, and only a loss after that counts. The culprit reaches `stuck_max`; the others do not.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.durable import inbox, lease
from holdfast.durable.bounds import check_limit
from holdfast.durable.lease import Lease
from holdfast.errors import Held, NotFound
from holdfast.store.api import Txn, operation
from holdfast.world import catalog
from holdfast.world.catalog import Blocker, Event, Status, WorldRecord, subject_of

ELSEWHERE = "assigned_to_another"
HELD = "held"
UNKNOWN = "unknown"
STOPPED = "stopped"
# Losses at one seq after which a world is run by itself.
SUSPECT = 2


class Granted(Record, frozen=True):
    """A lease with the world's record, or why there is none."""

    world_id: str
    lease: Lease | None
    record: WorldRecord | None
    refusal: str = ""
    retry_at_ns: int = 0


@operation
def acquire(
    txn: Txn,
    universe: str,
    world_ids: list[str],
    worker: str,
    incarnation: str,
    ttl_ns: int,
    stuck_max: int = 5,
) -> list[Granted]:
    check_limit(len(world_ids), "world_ids")
    return [
        _acquire(txn, universe, world_id, worker, incarnation, ttl_ns, stuck_max)
        for world_id in world_ids
    ]


@operation
def try_alone(txn: Txn, universe: str, world_id: str, held: Lease) -> None:
    """Say that a suspect runs now and nothing beside it."""
    txn.require_live(held)
    record = catalog.record(txn, universe, world_id)
    catalog.save(txn, replace(record, stuck_alone=True))


@operation
def park(txn: Txn, universe: str, world_id: str, held: Lease, blocker: Blocker) -> WorldRecord:
    """Stop hosting a world that must not go on, and say why. Only its holder may."""
    txn.require_live(held)
    return catalog.change.fn(txn, universe, world_id, Event.PARK, blocker)


def suspect(record: WorldRecord) -> bool:
    return record.stuck_count >= SUSPECT


def _acquire(
    txn: Txn,
    universe: str,
    world_id: str,
    worker: str,
    incarnation: str,
    ttl_ns: int,
    stuck_max: int,
) -> Granted:
    try:
        record = catalog.record(txn, universe, world_id)
    except NotFound:
        # It was erased since its hint was read; others are asked for in the same call.
        return Granted(world_id, None, None, UNKNOWN)
    if record.status is not Status.ACTIVE:
        return Granted(world_id, None, record, record.status.value)
    if record.stopped:
        return Granted(world_id, None, record, STOPPED)
    assigned = catalog.assignment(txn, universe, world_id)
    if assigned is not None and assigned.desired_worker_id not in (None, worker):
        return Granted(world_id, None, record, ELSEWHERE)
    subject = subject_of(universe, world_id)
    before = lease.current(txn, subject)
    try:
        granted = lease.acquire.fn(txn, subject, worker, incarnation, ttl_ns)
    except Held as held:
        return Granted(world_id, None, record, HELD, held.until_ns)
    lost = before is not None and before.state is not lease.State.FREE
    if lost and before is not None and before.epoch != granted.epoch:
        record = _hold_against(txn, record, subject, stuck_max)
        if record.status is Status.PARKED:
            return Granted(world_id, None, record, record.status.value)
    return Granted(world_id, granted, record)


def _hold_against(txn: Txn, record: WorldRecord, subject: str, stuck_max: int) -> WorldRecord:
    if not inbox.depth(txn, subject):
        return record
    seq = inbox.cursor(txn, subject) + 1
    count = 1
    if record.stuck_seq == seq:
        to_blame = record.stuck_alone or record.stuck_count < SUSPECT
        count = record.stuck_count + to_blame
    if count >= stuck_max:
        text = f"the lease was lost {count} times while handling inbox seq {seq}"
        blocker = Blocker("reducer_stuck", text)
        return catalog.change.fn(txn, record.universe, record.world_id, Event.PARK, blocker)
    now = replace(record, stuck_seq=seq, stuck_count=count, stuck_alone=False)
    catalog.save(txn, now)
    return now
