"""What can go wrong at a commit, and how often it does in one run.

Each boundary of INVARIANTS.md's second table is a commit of some role, tried before, after and with
unknown outcome. `Plan` answers, commit by commit, what happens there: drawn from the tape, or, for
exhaustive runs, laid down in advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from holdfast.sim.tape import MILLE, Tape


class Fault(Enum):
    CRASH_BEFORE = "crash before"  # the actor dies; nothing was applied
    CRASH_AFTER = "crash after"  # the actor dies; it was applied
    UNKNOWN_BEFORE = "unknown before"  # CommitUnknown; nothing was applied
    UNKNOWN_AFTER = "unknown after"  # CommitUnknown; it was applied
    LOST_BEFORE = "lost before"  # the request is lost, the client sends it again
    LOST_AFTER = "lost after"  # the answer is lost, the client sends the request again
    CONFLICT = "conflict"  # somebody else committed first: the function runs again
    STALL = "stall"  # the actor is paused for longer than its leases
    FULL = "full"  # the disk is full: StoreFull, nothing was applied


# Of a thousand doubtful commits, those whose answer is lost.
DOUBTFUL_MILLE = 350


class Plan:
    """What happens at each commit attempt; `rates` are per mille."""

    def __init__(
        self, tape: Tape, rates: Mapping[Fault, int], forced: Mapping[int, Fault] | None = None
    ) -> None:
        self.boundary = 0
        self.calm = False
        self._tape = tape
        self._forced = dict(forced or {})
        # The faults sit at the top of the range, so that the zero of a worn-out tape is none.
        self._bands: list[tuple[int, Fault]] = []
        top = MILLE
        for fault, rate in rates.items():
            top -= rate
            self._bands.append((top, fault))
        assert top > 0, "more faults than commits"

    def next(self, *, doubtful: bool = False) -> Fault | None:
        """What happens at this commit. The answer to a doubtful one is lost more often, where any is."""
        self.boundary += 1
        if self.boundary in self._forced:
            return self._forced[self.boundary]
        if self.calm or not self._bands:
            return None
        drawn = self._tape.draw(MILLE)
        for low, fault in self._bands:
            if drawn >= low:
                return fault
        lossy = any(fault is Fault.UNKNOWN_AFTER for _, fault in self._bands)
        if doubtful and lossy and self._tape.chance(DOUBTFUL_MILLE):
            return Fault.UNKNOWN_AFTER
        return None
