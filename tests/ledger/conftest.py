from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.store.api import Store
from tests.postgres import fresh_url


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    urls = {"memory": lambda: "memory:", "lmdb": lambda: str(tmp_path / "store")}
    with stores.open(urls.get(request.param, fresh_url)()) as store:
        yield store
