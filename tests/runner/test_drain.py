"""The drain of a stopping worker as tables: times and work in progress in, phase out."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.runner.drain import Drain, DrainPhase

MODULES = ("holdfast.runner.drain",)

BEGAN_NS = 100 * S
GRACE, OVERDUE, FINISHED = DrainPhase


@pytest.mark.parametrize(
    ("after_ns", "grace_ns", "in_progress", "expected"),
    [
        (0, 10 * S, 1, GRACE),
        (10 * S - 1, 10 * S, 1, GRACE),
        (10 * S, 10 * S, 1, OVERDUE),
        (60 * S, 10 * S, 5, OVERDUE),
        # Without a grace time the work is abandoned at once, and without an end never.
        (0, 0, 1, OVERDUE),
        (3600 * S, None, 1, GRACE),
        # No work is left.
        (0, 10 * S, 0, FINISHED),
        (0, 0, 0, FINISHED),
        (60 * S, 10 * S, 0, FINISHED),
        (60 * S, None, 0, FINISHED),
    ],
)
def test_phase_of_a_drain(
    after_ns: int, grace_ns: int | None, in_progress: int, expected: DrainPhase
) -> None:
    drain = Drain()
    drain.phase(BEGAN_NS, grace_ns=grace_ns, in_progress=1)
    found = drain.phase(BEGAN_NS + after_ns, grace_ns=grace_ns, in_progress=in_progress)
    assert found is expected


def test_grace_time_counts_from_the_first_call() -> None:
    drain = Drain()
    phases = [
        drain.phase(BEGAN_NS + passed_ns, grace_ns=3 * S, in_progress=1)
        for passed_ns in (0, 2 * S, 3 * S, 4 * S)
    ]
    assert phases == [GRACE, GRACE, OVERDUE, OVERDUE]


def test_changed_grace_time_applies_to_a_drain_in_progress() -> None:
    drain = Drain()
    assert drain.phase(BEGAN_NS, grace_ns=10 * S, in_progress=1) is GRACE
    assert drain.phase(BEGAN_NS + S, grace_ns=0, in_progress=1) is OVERDUE
