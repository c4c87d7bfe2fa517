"""What follows from bodies and statuses, counted and built again, and compared with the rows.

places       a task that waits is in one, the one that it belongs to; any other task is in none
runs         a task of a run has no status; leases of runs are found by number and by task
expiries     whatever is leased is looked at when its time is up, or before
counts       of each queue, and of the leases of each limit
keys         name a task that has this key; a key of a task that is kept is known
dependents   a blocked task is told by each that it waits for
redriven     the old task and the new one name each other
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from holdfast import codec
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks.rows import (
    FRESH,
    Body,
    Counts,
    Keys,
    Spec,
    Status,
    counts_of,
    decode_body,
    decode_status,
    is_suspect,
    keys_of,
    order,
    pack_int,
    seq_of,
    spec_of,
)
from holdfast.tasks.runs import SEQ_END, Held, batch_of, held_between, lane_of, members, run_of
from holdfast.tasks.states import State
from holdfast.tasks.verify import Difference, rows_of


class Task(NamedTuple):
    body: Body
    spec: Spec
    status: Status


def differences(txn: Txn, universe: str) -> Iterator[Difference]:
    keys = keys_of(universe)
    tasks = tasks_of(txn, keys)
    yield from _places(txn, keys, tasks)
    yield from _runs(txn, keys, tasks)
    yield from _expiries(txn, keys, tasks)
    yield from _counts(txn, keys, tasks)
    yield from _keys(txn, keys, tasks)
    yield from _dependents(txn, keys, tasks)
    yield from _redriven(tasks)


def tasks_of(txn: Txn, keys: Keys) -> dict[int, Task]:
    found: dict[int, Task] = {}
    held = held_between(txn, keys, 0, SEQ_END)
    for key, row in rows_of(txn, keys.bodies):
        packed_seq = key[len(keys.bodies) :]
        seq = seq_of(packed_seq)
        kept = txn.get(keys.statuses + packed_seq)
        body = decode_body(row)
        status = held.get(seq, FRESH) if kept is None else decode_status(kept)
        found[seq] = Task(body, spec_of(txn, keys, body.spec), status)
    return found


def place_of(txn: Txn, keys: Keys, seq: int, task: Task) -> dict[str, bytes]:
    """The keys that a task which waits may be found by, one for each place."""
    body, spec, status = task
    here = order(spec, pack_int(seq))
    if status.waits:
        return {}
    not_before_ns = status.not_before_ns or body.not_before_ns
    suspect = is_suspect(spec, status)
    places = {"suspect": keys.suspects + here} if suspect else {"ready": keys.ready + here}
    if not_before_ns:
        places["delayed"] = keys.delayed + pack_int(not_before_ns) + pack_int(seq)
    if not_before_ns > txn.now_ns:
        return {"delayed": places["delayed"]}
    places["stray"] = keys.strays + tuples.pack((spec.queue, spec.name)) + here
    if body.limit:
        places["parked"] = keys.parked + tuples.pack((spec.queue, body.limit)) + here
    return places


def _places(txn: Txn, keys: Keys, tasks: dict[int, Task]) -> Iterator[Difference]:
    where: dict[int, list[tuple[str, bytes, bytes]]] = defaultdict(list)
    for place, key, row, seq in _placed(txn, keys):
        where[seq].append((place, key, row))
    for seq, task in tasks.items():
        found = where.pop(seq, [])
        waits = task.status.state == State.WAITING
        right = place_of(txn, keys, seq, task) if waits else {}
        names = [place for place, _, _ in found]
        if len(found) != min(len(right), 1) or any(right.get(p) != key for p, key, _ in found):
            yield Difference(seq, 0, "place", names or "none", sorted(right) or "none")
        for place, _, row in found:
            if place == "delayed":
                suspect = is_suspect(task.spec, task.status)
                lane = keys.suspects if suspect else keys.ready
                then = lane + order(task.spec, pack_int(seq))
                if row != then:
                    yield Difference(seq, 0, "place after its delay", row, then)
    for seq, found in where.items():
        yield Difference(seq, 0, "place", [place for place, _, _ in found], "no such task")


def _placed(txn: Txn, keys: Keys) -> Iterator[tuple[str, bytes, bytes, int]]:
    """Every task that is in a place: where, by which key, by which row; those of runs one by one."""
    for place, prefix in prefixes(keys):
        for key, row in rows_of(txn, prefix):
            if place == "delayed":
                yield place, key, row, _last_int(key)
            else:
                for own, seq in members(lane_of(key, row), row):
                    yield place, own, row, seq


def _runs(txn: Txn, keys: Keys, tasks: dict[int, Task]) -> Iterator[Difference]:
    for key, row in rows_of(txn, keys.ready):
        first, last = run_of(row)
        if key != lane_of(key, row) + pack_int(first):
            yield Difference(first, 0, "run", key, "a key that ends with its first task")
        if first < last:
            lane = lane_of(key, row)
            for own, seq in members(lane, row):
                if txn.get(keys.statuses + pack_int(seq)) is not None:
                    yield Difference(seq, 0, "run", own, "no status")
    named = {
        seq_of(key[len(keys.held_at) :]): seq_of(row) for key, row in rows_of(txn, keys.held_at)
    }
    for key, row in rows_of(txn, keys.held):
        lease, held = seq_of(key[len(keys.held) :]), codec.unpack_as(Held, row)
        if not held.runs or lease % 2:
            yield Difference(0, 0, f"lease {lease} of runs", held.runs, "an even one of tasks")
        for first in held.firsts:
            if named.pop(first, 0) != lease:
                yield Difference(first, 0, "run of a lease", "not found by its first task", lease)
        for first, last, spec in held.runs:
            for seq in range(first, last + 1):
                task = tasks.get(seq)
                if task is None or task.body.spec != spec:
                    yield Difference(seq, 0, "run of a lease", "another task", lease)
                if txn.get(keys.statuses + pack_int(seq)) is not None:
                    yield Difference(seq, 0, "run of a lease", lease, "no status")
    for first, lease in named.items():
        yield Difference(first, 0, "run of a lease", lease, "no such lease")


def prefixes(keys: Keys) -> list[tuple[str, bytes]]:
    return [
        ("ready", keys.ready),
        ("suspect", keys.suspects),
        ("parked", keys.parked),
        ("stray", keys.strays),
        ("delayed", keys.delayed),
    ]


def _expiries(txn: Txn, keys: Keys, tasks: dict[int, Task]) -> Iterator[Difference]:
    looked: dict[tuple[int, int], int] = {}
    for key, row in rows_of(txn, keys.expiries):
        batch, seqs = batch_of(txn, keys, key, row)
        at_ns = int(tuples.unpack(key)[-2])
        for seq in seqs:
            looked[seq, batch.lease] = max(at_ns, looked.get((seq, batch.lease), 0))
    given = txn.count(keys.lease)
    for seq, task in tasks.items():
        status = task.status
        if status.state != State.LEASED:
            continue
        at = looked.get((seq, status.lease))
        if at is None or at > status.expires_ns:
            yield Difference(seq, 0, "looked at when its lease is over", at, status.expires_ns)
        if status.lease > given:
            yield Difference(seq, 0, "lease", status.lease, f"{given} given")


def counted(
    txn: Txn, keys: Keys, tasks: dict[int, Task] | None = None
) -> tuple[dict[str, Counter[str]], Counter[tuple[str, str]]]:
    """How many tasks of a queue are in each place or state, and how many of a limit are leased."""
    tasks = tasks_of(txn, keys) if tasks is None else tasks
    right: dict[str, Counter[str]] = defaultdict(Counter)
    running: Counter[tuple[str, str]] = Counter()
    for task in tasks.values():
        state = State(task.status.state)
        if state is State.WAITING:
            if task.status.waits:
                right[task.spec.queue]["blocked"] += 1
        else:
            right[task.spec.queue][state.name.lower()] += 1
        if state is State.LEASED and task.body.limit:
            running[task.spec.queue, task.body.limit] += 1
    for place, _, _, seq in _placed(txn, keys):
        if seq in tasks:
            right[tasks[seq].spec.queue][place] += 1
    return right, running


def _counts(txn: Txn, keys: Keys, tasks: dict[int, Task]) -> Iterator[Difference]:
    right, running = counted(txn, keys, tasks)
    queues = {str(tuples.unpack(key)[-1]) for key, _ in rows_of(txn, keys.counts)}
    for queue in sorted(queues | set(right)):
        kept = counts_of(txn, keys, queue)
        for what in Counts.__struct_fields__:
            if getattr(kept, what) != right[queue][what]:
                where = f"count of {what} in {queue}"
                yield Difference(0, 0, where, getattr(kept, what), right[queue][what])
    told = {
        (str(queue), str(limit)): schema.int_of(row)
        for key, row in rows_of(txn, keys.running)
        for queue, limit in [tuples.unpack(key)[-2:]]
    }
    for pair in sorted({*told, *running}):
        if told.get(pair, 0) != running[pair]:
            where = f"leases of limit {pair[1]} in {pair[0]}"
            yield Difference(0, 0, where, told.get(pair, 0), running[pair])


def _keys(txn: Txn, keys: Keys, tasks: dict[int, Task]) -> Iterator[Difference]:
    known: dict[tuple[str, str], int] = {}
    for key, row in rows_of(txn, keys.keys):
        name, own = (str(part) for part in tuples.unpack(key)[-2:])
        seq = known[name, own] = seq_of(row)
        task = tasks.get(seq)
        if task is None or (task.spec.name, task.body.key) != (name, own):
            yield Difference(seq, 0, "key", f"{name} {own}", "a task that has this key")
    for seq, task in tasks.items():
        if not task.body.key:
            continue
        named, last = known.get((task.spec.name, task.body.key)), last_of(tasks, seq)
        if named != last:
            yield Difference(seq, 0, f"key {task.body.key}", named, last)


def last_of(tasks: dict[int, Task], seq: int) -> int:
    """The task itself, or the last of those that were put in its place."""
    while seq in tasks and tasks[seq].status.redriven_by:
        seq = tasks[seq].status.redriven_by
    return seq


def _dependents(txn: Txn, keys: Keys, tasks: dict[int, Task]) -> Iterator[Difference]:
    told_by: Counter[int] = Counter()
    for key, row in rows_of(txn, keys.dependents):
        other, seq = int(tuples.unpack(key)[-2]), seq_of(row)
        told_by[seq] += 1
        first = tasks.get(other)
        ended = first is None or first.status.state not in (State.WAITING, State.LEASED)
        if ended and txn.get(keys.ended + pack_int(other)) is None:
            yield Difference(seq, 0, f"told when {other} ends", "never", "it has ended")
        if first is not None and not ended and not first.status.awaited:
            yield Difference(other, 0, "awaited", False, True)
    for seq, task in tasks.items():
        status = task.status
        if status.state == State.WAITING and status.waits != told_by[seq]:
            yield Difference(seq, 0, "waits", status.waits, told_by[seq])
        if status.waits and status.state != State.WAITING:
            yield Difference(seq, 0, "waits", status.waits, 0)


def _redriven(tasks: dict[int, Task]) -> Iterator[Difference]:
    for seq, task in tasks.items():
        old, new = task.body.redrive_of, task.status.redriven_by
        if old in tasks and tasks[old].status.redriven_by != seq:
            yield Difference(old, 0, "redriven by", tasks[old].status.redriven_by, seq)
        if new and (new not in tasks or tasks[new].body.redrive_of != seq):
            yield Difference(seq, 0, "redriven by", new, "a task in its place")


def _last_int(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])
