"""Task submission: `TaskCreated`.

A batch is atomic. `submit_each` takes tasks of different callers and accepts or refuses each task
separately. A task may have an idempotency key (a second submission with the same key and arguments
returns the first task while it is stored), a limit key (`model.QueueLimits`), a delay and
dependencies.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from holdfast.codec import Record
from holdfast.config import (
    BLOB_THRESHOLD_BYTES,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
)
from holdfast.durable.validation import check_limit, check_name, check_time, check_ttl
from holdfast.errors import Invalid, KeyConflict, KeyTooLarge, NotFound, ValueTooLarge, to_wire
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
    refused: dict[int, Invalid] = {}
    for index, (spec_no, new_task) in enumerate(zip(spec_of_each, new, strict=True)):
        try:
            _spec_row(keys, specs[spec_no])
            if new_task.key or new_task.after:
                what = "key" if new_task.key else "after"
                raise Invalid(
                    what=what,
                    why="not allowed in a batch of several callers; submit the task alone",
                )
            _check_new_task(keys, specs[spec_no], new_task, index)
        except Invalid as error:
            refused[index] = error
    if not refused:
        return SubmitEachResult(_create_tasks(txn, universe, specs, spec_of_each, new), [])
    seqs = [0] * len(new)
    kept = [index for index in range(len(new)) if index not in refused]
    if kept:
        used = sorted({spec_of_each[index] for index in kept})
        place = {spec_no: n for n, spec_no in enumerate(used)}
        made = _create_tasks(
            txn,
            universe,
            [specs[spec_no] for spec_no in used],
            [place[spec_of_each[index]] for index in kept],
            [new[index] for index in kept],
        )
        for index, seq in zip(kept, made, strict=True):
            seqs[index] = seq
    return SubmitEachResult(seqs, [(index, *to_wire(error)) for index, error in refused.items()])


def _check_columns(specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]) -> None:
    check_limit(len(new), "tasks")
    if len(spec_of_each) != len(new) or not set(spec_of_each) <= set(range(len(specs))):
        raise Invalid(what="tasks", why="each task needs exactly one spec")


def _create_tasks(
    txn: Txn, universe: str, specs: list[TaskSpec], spec_of_each: list[int], new: list[TaskToSubmit]
) -> list[int]:
    check_limit(len(new), "tasks")
    unit = UnitOfWork(txn, universe)
    keys, now_ns, generation = unit.keys, unit.now_ns, txn.generation
    spec_rows = [_spec_row(keys, spec) for spec in specs]
    for index, (spec_no, new_task) in enumerate(zip(spec_of_each, new, strict=True)):
        _check_new_task(keys, specs[spec_no], new_task, index)
    put, bodies = txn.put, keys.bodies
    for spec_row in spec_rows:
        if txn.get(spec_row.key) is None:
            put(spec_row.key, spec_row.row)
    spec_hashes = [spec_row.spec_hash for spec_row in spec_rows]
    # The common case: a task without key, limit, delay or dependencies is ready at once.
    ready_prefixes = [spec_row.ready_prefix for spec_row in spec_rows]
    seq = txn.count(keys.seq_counter)
    seqs: list[int] = []
    created: list[int] = []
    rows: list[bytes] = []
    dead_on_arrival: list[tuple[int, TaskSpec]] = []
    batchable_counts = [0] * len(specs)
    # The open range: its spec, its first and its last seq.
    range_spec_no, first, end = 0, 0, -1
    for spec_no, new_task in zip(spec_of_each, new, strict=True):
        args, blob = new_task.args, b""
        if len(args) > BLOB_THRESHOLD_BYTES:
            args, blob = b"", blobs.put(txn, args)
        if not (new_task.key or new_task.limit or new_task.after or new_task.delay_ns or blob):
            seq += 1
            packed_seq = pack_int(seq)
            row = pack(TaskBodyRow(spec_hashes[spec_no], args, now_ns, generation))
            put(bodies + packed_seq, row)
            if seq != end + 1 or spec_no != range_spec_no:
                if first:
                    put(ready_prefixes[range_spec_no] + pack_int(first), encode_range(first, end))
                range_spec_no, first = spec_no, seq
            end = seq
            batchable_counts[spec_no] += 1
            created.append(seq)
            rows.append(row)
            seqs.append(seq)
            continue
        if first:
            # Close the range: this task may depend on one of its tasks, which then splits off.
            put(ready_prefixes[range_spec_no] + pack_int(first), encode_range(first, end))
            first, end = 0, -1
        spec = specs[spec_no]
        existing = _find_by_key(unit, new_task, spec_hashes[spec_no], spec)
        if existing:
            if blob:
                blobs.release.fn(txn, blob)
            seqs.append(existing)
            continue
        seq += 1
        packed_seq = pack_int(seq)
        named = (after if after > 0 else seqs[-after - 1] for after in new_task.after)
        dependencies = tuple(dict.fromkeys(named))
        _check_dependencies(unit, seq, dependencies)
        body = TaskBodyRow(
            spec_hashes[spec_no],
            args,
            now_ns,
            generation,
            now_ns + new_task.delay_ns if new_task.delay_ns else 0,
            new_task.key,
            new_task.limit,
            dependencies,
            0,
            blob,
        )
        row = pack(body)
        put(bodies + packed_seq, row)
        if new_task.key:
            put(keys.idempotency_keys + tuples.pack((spec.name, new_task.key)), packed_seq)
        waits = dependents.register(unit, packed_seq, dependencies)
        status = NEW_STATUS if not waits else TaskStatusRow(waits=waits)
        if waits:
            unit.write_status(packed_seq, status)
        if waits is None:
            dead_on_arrival.append((seq, spec))
            unit.write_status(
                packed_seq,
                status_fold.apply_death(NEW_STATUS, dependents.DEPENDENCY_FAILED, now_ns),
            )
        else:
            unit.enqueue(packed_seq, body, spec, status)
        created.append(seq)
        rows.append(row)
        seqs.append(seq)
    if first:
        put(ready_prefixes[range_spec_no] + pack_int(first), encode_range(first, end))
    for spec, count in zip(specs, batchable_counts, strict=True):
        if count:
            unit.counts.add(spec.queue, "ready", count)
            unit.notify_queue(spec.queue)
    if created:
        put(keys.seq_counter, encode_int(seq))
        unit.log.append(TasksCreated(created, digest_rows(rows)))
    for dead, spec in dead_on_arrival:
        unit.log.append(TasksDead([dead], dependents.DEPENDENCY_FAILED))
        unit.finish(dead, spec, "dead", awaited=False)
    unit.close()
    return seqs


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
