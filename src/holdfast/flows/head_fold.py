"""The head fold: computes the head of a flow from its records. It is pure.

Operations write heads with `apply_record`, and `consistency` folds the stored records again, so that a stored head
and a replay cannot disagree about the meaning of a record. `SUSPEND` and `WAKE` have no record: a RUNNING flow
without an activation is WAITING.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.flows import records
from holdfast.flows.model import UNDO_PREFIX, FlowHeadRow
from holdfast.flows.records import AnyRecord
from holdfast.flows.states import END_EVENTS, FLOW_TRANSITIONS, FlowEvent, FlowState


def apply_record(head: FlowHeadRow, record: AnyRecord, decided_ns: int) -> FlowHeadRow:
    """Return the head after a record. An illegal record raises and changes nothing."""
    head = replace(head, records=head.records + 1)
    match record:
        case records.StepCompleted() | records.StepFailure():
            if record.name.startswith(UNDO_PREFIX):
                return replace(head, undone=head.undone + 1)
        case records.CancelRequested():
            return replace(head, cancelled=True)
        case records.FlowTimedOut():
            return replace(head, timed_out=True)
        case records.AttemptRaised():
            return replace(
                head,
                failures=head.failures + 1,
                error_type=record.error_type,
                error=record.error,
            )
        case records.CompensationStarted():
            return replace(
                move(head, FlowEvent.COMPENSATE),
                end_state=record.state,
                code=record.code,
                step=record.step,
                error_type=record.error_type,
                error=record.error,
            )
        case records.FlowParked():
            return replace(
                move(head, FlowEvent.PARK),
                code=record.code or head.code,
                step=record.step,
                error=record.why,
                code_version=record.code_version,
                task=0,
            )
        case records.FlowResumed():
            resumed = move(head, FlowEvent.RESUME)
            # Compensations that had started go on.
            state = FlowState.COMPENSATING if head.end_state else FlowState.RUNNING
            return replace(resumed, state=state, code="")
        case records.FlowEnded():
            return replace(
                move(head, END_EVENTS[FlowState(record.state)]),
                code=record.code,
                step=record.step,
                error_type=record.error_type,
                error=record.error,
                ended_ns=decided_ns,
                task=0,
            )
        case records.FlowRedriven():
            return replace(
                move(head, FlowEvent.REDRIVE),
                failures=0,
                code="",
                step="",
                error_type="",
                error="",
                ended_ns=0,
                cancelled=False,
                timed_out=False,
                end_state=0,
                redriven_at=head.records if record.tasks else head.redriven_at,
            )
        case records.UndoRedriven():
            redriven = move(head, FlowEvent.REDRIVE_UNDO)
            redriven_at = head.records if record.tasks else head.redriven_at
            return replace(redriven, ended_ns=0, redriven_at=redriven_at)
        case _:
            pass
    return head


def move(head: FlowHeadRow, event: FlowEvent) -> FlowHeadRow:
    return replace(head, state=FLOW_TRANSITIONS.next(FlowState(head.state), event))
