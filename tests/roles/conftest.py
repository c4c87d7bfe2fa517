from collections.abc import Iterator

import pytest

from tests.postgres import RIGS
from tests.roles.rig import Rig
from tests.world.rig import rows_on


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(backend=rows_on(request.param))
    yield made
    made.store.close()
