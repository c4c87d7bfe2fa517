"""Task submission: `TaskCreated`.

A batch is atomic. `submit_each` takes tasks of different callers and accepts or refuses each task
separately. A task may have an idempotency key (a second submission with the same key and arguments
returns the first task while it is stored), a limit key (`model.QueueLimits`), a delay,
dependencies and a tag (`durable.tags`).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.codec import Record
from holdfast.config import (
    BLOB_THRESHOLD_BYTES,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
)
from holdfast.durable import load_limits, tags
from holdfast.durable.validation import check_limit, check_name, check_time, check_ttl
from holdfast.errors import (
    HoldfastError,
    Invalid,
    KeyConflict,
    KeyTooLarge,
    NotFound,
    Overloaded,
    ValueTooLarge,
    to_wire,
)
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import encode_int
from holdfast.tasks import dependents, status_fold
from holdfast.tasks.events import TasksCreated, TasksDead, digest_rows
from holdfast.tasks.model import (
    EXECUTOR_KINDS,
    NEW_STATUS,
    TaskBodyRow,
    TaskKeys,
    TaskSpec,
    TaskStatusRow,
    dangling_row,
    keys_of,
    pack,
    pack_int,
    queue_index,
    spec_hash,
    unpack_seq,
)
from holdfast.tasks.row_ranges import encode_range
from holdfast.tasks.unit_of_work import UnitOfWork

AFTER_MAX = 1_000


class CyclicDependency(Invalid):
    code = "cyclic_dependency"
    hint = "a task cannot depend on itself, directly or through other tasks"


class TaskToSubmit(Record, frozen=True):
    """A task to submit. `after` holds seqs of dependencies. Negative numbers refer to the same
    batch: -1 is its first task.
    """

    args: bytes
    delay_ns: int = 0
    key: str = ""
    limit: str = ""
    after: tuple[int, ...] = ()
    # The trace context of the submission.
    trace: bytes = b""
    tag: str = ""
    # The FAILED or DEAD task that this one replaces.
    redrive_of: int = 0


@operation("tasks.submit")
def submit(txn: Txn, universe: str, spec: TaskSpec, new: list[TaskToSubmit]) -> list[int]:
    """Create tasks atomically. Returns their seqs. For a key in use, returns its existing task."""
    return _create_tasks(txn, universe, [spec], [0] * len(new), new)


@operation("tasks.submit_all")
def submit_all(
    txn: Txn, universe: str, specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]
) -> list[int]:
    """`submit` for tasks with different specs."""
    _check_columns(specs, spec_of_each, new)
    return _create_tasks(txn, universe, specs, spec_of_each, new)


class SubmitEachResult(Record, frozen=True):
    """The result of `submit_each`: the seq of each task (0 if refused), and the refusals as
    (position, error code, error fields).
    """

    seqs: list[int]
    refused: list[tuple[int, str, dict[str, Any]]]


@operation("tasks.submit_each")
def submit_each(
    txn: Txn, universe: str, specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]
) -> SubmitEachResult:
    """`submit_all` for tasks of different callers: a refused task does not affect the rest of the
    batch.

    These tasks have neither keys nor dependencies, so every check needs only the task and precedes
    all writes.
    """
    _check_columns(specs, spec_of_each, new)
    keys = keys_of(universe)
    refused: dict[int, HoldfastError] = {}
    unit = UnitOfWork(txn, universe)
    rooms = None if unit.load_limits is None else _Rooms(unit)
    for index, (spec_no, new_task) in enumerate(zip(spec_of_each, new, strict=True)):
        try:
            _spec_row(keys, specs[spec_no])
            if new_task.key or new_task.after:
                what = "key" if new_task.key else "after"
                raise Invalid(
                    what=what,
                    why="a task with key or after cannot share a batch with other callers; submit it alone",
                )
            _check_new_task(keys, specs[spec_no], new_task, index)
            if rooms is not None:
                rooms.take(specs[spec_no].queue, len(new_task.args))
        except (Invalid, Overloaded) as error:
            refused[index] = error
    if not refused:
        seqs = _create_within(unit, specs, spec_of_each, new)
        unit.close()
        return SubmitEachResult(seqs, [])
    seqs = [0] * len(new)
    kept = [index for index in range(len(new)) if index not in refused]
    if kept:
        used = sorted({spec_of_each[index] for index in kept})
        place = {spec_no: n for n, spec_no in enumerate(used)}
        made = _create_within(
            unit,
            [specs[spec_no] for spec_no in used],
            [place[spec_of_each[index]] for index in kept],
            [new[index] for index in kept],
        )
        for index, seq in zip(kept, made, strict=True):
            seqs[index] = seq
        unit.close()
    return SubmitEachResult(seqs, [(index, *to_wire(error)) for index, error in refused.items()])


def _check_columns(specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]) -> None:
    check_limit(len(new), "tasks")
    if len(spec_of_each) != len(new) or not set(spec_of_each) <= set(range(len(specs))):
        raise Invalid(what="tasks", why="each task needs exactly one spec")


def create_within(unit: UnitOfWork, spec: TaskSpec, new: list[TaskToSubmit]) -> list[int]:
    """Create tasks of one spec within an open unit of work, which the caller closes."""
    return _create_within(unit, [spec], [0] * len(new), new)


def create_each_within(
    unit: UnitOfWork, specs: list[TaskSpec], new: list[TaskToSubmit]
) -> list[int]:
    """Create tasks, each with its spec, within an open unit of work, which the caller closes."""
    numbers = {spec: number for number, spec in enumerate(dict.fromkeys(specs))}
    return _create_within(unit, list(numbers), [numbers[spec] for spec in specs], new)


def _create_tasks(
    txn: Txn, universe: str, specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]
) -> list[int]:
    unit = UnitOfWork(txn, universe)
    if unit.load_limits is None:
        seqs = _create_within(unit, specs, spec_of_each, new)
    else:
        seqs = _create_judged(unit, specs, spec_of_each, new)
    unit.close()
    return seqs


def _create_judged(
    unit: UnitOfWork, specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]
) -> list[int]:
    """Create tasks, or raise Overloaded if they exceed a load limit."""
    before = unit.txn.count(unit.keys.seq_counter)
    seqs = _create_within(unit, specs, spec_of_each, new)
    # A known key creates nothing, so the repeat of an accepted call is never refused.
    if unit.txn.count(unit.keys.seq_counter) > before:
        unit.judge_new_tasks({specs[spec_no].queue for spec_no in spec_of_each})
    return seqs


class _Rooms:
    """The room for new tasks of one operation below the load limits: each task takes one place."""

    def __init__(self, unit: UnitOfWork) -> None:
        self._unit = unit
        self._taken: Counter[str] = Counter()
        self._bytes = 0

    def take(self, queue: str, size: int) -> None:
        """Take a place for a task, or raise Overloaded."""
        unit = self._unit
        limits = unit.load_limits
        if limits is None:
            return
        universe, taken = unit.keys.universe, self._taken
        queue_max = limits.queues.get(queue, 0)
        if queue_max:
            waiting = unit.counts.waiting(queue) + taken[queue] + 1
            if waiting > queue_max:
                raise load_limits.refuse("queue", universe, waiting, queue_max, queue=queue)
        if limits.tasks:
            waiting = unit.waiting_in_universe() + taken.total() + 1
            if waiting > limits.tasks:
                raise load_limits.refuse(load_limits.TASKS, universe, waiting, limits.tasks)
        if limits.bytes_in_flight:
            found = load_limits.counted(unit.txn, universe, load_limits.BYTES) + self._bytes + size
            if found > limits.bytes_in_flight:
                raise load_limits.refuse(load_limits.BYTES, universe, found, limits.bytes_in_flight)
        taken[queue] += 1
        self._bytes += size


def _create_within(
    unit: UnitOfWork, specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]
) -> list[int]:
    check_limit(len(new), "tasks")
    txn = unit.txn
    spec_rows = [_spec_row(unit.keys, spec) for spec in specs]
    for index, (spec_no, new_task) in enumerate(zip(spec_of_each, new, strict=True)):
        _check_new_task(unit.keys, specs[spec_no], new_task, index)
    for spec_row in spec_rows:
        if txn.get(spec_row.key) is None:
            txn.put(spec_row.key, spec_row.row)
    batch = _TaskBatch(unit, specs, spec_rows)
    # Consecutive tasks of one spec without options: their arguments and traces. They are ready at once.
    ready: list[tuple[bytes, bytes]] = []
    ready_spec_no = 0
    for spec_no, new_task in zip(spec_of_each, new, strict=True):
        args, blob = new_task.args, b""
        if len(args) > BLOB_THRESHOLD_BYTES:
            args, blob = b"", blobs.put(txn, args)
        has_options = (
            new_task.key
            or new_task.limit
            or new_task.after
            or new_task.delay_ns
            or new_task.tag
            or new_task.redrive_of
            or blob
        )
        if ready and (has_options or spec_no != ready_spec_no):
            batch.add_ready(ready_spec_no, ready)
            ready = []
        if has_options:
            batch.add(spec_no, new_task, args, blob)
        else:
            ready_spec_no = spec_no
            ready.append((args, new_task.trace))
    if ready:
        batch.add_ready(ready_spec_no, ready)
    batch.save()
    return batch.seqs


class _TaskBatch:
    """Writes the rows of new tasks and collects their log record. `seqs` has the seq of each
    submitted task, the existing one for a known key.
    """

    __slots__ = (
        "_bodies", "_created", "_dead_on_arrival", "_generation", "_put", "_ready_counts", "_rows", "_seq",
        "_spec_rows", "_specs", "_unit", "seqs",
    )  # fmt: skip

    def __init__(self, unit: UnitOfWork, specs: list[TaskSpec], spec_rows: list[_SpecRow]) -> None:
        self._unit = unit
        self._specs = specs
        self._spec_rows = spec_rows
        self._put, self._bodies = unit.txn.put, unit.keys.bodies
        self._generation = unit.txn.generation
        self._seq = unit.txn.count(unit.keys.seq_counter)
        self._ready_counts = [0] * len(specs)
        self._created: list[int] = []
        self._rows: list[bytes] = []
        self._dead_on_arrival: list[tuple[int, TaskSpec]] = []
        self.seqs: list[int] = []

    def add_ready(self, spec_no: int, arguments: list[tuple[bytes, bytes]]) -> None:
        """Create consecutive tasks of one spec without options. One index row has their range."""
        put, bodies, spec_row = self._put, self._bodies, self._spec_rows[spec_no]
        now_ns, generation, rows = self._unit.now_ns, self._generation, self._rows
        first, last = self._seq + 1, self._seq + len(arguments)
        spec_hash, seqs = spec_row.spec_hash, range(first, last + 1)
        for seq, (args, trace) in zip(seqs, arguments, strict=True):
            row = pack(TaskBodyRow(spec_hash, args, now_ns, generation, trace=trace))
            put(bodies + pack_int(seq), row)
            rows.append(row)
        put(spec_row.ready_prefix + pack_int(first), encode_range(first, last))
        self._seq = last
        self._unit.listed.create(self._unit.keys, self._specs[spec_no], first, last)
        self._ready_counts[spec_no] += len(arguments)
        self._created += seqs
        self.seqs += seqs

    def add(self, spec_no: int, new_task: TaskToSubmit, args: bytes, blob: bytes) -> None:
        """Create a task with options, or find the task of its key."""
        unit, spec, spec_hash = self._unit, self._specs[spec_no], self._spec_rows[spec_no].spec_hash
        existing = _find_by_key(unit, new_task, spec_hash, spec)
        if existing:
            if blob:
                blobs.release.fn(unit.txn, blob)
            self.seqs.append(existing)
            return
        self._seq = seq = self._seq + 1
        packed_seq = pack_int(seq)
        named = (after if after > 0 else self.seqs[-after - 1] for after in new_task.after)
        dependencies = tuple(dict.fromkeys(named))
        _check_dependencies(unit, seq, dependencies)
        body = TaskBodyRow(
            spec_hash,
            args,
            unit.now_ns,
            self._generation,
            unit.now_ns + new_task.delay_ns if new_task.delay_ns else 0,
            key=new_task.key,
            limit=new_task.limit,
            after=dependencies,
            blob=blob,
            trace=new_task.trace,
            tag=new_task.tag,
            redrive_of=new_task.redrive_of,
        )
        row = pack(body)
        self._put(self._bodies + packed_seq, row)
        if new_task.redrive_of:
            replaced = pack_int(new_task.redrive_of)
            unit.write_status(replaced, replace(unit.status(replaced), redriven_by=seq))
        tags.add(unit.txn, unit.keys.tags, body.tag, packed_seq)
        unit.listed.create(unit.keys, spec, seq, seq)
        if new_task.key:
            index_key = unit.keys.idempotency_keys + tuples.pack((spec.name, new_task.key))
            self._put(index_key, packed_seq)
        self._enqueue(seq, packed_seq, body, spec)
        self._created.append(seq)
        self._rows.append(row)
        self.seqs.append(seq)

    def _enqueue(self, seq: int, packed_seq: bytes, body: TaskBodyRow, spec: TaskSpec) -> None:
        """Put a task into its wait state. A task whose dependency has failed is dead on arrival."""
        unit = self._unit
        waits = dependents.register(unit, packed_seq, body.after)
        if waits is None:
            self._dead_on_arrival.append((seq, spec))
            dead = status_fold.apply_death(NEW_STATUS, dependents.DEPENDENCY_FAILED, unit.now_ns)
            unit.write_status(packed_seq, dead)
            return
        status = NEW_STATUS if not waits else TaskStatusRow(waits=waits)
        if waits:
            unit.write_status(packed_seq, status)
        unit.enqueue(packed_seq, body, spec, status)

    def save(self) -> None:
        """Write the counters and the log record."""
        unit = self._unit
        for spec, count in zip(self._specs, self._ready_counts, strict=True):
            if count:
                unit.counts.add(spec.queue, "ready", count)
                unit.notify_queue(spec.queue)
        if self._created:
            self._put(unit.keys.seq_counter, encode_int(self._seq))
            unit.log.append(TasksCreated(self._created, digest_rows(self._rows)))
            if unit.load_limits is not None:
                unit.count_created(self._rows)
        for dead, spec in self._dead_on_arrival:
            unit.log.append(TasksDead([dead], dependents.DEPENDENCY_FAILED))
            unit.finish(dead, spec, "dead", awaited=False)


@lru_cache(1024)
def check_spec(spec: TaskSpec) -> None:
    check_name("task", spec.name)
    check_name("queue", spec.queue)
    check_ttl(spec.lease_ns)
    check_ttl(spec.window_ns)
    check_time("retain_ns", spec.retain_ns)
    check_time("backoff_ns", spec.backoff_ns)
    check_time("backoff_ns_max", spec.backoff_ns_max)
    for what in ("attempts", "expiries_max"):
        if not 1 <= getattr(spec, what) <= 1_000_000:
            raise Invalid(what=what, found=getattr(spec, what), min=1, max=1_000_000)
    if spec.kind not in EXECUTOR_KINDS:
        raise Invalid(what="kind", found=spec.kind, expected=list(EXECUTOR_KINDS))
    if not -QUEUE_PRIORITY_MAX <= spec.priority <= QUEUE_PRIORITY_MAX:
        raise Invalid(what="priority", found=spec.priority, max=QUEUE_PRIORITY_MAX)


def check_new(universe: str, spec: TaskSpec, new_task: TaskToSubmit) -> None:
    """Refuse a task that cannot be stored."""
    keys = keys_of(universe)
    _spec_row(keys, spec)
    _check_new_task(keys, spec, new_task, 0)


def _check_new_task(keys: TaskKeys, spec: TaskSpec, new_task: TaskToSubmit, index: int) -> None:
    """Refuse a task that cannot be stored, without reading any row.

    A task may depend only on earlier tasks of its batch, so no cycle can exist.
    """
    if len(new_task.args) > MESSAGE_BYTES_MAX:
        raise ValueTooLarge(what="arguments", bytes=len(new_task.args), bytes_max=MESSAGE_BYTES_MAX)
    if new_task.after:
        if len(new_task.after) > AFTER_MAX:
            raise Invalid(what="after", why="too many", found=len(new_task.after), max=AFTER_MAX)
        for after in new_task.after:
            if after == 0:
                raise Invalid(what="after", why="seqs start at 1, positions in the batch at -1")
            if after < 0 and -after - 1 >= index:
                raise CyclicDependency(task=index, waits_for=-after - 1)
    if new_task.delay_ns:
        check_time("delay_ns", new_task.delay_ns)
    if new_task.key:
        check_name("key", new_task.key)
    if new_task.limit:
        check_name("limit_key", new_task.limit)
    if new_task.tag:
        check_name("tag", new_task.tag)
    if new_task.limit or new_task.key:
        _check_key_lengths(keys, spec, new_task.limit, new_task.key)


class _SpecRow(NamedTuple):
    """The encoded spec row with its hash and key, and the queue index of its ready tasks."""

    spec_hash: bytes
    key: bytes
    row: bytes
    ready_prefix: bytes


@lru_cache(1024)
def _spec_row(keys: TaskKeys, spec: TaskSpec) -> _SpecRow:
    check_spec(spec)
    _check_key_lengths(keys, spec)
    hash_of_spec = spec_hash(spec)
    ready = keys.ready + queue_index(spec.queue, spec.kind, spec.priority)
    return _SpecRow(hash_of_spec, keys.specs + tuples.pack((hash_of_spec,)), pack(spec), ready)


def _check_key_lengths(keys: TaskKeys, spec: TaskSpec, limit: str = "", key: str = "") -> None:
    """Refuse a task if one of its row keys could exceed the key size. Each name is within its
    bound, but a key combines several names.
    """
    longest = max(
        len(keys.throttled) + len(tuples.pack((spec.queue, limit, spec.queue))),
        len(keys.unroutable) + len(tuples.pack((spec.queue, spec.name, spec.queue))),
        len(keys.idempotency_keys) + len(tuples.pack((spec.name, key))),
    )
    if longest + _NUMBERS_BYTES > KEY_BYTES_MAX:
        raise KeyTooLarge(
            what="task", name=spec.name, bytes=longest + _NUMBERS_BYTES, bytes_max=KEY_BYTES_MAX
        )


# The maximum encoded size of a kind, a priority and a seq.
_NUMBERS_BYTES = 27


def _check_dependencies(unit: UnitOfWork, seq: int, dependencies: tuple[int, ...]) -> None:
    for dependency in dependencies:
        if dependency == seq:
            raise CyclicDependency(task=seq, waits_for=dependency)
        if unit.body(pack_int(dependency)) is None:
            raise NotFound(what="task", why="after= names an unknown task", task=dependency)


def _find_by_key(unit: UnitOfWork, new_task: TaskToSubmit, name: bytes, spec: TaskSpec) -> int:
    """Return the task with this key, or 0. Different arguments raise `KeyConflict`."""
    if not new_task.key:
        return 0
    packed_seq = unit.txn.get(unit.keys.idempotency_keys + tuples.pack((spec.name, new_task.key)))
    if packed_seq is None:
        return 0
    body = unit.body(packed_seq)
    if body is None:
        raise dangling_row(packed_seq)
    args = blobs.get(unit.txn, body.blob) if body.blob else body.args
    if args != new_task.args:
        raise KeyConflict(
            what="task", name=spec.name, key=new_task.key, task=unpack_seq(packed_seq)
        )
    return unpack_seq(packed_seq)
