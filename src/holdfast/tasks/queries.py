"""Task queries: the details of one task, the counters of each queue, the queues with work.

No query scans tasks. A query reads a task by its seq, or the first row of an index. `task_list`
holds the lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from holdfast.codec import unpack_as
from holdfast.durable.validation import check_name
from holdfast.errors import NotFound
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.tasks import fair_turns
from holdfast.tasks.ids import LeaseId, TaskId
from holdfast.tasks.model import (
    EXECUTOR_KINDS,
    QueueLimits,
    TaskBodyRow,
    TaskCounts,
    TaskKeys,
    TaskSpec,
    TaskStatusRow,
    decode_int_at,
    get_body,
    get_counts,
    get_limits,
    get_spec,
    index_key,
    keys_of,
    pack_int,
    pack_text,
    queue_index,
    unpack_seq,
)
from holdfast.tasks.row_ranges import RangeLeaseTable, get_status
from holdfast.tasks.row_ranges import find_range as find_in
from holdfast.tasks.states import TaskState

QUEUES_MAX = 10_000


class TaskRow(NamedTuple):
    """A task with its current status. `where` is its state, or the wait state of a waiting task."""

    seq: int
    body: TaskBodyRow
    spec: TaskSpec
    status: TaskStatusRow
    where: str

    @property
    def id(self) -> TaskId:
        return TaskId(self.body.generation, self.seq)

    @property
    def state(self) -> TaskState:
        return TaskState(self.status.state)

    @property
    def not_before_ns(self) -> int:
        return self.status.not_before_ns or self.body.not_before_ns


class TaskDetails(NamedTuple):
    """The details of one task."""

    row: TaskRow
    args: bytes
    # Empty unless the task is COMPLETED.
    result: bytes
    # The last progress value. Empty if the task reported none.
    progress: bytes
    lease: LeaseId | None
    after: tuple[TaskId, ...]
    redrive_of: TaskId | None
    redriven_by: TaskId | None


def get_task(txn: Txn, universe: str, task: TaskId) -> TaskRow:
    row = get_row(txn, keys_of(universe), pack_int(task.seq))
    if row is None or row.body.generation != task.generation:
        raise NotFound(what="task", task=str(task), universe=universe)
    return row


def was_removed(txn: Txn, universe: str, task: TaskId) -> bool:
    """Whether a missing task existed in this store. Only ended tasks are removed.

    For another generation the answer is False: the task may have been submitted after the backup
    that was restored.
    """
    return task.generation == txn.generation and task.seq <= txn.count(
        keys_of(universe).seq_counter
    )


def task_ids(txn: Txn, universe: str, seqs: list[int]) -> list[TaskId]:
    """Return the ids of existing tasks."""
    keys = keys_of(universe)
    ids = []
    for seq in seqs:
        body = get_body(txn, keys, pack_int(seq))
        if body is None:
            raise NotFound(what="task", seq=seq, universe=universe)
        ids.append(TaskId(body.generation, seq))
    return ids


def arguments_of_key(txn: Txn, universe: str, name: str, key: str) -> bytes | None:
    """The encoded arguments with which the task of a key was submitted. None if the key is free."""
    keys = keys_of(universe)
    packed_seq = txn.get(keys.idempotency_keys + tuples.pack((name, key)))
    body = None if packed_seq is None else get_body(txn, keys, packed_seq)
    if body is None:
        return None
    return blobs.get(txn, body.blob) if body.blob else body.args


def get_details(txn: Txn, universe: str, task: TaskId) -> TaskDetails:
    keys = keys_of(universe)
    row = get_task(txn, universe, task)
    body, status = row.body, row.status
    leased = status.state == TaskState.LEASED
    return TaskDetails(
        row=row,
        args=blobs.get(txn, body.blob) if body.blob else body.args,
        result=blobs.get(txn, status.blob) if status.blob else status.result,
        progress=txn.get(keys.progress + pack_int(row.seq)) or b"",
        lease=LeaseId(txn.generation, status.lease, row.seq) if leased else None,
        after=tuple(id_of(txn, keys, seq, body) for seq in body.after),
        redrive_of=id_of(txn, keys, body.redrive_of, body) if body.redrive_of else None,
        redriven_by=id_of(txn, keys, status.redriven_by, body) if status.redriven_by else None,
    )


def where_is(txn: Txn, universe: str, seq: int) -> str:
    """Return the state of a task, or the wait state of a waiting one. "" if the task was removed."""
    row = get_row(txn, keys_of(universe), pack_int(seq))
    return "" if row is None else row.where


def was_granted(txn: Txn, universe: str, lease: LeaseId) -> bool:
    """Whether a lease may have been granted. False proves that the worker invented the lease id."""
    keys = keys_of(universe)
    if lease.generation != txn.generation:
        return lease.generation < txn.generation
    return (
        lease.lease <= txn.count(keys.lease_counter)
        and get_status(txn, keys, pack_int(lease.seq)).attempt > 0
    )


# -- queues ---------------------------------------------------------------------------------------


class QueueRow(NamedTuple):
    queue: str
    counts: TaskCounts
    limits: QueueLimits


def list_queues(txn: Txn, universe: str) -> list[QueueRow]:
    """List queues with tasks (ended ones included) or limits, sorted by name."""
    keys = keys_of(universe)
    counts, limits = (
        {
            str(tuples.unpack(key[len(space) :])[0]): row
            for key, row in txn.scan(space, tuples.prefix_end(space), QUEUES_MAX)
        }
        for space in (keys.counts, keys.limits)
    )
    return [
        QueueRow(
            name,
            unpack_as(TaskCounts, counts[name]) if name in counts else TaskCounts(),
            unpack_as(QueueLimits, limits[name]) if name in limits else QueueLimits(),
        )
        for name in sorted(counts.keys() | limits.keys())
    ]


def find_queue(txn: Txn, universe: str, queue: str) -> QueueRow | None:
    """Return a queue; None if it has no task and no setting."""
    check_name("queue", queue)
    keys = keys_of(universe)
    packed = pack_text(queue)
    if txn.get(keys.counts + packed) is None and txn.get(keys.limits + packed) is None:
        return None
    return read_queue(txn, universe, queue)


def read_queue(txn: Txn, universe: str, queue: str) -> QueueRow:
    """Return a queue. A queue without tasks and settings has zero counts."""
    keys = keys_of(universe)
    return QueueRow(queue, get_counts(txn, keys, queue), get_limits(txn, keys, queue))


class LimitKeyRow(NamedTuple):
    """A limit key of a queue with throttled tasks: its leased tasks, and the throttled task that is granted first."""

    key: str
    leased: int
    first: TaskId


def list_limit_keys(
    txn: Txn, universe: str, queue: str, after: str = "", limit: int = 100
) -> list[LimitKeyRow]:
    """List the limit keys that tasks of a queue wait for, with one seek for each key."""
    check_name("queue", queue)
    keys = keys_of(universe)
    prefix = keys.throttled + pack_text(queue)
    found: list[LimitKeyRow] = []
    lo = tuples.prefix_end(prefix + tuples.pack((after,))) if after else prefix
    while len(found) < limit:
        rows = txn.scan(lo, tuples.prefix_end(prefix), 1)
        if not rows:
            break
        key = str(tuples.unpack(rows[0][0][len(prefix) :])[0])
        body = get_body(txn, keys, rows[0][1])
        leased = txn.count(keys.leased_per_limit + tuples.pack((queue, key)))
        if body is not None:
            first = TaskId(body.generation, unpack_seq(rows[0][1]))
            found.append(LimitKeyRow(key, leased, first))
        lo = tuples.prefix_end(prefix + tuples.pack((key,)))
    return found


def queues_with_work(
    txn: Txn,
    universe: str,
    queues: Iterable[str],
    task_names: Collection[str] = (),
    kinds: Collection[int] = EXECUTOR_KINDS,
) -> list[str]:
    """Return the queues that have a task for a worker with these task names (empty: any name) and
    executor kinds.
    """
    keys = keys_of(universe)
    return [queue for queue in queues if _has_work(txn, keys, queue, task_names, kinds)]


def _has_work(
    txn: Txn, keys: TaskKeys, name: str, task_names: Collection[str], kinds: Collection[int]
) -> bool:
    counts = get_counts(txn, keys, name)
    if not (counts.ready or counts.suspect or counts.stray):
        return False
    limits = get_limits(txn, keys, name)
    if limits.paused_ns or (limits.concurrency and counts.leased >= limits.concurrency):
        return False
    queue = pack_text(name)
    spaces = (keys.ready, keys.fair) if counts.ready else ()
    lanes = [space + queue + pack_int(kind) for space in spaces for kind in kinds]
    if counts.suspect or any(txn.scan(space, tuples.prefix_end(space), 1) for space in lanes):
        return True
    if not counts.stray:
        return False
    unroutable = keys.unroutable + queue
    lo = unroutable
    while found := txn.scan(lo, tuples.prefix_end(unroutable), 1):
        task = tuples.unpack(found[0][0][len(unroutable) :])[0]
        if not task_names or task in task_names:
            return True
        lo = tuples.prefix_end(unroutable + tuples.pack((task,)))
    return False


def finished_among(txn: Txn, universe: str, seqs: Iterable[int]) -> list[int]:
    """Return the tasks among these that have ended or were removed."""
    keys = keys_of(universe)
    leases = RangeLeaseTable(txn, keys)
    return [
        seq
        for seq in seqs
        if leases.status(pack_int(seq)).state not in (TaskState.WAITING, TaskState.LEASED)
        or get_body(txn, keys, pack_int(seq)) is None
    ]


def is_retention_due(txn: Txn, universe: str) -> bool:
    """Whether the retention of an ended task is over."""
    first_ns = next_retention_ns(txn, universe)
    return first_ns is not None and first_ns <= txn.now_ns


def next_retention_ns(txn: Txn, universe: str) -> int | None:
    """Return the store time when the next ended task is removed, or None."""
    retained = keys_of(universe).retained
    first = txn.scan(retained, tuples.prefix_end(retained), 1)
    return decode_int_at(first[0][0], len(retained)) if first else None


# -- inside ---------------------------------------------------------------------------------------


def get_row(
    txn: Txn, keys: TaskKeys, packed_seq: bytes, leases: RangeLeaseTable | None = None
) -> TaskRow | None:
    """Read a task. A caller that reads many tasks passes one `RangeLeaseTable` for all."""
    body = get_body(txn, keys, packed_seq)
    if body is None:
        return None
    spec = get_spec(txn, keys, body.spec)
    status = (leases or RangeLeaseTable(txn, keys)).status(packed_seq)
    where = TaskState(status.state).name.lower()
    if status.state == TaskState.WAITING:
        where = _wait_state_of(txn, keys, packed_seq, body, spec, status)
    return TaskRow(unpack_seq(packed_seq), body, spec, status, where)


def _wait_state_of(
    txn: Txn,
    keys: TaskKeys,
    packed_seq: bytes,
    body: TaskBodyRow,
    spec: TaskSpec,
    status: TaskStatusRow,
) -> str:
    index_position = index_key(spec, packed_seq)
    if find_in(txn, keys.ready + queue_index(spec.queue, spec.kind, spec.priority), packed_seq):
        return "ready"
    if body.limit and fair_turns.has_place(txn, keys, packed_seq):
        return "ready"
    if txn.get(keys.quarantined + index_position) is not None:
        return "suspect"
    if txn.get(keys.unroutable + tuples.pack((spec.queue, spec.name)) + index_position) is not None:
        return "stray"
    if status.waits:
        return "blocked"
    not_before_ns = status.not_before_ns or body.not_before_ns
    if txn.get(keys.delayed + pack_int(not_before_ns) + packed_seq) is not None:
        return "delayed"
    return "parked"


def id_of(txn: Txn, keys: TaskKeys, seq: int, named_by: TaskBodyRow) -> TaskId:
    """Return the id of a task referred to by seq. The task may be removed."""
    body = get_body(txn, keys, pack_int(seq))
    return TaskId((body or named_by).generation, seq)
