"""The drain of a stopping worker, as a pure rule of time. The task worker and the runner share it.

release   at every step, work that has not started: another worker can start it at once
GRACE     work in progress may finish, and its leases are extended
OVERDUE   the grace time is over: the worker abandons the work in progress and releases it
FINISHED  no work is left
"""

from __future__ import annotations

from enum import Enum


class DrainPhase(Enum):
    GRACE = "grace"
    OVERDUE = "overdue"
    FINISHED = "finished"


class Drain:
    def __init__(self) -> None:
        self._began_ns: int | None = None

    def phase(self, now_ns: int, *, grace_ns: int | None, in_progress: int) -> DrainPhase:
        """Return the phase. The first call begins the drain. Without a `grace_ns` the grace time has no
        end. A `grace_ns` that differs from the one of an earlier call counts from the beginning too."""
        if self._began_ns is None:
            self._began_ns = now_ns
        if not in_progress:
            return DrainPhase.FINISHED
        if grace_ns is None or now_ns - self._began_ns < grace_ns:
            return DrainPhase.GRACE
        return DrainPhase.OVERDUE
