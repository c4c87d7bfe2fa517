"""The state machine of a job.

RUNNING    a server applies the action to the selection
DONE       the whole selection was processed, or `limit` subjects
CANCELLED  an operator ended it; subjects that were processed stay so
FAILED     an error ended it
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.transitions import Transitions


class JobState(IntEnum):
    RUNNING = 0
    DONE = 1
    CANCELLED = 2
    FAILED = 3


class JobEvent(IntEnum):
    FINISH = 0
    CANCEL = 1
    FAIL = 2


_S, _E = JobState, JobEvent

JOB_TRANSITIONS = Transitions(
    "job",
    JobState.RUNNING,
    {
        (_S.RUNNING, _E.FINISH): _S.DONE,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
    },
)
