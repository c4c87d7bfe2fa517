"""Task administration: cancel, redrive, limits and pauses of queues, retention.

A task cancelled while it runs is DEAD at once. Its lease is revoked and its worker is notified.
Later reports of the worker are answered CANCELLED.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from holdfast.config import BATCH_MAX
from holdfast.durable import tags
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, NotFound
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.tasks import dependents
from holdfast.tasks.events import TasksCreated, digest_rows
from holdfast.tasks.leases import ROWS_FIRST, expire_and_promote, is_live, mark_dead
from holdfast.tasks.model import (
    NEW_STATUS,
    QueueLimits,
    decode_int_at,
    get_limits,
    get_spec,
    is_batchable,
    keys_of,
    pack,
    pack_int,
    pack_text,
    unpack_seq,
)
from holdfast.tasks.states import TaskState
from holdfast.tasks.unit_of_work import UNSUCCESSFUL, UnitOfWork


@operation("tasks.cancel")
def cancel(txn: Txn, universe: str, seqs: list[int], reason: str = "cancelled") -> list[bool]:
    """Cancel waiting and running tasks. Returns for each whether this call ended it."""
    check_limit(len(seqs), "tasks")
    check_name("reason", reason)
    unit = UnitOfWork(txn, universe)
    cancelled = [cancel_within(unit, seq, reason) for seq in seqs]
    dependents.release(unit)
    unit.close()
    return cancelled


def cancel_within(unit: UnitOfWork, seq: int, reason: str = "cancelled") -> bool:
    """Cancel a task within an open unit of work. Returns whether this call ended it."""
    txn, packed_seq = unit.txn, pack_int(seq)
    body = unit.body(packed_seq)
    if body is None:
        raise NotFound(what="task", task=seq)
    status = unit.status(packed_seq) if is_batchable(body) else unit.waiting_status(packed_seq)
    if status.state not in (TaskState.WAITING, TaskState.LEASED):
        return False
    spec = get_spec(txn, unit.keys, body.spec)
    if status.state == TaskState.LEASED:
        unit.on_lease_end(spec, body.limit)
        txn.add(unit.keys.revocations, 1)
        txn.notify(unit.keys.revoked_topic)
    else:
        unit.dequeue(packed_seq, body, spec, status)
    mark_dead(unit, seq, packed_seq, spec, status, reason)
    return True


@operation("tasks.redrive")
def redrive(txn: Txn, universe: str, seqs: list[int]) -> list[int]:
    """Submit FAILED and DEAD tasks again as new tasks with a full retry budget. Returns the new
    seqs.

    For a task that was already redriven, returns its replacement. Any other state is Invalid.
    """
    check_limit(len(seqs), "tasks")
    unit = UnitOfWork(txn, universe)
    keys = unit.keys
    answers: list[int] = []
    created: list[int] = []
    rows: list[bytes] = []
    seq = last = txn.count(keys.seq_counter)
    for old in seqs:
        packed_old = pack_int(old)
        body = unit.body(packed_old)
        if body is None:
            raise NotFound(what="task", task=old)
        status = unit.status(packed_old)
        if status.redriven_by:
            answers.append(status.redriven_by)
            continue
        if status.state not in (TaskState.FAILED, TaskState.DEAD):
            raise Invalid(
                what="task",
                task=old,
                why="only FAILED and DEAD tasks are redriven",
                state=TaskState(status.state).name,
            )
        seq += 1
        packed_seq = pack_int(seq)
        if body.blob:
            blobs.retain.fn(txn, body.blob)
        new_body = replace(
            body,
            created_ns=unit.now_ns,
            generation=txn.generation,
            not_before_ns=0,
            after=[],
            redrive_of=old,
        )
        row = pack(new_body)
        txn.put(keys.bodies + packed_seq, row)
        tags.add(txn, keys.tags, body.tag, packed_seq)
        spec = get_spec(txn, keys, body.spec)
        unit.listed.create(keys, spec, seq, seq)
        if body.key:
            txn.put(keys.idempotency_keys + tuples.pack((spec.name, body.key)), packed_seq)
        unit.write_status(packed_old, replace(status, redriven_by=seq))
        unit.enqueue(packed_seq, new_body, spec, NEW_STATUS)
        created.append(seq)
        rows.append(row)
        answers.append(seq)
    if created:
        txn.add(keys.seq_counter, seq - last)
        unit.log.append(TasksCreated(created, digest_rows(rows)))
        unit.count_created(rows)
    unit.close()
    return answers


@operation("tasks.set_limits")
def set_limits(
    txn: Txn, universe: str, queue: str, limits: QueueLimits, declared: bool = False
) -> None:
    """Set the maximum number of leased tasks of a queue. Existing leases are not revoked.

    `declared` limits of an app take effect only if the declaration changed. Until then an
    operator's setting wins.
    """
    check_name("queue", queue)
    for what in ("concurrency", "per_key"):
        if not 0 <= getattr(limits, what) <= 1_000_000:
            raise Invalid(what=what, found=getattr(limits, what), min=0, max=1_000_000)
    keys = keys_of(universe)
    key = keys.limits + pack_text(queue)
    stored = get_limits(txn, keys, queue)
    values = (limits.concurrency, limits.per_key)
    if declared and stored.declared == values:
        return
    updated = QueueLimits(*values, values if declared else stored.declared, stored.paused_ns)
    if updated == stored:
        return
    txn.put(key, pack(updated))
    unit = UnitOfWork(txn, universe)
    _requeue_throttled(unit, queue)
    unit.notify_queue(queue)
    unit.close()


@operation("tasks.set_queue_paused")
def set_queue_paused(txn: Txn, universe: str, queue: str, paused: bool) -> bool:
    """Pause or resume a queue. Returns whether it changed.

    A paused queue accepts tasks and grants none. Its leases continue, so its running tasks end as usual.
    """
    check_name("queue", queue)
    keys = keys_of(universe)
    key = keys.limits + pack_text(queue)
    stored = get_limits(txn, keys, queue)
    if bool(stored.paused_ns) == paused:
        return False
    updated = replace(stored, paused_ns=txn.now_ns if paused else 0)
    if updated == QueueLimits():
        txn.delete(key)
    else:
        txn.put(key, pack(updated))
    if not paused:
        txn.notify(keys.queue_topic(queue))
    return True


def _requeue_throttled(unit: UnitOfWork, queue: str) -> None:
    """Requeue throttled tasks. Grants throttle them again if the limit has no free slot. Tasks
    beyond one batch follow when leases of their limit end.
    """
    txn, keys = unit.txn, unit.keys
    prefix = keys.throttled + pack_text(queue)
    for key, packed_seq in txn.scan(prefix, tuples.prefix_end(prefix), BATCH_MAX):
        txn.delete(key)
        body, spec = unit.body_and_spec(packed_seq)
        unit.counts.add(queue, "parked", -1)
        unit.enqueue(packed_seq, body, spec, unit.waiting_status(packed_seq), returned=True)


@operation("tasks.report_progress")
def report_progress(txn: Txn, universe: str, updates: list[tuple[int, int, bytes]]) -> None:
    """Store progress values of running tasks as (seq, lease, value). Soft state, not logged."""
    unit = UnitOfWork(txn, universe)
    for seq, lease_no, text in updates:
        packed_seq = pack_int(seq)
        if is_live(unit.status(packed_seq), lease_no, unit.now_ns):
            txn.put(unit.keys.progress + packed_seq, text)
            txn.notify(unit.keys.task_topic(seq))


@operation("tasks.maintain")
def maintain(txn: Txn, universe: str, limit: int) -> int:
    """Expire leases, promote due tasks and remove tasks past their retention. Returns the number of
    steps.
    """
    check_limit(limit)
    unit = UnitOfWork(txn, universe)
    done = expire_and_promote(unit, limit)
    done += _remove_past_retention(unit, limit)
    unit.close()
    return done


def _remove_past_retention(unit: UnitOfWork, limit: int) -> int:
    """Remove at most `limit` tasks past their retention, oldest first. Returns their number."""
    txn, keys = unit.txn, unit.keys
    removable: list[int] = []
    at, end = keys.retained, keys.retained + pack_int(unit.now_ns + 1)
    # A row holds the tasks that one operation ended: one, or thousands.
    page_rows = min(ROWS_FIRST, limit)
    while len(removable) < limit:
        page = txn.scan(at, end, page_rows)
        for key, row in page:
            room = limit - len(removable)
            if not room:
                break
            txn.delete(key)
            seqs = msgspec.msgpack.decode(row, type=list[int])
            removable += seqs[:room]
            rest = seqs[room:]
            if rest:
                until = pack_int(decode_int_at(key, len(keys.retained)))
                txn.put(keys.retained + until + pack_int(rest[0]), pack(rest))
        if len(page) < page_rows:
            break
        at, page_rows = page[-1][0] + b"\x00", limit - len(removable)
    packed = [pack_int(seq) for seq in removable]
    txn.prefetch(prefix + one for one in packed for prefix in (keys.bodies, keys.statuses))
    for packed_seq in packed:
        _remove_task(unit, packed_seq)
    return len(removable)


def _remove_task(unit: UnitOfWork, packed_seq: bytes) -> None:
    txn, keys = unit.txn, unit.keys
    body = unit.body(packed_seq)
    if body is None:
        return
    status = unit.status(packed_seq)
    spec = get_spec(txn, keys, body.spec)
    for blob in (body.blob, status.blob):
        if blob:
            blobs.release.fn(txn, blob)
    if body.key:
        key = keys.idempotency_keys + tuples.pack((spec.name, body.key))
        if txn.get(key) == packed_seq:
            txn.delete(key)
    tags.remove(txn, keys.tags, body.tag, packed_seq)
    if not spec.owner:
        outcome = TaskState(status.state).name.lower()
        unit.ended.remove(spec.queue, status.ended_ns, outcome)
        unit.listed.remove(keys, spec, outcome, unpack_seq(packed_seq))
    if status.state in UNSUCCESSFUL:
        unit.leave_error_group(packed_seq, status)
    txn.delete(keys.bodies + packed_seq)
    txn.delete(keys.statuses + packed_seq)
    txn.delete(keys.progress + packed_seq)
    unit.counts.add(spec.queue, TaskState(status.state).name.lower(), -1)
