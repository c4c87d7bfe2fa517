from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.rows import LmdbBackend
from tests.world.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture(params=["memory", "lmdb"])
def any_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """The same on every store whose time we move."""
    if request.param == "memory":
        yield Rig()
        return
    backend = LmdbBackend(tmp_path, readonly=False)
    yield Rig(backend=backend)
    backend.close()
