"""Fault plans of the crash-point tests. `make test` tries one fault at each commit, `make sim` all of them."""

from collections.abc import Callable, Iterator

import pytest

from tests.simulation.crash_points import FaultsByCommit, rotated_faults, single_faults

FaultPlanner = Callable[..., Iterator[FaultsByCommit]]

FAULT_PLANS = (
    pytest.param(rotated_faults, id="rotated"),
    pytest.param(single_faults, id="all", marks=pytest.mark.deep),
)
