"""A desk on each store whose time is moved by hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import SimClock
from tests.durable.conftest import SIMULATED
from tests.tasks.rig import Desk


@pytest.fixture(params=list(SIMULATED))
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    clock = SimClock()
    for store in SIMULATED[request.param](tmp_path, clock):
        yield Desk(store, clock)
