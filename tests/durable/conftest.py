"""Stores for the durable suites.

`store` is every store there is; `sim_store` those whose time the `clock` fixture moves. To run the
suites on one more, add its opener to `OPENERS` (and to `SIMULATED` if it takes the clock).
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.clock import SimClock
from holdfast.store.api import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.store.postgres import PostgresStore
from holdfast.store.rows import LmdbBackend
from tests.postgres import fresh_url

Opener = Callable[[Path, SimClock], Iterator[Store]]


def open_memory(path: Path, clock: SimClock) -> Iterator[Store]:
    with LocalStore("memory:", MemoryBackend(), clock) as store:
        yield store


def open_lmdb_local(path: Path, clock: SimClock) -> Iterator[Store]:
    backend = LmdbBackend(path, readonly=False)
    with LocalStore(f"lmdb:{path}", backend, clock) as store:
        yield store
    backend.close()


def open_postgres(path: Path, clock: SimClock) -> Iterator[Store]:
    with PostgresStore(fresh_url(), clock=clock) as store:
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
