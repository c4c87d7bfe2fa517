"""Consistency check of schedules: due index, queue of occurrences, last occurrence, changes and idempotency keys.

It reads all schedules and occurrences. Only `holdfast verify` and tests use it.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast import codec
from holdfast.durable.difference import Difference
from holdfast.flows.model import decode_head
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.flows.states import ENDED
from holdfast.schedules.model import (
    CHANGES_MAX,
    OccurrenceRow,
    ScheduleKeys,
    ScheduleRow,
    decode_occurrence,
    decode_schedule,
    keys_of,
    time_text,
)
from holdfast.schedules.states import OccurrenceState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks.model import get_body, pack_int
from holdfast.tasks.model import keys_of as task_keys_of


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    """Yield the differences between the index rows and the schedules with their occurrences."""
    keys = keys_of(universe)
    schedules: dict[str, ScheduleRow] = {}
    for key, packed in iter_rows(txn, keys.schedules):
        name = str(tuples.unpack(key)[-1])
        schedules[name] = row = decode_schedule(packed)
        if row.definition.name != name:
            yield Difference("schedule", f"{universe}/{name}", "name", row.definition.name, name)
    due = {_due_of(key) for key, _ in iter_rows(txn, keys.due)}
    expected_due = {(row.next_ns, name) for name, row in schedules.items() if row.is_active}
    for due_ns, name in sorted(due ^ expected_due):
        stored = "stored" if (due_ns, name) in due else None
        expected = "a due row" if (due_ns, name) in expected_due else None
        yield Difference("schedule", f"{universe}/{name}", f"due at {due_ns}", stored, expected)
    yield from _check_occurrences(txn, keys, schedules)
    for schedule in schedules.values():
        yield from _check_last_occurrence(txn, keys, schedule)
        yield from _check_changes(txn, keys, schedule)
    yield from _check_keys(txn, keys, schedules)


def _check_occurrences(
    txn: Txn, keys: ScheduleKeys, schedules: dict[str, ScheduleRow]
) -> Iterator[Difference]:
    queue = {_occurrence_of(key) for key, _ in iter_rows(txn, keys.queue)}
    queued: set[tuple[str, int]] = set()
    for key, packed in iter_rows(txn, keys.occurrences):
        name, occurrence_ns = _occurrence_of(key)
        if name not in schedules:
            continue  # the rest of a deleted schedule
        row = decode_occurrence(packed)
        if row.state == OccurrenceState.QUEUED:
            queued.add((name, occurrence_ns))
        yield from _check_occurrence(f"{keys.universe}/{name}", occurrence_ns, row)
    for name, occurrence_ns in sorted(queued ^ {found for found in queue if found[0] in schedules}):
        stored = "stored" if (name, occurrence_ns) in queue else None
        expected = "a queue row" if (name, occurrence_ns) in queued else None
        what = f"queue at {occurrence_ns}"
        yield Difference("schedule", f"{keys.universe}/{name}", what, stored, expected)
    for name, schedule in schedules.items():
        where = f"{keys.universe}/{name}"
        count = sum(found[0] == name for found in queued)
        if schedule.queued != count:
            yield Difference("schedule", where, "queued occurrences", schedule.queued, count)
        if count and not _will_end(txn, keys.universe, schedule):
            yield Difference(
                "schedule", where, "the task or flow that the queue waits for", "ended", "open"
            )


def _check_occurrence(where: str, occurrence_ns: int, row: OccurrenceRow) -> Iterator[Difference]:
    what = f"occurrence {time_text(occurrence_ns)}"
    if row.state == OccurrenceState.DUE:
        yield Difference("schedule", where, what, "DUE", "a decision")
    if (row.state == OccurrenceState.STARTED) != bool(row.seq):
        state = OccurrenceState(row.state).name
        yield Difference("schedule", where, what, f"{state} with task {row.seq}", "a started task")


def _will_end(txn: Txn, universe: str, schedule: ScheduleRow) -> bool:
    """Whether the last task or flow of a schedule will end: a running flow, or a task with a registered end callback."""
    packed_seq = pack_int(schedule.last_seq)
    if schedule.last_is_flow:
        head = txn.get(flow_keys_of(universe).heads + packed_seq)
        return head is not None and decode_head(head).state not in ENDED
    task_keys = task_keys_of(universe)
    prefix = task_keys.dependents + packed_seq
    has_listener = bool(txn.scan(prefix, tuples.prefix_end(prefix), 1))
    return get_body(txn, task_keys, packed_seq) is not None and has_listener


def _check_last_occurrence(
    txn: Txn, keys: ScheduleKeys, schedule: ScheduleRow
) -> Iterator[Difference]:
    """The row of the last started occurrence exists until its retention is over, and names the task or flow."""
    name, last_ns = schedule.definition.name, schedule.last_ns
    if last_ns <= schedule.floor_ns:
        return
    packed = txn.get(keys.occurrence(name, last_ns))
    row = None if packed is None else decode_occurrence(packed)
    found = None if row is None else (row.seq, row.generation, row.is_flow)
    expected = (schedule.last_seq, schedule.last_generation, schedule.last_is_flow)
    if found != expected:
        what = f"last occurrence {time_text(last_ns)}"
        yield Difference("schedule", f"{keys.universe}/{name}", what, found, expected)


def _check_changes(txn: Txn, keys: ScheduleKeys, schedule: ScheduleRow) -> Iterator[Difference]:
    """The last changes have their rows."""
    name, last = schedule.definition.name, schedule.changes
    for number in range(max(last - CHANGES_MAX, 0) + 1, last + 1):
        if txn.get(keys.changes + tuples.pack((name, number))) is None:
            yield Difference(
                "schedule", f"{keys.universe}/{name}", f"change {number}", None, "a row"
            )


def _check_keys(
    txn: Txn, keys: ScheduleKeys, schedules: dict[str, ScheduleRow]
) -> Iterator[Difference]:
    stored = {
        str(tuples.unpack(key)[-1]): str(codec.unpack(row)[0])
        for key, row in iter_rows(txn, keys.keys)
    }
    expected = {row.key: name for name, row in schedules.items() if row.key}
    for key in sorted(stored.keys() | expected.keys()):
        if stored.get(key) != expected.get(key):
            where = f"{keys.universe}/{key}"
            yield Difference("schedule", where, "key", stored.get(key), expected.get(key))


def _due_of(key: bytes) -> tuple[int, str]:
    *_, due_ns, name = tuples.unpack(key)
    assert isinstance(due_ns, int)
    assert isinstance(name, str)
    return due_ns, name


def _occurrence_of(key: bytes) -> tuple[str, int]:
    *_, name, occurrence_ns = tuples.unpack(key)
    assert isinstance(name, str)
    assert isinstance(occurrence_ns, int)
    return name, occurrence_ns
