"""The state machine of a task: its states and the table of legal transitions.

Five of the eight log records change the state, one creates the task, and two change no state:
`LeaseExtended` extends a lease, `TaskCancelled` records a report under a lost lease.
A failure moves a task to WAITING while attempts remain, otherwise to FAILED.
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.transitions import Transitions


class TaskState(IntEnum):
    WAITING = 0
    LEASED = 1
    COMPLETED = 2
    FAILED = 3
    DEAD = 4


class TaskEvent(IntEnum):
    GRANT = 0
    EXTEND = 1
    EXPIRE = 2
    COMPLETE = 3
    RETRY = 4
    FAIL = 5
    BURY = 6


TASK_TRANSITIONS = Transitions(
    "task",
    TaskState.WAITING,
    {
        (TaskState.WAITING, TaskEvent.GRANT): TaskState.LEASED,
        (TaskState.WAITING, TaskEvent.BURY): TaskState.DEAD,
        (TaskState.LEASED, TaskEvent.EXTEND): TaskState.LEASED,
        (TaskState.LEASED, TaskEvent.EXPIRE): TaskState.WAITING,
        (TaskState.LEASED, TaskEvent.COMPLETE): TaskState.COMPLETED,
        (TaskState.LEASED, TaskEvent.RETRY): TaskState.WAITING,
        (TaskState.LEASED, TaskEvent.FAIL): TaskState.FAILED,
        (TaskState.LEASED, TaskEvent.BURY): TaskState.DEAD,
    },
)
