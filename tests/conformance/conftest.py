"""The conformance suite runs on every store in `STORES`. A new store is added to that tuple."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast.store
from holdfast.clock import SYSTEM
from holdfast.config import WriterLimits
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.backend import LmdbBackend
from tests.postgres import OLDEST, reused_url

STORES = ("memory", "lmdb-local", "lmdb", "postgres", "postgres-16")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with open_store(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=["lmdb-local", "lmdb", "postgres"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """Return a function that closes a durable store and opens it again."""
    opened: list[Store] = []
    url = reused_url() if request.param == "postgres" else ""

    def again() -> Store:
        if opened:
            opened[-1].close()
        opened.append(open_store(request.param, tmp_path, url))
        return opened[-1]

    yield again
    opened[-1].close()


class LocalLmdbStore(InProcessStore):
    """A store on an LMDB backend in this process. It closes its backend."""

    def __init__(self, path: Path) -> None:
        self._lmdb_backend = LmdbBackend(path / "local", readonly=False)
        super().__init__(f"lmdb:{path}", self._lmdb_backend, SYSTEM)

    def close(self) -> None:
        super().close()
        self._lmdb_backend.close()


def open_store(kind: str, path: Path, url: str = "") -> Store:
    if kind == "postgres":
        return holdfast.store.open(url or reused_url())
    if kind == "postgres-16":
        return holdfast.store.open(reused_url(OLDEST))
    if kind == "memory":
        return holdfast.store.open("memory:")
    if kind == "lmdb":
        return holdfast.store.open(path / "data", limits=WriterLimits(idle_exit_s=0.2))
    (path / "local").mkdir(exist_ok=True)
    return LocalLmdbStore(path)
