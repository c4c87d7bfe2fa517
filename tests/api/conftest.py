"""The fixture of the endpoint tests: one rig for each store. Each test has another universe."""

from collections.abc import Iterator
from itertools import count

import pytest

from holdfast import store as stores
from holdfast.store.api import Store
from tests.api.rig import ApiRig

_universes = count(1)


@pytest.fixture(scope="package", params=["memory", "lmdb"])
def api_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    url = "memory:" if request.param == "memory" else str(tmp_path_factory.mktemp("api") / "data")
    with stores.open(url) as store:
        yield store


@pytest.fixture
def rig(api_store: Store) -> Iterator[ApiRig]:
    with ApiRig(api_store, f"shop-{next(_universes)}") as opened:
        yield opened
