from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.lmdb.backend import LmdbBackend
from tests.postgres import RIG_STORES_DEEP
from tests.world.rig import WorldRig, make_backend


@pytest.fixture(params=RIG_STORES_DEEP)
def rig(request: pytest.FixtureRequest) -> Iterator[WorldRig]:
    world_rig = WorldRig(backend=make_backend(request.param))
    yield world_rig
    world_rig.store.close()


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def any_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorldRig]:
    """The rig on every store that accepts a simulated clock."""
    if request.param != "lmdb":
        world_rig = WorldRig(backend=make_backend(request.param))
        yield world_rig
        world_rig.store.close()
        return
    backend = LmdbBackend(tmp_path, readonly=False)
    yield WorldRig(backend=backend)
    backend.close()
