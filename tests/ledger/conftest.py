from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.store.api import Store


@pytest.fixture(params=["memory", "lmdb"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = "memory:" if request.param == "memory" else str(tmp_path / "store")
    with stores.open(url) as store:
        yield store
