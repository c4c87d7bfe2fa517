"""Task dependencies: `after=[…]`.

A dependent stays blocked until all its dependencies have ended. A completed dependency decrements
its count of open dependencies. A failed or dead dependency makes the dependent DEAD. An ended task
with dependents leaves a row (`e`). This and later operations process these rows, a bounded number
of dependents each, so no commit grows with the number of dependents.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.codec import digest, unpack
from holdfast.store import tuples
from holdfast.tasks import status_fold
from holdfast.tasks.events import TasksDead
from holdfast.tasks.model import NEW_STATUS, pack, pack_int, unpack_seq
from holdfast.tasks.owner_callbacks import callbacks_of
from holdfast.tasks.states import TaskState
from holdfast.tasks.unit_of_work import DEPENDENTS_MAX, UnitOfWork

DEPENDENCY_FAILED = "dependency_failed"
# The first byte of the row of a listener. The row of a dependent task starts with the type code of an integer.
LISTENER = b"L"
# The digest in the key of a listener's row.
LISTENER_KEY_BYTES = 16


def register(unit: UnitOfWork, packed_seq: bytes, dependencies: Sequence[int]) -> int | None:
    """Register a new task with its dependencies. Returns the number of open ones, or None if one
    has failed.
    """
    waits = 0
    for dependency in dependencies:
        packed_dependency = pack_int(dependency)
        status = unit.status(packed_dependency)
        if status.state in (TaskState.FAILED, TaskState.DEAD):
            return None
        if status.state == TaskState.COMPLETED:
            continue
        unit.txn.put(unit.keys.dependents + packed_dependency + packed_seq, packed_seq)
        if not status.awaited:
            if status == NEW_STATUS:
                unit.split_from_range(packed_dependency, unit.body_and_spec(packed_dependency)[1])
            unit.write_status(packed_dependency, replace(status, awaited=True))
        waits += 1
    return waits


def listen(unit: UnitOfWork, seq: int, owner: str, listener: bytes) -> None:
    """Call `on_end` of the owner when a task has ended, with `listener`. The task must not have ended yet."""
    packed_seq = pack_int(seq)
    row = LISTENER + pack([owner, listener])
    key = unit.keys.dependents + packed_seq + tuples.pack((digest(row)[:LISTENER_KEY_BYTES],))
    unit.txn.put(key, row)
    status = unit.status(packed_seq)
    if not status.awaited:
        if status == NEW_STATUS:
            unit.split_from_range(packed_seq, unit.body_and_spec(packed_seq)[1])
        unit.write_status(packed_seq, replace(status, awaited=True))


def release(unit: UnitOfWork, limit: int = DEPENDENTS_MAX) -> int:
    """Update the dependents of ended tasks, including tasks that end here. Returns the number
    processed.
    """
    txn, keys = unit.txn, unit.keys
    released = 0
    while released < limit:
        ended = txn.scan(keys.pending_releases, tuples.prefix_end(keys.pending_releases), 1)
        if not ended:
            return released
        key, place = ended[0]
        packed = key[len(keys.pending_releases) :]
        completed = place == b"completed"
        prefix = keys.dependents + packed
        found = txn.scan(prefix, tuples.prefix_end(prefix), limit - released)
        for row, dependent in found:
            txn.delete(row)
            if dependent.startswith(LISTENER):
                _call_listener(unit, packed, dependent)
            else:
                _on_dependency_end(unit, dependent, completed)
        released += len(found)
        if released < limit:
            txn.delete(key)
            released += 1
    return released


def _call_listener(unit: UnitOfWork, packed_seq: bytes, row: bytes) -> None:
    owner, listener = unpack(row[len(LISTENER) :])
    callbacks_of(owner).on_end(unit, listener, unit.status(packed_seq))


def _on_dependency_end(unit: UnitOfWork, packed_seq: bytes, completed: bool) -> None:
    # A task with dependencies is never part of a range.
    status = unit.waiting_status(packed_seq)
    if status.state != TaskState.WAITING or not status.waits:
        return  # cancelled, or dead because of another dependency
    body, spec = unit.body_and_spec(packed_seq)
    if completed:
        after = replace(status, waits=status.waits - 1)
        unit.write_status(packed_seq, after)
        if not after.waits:
            unit.counts.add(spec.queue, "blocked", -1)
            unit.leave_blocked(packed_seq, spec)
            unit.enqueue(packed_seq, body, spec, after)
        return
    seq = unpack_seq(packed_seq)
    unit.log.append(TasksDead([seq], DEPENDENCY_FAILED))
    unit.write_status(packed_seq, status_fold.apply_death(status, DEPENDENCY_FAILED, unit.now_ns))
    unit.counts.add(spec.queue, "blocked", -1)
    unit.leave_blocked(packed_seq, spec)
    unit.finish(seq, spec, "dead", awaited=status.awaited)
