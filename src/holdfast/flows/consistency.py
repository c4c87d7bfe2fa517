"""Consistency check of flows: heads, indexes, due times and counters, recomputed from the records.

It reads all flows. Only `holdfast verify` and tests use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from holdfast import codec
from holdfast.durable import dead_letters
from holdfast.durable.difference import Difference
from holdfast.errors import IllegalTransition
from holdfast.flows import compensation_dead_letters, head_fold
from holdfast.flows.model import (
    TIMEOUT_NAME,
    FlowBodyRow,
    FlowCounts,
    FlowHeadRow,
    FlowId,
    FlowKeys,
    OpenStep,
    decode_body,
    decode_head,
    decode_open,
    keys_of,
    pack_int,
)
from holdfast.flows.records import (
    FlowRedriven,
    StepCompleted,
    StepFailure,
    UndoRedriven,
    decode_record,
)
from holdfast.flows.retention import REMOVING
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks.model import get_body as get_task_body
from holdfast.tasks.model import keys_of as task_keys_of


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    """Yield the differences between stored rows and the records of the flows."""
    keys = keys_of(universe)
    heads = {_last_int(key): decode_head(row) for key, row in iter_rows(txn, keys.heads)}
    bodies = {_last_int(key): decode_body(row) for key, row in iter_rows(txn, keys.bodies)}
    for seq in sorted(heads.keys() ^ bodies.keys()):
        yield Difference("flow", f"{universe}/{seq}", "rows", "one of two", "body and head")
    opens: dict[int, dict[tuple[str, int], OpenStep]] = {}
    for key, row in iter_rows(txn, keys.open_steps):
        *_, flow, name, occurrence = tuples.unpack(key)
        opens.setdefault(int(flow), {})[str(name), int(occurrence)] = decode_open(row)
    for seq in sorted(heads.keys() & bodies.keys()):
        yield from _check_flow(txn, keys, seq, bodies[seq], heads[seq], opens.get(seq, {}))
    yield from _check_indexes(txn, keys, bodies, heads)
    yield from _check_due(txn, keys, bodies, heads, opens)
    yield from _check_compensation_dead_letters(txn, keys, bodies, heads)
    removing = {_last_int(key) for key, mark in iter_rows(txn, keys.retained) if mark == REMOVING}
    for key, _ in iter_rows(txn, keys.threads):
        flow = int(tuples.unpack(key[len(keys.threads) :])[0])
        if flow not in bodies and flow not in removing:
            yield Difference("flow", f"{universe}/{flow}", "thread of a step", "a row", "none")


def _check_compensation_dead_letters(
    txn: Txn, keys: FlowKeys, bodies: dict[int, FlowBodyRow], heads: dict[int, FlowHeadRow]
) -> Iterator[Difference]:
    """Each dead letter of a stored flow belongs to a compensation whose last outcome is a failure."""
    queue, after = compensation_dead_letters.queue_of(keys.universe), 0
    while letters := dead_letters.list_dead(txn, queue, after):
        after = letters[-1].seq
        for letter in letters:
            undo = compensation_dead_letters.decode_payload(letter.payload)
            seq = undo.id.seq
            if (
                seq not in heads
                or seq not in bodies
                or bodies[seq].generation != undo.id.generation
            ):
                continue  # the flow was removed after its retention
            last: object = None
            for _, row in iter_rows(txn, keys.records_of(seq, undo.run)):
                record = decode_record(row).record
                if isinstance(record, StepCompleted | StepFailure | UndoRedriven):
                    if (record.name, record.occurrence) == (undo.step, undo.occurrence):
                        last = record
            if not isinstance(last, StepFailure):
                where = f"{keys.universe}/{undo.flow}"
                found = "none" if last is None else type(last).__name__
                yield Difference("flow", where, f"dead letter {letter.seq}", found, "a failure")


def _check_flow(
    txn: Txn,
    keys: FlowKeys,
    seq: int,
    body: FlowBodyRow,
    head: FlowHeadRow,
    opens: dict[tuple[str, int], OpenStep],
) -> Iterator[Difference]:
    where = f"{keys.universe}/{FlowId(body.generation, seq)}"
    expected = FlowHeadRow(run=head.run)
    decided_ns = 0
    for count, (key, row) in enumerate(iter_rows(txn, keys.records_of(seq, head.run)), start=1):
        if _last_int(key) != count:
            yield Difference("flow", where, "number of a record", _last_int(key), count)
            return
        stored = decode_record(row)
        if stored.decided_ns < decided_ns:
            yield Difference("flow", where, "time of a record", stored.decided_ns, decided_ns)
        decided_ns = stored.decided_ns
        if isinstance(stored.record, FlowRedriven):
            expected = replace(expected, task=0)
        try:
            expected = head_fold.apply_record(expected, stored.record, stored.decided_ns)
        except IllegalTransition as error:
            yield Difference("flow", where, f"record {count}", str(error), "a legal record")
            return
    if expected.state == FlowState.RUNNING and not head.task:
        expected = replace(expected, state=FlowState.WAITING)
    for field in (
        "state",
        "records",
        "failures",
        "cancelled",
        "timed_out",
        "end_state",
        "code",
        "step",
        "error_type",
        "error",
        "ended_ns",
        "undone",
    ):
        if getattr(head, field) != getattr(expected, field):
            yield Difference("flow", where, field, getattr(head, field), getattr(expected, field))
    if head.open_steps != len(opens):
        yield Difference("flow", where, "open steps", head.open_steps, len(opens))
    if head.state in ENDED and head.task:
        yield Difference("flow", where, "activation", head.task, "none after the end")
    if head.task and get_task_body(txn, task_keys_of(keys.universe), pack_int(head.task)) is None:
        yield Difference("flow", where, "activation", head.task, "a stored task")


def _check_indexes(
    txn: Txn, keys: FlowKeys, bodies: dict[int, FlowBodyRow], heads: dict[int, FlowHeadRow]
) -> Iterator[Difference]:
    states = {tuple(tuples.unpack(key)[-2:]) for key, _ in iter_rows(txn, keys.states)}
    expected_states = {(int(head.state), seq) for seq, head in heads.items()}
    if states != expected_states:
        odd = sorted(states ^ expected_states, key=str)[0]
        yield Difference(
            "flow",
            keys.universe,
            "flows by state",
            len(states),
            f"{len(expected_states)}, such as {odd}",
        )
    counted: dict[str, Counter[str]] = {}
    for seq, head in heads.items():
        if seq in bodies:
            name = bodies[seq].spec.name
            counted.setdefault(name, Counter())[FlowState(head.state).name.lower()] += 1
    stored = {
        str(tuples.unpack(key)[-1]): codec.unpack_as(FlowCounts, row)
        for key, row in iter_rows(txn, keys.counts)
    }
    expected_counts = {name: FlowCounts(**counts) for name, counts in counted.items()}
    for name in sorted(stored.keys() | expected_counts.keys()):
        if stored.get(name) != expected_counts.get(name):
            yield Difference(
                "flow",
                f"{keys.universe}/{name}",
                "counters",
                stored.get(name),
                expected_counts.get(name),
            )
    retained = {
        tuple(tuples.unpack(key)[-2:])
        for key, mark in iter_rows(txn, keys.retained)
        if mark != REMOVING or _last_int(key) in bodies
    }
    expected_retained = {
        (head.ended_ns + bodies[seq].spec.retain_ns, seq)
        for seq, head in heads.items()
        if head.state in ENDED and seq in bodies
    }
    if retained != expected_retained:
        yield Difference(
            "flow", keys.universe, "ended flows", len(retained), len(expected_retained)
        )


def _check_due(
    txn: Txn,
    keys: FlowKeys,
    bodies: dict[int, FlowBodyRow],
    heads: dict[int, FlowHeadRow],
    opens: dict[int, dict[tuple[str, int], OpenStep]],
) -> Iterator[Difference]:
    """Each open step with a due time and each running timeout has a due row. A retry has a row without a step."""
    due = {tuple(tuples.unpack(key)[-4:]) for key, _ in iter_rows(txn, keys.due)}
    for seq, head in heads.items():
        for (name, occurrence), step in opens.get(seq, {}).items():
            if step.due_ns and (step.due_ns, seq, name, occurrence) not in due:
                yield Difference(
                    "flow", f"{keys.universe}/{seq}", f"due time of {name}", "none", step.due_ns
                )
        limit_ns = bodies[seq].spec.timeout_ns if seq in bodies else 0
        if (
            limit_ns
            and head.state not in ENDED
            and not head.timed_out
            and not head.end_state
            and not head.cancelled
        ):
            at_ns = head.run_started_ns + limit_ns
            if (at_ns, seq, TIMEOUT_NAME, 0) not in due:
                yield Difference("flow", f"{keys.universe}/{seq}", "timeout", "none", at_ns)


def _last_int(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])
