"""Stopped worlds: worlds that wait for other code, because of an undeclared item (invariant I7) or
because of a journal entry that their code replays differently from the code that made it (J6).

    mark_stopped    the host does not declare the type: the world waits, indexed by its requirement
    resume          a worker declares the type, or the time has passed and the item is given up
    park_stopped    the code that made an entry did not appear: park with `replay_diverged`
    clear_stop      the item is behind the cursor
    item_status     the state of an accepted item: waiting, handled, failed, dead or removed

- A stopped world is assigned to no worker, unless it is pinned, and has no runnable mark. The
  orchestrator finds it in this index by its requirement, the longest waiting first.
- The wait starts when the world stops before the item, and continues if it stops there again. Items
  with one requirement wait concurrently: a thousand of them are given up after a single timeout.
- An item that is given up is journaled as `unknown`, so that each inbox seq has an entry, and
  becomes a dead letter `unknown_event`. Its seq maps to the dead letter and to its new seq after a
  redrive, so its key never counts as handled in between.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import inbox, journal
from holdfast.durable.validation import check_limit
from holdfast.errors import NotFound, ReplayDiverged
from holdfast.messages import Ingress
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.world import catalog, journal_entry
from holdfast.world.catalog import StopReason, WorldBlocker, WorldEvent, WorldRecord
from holdfast.world.code_requirement import CodeRequirement, stopped_prefix, stopped_prefix_of
from holdfast.world.definition import cause_of
from holdfast.world.journal_entry import StepOutcome

# The maximum number of redrives of one item that a status query follows.
REDRIVES_MAX = 1000

InboxItemState = Literal["waiting", "handled", "failed", "removed", "dead"]


class GivenUpItem(Record, frozen=True):
    """An item that no worker declared in time: its dead letter, and its new seq after a redrive."""

    type: str
    letter: int
    again: int = 0


class InboxItemStatus(Record, frozen=True):
    """The status of an accepted item. `type` is the undeclared type that the item, or an item
    before it, waits for or failed with. `letter` is the seq of the dead letter."""

    state: InboxItemState
    seq: int
    type: str = ""
    letter: int = 0


def requirement_of(world: str, ingress: Ingress) -> CodeRequirement:
    """Return the code requirement of an ingress."""
    (side, type), version = cause_of(ingress)
    return CodeRequirement(world, side, type, version)


# -- stop and resume -----------------------------------------------------------------------------


def mark_stopped(
    txn: Txn,
    record: WorldRecord,
    need: CodeRequirement,
    *,
    seq: int,
    since_ns: int = 0,
    height: int = 0,
    why: str = "",
) -> None:
    """Stop a world before an item. Its host releases it in the same commit. The wait starts now, or
    at an earlier known time. `height` is an entry of other code and `why` is the difference in the
    replay."""
    universe, world_id = record.universe, record.world_id
    former = record.unknown
    is_same_stop = former is not None and (former.seq, former.side, former.type, former.height) == (
        seq,
        need.side,
        need.type,
        height,
    )
    if former is not None and is_same_stop:
        since_ns = former.since_ns
    else:
        since_ns = min(since_ns or txn.now_ns, txn.now_ns)
    assigned = catalog.find_assignment(txn, universe, world_id)
    priority = 0 if assigned is None else assigned.priority
    stopped = StopReason(
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
    catalog.save_record(txn, replace(record, unknown=stopped))
    txn.put(stopped.row_key(universe, record.type, world_id), codec.pack(need))
    if assigned is not None and not assigned.pinned:
        catalog.unassign_without_mark(txn, universe, world_id)
    catalog.remove_marks(txn, universe, world_id, _worker_of(assigned))
    txn.notify(catalog.runnable_topic(universe, catalog.UNASSIGNED))


def resume(txn: Txn, record: WorldRecord, worker: str, reason: str, *, give_up: bool) -> None:
    """Resume a world: on a worker that declares its next item, or on any worker to give the item
    up."""
    unknown = record.unknown
    if unknown is None or not unknown.waits:
        return
    _unlist(txn, record)
    catalog.save_record(
        txn, replace(record, unknown=replace(unknown, waits=False, given_up=give_up))
    )
    assigned = catalog.find_assignment(txn, record.universe, record.world_id)
    if assigned is not None and assigned.pinned:
        catalog.mark_runnable(txn, record.universe, record.world_id)
    else:
        catalog.assign(txn, record.universe, record.world_id, worker, unknown.priority, reason)


def park_stopped(txn: Txn, record: WorldRecord) -> None:
    """Park a stopped world: the code that made an entry did not appear, and other code replays it
    differently."""
    unknown = record.unknown
    if unknown is None or not unknown.waits or not unknown.needs_code:
        return
    blocker = WorldBlocker(ReplayDiverged.code, unknown.why, unknown.height)
    catalog.change_status(txn, record.universe, record.world_id, WorldEvent.PARK, blocker)


def clear_stop(txn: Txn, universe: str, world_id: str) -> None:
    """Clear the stop of a world whose cursor has passed the item."""
    record = catalog.get_record(txn, universe, world_id)
    if record.stopped:
        _unlist(txn, record)
    catalog.save_record(txn, replace(record, unknown=None))


# -- queries -------------------------------------------------------------------------------------


def list_requirements(txn: Txn, universe: str, limit: int) -> list[tuple[CodeRequirement, int]]:
    """Return the requirements of stopped worlds with their earliest wait, by one seek per
    requirement."""
    prefix = stopped_prefix(universe)
    requirements: list[tuple[CodeRequirement, int]] = []
    at = prefix
    while len(requirements) < limit and (first := txn.scan(at, tuples.prefix_end(prefix), 1)):
        key, row = first[0]
        need = codec.unpack_as(CodeRequirement, row)
        of = stopped_prefix_of(universe, need)
        requirements.append((need, _parse_position(key, of)[0]))
        at = tuples.prefix_end(of)
    return requirements


def list_waiting(
    txn: Txn, universe: str, need: CodeRequirement, after: bytes, limit: int
) -> list[tuple[bytes, int, str]]:
    """Return (position, since, world id) of worlds with a requirement, the longest waiting
    first."""
    check_limit(limit)
    prefix = stopped_prefix_of(universe, need)
    found = txn.scan(after + b"\x00" if after else prefix, tuples.prefix_end(prefix), limit)
    return [(key, *_parse_position(key, prefix)) for key, _ in found]


def list_stopped(txn: Txn, universe: str, limit: int) -> list[str]:
    """Return stopped worlds with any requirement."""
    check_limit(limit)
    prefix = stopped_prefix(universe)
    found = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[2]) for key, _ in found]


# -- status of an item ---------------------------------------------------------------------------


def record_given_up(
    txn: Txn, universe: str, world_id: str, seq: int, type: str, letter: int
) -> None:
    """Map the inbox seq of a given-up item to the seq of its dead letter."""
    txn.put(_given_up_key(universe, world_id, seq), codec.pack(GivenUpItem(type, letter)))


def record_redrive(txn: Txn, universe: str, world_id: str, seq: int, again: int) -> None:
    """Add the new inbox seq of the redriven item to the mapping of its old seq."""
    found = find_given_up(txn, universe, world_id, seq)
    if found is not None:
        row = codec.pack(replace(found, again=again))
        txn.put(_given_up_key(universe, world_id, seq), row)


def find_given_up(txn: Txn, universe: str, world_id: str, seq: int) -> GivenUpItem | None:
    row = txn.get(_given_up_key(universe, world_id, seq))
    return None if row is None else codec.unpack_as(GivenUpItem, row)


def item_status(txn: Txn, universe: str, world_id: str, seq: int) -> InboxItemStatus:
    """Return the status of an item that was accepted under this seq."""
    record = catalog.get_record(txn, universe, world_id)
    subject = catalog.subject_of(universe, world_id)
    cursor = inbox.cursor(txn, subject)
    for _ in range(REDRIVES_MAX):
        if seq > cursor:
            need = (
                record.unknown.requirement(record.type)
                if record.unknown and record.stopped
                else None
            )
            blocked = "" if need is None else need.cause if need.needs_code else need.type
            return InboxItemStatus("waiting", seq, blocked)
        found = find_given_up(txn, universe, world_id, seq)
        if found is None:
            return InboxItemStatus(_entry_state(txn, record, seq), seq)
        if not found.again:
            return InboxItemStatus("dead", seq, found.type, found.letter)
        seq = found.again
    return InboxItemStatus("waiting", seq)


# -- inside --------------------------------------------------------------------------------------


def _entry_state(txn: Txn, record: WorldRecord, seq: int) -> InboxItemState:
    """Return the outcome of the entry of a seq. `removed`: the entry was trimmed and its outcome is
    lost."""
    height = seq + (0 if record.lineage is None else record.lineage.forked_at_height)
    subject = catalog.subject_of(record.universe, record.world_id)
    try:
        found = journal.read(txn, subject, height, height + 1, 1)
    except NotFound:
        return "removed"
    if found and journal_entry.decode(found[0].body).outcome is StepOutcome.FAILED:
        return "failed"
    return "handled"


def _worker_of(assigned: catalog.Assignment | None) -> str:
    return (
        catalog.UNASSIGNED if assigned is None else assigned.desired_worker_id or catalog.UNASSIGNED
    )


def _unlist(txn: Txn, record: WorldRecord) -> None:
    unknown = record.unknown
    assert unknown is not None
    txn.delete(unknown.row_key(record.universe, record.type, record.world_id))


def _parse_position(key: bytes, prefix: bytes) -> tuple[int, str]:
    since_ns, world_id = tuples.unpack(key[len(prefix) :])
    assert isinstance(since_ns, int)
    return since_ns, str(world_id)


def _given_up_key(universe: str, world_id: str, seq: int) -> bytes:
    prefix = schema.key_prefix(schema.Space.WORLD, universe, "g", world_id)
    return prefix + tuples.pack((seq,))
