from collections.abc import Iterator

import pytest

from tests.postgres import RIG_STORES_DEEP
from tests.runner.rig import RunnerRig


@pytest.fixture(params=RIG_STORES_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[RunnerRig]:
    made = RunnerRig(request.param)
    yield made
    made.store.close()
