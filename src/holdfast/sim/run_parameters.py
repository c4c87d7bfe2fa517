"""Run parameters of a simulated ledger run: its size, its policy and the behaviour of its rows.

All values are small, so that a run reaches each limit (page, budget, lease, checkpoint, distance to
the commit) many times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from holdfast.clock import MS, S
from holdfast.sim.choice_tape import ChoiceTape

# Leases of grants. The lease of the run itself is LEASE_NS of the simulation.
GRANT_NS = 2 * S
GRACE_NS = 1 * S


class RowBehaviour(IntEnum):
    """Behaviour of a row's function. FLAKY fails once, STUBBORN on every attempt, POISON kills its
    task."""

    FINE = 0
    SKIPPED = 1
    WRONG = 2
    FLAKY = 3
    STUBBORN = 4
    POISON = 5


# Per hundred rows. The zero of an exhausted tape is FINE.
_BEHAVIOUR_WEIGHTS = (
    *[RowBehaviour.FINE] * 72,
    *[RowBehaviour.SKIPPED] * 6,
    *[RowBehaviour.WRONG] * 5,
    *[RowBehaviour.FLAKY] * 8,
    *[RowBehaviour.STUBBORN] * 4,
    *[RowBehaviour.POISON] * 5,
)


@dataclass
class RunParameters:
    services: int = 2
    tasks: int = 2
    rows: int = 16
    attempts_max: int = 3
    retries_max: int = 0
    page_rows: int = 16
    batch_rows: int = 0
    ahead_rows_max: int = 0
    # Rows per file of the sink, and log entries between two checkpoints.
    file_rows: int = 4
    checkpoint_entries: int = 12
    # Rows that a task claims, begins together and reports together.
    claim_rows: int = 6
    # Above 0, tasks claim rows of one of this many intervals, as in a lazy stage.
    partitions: int = 0
    begin_rows: int = 3
    flush_rows: int = 3
    # Per mille: lost answers, pauses beyond a lease, cancellations, contradictory reports.
    lost_answer_mille: int = 0
    pause_mille: int = 0
    cancel_mille: int = 0
    illegal_action_mille: int = 0
    # Per mille of service starts by a new driver, with new tasks.
    new_driver_mille: int = 400
    # Behaviour of each row. Drawn if empty.
    behaviours: list[RowBehaviour] = field(default_factory=list)

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


def draw_behaviour(tape: ChoiceTape) -> RowBehaviour:
    return _BEHAVIOUR_WEIGHTS[tape.draw(len(_BEHAVIOUR_WEIGHTS))]


def draw_run_parameters(tape: ChoiceTape) -> RunParameters:
    """Draw the run parameters of a seed."""
    return RunParameters(
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
        lost_answer_mille=(0, 40, 120)[tape.draw(3)],
        pause_mille=(0, 25, 60)[tape.draw(3)],
        cancel_mille=(0, 0, 200)[tape.draw(3)],
        illegal_action_mille=(0, 0, 0, 0, 0, 80)[tape.draw(6)],
    )
