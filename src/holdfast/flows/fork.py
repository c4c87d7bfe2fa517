"""Forks: a new flow that takes over the recorded steps of another flow, up to a step or a compensation.

Steps in progress, inbox and timers are not taken over. The fork has its own idempotency keys and compensates
its own steps only. It takes over records, so its code version changes nothing: outcomes with a lower position, and the
identities of the parent's compensations.

A registration does not name its step. It belongs to the parent if the fork takes over a step with a lower position.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.durable.validation import check_name
from holdfast.errors import Invalid, KeyConflict, NotFound
from holdfast.flows.model import UNDO_PREFIX, FlowHeadRow, FlowId, StartedFlow, pack_int
from holdfast.flows.records import (
    AnyRecord,
    FlowRedriven,
    Forked,
    ParentUndo,
    Published,
    StepCompleted,
    StepFailure,
    UndoRegistered,
    decode_record,
    without_end,
)
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import encode_int

# Names of waits and values: `hf.sleep`, `hf.receive`, `hf.now`. No compensation belongs to them.
OWN_PREFIX = "hf."


@operation("flows.fork")
def fork(
    txn: Txn, universe: str, flow_seq: int, generation: int, key: str, at: str = ""
) -> StartedFlow:
    """Start a flow with the recorded outcomes before the step `at`. A repeated call returns the same fork."""
    check_name("key", key)
    unit = FlowUnit(txn, universe)
    parent = unit.load(flow_seq)
    body = parent.body
    if body.generation != generation:
        raise NotFound(what="flow", flow=str(FlowId(generation, flow_seq)))
    keys = unit.keys
    index_key = keys.keys + tuples.pack((body.spec.name, key))
    if (packed := txn.get(index_key)) is not None:
        existing = unit.load(tuples.unpack_last_int(packed, 0))
        if existing.body.fork_of != flow_seq or existing.body.fork_at != at:
            raise KeyConflict(what="flow", name=body.spec.name, key=key)
        return StartedFlow(existing.seq, existing.body.generation)
    stored = _stored_records(unit, parent)
    records, position = _records_before(unit, parent, stored, at)
    seq = txn.count(keys.seq_counter) + 1
    txn.put(keys.seq_counter, encode_int(seq))
    args, blob = body.args, body.blob
    if parent.head.args is not None:
        args, blob = parent.head.args, parent.head.args_blob
    if blob:
        blobs.retain.fn(txn, blob)
    child = unit.create(
        seq,
        replace(
            body,
            args=args,
            blob=blob,
            key=key,
            created_ns=unit.now_ns,
            generation=txn.generation,
            parent=None,
            fork_of=flow_seq,
            fork_at=at,
            redrive_of=0,
        ),
        FlowHeadRow(run_started_ns=unit.now_ns),
    )
    txn.put(index_key, pack_int(seq))
    unit.append(child, _forked(stored, records, position))
    for record in records:
        if isinstance(record, StepCompleted) and record.blob:
            blobs.retain.fn(txn, record.blob)
        if isinstance(record, StepFailure):
            # A redrive of the fork does not take the tasks of its parent.
            record = replace(record, child=0)
        unit.append(child, record)
        if isinstance(record, Published):
            txn.put(keys.published + tuples.pack((seq, record.name)), record.value)
    unit.put_timeout(child)
    unit.activate(child)
    unit.close()
    return StartedFlow(seq, txn.generation)


def _stored_records(unit: FlowUnit, flow: OpenFlow) -> list[AnyRecord]:
    """The records of the last run, without an end that was redriven."""
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    stored: list[AnyRecord] = []
    for _, row in unit.txn.scan(prefix, tuples.prefix_end(prefix)):
        record = decode_record(row).record
        if isinstance(record, FlowRedriven):
            stored = without_end(stored, record)
        stored.append(record)
    return stored


def _records_before(
    unit: FlowUnit, flow: OpenFlow, stored: list[AnyRecord], at: str
) -> tuple[list[AnyRecord], int]:
    """The outcomes with a lower position than the step or the compensation `at`, and the position."""
    outcomes = [
        record
        for record in stored
        if isinstance(record, StepCompleted | StepFailure)
        and not record.name.startswith(UNDO_PREFIX)
    ]
    undos = _registered(stored)
    if not at:
        position = max((record.position for record in [*outcomes, *undos]), default=0) + 1
        published = [record for record in stored if isinstance(record, Published)]
        return [*outcomes, *published], position
    name, _, occurrence = at.partition("#")
    if occurrence and not occurrence.isdecimal():
        raise Invalid(
            what="at",
            found=at[:64],
            expected='a step such as "charge" or "charge#3", or a compensation: "undo:refund"',
        )
    wanted = (name, int(occurrence or 1))
    known = {(record.name, record.occurrence): record.position for record in outcomes}
    for open_name, open_occurrence, step in unit.open_steps(flow):
        known[open_name, open_occurrence] = step.position
    for undo in undos:
        known[UNDO_PREFIX + undo.name, undo.occurrence] = undo.position
    if wanted not in known:
        raise NotFound(what="step", flow=flow.seq, step=f"{wanted[0]}#{wanted[1]}")
    position = known[wanted]
    return [record for record in outcomes if record.position < position], position


def _registered(stored: list[AnyRecord]) -> list[ParentUndo]:
    """The compensations that the code registered, also those before the fork if the flow is one."""
    found: list[ParentUndo] = []
    for record in stored:
        if isinstance(record, Forked):
            found.extend(record.undos)
        elif isinstance(record, UndoRegistered):
            found.append(ParentUndo(record.name, record.occurrence, record.position))
    return found


def _forked(stored: list[AnyRecord], taken: list[AnyRecord], position: int) -> Forked:
    """The first record of a fork. A fork of a fork that a former release made counts positions, as its parent does."""
    for record in stored:
        if isinstance(record, Forked) and record.taken < 0:
            return Forked(position)
    steps = [
        record.position
        for record in taken
        if isinstance(record, StepCompleted | StepFailure)
        and not record.name.startswith(OWN_PREFIX)
    ]
    first = min(steps, default=position)
    undos = [undo for undo in _registered(stored) if first < undo.position < position]
    return Forked(position, len(taken), tuple(undos))
