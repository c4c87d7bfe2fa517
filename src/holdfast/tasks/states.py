"""The states of a task, and the only ways from one to another.

Five of the eight log records move a task, one names its beginning, and two move nothing:
`LeaseExtended` lets a lease last longer, `TaskCancelled` tells a worker that it has lost its own.
A failure moves a task to WAITING while its budget lasts, else to FAILED.
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.transitions import Transitions


class State(IntEnum):
    WAITING = 0
    LEASED = 1
    COMPLETED = 2
    FAILED = 3
    DEAD = 4


class Event(IntEnum):
    GRANT = 0
    EXTEND = 1
    EXPIRE = 2
    COMPLETE = 3
    RETRY = 4
    FAIL = 5
    BURY = 6


TABLE = Transitions(
    "task",
    State.WAITING,
    {
        (State.WAITING, Event.GRANT): State.LEASED,
        (State.WAITING, Event.BURY): State.DEAD,
        (State.LEASED, Event.EXTEND): State.LEASED,
        (State.LEASED, Event.EXPIRE): State.WAITING,
        (State.LEASED, Event.COMPLETE): State.COMPLETED,
        (State.LEASED, Event.RETRY): State.WAITING,
        (State.LEASED, Event.FAIL): State.FAILED,
        (State.LEASED, Event.BURY): State.DEAD,
    },
)
