"""A task rig on each store with simulated time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import SimClock
from tests.durable.conftest import SIMULATED
from tests.tasks.rig import TaskOperationsRig


@pytest.fixture(params=list(SIMULATED))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TaskOperationsRig]:
    clock = SimClock()
    for store in SIMULATED[request.param](tmp_path, clock):
        yield TaskOperationsRig(store, clock)
