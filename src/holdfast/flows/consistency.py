"""Consistency check of flows: every kind of row, compared with the rows that it follows from.

    records      numbers without a gap, in the order of time, each legal after the one before; also of former runs
    heads        the fold of the records; the activation and the children in progress exist
    derived      the indexes, counters, timers and keys of `derived_rows`
    inbox        every event that was sent is in the inbox or in a record, while all runs are retained
    strays       rows of flows that do not exist
    blobs        every large value exists
    dead letters of failed compensations

It reads all flows. Only `holdfast verify`, the rebuild of a store and tests use it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from holdfast import codec
from holdfast.durable.difference import Difference
from holdfast.flows import compensation_dead_letters, derived_rows
from holdfast.flows.derived_rows import StoredFlow, StoredFlows
from holdfast.flows.model import FLOW, TASK, FlowHeadRow, pack_int
from holdfast.flows.records import (
    StepCompleted,
    StepFailure,
    UndoRedriven,
    decode_record,
)
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks.model import get_body as get_task_body
from holdfast.tasks.model import keys_of as task_keys_of

# The fields of a head that follow from its records.
FOLDED_FIELDS = (
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
    "redriven_at",
)


def find_differences(txn: Txn, universe: str) -> Iterator[Difference]:
    """Yield the differences between the stored rows and the rows that they follow from."""
    stored = derived_rows.load_flows(txn, universe)
    for seq in sorted(stored.one_of_two):
        yield Difference("flow", stored.where(seq), "rows", "one of two", "body and head")
    for flow in stored.flows.values():
        yield from _check_records(stored, flow)
        yield from _check_head(txn, stored, flow)
        yield from _check_children(txn, stored, flow)
        yield from _check_inbox(txn, stored, flow)
    for index in derived_rows.derive(txn, stored):
        yield from _check_index(txn, stored, index)
    yield from _check_strays(txn, stored)
    last = max(stored.flows, default=0)
    if txn.count(stored.keys.seq_counter) < last:
        counted = txn.count(stored.keys.seq_counter)
        yield Difference("flow", universe, "last number of a flow", counted, last)
    yield from _check_compensation_dead_letters(txn, stored)


def _check_records(stored: StoredFlows, flow: StoredFlow) -> Iterator[Difference]:
    where = stored.where(flow.seq)
    for what, found, expected in flow.facts.problems:
        yield Difference("flow", where, what, found, expected)
    for run in flow.facts.runs:
        if run > flow.head.run:
            yield Difference("flow", where, "run of a record", run, f"at most {flow.head.run}")


def fold_head(flow: StoredFlow) -> FlowHeadRow:
    """The stored head with the fields that its records give."""
    run = flow.facts.runs.get(flow.head.run)
    folded = FlowHeadRow() if run is None else run.head
    if folded.state == FlowState.RUNNING and not flow.head.task:
        folded = replace(folded, state=FlowState.WAITING)
    fields = {field: getattr(folded, field) for field in FOLDED_FIELDS}
    return replace(flow.head, **fields, unread=sum(mail.counted for mail in flow.mail.values()))


def _check_head(txn: Txn, stored: StoredFlows, flow: StoredFlow) -> Iterator[Difference]:
    where, head, expected = stored.where(flow.seq), flow.head, fold_head(flow)
    run = flow.facts.runs.get(head.run)
    if run is None or run.is_sound:
        for field in FOLDED_FIELDS:
            if getattr(head, field) != getattr(expected, field):
                found = getattr(head, field)
                yield Difference("flow", where, field, found, getattr(expected, field))
    if head.unread != expected.unread:
        yield Difference("flow", where, "events in the inbox", head.unread, expected.unread)
    if head.open_steps != len(flow.opens):
        yield Difference("flow", where, "open steps", head.open_steps, len(flow.opens))
    if head.state in ENDED and head.task:
        yield Difference("flow", where, "activation", head.task, "none after the end")
    tasks = task_keys_of(stored.keys.universe)
    if head.task and get_task_body(txn, tasks, pack_int(head.task)) is None:
        yield Difference("flow", where, "activation", head.task, "a stored task")
    for what, blob in (
        ("arguments", flow.body.blob),
        ("arguments of the run", head.args_blob),
        ("result", head.blob),
    ):
        if blob and not blobs.exists(txn, blob):
            yield Difference("flow", where, f"blob of the {what}", "none", blob.hex())
    if run is not None and run.result_digest and not head.blob:
        found = codec.digest(head.result)[:16]
        if found != run.result_digest:
            yield Difference("flow", where, "digest of the result", found, run.result_digest)


def _check_children(txn: Txn, stored: StoredFlows, flow: StoredFlow) -> Iterator[Difference]:
    """The child task or child flow of a step in progress exists, and has not ended."""
    where, tasks = stored.where(flow.seq), task_keys_of(stored.keys.universe)
    for (name, occurrence), step in flow.opens.items():
        what = f"child of {name}#{occurrence}"
        if step.kind == TASK and get_task_body(txn, tasks, pack_int(step.child)) is None:
            yield Difference("flow", where, what, f"task {step.child}", "a stored task")
        if step.kind == FLOW:
            child = stored.flows.get(step.child)
            if child is None or child.head.state in ENDED:
                yield Difference("flow", where, what, f"flow {step.child}", "a flow in progress")


def _check_inbox(txn: Txn, stored: StoredFlows, flow: StoredFlow) -> Iterator[Difference]:
    where, sent = stored.where(flow.seq), flow.head.mail
    for number, mail in flow.mail.items():
        if not 1 <= number <= sent:
            yield Difference("flow", where, "number of an event", number, f"at most {sent}")
        if mail.blob and not blobs.exists(txn, mail.blob):
            yield Difference("flow", where, f"blob of event {number}", "none", mail.blob.hex())
    if flow.has_all_runs:
        for number in range(1, sent + 1):
            if number not in flow.mail and number not in flow.facts.received:
                yield Difference("flow", where, f"event {number}", "none", "in inbox or record")


def _check_index(
    txn: Txn, stored: StoredFlows, index: derived_rows.DerivedIndex
) -> Iterator[Difference]:
    missing = dict(index.required)
    for key, row in iter_rows(txn, index.prefix):
        expected = missing.pop(key, None)
        if row != expected and not (expected is None and index.allows(key, row)):
            yield Difference("flow", stored.where(index.subject(key)), index.what, row, expected)
    for key, row in missing.items():
        yield Difference("flow", stored.where(index.subject(key)), index.what, None, row)


def _check_strays(txn: Txn, stored: StoredFlows) -> Iterator[Difference]:
    """Every record, step in progress and event belongs to a stored flow, or to one that is being removed."""
    keys, known = stored.keys, stored.flows.keys() | stored.removing | stored.one_of_two
    for what, prefix in (
        ("records", keys.records),
        ("steps in progress", keys.open_steps),
        ("inbox", keys.mail),
    ):
        for seq in _iter_flows(txn, prefix):
            if seq not in known:
                yield Difference("flow", stored.where(seq), what, "rows", "no rows without a flow")


def _iter_flows(txn: Txn, prefix: bytes) -> Iterator[int]:
    """Yield the distinct flows that follow a prefix, with one seek per flow."""
    at, end = prefix, tuples.prefix_end(prefix)
    while rows := txn.scan(at, end, 1):
        seq = tuples.unpack(rows[0][0][len(prefix) :])[0]
        assert isinstance(seq, int)
        yield seq
        at = tuples.prefix_end(prefix + pack_int(seq))


def _check_compensation_dead_letters(txn: Txn, stored: StoredFlows) -> Iterator[Difference]:
    """Each dead letter of a stored flow belongs to a compensation whose last outcome is a failure."""
    for letter, undo in compensation_dead_letters.iter_letters(txn, stored.keys.universe):
        seq = undo.id.seq
        if seq not in stored.flows or stored.flows[seq].body.generation != undo.id.generation:
            continue  # the flow was removed after its retention
        last: object = None
        for _, row in iter_rows(txn, stored.keys.records_of(seq, undo.run)):
            record = decode_record(row).record
            if isinstance(record, StepCompleted | StepFailure | UndoRedriven):
                if (record.name, record.occurrence) == (undo.step, undo.occurrence):
                    last = record
        if not isinstance(last, StepFailure):
            found = "none" if last is None else type(last).__name__
            yield Difference("flow", stored.where(seq), f"dead letter {letter}", found, "a failure")
