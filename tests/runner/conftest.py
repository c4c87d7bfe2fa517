from collections.abc import Iterator

import pytest

from tests.postgres import RIGS
from tests.runner.rig import Rig


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.store.close()
