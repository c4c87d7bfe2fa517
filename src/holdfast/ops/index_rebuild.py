"""Index rebuild: recreates the indexes of queues, waiting tasks, dispatches, flows and schedules from their records.

    queue      waiting and claimed items, from the items and their claims; dead letters by time
    task       wait states and the list index, from bodies and statuses; keys and tags, from bodies
    dispatch   requests by state, marks and counters, from the records
    flow       the indexes of `flows.derived_rows`, after the folded fields of the heads
    schedule   the due index, the queue of occurrences, and the keys

A correct index row is not rewritten. A row that names a missing item, dead letter or claim also stays: no
log contains the lost record, so the second verification must still report the difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import BATCH_MAX
from holdfast.dispatch import log
from holdfast.dispatch.request import DispatchRecord, mark_of
from holdfast.durable import dead_letters, item
from holdfast.durable.tags import pack_tag
from holdfast.flows import consistency as flow_consistency
from holdfast.flows import derived_rows, name_index
from holdfast.flows.derived_rows import StoredFlow
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.schedules import model as schedule_rows
from holdfast.schedules.states import OccurrenceState
from holdfast.store import schema, tuples
from holdfast.store.prefix_scan import iter_rows
from holdfast.store.schema import Space
from holdfast.store.txn import ApplyTxn
from holdfast.tasks import consistency as task_consistency
from holdfast.tasks import list_index, row_ranges
from holdfast.tasks import model as task_rows
from holdfast.tasks.consistency import StoredTask
from holdfast.tasks.states import TaskState
from holdfast.world import intents


def replace_rows(txn: ApplyTxn, prefix: bytes, expected: Mapping[bytes, bytes]) -> None:
    """Make the rows below a prefix equal to these."""
    for key, _ in list(iter_rows(txn, prefix)):
        if key not in expected:
            txn.delete(key)
    for key, row in expected.items():
        txn.put(key, row)


# -- queues --------------------------------------------------------------------------------------


def rebuild_queue(txn: ApplyTxn, name: str) -> None:
    keys = item.keys_of(name)
    letters = {
        key[len(keys.dead) :]: codec.unpack_as(dead_letters.DeadLetter, row)
        for key, row in iter_rows(txn, keys.dead)
    }
    _set_index_rows(
        txn,
        keys.dead_by_time,
        {
            letter_seq: keys.dead_by_time + item.pack_int(letter.died_ns) + letter_seq
            for letter_seq, letter in letters.items()
        },
        letters,
    )
    items = {
        key[len(keys.items) :]: item.decode_item(row) for key, row in iter_rows(txn, keys.items)
    }
    claims = {
        key[len(keys.claim_rows) :]: item.decode_claim_row(row)
        for key, row in iter_rows(txn, keys.claim_rows)
    }
    # Only the claim row has the claim number, so an item whose claim row is lost is left unchanged.
    indexed = _indexed_seqs(txn, keys.by_expiry) | _indexed_seqs(txn, keys.by_owner)
    usable = items.keys() - (indexed - claims.keys())
    claimed = {seq: hold for seq, hold in claims.items() if seq in usable}
    by_expiry = {
        seq: keys.by_expiry + item.pack_int(hold.expires_ns) + seq for seq, hold in claimed.items()
    }
    by_owner = {
        seq: keys.by_owner + item.pack_owner(hold.owner) + seq for seq, hold in claimed.items()
    }
    _set_index_rows(txn, keys.by_expiry, by_expiry, usable)
    _set_index_rows(txn, keys.by_owner, by_owner, usable)
    ready, delayed = _indexed_seqs(txn, keys.ready), _indexed_seqs(txn, keys.delayed)
    waiting = usable - claimed.keys()
    unindexed = {seq for seq in waiting if (seq in ready) == (seq in delayed)}
    misplaced = unindexed | claimed.keys()
    _set_index_rows(
        txn,
        keys.ready,
        {
            seq: keys.ready_key(items[seq].priority, items[seq].fair_rank, seq)
            for seq in unindexed
            if not items[seq].not_before_ns
        },
        misplaced,
    )
    _set_index_rows(
        txn,
        keys.delayed,
        {
            seq: keys.delayed + item.pack_int(items[seq].not_before_ns) + seq
            for seq in unindexed
            if items[seq].not_before_ns
        },
        misplaced,
    )


def _indexed_seqs(txn: ApplyTxn, prefix: bytes) -> set[bytes]:
    """Return the seqs in the index rows under a prefix. A row whose key ends with another seq than its value is ignored."""
    return {row for key, row in iter_rows(txn, prefix) if key.endswith(row)}


def _set_index_rows(
    txn: ApplyTxn, prefix: bytes, key_by_seq: Mapping[bytes, bytes], about: Iterable[bytes]
) -> None:
    """Write the index rows `key_by_seq`. Delete any other index row of the items in `about`, and each row whose key ends
    with another seq than its value. Valid rows of other items stay."""
    expected_keys, own_seqs = set(key_by_seq.values()), set(about)
    for key, row in list(iter_rows(txn, prefix)):
        # A row whose key and value name different items is invalid.
        if key not in expected_keys and (row in own_seqs or not key.endswith(row)):
            txn.delete(key)
    for packed_seq, key in key_by_seq.items():
        txn.put(key, packed_seq)


# -- dispatches ----------------------------------------------------------------------------------


def rebuild_dispatches(txn: ApplyTxn, universe: str) -> None:
    keys = log.keys_of(universe)
    records = [codec.unpack_as(DispatchRecord, row) for _, row in iter_rows(txn, keys.records)]
    counted = Counter(record.status for record in records)
    for status, prefix in keys.states.items():
        expected = {
            log.index_key(universe, status, record): record.request_id.encode()
            for record in records
            if record.status is status
        }
        replace_rows(txn, prefix, expected)
        _set_counter(txn, keys.counts[status], counted[status])
    _set_counter(txn, keys.deferred, sum(record.deferred for record in records))
    marks = {
        keys.marks + tuples.pack((mark_of(record.request_id),)): record.request_id.encode()
        for record in records
    }
    replace_rows(txn, keys.marks, marks)


def _set_counter(txn: ApplyTxn, key: bytes, expected: int) -> None:
    if txn.count(key) != expected:
        txn.put(key, schema.encode_int(expected))


# -- tasks ---------------------------------------------------------------------------------------


class _WaitIndexRow(NamedTuple):
    """An index row of a wait state. It covers a range of tasks. `members` has for each task its key in this index if it had
    its own row, and its seq."""

    wait_state: str
    key: bytes
    row: bytes
    members: list[tuple[bytes, int]]


def rebuild_wait_states(txn: ApplyTxn, universe: str) -> None:
    """Put every waiting task into exactly one wait-state index, and remove all other tasks from them."""
    keys = task_rows.keys_of(universe)
    tasks = task_consistency.load_tasks(txn, keys)
    index_rows = _wait_index_rows(txn, keys)
    times_indexed = Counter(seq for index_row in index_rows for _, seq in index_row.members)
    correct: set[int] = set()
    for index_row in index_rows:
        if all(
            times_indexed[seq] == 1
            and seq in tasks
            and _is_correct(txn, keys, seq, tasks[seq], index_row, single_key)
            for single_key, seq in index_row.members
        ):
            correct.update(seq for _, seq in index_row.members)
        else:
            txn.delete(index_row.key)
    unindexed = [
        seq
        for seq, task in tasks.items()
        if seq not in correct and task.status.state == TaskState.WAITING and not task.status.waits
    ]
    for first, last in _group_ranges(txn, keys, tasks, sorted(unindexed)):
        task = tasks[first]
        expected = task_consistency.expected_keys(txn, keys, first, task)
        wait_state = next(name for name in ("delayed", "suspect", "ready") if name in expected)
        row = (
            _ready_key(keys, first, task)
            if wait_state == "delayed"
            else row_ranges.encode_range(first, last)
        )
        txn.put(expected[wait_state], row)
    _rebuild_fair_places(txn, keys)


def _rebuild_fair_places(txn: ApplyTxn, keys: task_rows.TaskKeys) -> None:
    """Remove the places of tasks that are not in the index of fair turns. Count the remaining places by queue."""
    counted: Counter[str] = Counter()
    for key, row in list(iter_rows(txn, keys.fair_places)):
        if txn.get(row) == key[len(keys.fair_places) :]:
            counted[str(tuples.unpack(row)[3])] += 1
        else:
            txn.delete(key)
    counts = {
        keys.fair_counts + task_rows.pack_text(queue): schema.encode_int(number)
        for queue, number in counted.items()
    }
    replace_rows(txn, keys.fair_counts, counts)


def rebuild_tags(txn: ApplyTxn, universe: str) -> None:
    keys = task_rows.keys_of(universe)
    tasks = task_consistency.load_tasks(txn, keys)
    replace_rows(txn, keys.tags, task_consistency.tag_rows(keys, tasks))


def rebuild_task_list(txn: ApplyTxn, universe: str) -> None:
    """Index every task for the task list, also those of older versions."""
    keys = task_rows.keys_of(universe)
    tasks = task_consistency.load_tasks(txn, keys)
    replace_rows(txn, keys.listed, task_consistency.list_index_rows(txn, keys, tasks))
    first = min((seq for seq, task in tasks.items() if not task.spec.owner), default=None)
    since = list_index.indexed_since(txn, keys)
    if first is not None and (since is None or first < since):
        txn.put(keys.listed_since, schema.encode_int(first))


def rebuild_effect_tags(txn: ApplyTxn, universe: str) -> None:
    """List every effect with a tag, also those of older versions."""
    prefix = intents.tag_prefix(universe)
    expected: dict[bytes, bytes] = {}
    for key, row in list(iter_rows(txn, schema.key_prefix(Space.WORLD, universe, "i"))):
        pending = codec.unpack_as(intents.PendingEffect, row)
        if pending.tag:
            expected[prefix + pack_tag(pending.tag) + tuples.pack((tuples.unpack(key)[-1],))] = b""
            txn.put(key, codec.pack(replace(pending, listed=True)))
    replace_rows(txn, prefix, expected)


def rebuild_keys(txn: ApplyTxn, universe: str) -> None:
    """Point each key at the task that has it, or at the last redrive of that task."""
    keys = task_rows.keys_of(universe)
    tasks = task_consistency.load_tasks(txn, keys)
    expected: dict[bytes, bytes] = {}
    for seq, task in tasks.items():
        if task.body.key:
            key = keys.idempotency_keys + tuples.pack((task.spec.name, task.body.key))
            expected[key] = task_rows.pack_int(task_consistency.last_redrive_of(tasks, seq))
    replace_rows(txn, keys.idempotency_keys, expected)


def _wait_index_rows(txn: ApplyTxn, keys: task_rows.TaskKeys) -> list[_WaitIndexRow]:
    index_rows: list[_WaitIndexRow] = []
    for wait_state, prefix in task_consistency.wait_state_prefixes(keys):
        for key, row in iter_rows(txn, prefix):
            if wait_state == "delayed":
                members = [(key, int(tuples.unpack(key)[-1]))]
            else:
                members = list(row_ranges.iter_range(row_ranges.index_prefix_of(key, row), row))
            index_rows.append(_WaitIndexRow(wait_state, key, row, members))
    return index_rows


def _is_correct(
    txn: ApplyTxn,
    keys: task_rows.TaskKeys,
    seq: int,
    task: StoredTask,
    index_row: _WaitIndexRow,
    single_key: bytes,
) -> bool:
    if task.status.state != TaskState.WAITING:
        return False
    if task_consistency.expected_keys(txn, keys, seq, task).get(index_row.wait_state) != single_key:
        return False
    if index_row.wait_state == "delayed":
        return index_row.row == _ready_key(keys, seq, task)
    # The key of a range row is that of its first task, and tasks of a range have no status row.
    is_single = len(index_row.members) == 1
    has_no_status = is_single or txn.get(keys.statuses + task_rows.pack_int(seq)) is None
    return has_no_status and index_row.key == index_row.members[0][0]


def _ready_key(keys: task_rows.TaskKeys, seq: int, task: StoredTask) -> bytes:
    """Return the index key of a task after its delay has passed."""
    lane = keys.quarantined if task_rows.is_quarantined(task.spec, task.status) else keys.ready
    return lane + task_rows.index_key(task.spec, task_rows.pack_int(seq))


def _group_ranges(
    txn: ApplyTxn, keys: task_rows.TaskKeys, tasks: Mapping[int, StoredTask], seqs: list[int]
) -> list[tuple[int, int]]:
    """Group tasks into ranges as at submission; return the first and last seq of each range."""
    ranges: list[tuple[int, int]] = []
    for seq in seqs:
        first, last = ranges[-1] if ranges else (0, 0)
        if (
            ranges
            and seq == last + 1
            and seq - first < BATCH_MAX
            and tasks[seq].body.spec == tasks[first].body.spec
            and all(_can_join_range(txn, keys, tasks[member], member) for member in (last, seq))
        ):
            ranges[-1] = (first, seq)
        else:
            ranges.append((seq, seq))
    return ranges


def _can_join_range(txn: ApplyTxn, keys: task_rows.TaskKeys, task: StoredTask, seq: int) -> bool:
    is_batchable = task_rows.is_batchable(task.body)
    return is_batchable and txn.get(keys.statuses + task_rows.pack_int(seq)) is None


# -- flows ---------------------------------------------------------------------------------------


def broken_records(flow: StoredFlow) -> Iterator[str]:
    """Yield why the records of a flow cannot give its head. Lost records are seen only in the head's number of them."""
    for what, found, _ in flow.facts.problems:
        yield f"{what}: {found}"
    run = flow.facts.runs.get(flow.head.run)
    stored = 0 if run is None else run.head.records
    if stored < flow.head.records:
        yield f"run {flow.head.run} has {stored} records, its head counts {flow.head.records}"


def rebuild_flows(txn: ApplyTxn, universe: str) -> None:
    keys = flow_keys_of(universe)
    for seq, flow in derived_rows.load_flows(txn, universe).flows.items():
        right = flow_consistency.fold_head(flow)
        if right != flow.head:
            txn.put(keys.heads + task_rows.pack_int(seq), codec.pack(right))
    rebuild_flow_names(txn, universe)
    for index in derived_rows.derive(txn, derived_rows.load_flows(txn, universe)):
        kept = {
            key: row
            for key, row in iter_rows(txn, index.prefix)
            if key not in index.required and index.allows(key, row)
        }
        replace_rows(txn, index.prefix, {**kept, **index.required})


def rebuild_flow_names(txn: ApplyTxn, universe: str) -> None:
    """List every flow by its name, and find every dead letter by its flow, also those of older versions."""
    stored = derived_rows.load_flows(txn, universe)
    if stored.flows:
        txn.put(name_index.mark_key(universe), b"")
        index = derived_rows.names(txn, stored)
        replace_rows(txn, index.prefix, index.required)
        for key, row in derived_rows.undo_letters(txn, stored).required.items():
            txn.put(key, row)


# -- schedules -----------------------------------------------------------------------------------


def rebuild_schedules(txn: ApplyTxn, universe: str) -> None:
    keys = schedule_rows.keys_of(universe)
    schedules = {
        str(tuples.unpack(key)[-1]): schedule_rows.decode_schedule(row)
        for key, row in iter_rows(txn, keys.schedules)
    }
    queue: dict[bytes, bytes] = {}
    queued: Counter[str] = Counter()
    for key, row in iter_rows(txn, keys.occurrences):
        name = str(tuples.unpack(key)[-2])
        is_queued = schedule_rows.decode_occurrence(row).state == OccurrenceState.QUEUED
        if is_queued and name in schedules:
            queue[keys.queue + key[len(keys.occurrences) :]] = b""
            queued[name] += 1
    for key, row in iter_rows(txn, keys.queue):
        if str(tuples.unpack(key)[-2]) not in schedules:
            queue[key] = row  # the rest of a deleted schedule
    replace_rows(txn, keys.queue, queue)
    due: dict[bytes, bytes] = {}
    named: dict[bytes, bytes] = {}
    for name, schedule in schedules.items():
        if schedule.queued != queued[name]:
            right = replace(schedule, queued=queued[name])
            txn.put(keys.schedule(name), codec.pack(right))
        if schedule.is_active:
            due[keys.due_row(schedule.next_ns, name)] = b""
        if schedule.key:
            key = keys.keys + tuples.pack((schedule.key,))
            stored = txn.get(key)
            # The key keeps the digest of the definition with which the schedule was created.
            named[key] = (
                stored
                if stored is not None and codec.unpack(stored)[0] == name
                else codec.pack([name, codec.digest_of(schedule.definition)])
            )
    replace_rows(txn, keys.due, due)
    replace_rows(txn, keys.keys, named)
