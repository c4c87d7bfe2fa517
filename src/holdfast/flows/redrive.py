"""Redrive: a FAILED or DEAD flow runs again.

Without compensations it continues at its failed step, under the same id and idempotency keys. A step whose child is a task
takes the task that an operator has redriven meanwhile, or redrives it (`children.start_task`). After compensations it is
a new flow from the top of its last run. The new flow has the key and names the old one in `redrive_of`.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.errors import Invalid
from holdfast.flows.model import FlowHeadRow, FlowId, StartedFlow, pack_int
from holdfast.flows.records import FlowEnded, FlowRedriven, StepFailure, decode_record
from holdfast.flows.states import FlowState
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import encode_int


@operation("flows.redrive")
def redrive(txn: Txn, universe: str, flow_seq: int) -> StartedFlow:
    """Run a FAILED or DEAD flow again. A repeated call returns the same flow."""
    unit = FlowUnit(txn, universe)
    flow = unit.load(flow_seq)
    redriven = redrive_within(unit, flow)
    unit.close()
    return StartedFlow(redriven.seq, redriven.body.generation)


def redrive_within(unit: FlowUnit, flow: OpenFlow) -> OpenFlow:
    head, body = flow.head, flow.body
    if head.redriven_by:
        return unit.load(head.redriven_by)
    if head.state not in (FlowState.FAILED, FlowState.DEAD):
        raise Invalid(
            what="flow",
            flow=str(FlowId(body.generation, flow.seq)),
            why="only FAILED and DEAD flows are redriven",
            state=FlowState(head.state).name,
        )
    if head.undone:
        copied = _start_copy(unit, flow)
        flow.head = replace(flow.head, redriven_by=copied.seq)
        return copied
    until_ns = head.ended_ns + body.spec.retain_ns
    unit.txn.delete(unit.keys.retained + tuples.pack((until_ns, flow.seq)))
    unit.append(flow, _redriven(unit, flow))
    flow.head = replace(flow.head, run_started_ns=unit.now_ns)
    unit.put_timeout(flow)
    unit.activate(flow)
    return flow


def _redriven(unit: FlowUnit, flow: OpenFlow) -> FlowRedriven:
    """The record of a redrive: the step whose failure ended the flow, and the child tasks of the steps that run again."""
    if not flow.head.step:
        return FlowRedriven()
    failed = ("", 0)
    tasks: list[tuple[str, int, int]] = []
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    for _, row in unit.txn.scan(prefix, tuples.prefix_end(prefix), None, True):
        record = decode_record(row).record
        if isinstance(record, FlowEnded) and not failed[0]:
            failed = (record.step, record.occurrence)
            if not record.step:
                break
        elif isinstance(record, StepFailure):
            if record.child:
                tasks.append((record.name, record.occurrence, record.child))
            if (record.name, record.occurrence) == failed:
                break
    return FlowRedriven(*failed, tuple(tasks))


def _start_copy(unit: FlowUnit, flow: OpenFlow) -> OpenFlow:
    """Start a flow with the arguments of the last run. Former runs have ended, so they are not repeated."""
    txn, keys, body, head = unit.txn, unit.keys, flow.body, flow.head
    seq = txn.count(keys.seq_counter) + 1
    txn.put(keys.seq_counter, encode_int(seq))
    for blob in (body.blob, head.args_blob):
        if blob:
            blobs.retain.fn(txn, blob)
    # A step of a flow can wait for the copy. A world or a schedule has had its answer.
    parent = body.parent if body.parent is not None and body.parent.flow else None
    copied = unit.create(
        seq,
        replace(
            body,
            created_ns=unit.now_ns,
            generation=txn.generation,
            redrive_of=flow.seq,
            parent=parent,
        ),
        FlowHeadRow(run_started_ns=unit.now_ns, args=head.args, args_blob=head.args_blob),
    )
    if body.key:
        txn.put(keys.keys + tuples.pack((body.spec.name, body.key)), pack_int(seq))
    if parent is not None:
        txn.put(keys.children + tuples.pack((parent.flow, seq)), b"")
    unit.put_timeout(copied)
    unit.activate(copied)
    return copied
