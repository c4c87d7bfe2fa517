"""The unit of work of one task operation: its rows, counters, log entry and notifications, in one
commit.

`UnitOfWork` is open while an operation runs. It moves tasks between the wait states (see `model`)
and maintains the counters. `status_fold` computes the statuses. `close` writes the log entry and
the counters and notifies the queue topics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.durable import error_groups, load_limits
from holdfast.durable.ended_counts import TASK, EndedDeltas
from holdfast.durable.load_limits import LoadLimits
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.tasks import fair_turns, list_index
from holdfast.tasks.events import TaskLog
from holdfast.tasks.list_index import ListIndexDeltas
from holdfast.tasks.model import (
    NEW_STATUS,
    CountDeltas,
    QueueLimits,
    TaskBodyRow,
    TaskKeys,
    TaskSpec,
    TaskStatusRow,
    dangling_row,
    decode_body,
    decode_status,
    get_body,
    get_limits,
    get_spec,
    index_key,
    int_end,
    is_quarantined,
    keys_of,
    pack,
    pack_int,
    pack_text,
    queue_index,
    unpack_seq,
)
from holdfast.tasks.row_ranges import RangeLeaseTable, remove_from_range
from holdfast.tasks.states import TaskState

# Dependents that one operation processes. Later operations process the rest.
DEPENDENTS_MAX = 1_000
UNSUCCESSFUL = (TaskState.FAILED, TaskState.DEAD)


class UnitOfWork:
    def __init__(self, txn: Txn, universe: str) -> None:
        self.txn = txn
        self.keys: TaskKeys = keys_of(universe)
        self.now_ns = txn.now_ns
        self.log = TaskLog()
        self.leases = RangeLeaseTable(txn, self.keys)
        self.counts = CountDeltas(txn, self.keys)
        self.ended = EndedDeltas()
        self.listed = ListIndexDeltas()
        # Tasks that ended in this operation, by retention time.
        self._ended_by_retention: dict[int, list[int]] = {}
        self._queues_to_notify: set[str] = set()
        # Limits that may have free capacity now.
        self._freed_limits: set[tuple[str, str]] = set()
        self._limits: dict[str, QueueLimits] = {}
        # The load limits of the universe; None if it has none.
        self.load_limits: LoadLimits | None = load_limits.find_at(txn, self.keys.load_limits)
        # Tasks skipped because the requesting worker may not run them now.
        self.skipped = 0

    def close(self) -> None:
        txn, keys = self.txn, self.keys
        if self._freed_limits:
            self.unthrottle()
        for retain_ns, seqs in self._ended_by_retention.items():
            until = pack_int(self.now_ns + retain_ns)
            txn.put(keys.retained + until + pack_int(seqs[0]), pack(seqs))
        self.leases.save()
        self.log.save(txn, keys)
        if self.load_limits is not None:
            self._save_backlog(self.load_limits)
        self.counts.save()
        self.ended.save(txn, keys.universe, TASK, self.now_ns)
        self.listed.save(txn, keys)
        for queue in self._queues_to_notify:
            txn.notify(keys.queue_topic(queue))

    # -- rows ----------------------------------------------------------------------------------

    def body(self, packed_seq: bytes) -> TaskBodyRow | None:
        return get_body(self.txn, self.keys, packed_seq)

    def body_and_spec(self, packed_seq: bytes) -> tuple[TaskBodyRow, TaskSpec]:
        body = get_body(self.txn, self.keys, packed_seq)
        if body is None:
            raise dangling_row(packed_seq)
        return body, get_spec(self.txn, self.keys, body.spec)

    def waiting_status(self, packed_seq: bytes) -> TaskStatusRow:
        """Read the status of a waiting task. It has no lease, so the range leases are not searched."""
        row = self.txn.get(self.keys.statuses + packed_seq)
        return NEW_STATUS if row is None else decode_status(row)

    def status(self, packed_seq: bytes) -> TaskStatusRow:
        return self.leases.status(packed_seq)

    def write_status(self, packed_seq: bytes, status: TaskStatusRow) -> None:
        self.leases.split_off(packed_seq, status)
        self.txn.put(self.keys.statuses + packed_seq, pack(status))
        if status.state in UNSUCCESSFUL:
            self._group_error(packed_seq, status)

    def _group_error(self, packed_seq: bytes, status: TaskStatusRow) -> None:
        """Put an unsuccessful task into the group of its error. A redrive takes it out."""
        if status.redriven_by:
            self.leave_error_group(packed_seq, status)
        elif not self.body_and_spec(packed_seq)[1].owner:
            subject = (unpack_seq(packed_seq),)
            text, universe = error_of(status), self.keys.universe
            error_groups.add(self.txn, universe, error_groups.TASK, text, status.ended_ns, subject)

    def leave_error_group(self, packed_seq: bytes, status: TaskStatusRow) -> None:
        subject = (unpack_seq(packed_seq),)
        text, universe = error_of(status), self.keys.universe
        error_groups.remove(self.txn, universe, error_groups.TASK, text, status.ended_ns, subject)

    def notify_queue(self, queue: str) -> None:
        self._queues_to_notify.add(queue)

    def limits(self, queue: str) -> QueueLimits:
        found = self._limits.get(queue)
        if found is None:
            found = self._limits[queue] = get_limits(self.txn, self.keys, queue)
        return found

    # -- load limits -----------------------------------------------------------------------------

    def judge_new_tasks(self, queues: Collection[str], count: int = 0) -> None:
        """Refuse new tasks in these queues if a limit is exceeded. `count` further tasks are created after this."""
        limits = self.load_limits
        if limits is None:
            return
        universe = self.keys.universe
        for queue in sorted(set(queues)):
            queue_max = limits.queues.get(queue, 0)
            waiting = self.counts.waiting(queue) + count
            if queue_max and waiting > queue_max:
                raise load_limits.refuse("queue", universe, waiting, queue_max, queue=queue)
        if limits.tasks:
            waiting = self.waiting_in_universe() + count
            if waiting > limits.tasks:
                raise load_limits.refuse(load_limits.TASKS, universe, waiting, limits.tasks)
        if limits.bytes_in_flight:
            found = load_limits.counted(self.txn, universe, load_limits.BYTES)
            if found > limits.bytes_in_flight:
                raise load_limits.refuse(load_limits.BYTES, universe, found, limits.bytes_in_flight)

    def waiting_in_universe(self) -> int:
        """The number of waiting tasks, with the changes of this operation. Only while `tasks` is limited."""
        stored = load_limits.counted(self.txn, self.keys.universe, load_limits.TASKS)
        return stored + self.counts.waiting_delta()

    def _save_backlog(self, limits: LoadLimits) -> None:
        """Add the change of the number of waiting tasks to the counter of the universe, while it is limited."""
        if limits.tasks:
            change = self.counts.waiting_delta()
            load_limits.add_to(self.txn, self.keys.universe, load_limits.TASKS, change)

    def count_created(self, rows: Iterable[bytes]) -> None:
        """Count the arguments of new tasks towards the bytes of the universe, while they are limited."""
        limits = self.load_limits
        if limits is not None and limits.bytes_in_flight:
            size = sum(arguments_size(self.txn, decode_body(row)) for row in rows)
            load_limits.add_to(self.txn, self.keys.universe, load_limits.BYTES, size)

    def _count_ended(self, seqs: list[int]) -> None:
        limits = self.load_limits
        if limits is None or not limits.bytes_in_flight:
            return
        bodies = [self.body(pack_int(seq)) for seq in seqs]
        size = sum(
            arguments_size(self.txn, body)
            for body in bodies
            if body is not None and body.created_ns >= limits.bytes_since_ns
        )
        load_limits.add_to(self.txn, self.keys.universe, load_limits.BYTES, -size)

    # -- places --------------------------------------------------------------------------------

    def enqueue(
        self,
        packed_seq: bytes,
        body: TaskBodyRow,
        spec: TaskSpec,
        status: TaskStatusRow,
        *,
        returned: bool = False,
    ) -> None:
        """Add a waiting task to the index of its wait state. `returned`: it was ready before."""
        place, key = self.wait_state(packed_seq, body, spec, status)
        self.counts.add(spec.queue, place)
        if place in list_index.PLACES:
            self.listed.enter(self.keys, spec, place, (unpack_seq(packed_seq),))
        if place == "delayed":
            at = self.keys.delayed + pack_int(_not_before(body, status)) + packed_seq
            self.txn.put(at, key)
            # A worker may be sleeping until a later due time.
            self.notify_queue(spec.queue)
        elif place != "blocked":
            was_ready = returned or bool(status.attempt)
            self._put_ready(packed_seq, body, spec, key, returned=was_ready)
            self.notify_queue(spec.queue)

    def _put_ready(
        self, packed_seq: bytes, body: TaskBodyRow, spec: TaskSpec, key: bytes, *, returned: bool
    ) -> None:
        """Add a task to the ready or quarantined index. A ready task with a limit key gets its fair turn."""
        if body.limit and key.startswith(self.keys.ready):
            fair_turns.add(self.txn, self.keys, spec, body.limit, packed_seq, returned=returned)
        else:
            self.txn.put(key, packed_seq)

    def wait_state(
        self, packed_seq: bytes, body: TaskBodyRow, spec: TaskSpec, status: TaskStatusRow
    ) -> tuple[str, bytes]:
        """Return the wait state and the index key. For a delayed task it is the key after the
        delay.
        """
        suspect = is_quarantined(spec, status)
        key = (self.keys.quarantined if suspect else self.keys.ready) + index_key(spec, packed_seq)
        if status.waits:
            return "blocked", b""
        if _not_before(body, status) > self.now_ns:
            return "delayed", key
        return ("suspect" if suspect else "ready"), key

    def dequeue(
        self, packed_seq: bytes, body: TaskBodyRow, spec: TaskSpec, status: TaskStatusRow
    ) -> None:
        """Remove a waiting task from its index."""
        txn, keys = self.txn, self.keys
        index_position = index_key(spec, packed_seq)
        throttled_key = keys.throttled + _throttle_prefix(spec.queue, body.limit) + index_position
        delayed_key = keys.delayed + pack_int(_not_before(body, status)) + packed_seq
        if remove_from_range(
            txn, keys.ready + queue_index(spec.queue, spec.kind, spec.priority), packed_seq
        ):
            self._count_dequeued(body, spec, "ready")
            return
        if body.limit and fair_turns.remove(txn, keys, spec, body.limit, packed_seq):
            self._count_dequeued(body, spec, "ready")
            return
        for place, key in (
            ("suspect", keys.quarantined + index_position),
            ("parked", throttled_key),
            ("stray", self.unroutable_key(spec, packed_seq)),
            ("delayed", delayed_key),
        ):
            if txn.get(key) is not None:
                txn.delete(key)
                self._count_dequeued(body, spec, place)
                if place == "delayed":
                    self.listed.leave(keys, spec, place, (unpack_seq(packed_seq),))
                return
        self.counts.add(spec.queue, "blocked", -1)
        self.leave_blocked(packed_seq, spec)

    def leave_blocked(self, packed_seq: bytes, spec: TaskSpec) -> None:
        """Take a task out of the blocked tasks of the task list. No row of a queue lists them."""
        self.listed.leave(self.keys, spec, "blocked", (unpack_seq(packed_seq),))

    def _count_dequeued(self, body: TaskBodyRow, spec: TaskSpec, place: str) -> None:
        self.counts.add(spec.queue, place, -1)
        if body.limit and place in ("ready", "suspect"):
            # The limit slot reserved for this task goes to the next throttled task.
            self.note_capacity(spec.queue, body.limit)

    def split_from_range(self, packed_seq: bytes, spec: TaskSpec) -> None:
        """Give a ready task its own row, because its status differs from the rest of its range."""
        queue_prefix = self.keys.ready + queue_index(spec.queue, spec.kind, spec.priority)
        if remove_from_range(self.txn, queue_prefix, packed_seq):
            self.txn.put(queue_prefix + packed_seq, packed_seq)

    def promote_due(self, limit: int) -> int:
        """Move delayed tasks that are due to the ready or quarantined index. Returns their number."""
        txn, keys = self.txn, self.keys
        due = txn.scan(keys.delayed, keys.delayed + pack_int(self.now_ns + 1), limit)
        for key, ready_key in due:
            packed_seq = key[int_end(key, len(keys.delayed)) :]
            txn.delete(key)
            body, spec = self.body_and_spec(packed_seq)
            self._put_ready(packed_seq, body, spec, ready_key, returned=True)
            self.counts.add(spec.queue, "delayed", -1)
            self.listed.leave(keys, spec, "delayed", (unpack_seq(packed_seq),))
            suspect = ready_key.startswith(keys.quarantined)
            self.counts.add(spec.queue, "suspect" if suspect else "ready")
            self.notify_queue(spec.queue)
        return len(due)

    # -- unroutable tasks --------------------------------------------------------------------------

    def unroutable_key(self, spec: TaskSpec, packed_seq: bytes) -> bytes:
        return (
            self.keys.unroutable
            + tuples.pack((spec.queue, spec.name))
            + index_key(spec, packed_seq)
        )

    def set_unroutable(
        self, packed_seq: bytes, body: TaskBodyRow, spec: TaskSpec, place: str
    ) -> None:
        """Move a task that the requesting worker does not define to the unroutable index."""
        self.skipped += 1
        fair_turns.remove(self.txn, self.keys, spec, body.limit, packed_seq)
        self.txn.put(self.unroutable_key(spec, packed_seq), packed_seq)
        self.counts.add(spec.queue, place, -1)
        self.counts.add(spec.queue, "stray")
        self.notify_queue(spec.queue)
        if body.limit:
            # Other tasks of the same limit must not wait for an unroutable one.
            self.note_capacity(spec.queue, body.limit)

    def restore_routable(self, queue: str, task_names: frozenset[str], limit: int) -> None:
        """Move unroutable tasks that the requesting worker defines back to their queue index."""
        if not self.counts.current(queue, "stray"):
            return
        txn, keys = self.txn, self.keys
        unroutable = keys.unroutable + pack_text(queue)
        lo = unroutable
        while limit > 0:
            found = txn.scan(lo, tuples.prefix_end(unroutable), limit)
            if not found:
                return
            _, spec = self.body_and_spec(found[0][1])
            of_name = keys.unroutable + tuples.pack((queue, spec.name))
            lo = tuples.prefix_end(of_name)
            if task_names and spec.name not in task_names:
                continue
            for key, packed_seq in found:
                if not key.startswith(of_name):
                    break
                txn.delete(key)
                body, task_spec = self.body_and_spec(packed_seq)
                suspect = is_quarantined(task_spec, self.waiting_status(packed_seq))
                target_prefix = keys.quarantined if suspect else keys.ready
                ready_key = target_prefix + index_key(task_spec, packed_seq)
                self._put_ready(packed_seq, body, task_spec, ready_key, returned=True)
                self.counts.add(queue, "stray", -1)
                self.counts.add(queue, "suspect" if suspect else "ready")
                limit -= 1

    # -- limits --------------------------------------------------------------------------------

    def limit_count_key(self, queue: str, limit: str) -> bytes:
        return self.keys.leased_per_limit + tuples.pack((queue, limit))

    def acquire_limit_slot(self, spec: TaskSpec, limit: str, slots_max: int) -> bool:
        """Take a slot of a limit, if one is free."""
        key = self.limit_count_key(spec.queue, limit)
        if slots_max and self.txn.count(key) >= slots_max:
            return False
        self.txn.add(key, 1)
        return True

    def throttle(
        self, key: bytes, packed_seq: bytes, body: TaskBodyRow, spec: TaskSpec, place: str
    ) -> None:
        self.skipped += 1
        txn = self.txn
        txn.delete(key)
        fair_turns.remove(txn, self.keys, spec, body.limit, packed_seq)
        prefix = self.keys.throttled + _throttle_prefix(spec.queue, body.limit)
        txn.put(prefix + index_key(spec, packed_seq), packed_seq)
        self.counts.add(spec.queue, place, -1)
        self.counts.add(spec.queue, "parked")

    def release_limit_slot(self, spec: TaskSpec, limit: str) -> None:
        """Release a slot of a limit for throttled tasks."""
        txn = self.txn
        key = self.limit_count_key(spec.queue, limit)
        if txn.count(key) > 1:
            txn.add(key, -1)
        else:
            txn.delete(key)
        self.note_capacity(spec.queue, limit)

    def note_capacity(self, queue: str, limit: str) -> None:
        """Note that a limit may have free capacity. `unthrottle` checks each noted limit once."""
        self._freed_limits.add((queue, limit))

    def unthrottle(self) -> None:
        """Move throttled tasks back to their queue index where the limit has free slots."""
        for queue, limit in sorted(self._freed_limits):
            self._unthrottle_limit(queue, limit)
        self._freed_limits.clear()

    def _unthrottle_limit(self, queue: str, limit: str) -> None:
        txn = self.txn
        slots_max = self.limits(queue).per_key
        prefix = self.keys.throttled + _throttle_prefix(queue, limit)
        leased = txn.count(self.limit_count_key(queue, limit))
        room = max(slots_max - leased, 0) if slots_max else DEPENDENTS_MAX
        for throttled_key, packed_seq in txn.scan(prefix, tuples.prefix_end(prefix), room):
            txn.delete(throttled_key)
            body, task_spec = self.body_and_spec(packed_seq)
            suspect = is_quarantined(task_spec, self.waiting_status(packed_seq))
            target_prefix = self.keys.quarantined if suspect else self.keys.ready
            ready_key = target_prefix + index_key(task_spec, packed_seq)
            self._put_ready(packed_seq, body, task_spec, ready_key, returned=True)
            self.counts.add(queue, "parked", -1)
            self.counts.add(queue, "suspect" if suspect else "ready")
            self.notify_queue(queue)

    # -- the end of a lease, the end of a task ---------------------------------------------------

    def on_lease_end(self, spec: TaskSpec, limit: str = "", count: int = 1) -> None:
        """Update counters and limits after leases have ended, with any outcome."""
        self.counts.add(spec.queue, "leased", -count)
        if limit:
            self.release_limit_slot(spec, limit)
        if self.limits(spec.queue).concurrency:
            self.notify_queue(spec.queue)

    def finish_many(self, seqs: list[int], spec: TaskSpec, place: str) -> None:
        """Record the end of tasks: counters, retention and notifications."""
        self.counts.add(spec.queue, place, len(seqs))
        if not spec.owner:
            self.ended.add(spec.queue, place, len(seqs))
            self.listed.enter(self.keys, spec, place, seqs)
        if self.load_limits is not None:
            self._count_ended(seqs)
        retained = self._ended_by_retention.get(spec.retain_ns)
        if retained is None:
            retained = self._ended_by_retention[spec.retain_ns] = []
        retained += seqs
        topic = self.keys.task_topic
        for topic_name in {topic(seq) for seq in seqs}:
            self.txn.notify(topic_name)

    def finish(self, seq: int, spec: TaskSpec, place: str, *, awaited: bool) -> None:
        """Record the end of one task, which may have dependents."""
        self.finish_many([seq], spec, place)
        if awaited:
            # Dependents may be released after the task itself is removed, so store the outcome.
            self.txn.put(self.keys.pending_releases + pack_int(seq), place.encode())


def error_of(status: TaskStatusRow) -> str:
    """The text of the error group of an unsuccessful task. A dead task may have the error of an earlier attempt."""
    error = status.error if status.state == TaskState.FAILED else ""
    return error_groups.group_text(status.reason, error)


def arguments_size(txn: Txn, body: TaskBodyRow) -> int:
    """Return the number of bytes of the arguments of a task."""
    return len(blobs.get(txn, body.blob)) if body.blob else len(body.args)


def _not_before(body: TaskBodyRow, status: TaskStatusRow) -> int:
    return status.not_before_ns or body.not_before_ns


def _throttle_prefix(queue: str, limit: str) -> bytes:
    return pack_text(queue) + tuples.pack((limit,))
