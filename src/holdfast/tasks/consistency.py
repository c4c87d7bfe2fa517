"""Consistency checks of tasks: derived rows, recomputed from bodies and statuses and compared.

    wait states  a waiting task has one row, in the index of its wait state; other tasks have none
    ranges       a task of a range has no status; a range lease is found by its number and by its first task
    expiries     every lease has an expiry row at or before the end of the lease
    counts       the counters of each queue, and the leased tasks of each limit
    keys         an idempotency key names a task with this key; the key of every stored task is indexed
    tags         the index of tags has one row for each task with a tag
    list         the index of the task list has the tasks since its first one
    dependents   a blocked task has one row for each task it waits for
    redrives     the old task and its replacement name each other
    specs        the hash in the key of a spec, from the spec

`replay_check` compares the statuses with the task log.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.durable.difference import Difference
from holdfast.durable.tags import pack_tag
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks import dependents, list_index
from holdfast.tasks.model import (
    NEW_STATUS,
    TaskBodyRow,
    TaskCounts,
    TaskKeys,
    TaskSpec,
    TaskStatusRow,
    decode_body,
    decode_int_at,
    decode_status,
    get_counts,
    get_spec,
    hash_of_row,
    index_key,
    is_quarantined,
    keys_of,
    pack_int,
    unpack_seq,
)
from holdfast.tasks.replay_check import task_difference
from holdfast.tasks.row_ranges import (
    SEQ_END,
    RangeLease,
    decode_range,
    index_prefix_of,
    iter_range,
    load_expiry_batch,
    range_lease_statuses,
)
from holdfast.tasks.states import TaskState


class StoredTask(NamedTuple):
    body: TaskBodyRow
    spec: TaskSpec
    status: TaskStatusRow


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    keys = keys_of(universe)
    tasks = load_tasks(txn, keys)
    yield from _check_wait_states(txn, keys, tasks)
    yield from _check_range_leases(txn, keys, tasks)
    yield from _check_expiries(txn, keys, tasks)
    yield from _check_counts(txn, keys, tasks)
    yield from _check_idempotency_keys(txn, keys, tasks)
    yield from _check_tags(txn, keys, tasks)
    yield from _check_list_index(txn, keys, tasks)
    yield from _check_dependents(txn, keys, tasks)
    yield from _check_redrives(txn, keys, tasks)


def check_specs(txn: Txn, universe: str) -> Iterator[Difference]:
    for key, row in iter_rows(txn, keys_of(universe).specs):
        name = tuples.unpack(key)[-1]
        codec.unpack_as(TaskSpec, row)
        # Of the stored bytes: other versions have specs with fewer or more fields.
        actual = hash_of_row(row)
        if actual != name:
            yield Difference("task", universe, "hash of a spec", actual, name)


def load_tasks(txn: Txn, keys: TaskKeys) -> dict[int, StoredTask]:
    tasks: dict[int, StoredTask] = {}
    leased_in_ranges = range_lease_statuses(txn, keys, 0, SEQ_END)
    for key, row in iter_rows(txn, keys.bodies):
        packed_seq = key[len(keys.bodies) :]
        seq = unpack_seq(packed_seq)
        status_row = txn.get(keys.statuses + packed_seq)
        body = decode_body(row)
        status = (
            leased_in_ranges.get(seq, NEW_STATUS)
            if status_row is None
            else decode_status(status_row)
        )
        tasks[seq] = StoredTask(body, get_spec(txn, keys, body.spec), status)
    return tasks


def expected_keys(txn: Txn, keys: TaskKeys, seq: int, task: StoredTask) -> dict[str, bytes]:
    """Return the index keys that a waiting task may have, by wait state."""
    body, spec, status = task
    index_position = index_key(spec, pack_int(seq))
    if status.waits:
        return {}
    not_before_ns = status.not_before_ns or body.not_before_ns
    suspect = is_quarantined(spec, status)
    fair_key = txn.get(keys.fair_places + pack_int(seq)) if body.limit else None
    expected = (
        {"suspect": keys.quarantined + index_position}
        if suspect
        else {"ready": fair_key or keys.ready + index_position}
    )
    if not_before_ns:
        expected["delayed"] = keys.delayed + pack_int(not_before_ns) + pack_int(seq)
    if not_before_ns > txn.now_ns:
        return {"delayed": expected["delayed"]}
    expected["stray"] = keys.unroutable + tuples.pack((spec.queue, spec.name)) + index_position
    if body.limit:
        expected["parked"] = keys.throttled + tuples.pack((spec.queue, body.limit)) + index_position
    return expected


def _check_wait_states(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]
) -> Iterator[Difference]:
    rows_by_task: dict[int, list[tuple[str, bytes, bytes]]] = defaultdict(list)
    for place, key, row, seq in _iter_waiting_rows(txn, keys):
        rows_by_task[seq].append((place, key, row))
    for seq, task in tasks.items():
        found = rows_by_task.pop(seq, [])
        waits = task.status.state == TaskState.WAITING
        expected = expected_keys(txn, keys, seq, task) if waits else {}
        names = [place for place, _, _ in found]
        if len(found) != min(len(expected), 1) or any(
            expected.get(p) != key for p, key, _ in found
        ):
            yield task_difference(
                txn, keys, seq, 0, "place", names or "none", sorted(expected) or "none"
            )
        for place, _, row in found:
            if place == "delayed":
                suspect = is_quarantined(task.spec, task.status)
                lane = keys.quarantined if suspect else keys.ready
                then = lane + index_key(task.spec, pack_int(seq))
                if row != then:
                    yield task_difference(txn, keys, seq, 0, "place after its delay", row, then)
    counted: Counter[str] = Counter()
    for key, row in iter_rows(txn, keys.fair_places):
        counted[str(tuples.unpack(row)[3])] += 1
        if txn.get(row) != key[len(keys.fair_places) :]:
            seq = unpack_seq(key[len(keys.fair_places) :])
            yield task_difference(txn, keys, seq, 0, "fair turn", "no row", row)
    for key, row in iter_rows(txn, keys.fair_counts):
        queue, stored = str(tuples.unpack(key)[-1]), schema.decode_int(row)
        if counted.pop(queue, 0) != stored:
            yield task_difference(
                txn, keys, 0, 0, f"tasks in fair turns of {queue}", stored, "another number"
            )
    for queue, number in counted.items():
        yield task_difference(txn, keys, 0, 0, f"tasks in fair turns of {queue}", 0, number)
    for seq, found in rows_by_task.items():
        yield task_difference(
            txn, keys, seq, 0, "place", [place for place, _, _ in found], "no such task"
        )


def _iter_waiting_rows(txn: Txn, keys: TaskKeys) -> Iterator[tuple[str, bytes, bytes, int]]:
    """Yield (wait state, key, row, seq) for every waiting task. Ranges are expanded."""
    for place, prefix in wait_state_prefixes(keys):
        for key, row in iter_rows(txn, prefix):
            if place == "delayed":
                yield place, key, row, _last_int(key)
            else:
                for own, seq in iter_range(index_prefix_of(key, row), row):
                    yield place, own, row, seq


def _check_range_leases(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]
) -> Iterator[Difference]:
    for key, row in iter_rows(txn, keys.ready):
        first, last = decode_range(row)
        if key != index_prefix_of(key, row) + pack_int(first):
            yield task_difference(
                txn, keys, first, 0, "run", key, "a key that ends with its first task"
            )
        if first < last:
            lane = index_prefix_of(key, row)
            for own, seq in iter_range(lane, row):
                if txn.get(keys.statuses + pack_int(seq)) is not None:
                    yield task_difference(txn, keys, seq, 0, "run", own, "no status")
    named = {
        unpack_seq(key[len(keys.range_lease_starts) :]): unpack_seq(row)
        for key, row in iter_rows(txn, keys.range_lease_starts)
    }
    for key, row in iter_rows(txn, keys.range_leases):
        lease, held = unpack_seq(key[len(keys.range_leases) :]), codec.unpack_as(RangeLease, row)
        if not held.ranges or lease % 2:
            yield task_difference(
                txn, keys, 0, 0, f"lease {lease} of runs", held.ranges, "an even one of tasks"
            )
        for first in held.firsts:
            if named.pop(first, 0) != lease:
                yield task_difference(
                    txn, keys, first, 0, "run of a lease", "not found by its first task", lease
                )
        for first, last, spec in held.ranges:
            for seq in range(first, last + 1):
                task = tasks.get(seq)
                if task is None or task.body.spec != spec:
                    yield task_difference(
                        txn, keys, seq, 0, "run of a lease", "another task", lease
                    )
                if txn.get(keys.statuses + pack_int(seq)) is not None:
                    yield task_difference(txn, keys, seq, 0, "run of a lease", lease, "no status")
    for first, lease in named.items():
        yield task_difference(txn, keys, first, 0, "run of a lease", lease, "no such lease")


def wait_state_prefixes(keys: TaskKeys) -> list[tuple[str, bytes]]:
    return [
        ("ready", keys.ready),
        ("ready", keys.fair),
        ("suspect", keys.quarantined),
        ("parked", keys.throttled),
        ("stray", keys.unroutable),
        ("delayed", keys.delayed),
    ]


def _check_expiries(txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]) -> Iterator[Difference]:
    scheduled_ns: dict[tuple[int, int], int] = {}
    for key, row in iter_rows(txn, keys.expiries):
        batch, seqs = load_expiry_batch(txn, keys, key, row)
        at_ns = int(tuples.unpack(key)[-2])
        for seq in seqs:
            scheduled_ns[seq, batch.lease] = max(at_ns, scheduled_ns.get((seq, batch.lease), 0))
    leases_granted = txn.count(keys.lease_counter)
    for seq, task in tasks.items():
        status = task.status
        if status.state != TaskState.LEASED:
            continue
        at = scheduled_ns.get((seq, status.lease))
        if at is None or at > status.expires_ns:
            yield task_difference(
                txn, keys, seq, 0, "looked at when its lease is over", at, status.expires_ns
            )
        if status.lease > leases_granted:
            yield task_difference(
                txn, keys, seq, 0, "lease", status.lease, f"{leases_granted} given"
            )


def count_tasks(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask] | None = None
) -> tuple[dict[str, Counter[str]], Counter[tuple[str, str]]]:
    """Count the tasks of each queue by wait state or state, and the leased tasks of each limit."""
    tasks = load_tasks(txn, keys) if tasks is None else tasks
    expected: dict[str, Counter[str]] = defaultdict(Counter)
    leased_per_limit: Counter[tuple[str, str]] = Counter()
    for task in tasks.values():
        state = TaskState(task.status.state)
        if state is TaskState.WAITING:
            if task.status.waits:
                expected[task.spec.queue]["blocked"] += 1
        else:
            expected[task.spec.queue][state.name.lower()] += 1
        if state is TaskState.LEASED and task.body.limit:
            leased_per_limit[task.spec.queue, task.body.limit] += 1
    for place, _, _, seq in _iter_waiting_rows(txn, keys):
        if seq in tasks:
            expected[tasks[seq].spec.queue][place] += 1
    return expected, leased_per_limit


def _check_counts(txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]) -> Iterator[Difference]:
    expected, running = count_tasks(txn, keys, tasks)
    queues = {str(tuples.unpack(key)[-1]) for key, _ in iter_rows(txn, keys.counts)}
    for queue in sorted(queues | set(expected)):
        stored_counts = get_counts(txn, keys, queue)
        for counter in TaskCounts.__struct_fields__:
            if getattr(stored_counts, counter) != expected[queue][counter]:
                where = f"count of {counter} in {queue}"
                yield task_difference(
                    txn,
                    keys,
                    0,
                    0,
                    where,
                    getattr(stored_counts, counter),
                    expected[queue][counter],
                )
    stored = {
        (str(queue), str(limit)): schema.decode_int(row)
        for key, row in iter_rows(txn, keys.leased_per_limit)
        for queue, limit in [tuples.unpack(key)[-2:]]
    }
    for pair in sorted({*stored, *running}):
        if stored.get(pair, 0) != running[pair]:
            where = f"leases of limit {pair[1]} in {pair[0]}"
            yield task_difference(txn, keys, 0, 0, where, stored.get(pair, 0), running[pair])


def _check_idempotency_keys(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]
) -> Iterator[Difference]:
    indexed: dict[tuple[str, str], int] = {}
    for key, row in iter_rows(txn, keys.idempotency_keys):
        name, task_key = (str(part) for part in tuples.unpack(key)[-2:])
        seq = indexed[name, task_key] = unpack_seq(row)
        task = tasks.get(seq)
        if task is None or (task.spec.name, task.body.key) != (name, task_key):
            yield task_difference(
                txn, keys, seq, 0, "key", f"{name} {task_key}", "a task that has this key"
            )
    for seq, task in tasks.items():
        if not task.body.key:
            continue
        named, last = indexed.get((task.spec.name, task.body.key)), last_redrive_of(tasks, seq)
        if named != last:
            yield task_difference(txn, keys, seq, 0, f"key {task.body.key}", named, last)


def tag_rows(keys: TaskKeys, tasks: dict[int, StoredTask]) -> dict[bytes, bytes]:
    """Return the index rows of the tags of these tasks."""
    return {
        keys.tags + pack_tag(task.body.tag) + pack_int(seq): b""
        for seq, task in tasks.items()
        if task.body.tag
    }


def _check_tags(txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]) -> Iterator[Difference]:
    expected, found = tag_rows(keys, tasks), dict(iter_rows(txn, keys.tags))
    for key in sorted(expected.keys() ^ found.keys()):
        is_listed, should_be = key in found, key in expected
        yield task_difference(
            txn, keys, _last_int(key), 0, "listed by its tag", is_listed, should_be
        )


def list_index_rows(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask], first: int = 0
) -> dict[bytes, bytes]:
    """Return the rows of the index of the task list, for the tasks from `first` on."""
    return list_index.expected_rows(
        keys,
        (
            (seq, task.spec, _listed_place(txn, keys, seq, task))
            for seq, task in tasks.items()
            if seq >= first
        ),
    )


def _listed_place(txn: Txn, keys: TaskKeys, seq: int, task: StoredTask) -> str:
    body, _, status = task
    state = TaskState(status.state).name.lower()
    if state in list_index.ENDED:
        return state
    if status.state == TaskState.WAITING and status.waits:
        return "blocked"
    due_ns = status.not_before_ns or body.not_before_ns
    is_delayed = txn.get(keys.delayed + pack_int(due_ns) + pack_int(seq)) is not None
    return "delayed" if is_delayed else list_index.ALL


def _check_list_index(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]
) -> Iterator[Difference]:
    first = list_index.indexed_since(txn, keys)
    if first is None:
        # No task was created since an older version wrote the store.
        return
    expected = list_index_rows(txn, keys, tasks, first)
    found = dict(iter_rows(txn, keys.listed))
    for key in sorted(expected.keys() | found.keys()):
        chunk = _last_int(key) * list_index.CHUNK
        # Tasks before the first indexed one have a bit once they end.
        counted = -1 << max(first - chunk, 0)
        should_be = list_index.decode_bits(expected.get(key))
        wrong = (list_index.decode_bits(found.get(key)) & counted) ^ should_be
        if wrong:
            seq = chunk + (wrong & -wrong).bit_length() - 1
            is_set = bool(should_be >> (seq - chunk) & 1)
            yield task_difference(txn, keys, seq, 0, "listed by queue and name", not is_set, is_set)


def last_redrive_of(tasks: dict[int, StoredTask], seq: int) -> int:
    """Return the last task in the chain of redrives that starts with this task."""
    while seq in tasks and tasks[seq].status.redriven_by:
        seq = tasks[seq].status.redriven_by
    return seq


def _check_dependents(
    txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]
) -> Iterator[Difference]:
    open_dependencies: Counter[int] = Counter()
    for key, row in iter_rows(txn, keys.dependents):
        other = decode_int_at(key, len(keys.dependents))
        # A listener is no task. It is checked like one, under the task it listens to.
        seq = other if row.startswith(dependents.LISTENER) else unpack_seq(row)
        open_dependencies[seq] += not row.startswith(dependents.LISTENER)
        first = tasks.get(other)
        ended = first is None or first.status.state not in (TaskState.WAITING, TaskState.LEASED)
        if ended and txn.get(keys.pending_releases + pack_int(other)) is None:
            yield task_difference(
                txn, keys, seq, 0, f"told when {other} ends", "never", "it has ended"
            )
        if first is not None and not ended and not first.status.awaited:
            yield task_difference(txn, keys, other, 0, "awaited", False, True)
    for seq, task in tasks.items():
        status = task.status
        if status.state == TaskState.WAITING and status.waits != open_dependencies[seq]:
            yield task_difference(txn, keys, seq, 0, "waits", status.waits, open_dependencies[seq])
        if status.waits and status.state != TaskState.WAITING:
            yield task_difference(txn, keys, seq, 0, "waits", status.waits, 0)


def _check_redrives(txn: Txn, keys: TaskKeys, tasks: dict[int, StoredTask]) -> Iterator[Difference]:
    for seq, task in tasks.items():
        old, new = task.body.redrive_of, task.status.redriven_by
        if old in tasks and tasks[old].status.redriven_by != seq:
            yield task_difference(
                txn, keys, old, 0, "redriven by", tasks[old].status.redriven_by, seq
            )
        if new and (new not in tasks or tasks[new].body.redrive_of != seq):
            yield task_difference(txn, keys, seq, 0, "redriven by", new, "a task in its place")


def _last_int(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])
