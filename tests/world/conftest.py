from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.rows import LmdbBackend
from tests.postgres import RIGS_DEEP
from tests.world.rig import Rig, rows_on


@pytest.fixture(params=RIGS_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(backend=rows_on(request.param))
    yield made
    made.store.close()


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def any_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """The same on every store whose time we move."""
    if request.param != "lmdb":
        made = Rig(backend=rows_on(request.param))
        yield made
        made.store.close()
        return
    backend = LmdbBackend(tmp_path, readonly=False)
    yield Rig(backend=backend)
    backend.close()
