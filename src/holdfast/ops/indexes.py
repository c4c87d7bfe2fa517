"""Indexes that `rebuild` makes again: of queues, of waiting tasks, and of dispatches.

    queue      items that wait or are claimed, from the items and their claims; dead letters by time
    task       places, from bodies and statuses; keys, from bodies
    dispatch   requests by state, marks and counters, from the records

A row of an index stays where it is as long as it is right. A row that names an item, a letter or a claim
that is gone stays, too: what was lost is in no log, so the difference must be seen afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from holdfast import codec
from holdfast.authority import dispatch_log
from holdfast.authority.dispatch import DispatchRecord, mark_of
from holdfast.config import BATCH_MAX
from holdfast.durable import dead, item
from holdfast.ops.inventory import rows_of
from holdfast.store import schema, tuples
from holdfast.store.txn import ApplyTxn
from holdfast.tasks import recount as tasks_recount
from holdfast.tasks import rows as task_rows
from holdfast.tasks import runs
from holdfast.tasks.recount import Task
from holdfast.tasks.states import State


def replace_rows(txn: ApplyTxn, prefix: bytes, right: Mapping[bytes, bytes]) -> None:
    """Let these be the rows below a prefix, and no others."""
    for key, _ in list(rows_of(txn, prefix)):
        if key not in right:
            txn.delete(key)
    for key, row in right.items():
        txn.put(key, row)


# -- queues --------------------------------------------------------------------------------------


def rebuild_queue(txn: ApplyTxn, name: str) -> None:
    keys = item.keys_of(name)
    letters = {
        key[len(keys.dead) :]: codec.unpack_as(dead.Dead, row)
        for key, row in rows_of(txn, keys.dead)
    }
    _index(
        txn,
        keys.died,
        {one: keys.died + item.pack_int(letter.died_ns) + one for one, letter in letters.items()},
        letters,
    )
    found = {key[len(keys.items) :]: item.decode(row) for key, row in rows_of(txn, keys.items)}
    holds = {key[len(keys.holds) :]: item.decode_hold(row) for key, row in rows_of(txn, keys.holds)}
    # The number of a claim is in its own row alone: an item whose claim is lost is left as it is.
    indexed = _named(txn, keys.claims) | _named(txn, keys.owners)
    known = found.keys() - (indexed - holds.keys())
    held = {seq: hold for seq, hold in holds.items() if seq in known}
    by_expiry = {
        seq: keys.claims + item.pack_int(hold.expires_ns) + seq for seq, hold in held.items()
    }
    by_owner = {seq: keys.owners + item.pack_owner(hold.owner) + seq for seq, hold in held.items()}
    _index(txn, keys.claims, by_expiry, known)
    _index(txn, keys.owners, by_owner, known)
    ready, delayed = _named(txn, keys.ready), _named(txn, keys.delayed)
    waits = known - held.keys()
    lost = {seq for seq in waits if (seq in ready) == (seq in delayed)}
    misplaced = lost | held.keys()
    _index(
        txn,
        keys.ready,
        {
            seq: keys.ready_key(found[seq].priority, found[seq].turn, seq)
            for seq in lost
            if not found[seq].not_before_ns
        },
        misplaced,
    )
    _index(
        txn,
        keys.delayed,
        {
            seq: keys.delayed + item.pack_int(found[seq].not_before_ns) + seq
            for seq in lost
            if found[seq].not_before_ns
        },
        misplaced,
    )


def _named(txn: ApplyTxn, prefix: bytes) -> set[bytes]:
    """What the rows of an index name, those whose key and value agree."""
    return {row for key, row in rows_of(txn, prefix) if key.endswith(row)}


def _index(
    txn: ApplyTxn, prefix: bytes, right: Mapping[bytes, bytes], about: Iterable[bytes]
) -> None:
    """Let an index have the rows of these alone, of all that it is about; other rows stay."""
    wanted, mine = set(right.values()), set(about)
    for key, row in list(rows_of(txn, prefix)):
        # A row whose key and value name different items names none.
        if key not in wanted and (row in mine or not key.endswith(row)):
            txn.delete(key)
    for packed_seq, key in right.items():
        txn.put(key, packed_seq)


# -- dispatches ----------------------------------------------------------------------------------


def rebuild_dispatches(txn: ApplyTxn, universe: str) -> None:
    keys = dispatch_log.keys_of(universe)
    records = [codec.unpack_as(DispatchRecord, row) for _, row in rows_of(txn, keys.records)]
    counted = Counter(one.status for one in records)
    for status, prefix in keys.states.items():
        there = {
            dispatch_log.place_of(universe, status, one): one.request_id.encode()
            for one in records
            if one.status is status
        }
        replace_rows(txn, prefix, there)
        _count(txn, keys.counts[status], counted[status])
    _count(txn, keys.deferred, sum(one.deferred for one in records))
    marks = {
        keys.marks + tuples.pack((mark_of(one.request_id),)): one.request_id.encode()
        for one in records
    }
    replace_rows(txn, keys.marks, marks)


def _count(txn: ApplyTxn, key: bytes, right: int) -> None:
    if txn.count(key) != right:
        txn.put(key, schema.int_bytes(right))


# -- tasks ---------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of a place, with the tasks that it names, each by the key that it has by itself."""

    place: str
    key: bytes
    row: bytes
    members: list[tuple[bytes, int]]


def rebuild_places(txn: ApplyTxn, universe: str) -> None:
    """Every task that waits is in one place, the one that it belongs to; others are in none."""
    keys = task_rows.keys_of(universe)
    tasks = tasks_recount.tasks_of(txn, keys)
    placed = _placed(txn, keys)
    named = Counter(seq for one in placed for _, seq in one.members)
    sound: set[int] = set()
    for one in placed:
        if all(
            named[seq] == 1 and seq in tasks and _belongs(txn, keys, seq, tasks[seq], one, own)
            for own, seq in one.members
        ):
            sound.update(seq for _, seq in one.members)
        else:
            txn.delete(one.key)
    lost = [
        seq
        for seq, task in tasks.items()
        if seq not in sound and task.status.state == State.WAITING and not task.status.waits
    ]
    for first, last in _runs(txn, keys, tasks, sorted(lost)):
        task = tasks[first]
        right = tasks_recount.place_of(txn, keys, first, task)
        place = next(name for name in ("delayed", "suspect", "ready") if name in right)
        row = _lane(keys, first, task) if place == "delayed" else runs.run_row(first, last)
        txn.put(right[place], row)


def rebuild_keys(txn: ApplyTxn, universe: str) -> None:
    """A key names the task that has it, or the last of those that were put in its place."""
    keys = task_rows.keys_of(universe)
    tasks = tasks_recount.tasks_of(txn, keys)
    right: dict[bytes, bytes] = {}
    for seq, task in tasks.items():
        if task.body.key:
            key = keys.keys + tuples.pack((task.spec.name, task.body.key))
            right[key] = task_rows.pack_int(tasks_recount.last_of(tasks, seq))
    replace_rows(txn, keys.keys, right)


def _placed(txn: ApplyTxn, keys: task_rows.Keys) -> list[_Row]:
    found: list[_Row] = []
    for place, prefix in tasks_recount.prefixes(keys):
        for key, row in rows_of(txn, prefix):
            if place == "delayed":
                members = [(key, int(tuples.unpack(key)[-1]))]
            else:
                members = list(runs.members(runs.lane_of(key, row), row))
            found.append(_Row(place, key, row, members))
    return found


def _belongs(
    txn: ApplyTxn, keys: task_rows.Keys, seq: int, task: Task, one: _Row, own: bytes
) -> bool:
    if task.status.state != State.WAITING:
        return False
    if tasks_recount.place_of(txn, keys, seq, task).get(one.place) != own:
        return False
    if one.place == "delayed":
        return one.row == _lane(keys, seq, task)
    # A row of a lane is found by its first task, and those of a run have no status.
    alone = len(one.members) == 1
    fresh = alone or txn.get(keys.statuses + task_rows.pack_int(seq)) is None
    return fresh and one.key == one.members[0][0]


def _lane(keys: task_rows.Keys, seq: int, task: Task) -> bytes:
    """The key of a task once its delay is over."""
    lane = keys.suspects if task_rows.is_suspect(task.spec, task.status) else keys.ready
    return lane + task_rows.order(task.spec, task_rows.pack_int(seq))


def _runs(
    txn: ApplyTxn, keys: task_rows.Keys, tasks: Mapping[int, Task], lost: list[int]
) -> list[tuple[int, int]]:
    """The first and the last of each run that tasks make up, as when they were submitted."""
    found: list[tuple[int, int]] = []
    for seq in lost:
        first, last = found[-1] if found else (0, 0)
        if (
            seq == last + 1
            and seq - first < BATCH_MAX
            and tasks[seq].body.spec == tasks[first].body.spec
            and all(_is_fresh(txn, keys, tasks[one], one) for one in (last, seq))
        ):
            found[-1] = (first, seq)
        else:
            found.append((seq, seq))
    return found


def _is_fresh(txn: ApplyTxn, keys: task_rows.Keys, task: Task, seq: int) -> bool:
    plain = task_rows.is_plain(task.body)
    return plain and txn.get(keys.statuses + task_rows.pack_int(seq)) is None
