"""Fixtures that open the shop on a store and return one face of its runtime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from tests.aio.faces import FACES, Face
from tests.aio.shop import app
from tests.postgres import RIG_STORES_DEEP, fresh_url


@pytest.fixture(params=["lmdb", *RIG_STORES_DEEP])
def rt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hf.Runtime]:
    urls = {"memory": lambda: "memory:", "lmdb": lambda: str(tmp_path), "postgres": fresh_url}
    with app.open(urls[request.param](), queues=["default"]) as runtime:
        yield runtime
        runtime.check()


@pytest.fixture(params=sorted(FACES))
def face(request: pytest.FixtureRequest, rt: hf.Runtime) -> Iterator[Face]:
    made = FACES[request.param](rt)
    yield made
    made.close()
