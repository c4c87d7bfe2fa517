"""Faults at commits, and their rates in one run.

Each boundary of the second table of INVARIANTS.md is a commit of some role. A fault hits it before,
after, or with an unknown outcome. `FaultPlan` returns the fault of each commit: drawn from the
tape, or fixed in advance for exhaustive runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from holdfast import failpoints
from holdfast.sim.choice_tape import PER_MILLE, ChoiceTape


class Fault(Enum):
    CRASH_BEFORE = "crash before"  # the actor dies; the commit is not applied
    CRASH_AFTER = "crash after"  # the actor dies; the commit is applied
    UNKNOWN_BEFORE = "unknown before"  # CommitUnknown; the commit is not applied
    UNKNOWN_AFTER = "unknown after"  # CommitUnknown; the commit is applied
    LOST_BEFORE = "lost before"  # the request is lost, the client resends it
    LOST_AFTER = "lost after"  # the answer is lost, the client resends the request
    CONFLICT = "conflict"  # another client committed first: the function runs again
    STALL = "stall"  # the actor is paused for longer than its leases
    FULL = "full"  # the disk is full: StoreFull, the commit is not applied


# Per mille of the loss-prone commits whose answer is lost.
LOSS_PRONE_MILLE = 350


class FaultPlan:
    """Returns the fault of each commit attempt. `rates` are per mille."""

    def __init__(
        self,
        tape: ChoiceTape,
        rates: Mapping[Fault, int],
        faults_by_commit: Mapping[int, Fault] | None = None,
    ) -> None:
        self.boundary = 0
        self.faults_stopped = False
        self._tape = tape
        self._faults_by_commit = dict(faults_by_commit or {})
        # Faults occupy the top of the range, so that the zero of an exhausted tape is no fault.
        self._bands: list[tuple[int, Fault]] = []
        top = PER_MILLE
        for fault, rate in rates.items():
            top -= rate
            self._bands.append((top, fault))
        assert top > 0, "more faults than commits"

    def next_fault(self, *, loss_prone: bool = False) -> Fault | None:
        """Return the fault of this commit. With `loss_prone` its answer is lost more often, if losses are
        enabled."""
        self.boundary += 1
        if failpoints.armed:
            failpoints.hit("sim.commit", self.boundary, loss_prone)
        if self.boundary in self._faults_by_commit:
            return self._faults_by_commit[self.boundary]
        if self.faults_stopped or not self._bands:
            return None
        lowest = self._bands[-1][0]
        drawn = self._tape.draw_fault(PER_MILLE, lambda value: value >= lowest)
        for low, fault in self._bands:
            if drawn >= low:
                return fault
        lossy = any(fault is Fault.UNKNOWN_AFTER for _, fault in self._bands)
        if loss_prone and lossy and self._tape.chance(LOSS_PRONE_MILLE):
            return Fault.UNKNOWN_AFTER
        return None
