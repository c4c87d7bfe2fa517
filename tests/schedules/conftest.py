"""Schedule rigs on each store with simulated time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.clock import SimClock
from holdfast.ops.verify import find_differences
from tests.durable.conftest import SIMULATED
from tests.schedules.rig import ScheduleRig

MakeRig = Callable[[hf.App], ScheduleRig]


@pytest.fixture(params=list(SIMULATED))
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeRig]:
    """A function that creates the rig of an app, on one store per test. `verify` must find nothing at the end."""
    clock = SimClock()
    rigs: list[ScheduleRig] = []
    for store in SIMULATED[request.param](tmp_path, clock):

        def make(app: hf.App, store=store) -> ScheduleRig:
            rigs.append(ScheduleRig(store, clock, app))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.flows.threads.shutdown(wait=True)
        assert store.read(find_differences) == []
