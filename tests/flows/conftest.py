"""Flow rigs on each store with simulated time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.clock import SimClock
from holdfast.ops.verify import find_differences
from tests.durable.conftest import SIMULATED
from tests.flows.rig import FlowRig


@pytest.fixture(params=list(SIMULATED))
def make_rig(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[hf.App], FlowRig]]:
    """A function that creates the rig of an app, on one store per test."""
    clock = SimClock()
    rigs: list[FlowRig] = []

    for store in SIMULATED[request.param](tmp_path, clock):

        def make(app: hf.App, store=store) -> FlowRig:
            rigs.append(FlowRig(store, clock, app))
            return rigs[-1]

        yield make
        for rig in rigs:
            assert rig.store.read(find_differences) == []
    for rig in rigs:
        rig.threads.shutdown(wait=True)
