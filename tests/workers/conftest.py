from collections.abc import Iterator

import pytest

from tests.postgres import RIG_STORES_DEEP
from tests.workers.rig import WorkerRig
from tests.world.rig import make_backend


@pytest.fixture(params=RIG_STORES_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[WorkerRig]:
    made = WorkerRig(backend=make_backend(request.param))
    yield made
    made.store.close()
