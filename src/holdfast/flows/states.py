"""The state machine of a flow.

RUNNING        an activation task is queued or leased
WAITING        no worker holds the flow: it waits for a timer, an event or a child
PARKED         its replay diverged: it waits for other code or for an operator
COMPENSATING   it failed, timed out or was cancelled, and its compensations run
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.transitions import Transitions


class FlowState(IntEnum):
    RUNNING = 0
    WAITING = 1
    PARKED = 2
    COMPENSATING = 3
    COMPLETED = 4
    FAILED = 5
    CANCELLED = 6
    DEAD = 7


class FlowEvent(IntEnum):
    SUSPEND = 0
    WAKE = 1
    PARK = 2
    RESUME = 3
    COMPENSATE = 4
    COMPLETE = 5
    FAIL = 6
    CANCEL = 7
    BURY = 8
    AGAIN = 9
    REDRIVE = 10
    REDRIVE_UNDO = 11


_S, _E = FlowState, FlowEvent

FLOW_TRANSITIONS = Transitions(
    "flow",
    FlowState.RUNNING,
    {
        (_S.RUNNING, _E.SUSPEND): _S.WAITING,
        (_S.RUNNING, _E.PARK): _S.PARKED,
        (_S.RUNNING, _E.COMPENSATE): _S.COMPENSATING,
        (_S.RUNNING, _E.COMPLETE): _S.COMPLETED,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
        (_S.RUNNING, _E.BURY): _S.DEAD,
        (_S.RUNNING, _E.AGAIN): _S.RUNNING,
        (_S.WAITING, _E.WAKE): _S.RUNNING,
        (_S.PARKED, _E.RESUME): _S.RUNNING,
        # The code that would run the compensations does not fit the record.
        (_S.PARKED, _E.CANCEL): _S.CANCELLED,
        # A suspended compensation keeps its state: an effect or a task is one of its steps.
        (_S.COMPENSATING, _E.SUSPEND): _S.COMPENSATING,
        (_S.COMPENSATING, _E.WAKE): _S.COMPENSATING,
        (_S.COMPENSATING, _E.PARK): _S.PARKED,
        (_S.COMPENSATING, _E.FAIL): _S.FAILED,
        (_S.COMPENSATING, _E.CANCEL): _S.CANCELLED,
        (_S.COMPENSATING, _E.BURY): _S.DEAD,
        (_S.FAILED, _E.REDRIVE): _S.RUNNING,
        (_S.DEAD, _E.REDRIVE): _S.RUNNING,
        # A failed compensation runs again. The flow ends as before.
        (_S.FAILED, _E.REDRIVE_UNDO): _S.COMPENSATING,
        (_S.CANCELLED, _E.REDRIVE_UNDO): _S.COMPENSATING,
        (_S.DEAD, _E.REDRIVE_UNDO): _S.COMPENSATING,
        (_S.COMPENSATING, _E.REDRIVE_UNDO): _S.COMPENSATING,
    },
)

ENDED = frozenset({_S.COMPLETED, _S.FAILED, _S.CANCELLED, _S.DEAD})
END_EVENTS = {
    _S.COMPLETED: _E.COMPLETE,
    _S.FAILED: _E.FAIL,
    _S.CANCELLED: _E.CANCEL,
    _S.DEAD: _E.BURY,
}
