"""Row states: the eight states of a seq and the twelve legal transitions.

    UNSEEN → DISPATCHED → IN_FLIGHT → TERMINAL_* → COMMITTED

A DISPATCHED row is ready or leased. The effect of an IN_FLIGHT row may have begun. Each transition
is named by an event. `DISPATCH` and `RETRY` lead to the same state. Their names separate a first
dispatch from a retry, so a batch dispatch cannot revive a failed row by accident.

This module uses no arrays, so a run can be inspected without NumPy.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from holdfast.transitions import Transitions


class RowState(IntEnum):
    UNSEEN = 0
    DISPATCHED = 1
    IN_FLIGHT = 2
    TERMINAL_SUCCESS = 3
    TERMINAL_SKIP = 4
    TERMINAL_FAIL = 5
    TERMINAL_CANCEL = 6
    COMMITTED = 7


class RowEvent(Enum):
    DISPATCH = "dispatch"
    BEGIN = "begin"
    SUCCEED = "succeed"
    SKIP = "skip"
    FAIL = "fail"
    CANCEL = "cancel"
    COMMIT = "commit"
    RETRY = "retry"


LEDGER = Transitions(
    "ledger",
    RowState.UNSEEN,
    {
        (RowState.UNSEEN, RowEvent.DISPATCH): RowState.DISPATCHED,
        (RowState.DISPATCHED, RowEvent.BEGIN): RowState.IN_FLIGHT,
        (RowState.IN_FLIGHT, RowEvent.SUCCEED): RowState.TERMINAL_SUCCESS,
        (RowState.IN_FLIGHT, RowEvent.SKIP): RowState.TERMINAL_SKIP,
        (RowState.IN_FLIGHT, RowEvent.FAIL): RowState.TERMINAL_FAIL,
        (RowState.DISPATCHED, RowEvent.CANCEL): RowState.TERMINAL_CANCEL,
        (RowState.IN_FLIGHT, RowEvent.CANCEL): RowState.TERMINAL_CANCEL,
        (RowState.TERMINAL_SUCCESS, RowEvent.COMMIT): RowState.COMMITTED,
        (RowState.TERMINAL_SKIP, RowEvent.COMMIT): RowState.COMMITTED,
        (RowState.TERMINAL_FAIL, RowEvent.COMMIT): RowState.COMMITTED,
        (RowState.TERMINAL_CANCEL, RowEvent.COMMIT): RowState.COMMITTED,
        (RowState.TERMINAL_FAIL, RowEvent.RETRY): RowState.DISPATCHED,
    },
)

TERMINAL = frozenset(
    {
        RowState.TERMINAL_SUCCESS,
        RowState.TERMINAL_SKIP,
        RowState.TERMINAL_FAIL,
        RowState.TERMINAL_CANCEL,
    }
)
# The lowest final code: terminal or committed.
FINAL_MIN = int(RowState.TERMINAL_SUCCESS)

# The target state of each event. An event has one target, independent of the prior state.
TARGET_STATE: dict[RowEvent, RowState] = {
    event: after for (_, event), after in LEDGER.table.items()
}
# The event of a reported outcome, by the code of its terminal state.
EVENT_BY_REPORTED_CODE: dict[int, RowEvent] = {
    int(RowState.TERMINAL_SUCCESS): RowEvent.SUCCEED,
    int(RowState.TERMINAL_SKIP): RowEvent.SKIP,
    int(RowState.TERMINAL_FAIL): RowEvent.FAIL,
}

# LEGAL[prior][attempted]: exactly twelve entries are true.
LEGAL: tuple[tuple[bool, ...], ...] = tuple(
    tuple(
        any(prior is state and after is to for (state, _), after in LEDGER.table.items())
        for to in RowState
    )
    for prior in RowState
)


def event_of(prior: RowState, attempted: RowState) -> RowEvent | None:
    """Return the event that leads from `prior` to `attempted`, or None if the pair is illegal."""
    for (state, event), after in LEDGER.table.items():
        if state is prior and after is attempted:
            return event
    return None
