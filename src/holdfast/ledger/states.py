"""States of a seq, and the twelve moves between them.

    UNSEEN → DISPATCHED → IN_FLIGHT → TERMINAL_* → COMMITTED

DISPATCHED is ready or leased, IN_FLIGHT means that the effect may have begun. A move is an event:
`DISPATCH` and `RETRY` arrive at the same state, and only their names tell a first dispatch from the
second life of a failed row, so a batch that dispatches can never revive a failure by accident.

No arrays here: a run can be looked at where NumPy is not installed.
"""

from __future__ import annotations

from enum import Enum, IntEnum

from holdfast.transitions import Transitions


class State(IntEnum):
    UNSEEN = 0
    DISPATCHED = 1
    IN_FLIGHT = 2
    TERMINAL_SUCCESS = 3
    TERMINAL_SKIP = 4
    TERMINAL_FAIL = 5
    TERMINAL_CANCEL = 6
    COMMITTED = 7


class Event(Enum):
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
    State.UNSEEN,
    {
        (State.UNSEEN, Event.DISPATCH): State.DISPATCHED,
        (State.DISPATCHED, Event.BEGIN): State.IN_FLIGHT,
        (State.IN_FLIGHT, Event.SUCCEED): State.TERMINAL_SUCCESS,
        (State.IN_FLIGHT, Event.SKIP): State.TERMINAL_SKIP,
        (State.IN_FLIGHT, Event.FAIL): State.TERMINAL_FAIL,
        (State.DISPATCHED, Event.CANCEL): State.TERMINAL_CANCEL,
        (State.IN_FLIGHT, Event.CANCEL): State.TERMINAL_CANCEL,
        (State.TERMINAL_SUCCESS, Event.COMMIT): State.COMMITTED,
        (State.TERMINAL_SKIP, Event.COMMIT): State.COMMITTED,
        (State.TERMINAL_FAIL, Event.COMMIT): State.COMMITTED,
        (State.TERMINAL_CANCEL, Event.COMMIT): State.COMMITTED,
        (State.TERMINAL_FAIL, Event.RETRY): State.DISPATCHED,
    },
)

TERMINAL = frozenset(
    {State.TERMINAL_SUCCESS, State.TERMINAL_SKIP, State.TERMINAL_FAIL, State.TERMINAL_CANCEL}
)
# The lowest code that a row never leaves for work again: terminal or committed.
FINAL_MIN = int(State.TERMINAL_SUCCESS)

# Where an event leads; it is one state for each, from wherever it is legal.
TARGET: dict[Event, State] = {event: after for (_, event), after in LEDGER.table.items()}
# How a finished row is reported: by the code of the state that it arrived at.
REPORTED: dict[int, Event] = {
    int(State.TERMINAL_SUCCESS): Event.SUCCEED,
    int(State.TERMINAL_SKIP): Event.SKIP,
    int(State.TERMINAL_FAIL): Event.FAIL,
}

# LEGAL[prior][attempted]: exactly twelve are true.
LEGAL: tuple[tuple[bool, ...], ...] = tuple(
    tuple(
        any(prior is state and after is to for (state, _), after in LEDGER.table.items())
        for to in State
    )
    for prior in State
)


def event_of(prior: State, attempted: State) -> Event | None:
    """The event that leads from one state to the other; None when the pair is illegal."""
    for (state, event), after in LEDGER.table.items():
        if state is prior and after is attempted:
            return event
    return None
