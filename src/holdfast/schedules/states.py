"""The state machine of an occurrence of a schedule.

DUE       its time has come
QUEUED    it waits for the end of the last occurrence
STARTED   its task or flow was created in the same commit
SKIPPED   it does not run; its row has the reason. Only a backfill starts it.
"""

from __future__ import annotations

from enum import IntEnum

from holdfast.transitions import Transitions


class OccurrenceState(IntEnum):
    DUE = 0
    QUEUED = 1
    STARTED = 2
    SKIPPED = 3


class OccurrenceEvent(IntEnum):
    START = 0
    QUEUE = 1
    SKIP = 2


_S, _E = OccurrenceState, OccurrenceEvent

OCCURRENCE_TRANSITIONS = Transitions(
    "occurrence of a schedule",
    OccurrenceState.DUE,
    {
        (_S.DUE, _E.START): _S.STARTED,
        (_S.DUE, _E.QUEUE): _S.QUEUED,
        (_S.DUE, _E.SKIP): _S.SKIPPED,
        (_S.QUEUED, _E.START): _S.STARTED,
        (_S.SKIPPED, _E.START): _S.STARTED,
        (_S.SKIPPED, _E.QUEUE): _S.QUEUED,
    },
)
