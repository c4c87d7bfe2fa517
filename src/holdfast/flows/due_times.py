"""The due times of flows: the end of sleeps, timeouts and retries.

    fire_due   end the sleeps and timeouts that are due, start the retries

Each of them appends its record and wakes the flow in the same commit.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.durable.validation import check_limit
from holdfast.errors import NotFound
from holdfast.flows import children
from holdfast.flows.model import EFFECT, FLOW, RECEIVE, RETRY_NAME, SLEEP, TASK, TIMEOUT_NAME
from holdfast.flows.operations import cancel_within
from holdfast.flows.records import FlowTimedOut, StepCompleted, StepFailure
from holdfast.flows.states import ENDED
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.store import tuples
from holdfast.store.api import Txn, operation


@operation("flows.fire_due")
def fire_due(txn: Txn, universe: str, limit: int) -> int:
    """End the sleeps and timeouts that are due, oldest first. Returns their number."""
    check_limit(limit)
    unit = FlowUnit(txn, universe)
    due = txn.scan(unit.keys.due, unit.keys.due + tuples.pack((unit.now_ns + 1,)), limit)
    for key, _ in due:
        txn.delete(key)
        *_, seq, name, occurrence = tuples.unpack(key)
        assert isinstance(seq, int)
        assert isinstance(name, str)
        assert isinstance(occurrence, int)
        try:
            flow = unit.load(seq)
        except NotFound:
            continue
        _fire(unit, flow, name, occurrence)
    unit.close()
    return len(due)


def _fire(unit: FlowUnit, flow: OpenFlow, name: str, occurrence: int) -> None:
    head = flow.head
    if head.state in ENDED:
        return
    if name == RETRY_NAME:
        if not head.task:
            unit.wake(flow)
        return
    if name == TIMEOUT_NAME:
        if not head.end_state and not head.cancelled:
            unit.append(flow, FlowTimedOut())
            unit.wake(flow)
        return
    step = unit.open_step(flow, name, occurrence)
    if step is None:
        return
    if step.kind in (TASK, EFFECT, FLOW):
        children.cancel_child(unit, step, cancel_within)
    unit.delete_open(flow, name, occurrence, replace(step, due_ns=0))
    if step.kind == SLEEP:
        unit.append(
            flow,
            StepCompleted(
                name,
                occurrence,
                step.position,
                step.digest,
                codec.pack(None),
                began_ns=step.began_ns,
            ),
        )
    else:
        unit.append(
            flow,
            StepFailure(
                name,
                occurrence,
                step.position,
                step.digest,
                "timeout",
                "Timeout",
                "no event came in time"
                if step.kind == RECEIVE
                else "the step exceeded its timeout",
                began_ns=step.began_ns,
                child=step.child if step.kind == TASK else 0,
            ),
        )
    unit.wake(flow)
