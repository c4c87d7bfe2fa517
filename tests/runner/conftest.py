from collections.abc import Iterator

import pytest

from tests.postgres import RIGS_DEEP
from tests.runner.rig import Rig


@pytest.fixture(params=RIGS_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.store.close()
