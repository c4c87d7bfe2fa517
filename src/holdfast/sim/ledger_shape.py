"""The shape of a simulated ledger run: its size and policy, and what its rows do to their worker.

Everything is small, so that each bound (a page, a budget, a lease, a checkpoint, the distance to
the commit) is met many times in a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from holdfast.clock import MS, S
from holdfast.sim.tape import Tape

# Leases of grants. The run's own lease is the simulation's LEASE_NS.
GRANT_NS = 2 * S
GRACE_NS = 1 * S


class Nature(IntEnum):
    """What a row's function does. FLAKY fails once, STUBBORN at every try, POISON kills its task."""

    FINE = 0
    SKIPPED = 1
    WRONG = 2
    FLAKY = 3
    STUBBORN = 4
    POISON = 5


# Of a hundred rows; the zero of a worn-out tape is FINE.
_NATURES = (
    *[Nature.FINE] * 72,
    *[Nature.SKIPPED] * 6,
    *[Nature.WRONG] * 5,
    *[Nature.FLAKY] * 8,
    *[Nature.STUBBORN] * 4,
    *[Nature.POISON] * 5,
)


@dataclass
class LedgerShape:
    services: int = 2
    tasks: int = 2
    rows: int = 16
    attempts_max: int = 3
    retries_max: int = 0
    page_rows: int = 16
    batch_rows: int = 0
    ahead_rows_max: int = 0
    # A file of the sink, and the entries between two checkpoints.
    file_rows: int = 4
    checkpoint_entries: int = 12
    # Rows that a task asks for, begins together, and reports together.
    claim_rows: int = 6
    # Above 0, tasks ask for rows of one of so many intervals, as those of a lazy stage do.
    partitions: int = 0
    begin_rows: int = 3
    flush_rows: int = 3
    # Per mille: answers that get lost, pauses beyond a lease, cancellations, reports of rows that
    # were reported otherwise already.
    lost_mille: int = 0
    pause_mille: int = 0
    cancel_mille: int = 0
    careless_mille: int = 0
    # Per mille of the starts: another driver, whose tasks are others.
    anew_mille: int = 400
    # What the rows are like; drawn when it is empty.
    natures: list[Nature] = field(default_factory=list)

    def policy(self) -> dict[str, Any]:
        return {
            "attempts_max": self.attempts_max,
            "retries_max": self.retries_max,
            "lease_ns": GRANT_NS,
            "grace_ns": GRACE_NS,
            "page_rows": self.page_rows,
            "batch_rows": self.batch_rows,
            "ahead_rows_max": self.ahead_rows_max,
            "backoff_first_ns": 50 * MS,
            "backoff_factor": 2.0,
            "backoff_max_ns": 1 * S,
        }


def nature(tape: Tape) -> Nature:
    return _NATURES[tape.draw(len(_NATURES))]


def drawn(tape: Tape) -> LedgerShape:
    """The shape that a seed draws."""
    return LedgerShape(
        services=1 + tape.draw(2),
        tasks=1 + tape.draw(4),
        rows=(8, 16, 24, 37)[tape.draw(4)],
        attempts_max=(3, 2, 1)[tape.draw(3)],
        retries_max=(0, 0, 3, 1)[tape.draw(4)],
        page_rows=(16, 8, 32)[tape.draw(3)],
        batch_rows=(0, 0, 4)[tape.draw(3)],
        ahead_rows_max=(0, 0, 5)[tape.draw(3)],
        file_rows=(4, 3, 1)[tape.draw(3)],
        checkpoint_entries=(12, 5, 40)[tape.draw(3)],
        claim_rows=(6, 2, 12)[tape.draw(3)],
        partitions=(0, 0, 3)[tape.draw(3)],
        begin_rows=(3, 1, 6)[tape.draw(3)],
        flush_rows=(3, 1, 5)[tape.draw(3)],
        lost_mille=(0, 40, 120)[tape.draw(3)],
        pause_mille=(0, 25, 60)[tape.draw(3)],
        cancel_mille=(0, 0, 200)[tape.draw(3)],
        careless_mille=(0, 0, 0, 0, 0, 80)[tape.draw(6)],
    )
