"""Redrive of failed compensations: the compensation runs again as its recorded step, with its idempotency key."""

from __future__ import annotations

from holdfast.durable import dead_letters
from holdfast.errors import Invalid, NotFound
from holdfast.flows import children, compensation_dead_letters
from holdfast.flows.compensation_dead_letters import FailedCompensation
from holdfast.flows.records import StepFailure, UndoRedriven, decode_record
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.store import tuples
from holdfast.store.api import Txn, operation


@operation("flows.redrive_undo")
def redrive_compensations(txn: Txn, universe: str, letters: list[int]) -> list[str]:
    """Run failed compensations again and remove their dead letters. All or none. Returns the ids of the flows."""
    unit = FlowUnit(txn, universe)
    flows: list[str] = []
    for letter in letters:
        flows.append(_redrive(unit, universe, letter))
    dead_letters.discard_dead.fn(txn, compensation_dead_letters.queue_of(universe), letters)
    unit.close()
    return flows


def _redrive(unit: FlowUnit, universe: str, letter: int) -> str:
    queue = compensation_dead_letters.queue_of(universe)
    found = dead_letters.list_dead(unit.txn, queue, letter - 1, 1) if letter > 0 else []
    if not found or found[0].seq != letter:
        raise NotFound(what="dead letter", queue=queue, seq=letter)
    undo: FailedCompensation = compensation_dead_letters.decode_payload(found[0].payload)
    flow = _require_ended(unit, undo)
    if flow.head.state in ENDED:
        until_ns = flow.head.ended_ns + flow.body.spec.retain_ns
        unit.txn.delete(unit.keys.retained + tuples.pack((until_ns, flow.seq)))
    unit.txn.delete(
        compensation_dead_letters.letter_key(universe, flow.seq, undo.step, undo.occurrence)
    )
    tasks = (*children.redriven_tasks(unit, flow), *_failed_task(unit, flow, undo))
    unit.append(flow, UndoRedriven(undo.step, undo.occurrence, tasks))
    unit.activate(flow)
    return undo.flow


def _failed_task(
    unit: FlowUnit, flow: OpenFlow, undo: FailedCompensation
) -> list[tuple[str, int, int]]:
    """The child task of a failed compensation, which an operator may have redriven, too."""
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    for _, row in unit.txn.scan(prefix, tuples.prefix_end(prefix), None, True):
        record = decode_record(row).record
        if isinstance(record, StepFailure):
            if (record.name, record.occurrence) == (undo.step, undo.occurrence):
                return [(record.name, record.occurrence, record.child)] if record.child else []
    return []


def _require_ended(unit: FlowUnit, undo: FailedCompensation) -> OpenFlow:
    """Load the flow of a failed compensation. Its code must not run at present."""
    try:
        flow = unit.load(undo.id.seq)
    except NotFound:
        raise NotFound(
            what="flow", flow=undo.flow, why="it was removed after its retention"
        ) from None
    if flow.body.generation != undo.id.generation or flow.head.run != undo.run:
        raise NotFound(what="flow", flow=undo.flow, run=undo.run)
    # In this commit another letter of the flow may have started its compensations again.
    if flow.stored is not None and flow.stored.state not in ENDED:
        raise Invalid(
            what="flow",
            flow=undo.flow,
            why="only compensations of an ended flow are redriven; redrive it after the end of the flow",
            state=FlowState(flow.head.state).name,
        )
    return flow
