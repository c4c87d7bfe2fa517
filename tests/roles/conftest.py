from collections.abc import Iterator

import pytest

from tests.postgres import RIGS_DEEP
from tests.roles.rig import Rig
from tests.world.rig import rows_on


@pytest.fixture(params=RIGS_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(backend=rows_on(request.param))
    yield made
    made.store.close()
