"""Store fixtures of the durable suites.

`store` runs a test on every store, `sim_store` on every store with a simulated clock. To add a store, add its
opener to `OPENERS`, and to `SIMULATED` if it takes the clock.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.clock import SimClock
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.postgres.store import PostgresStore
from tests.postgres import reused_url

Opener = Callable[[Path, SimClock], Iterator[Store]]


def open_memory(path: Path, clock: SimClock) -> Iterator[Store]:
    with InProcessStore("memory:", MemoryBackend(), clock) as store:
        yield store


def open_lmdb_local(path: Path, clock: SimClock) -> Iterator[Store]:
    backend = LmdbBackend(path, readonly=False)
    with InProcessStore(f"lmdb:{path}", backend, clock) as store:
        yield store
    backend.close()


def open_postgres(path: Path, clock: SimClock) -> Iterator[Store]:
    with PostgresStore(reused_url(), clock=clock) as store:
        yield store


SIMULATED: dict[str, Opener] = {
    "memory": open_memory,
    "lmdb-local": open_lmdb_local,
    "postgres": open_postgres,
}
OPENERS: dict[str, Opener] = {**SIMULATED}


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture(params=list(OPENERS))
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock) -> Iterator[Store]:
    yield from OPENERS[request.param](tmp_path, clock)


@pytest.fixture(params=list(SIMULATED))
def sim_store(request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock) -> Iterator[Store]:
    yield from SIMULATED[request.param](tmp_path, clock)
