"""A process that stops waits for a server that is away for as long as it has said, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.clock import SYSTEM, S
from holdfast.errors import HoldfastError
from holdfast.store.api import Txn
from holdfast.store.pg import engine, readers
from holdfast.store.pg.patience import Haste
from holdfast.store.pg.server import Away, Unreachable
from holdfast.store.postgres import PostgresStore
from tests.chaos.proxy import Proxy
from tests.pgcluster import DATABASE, USER, Cluster

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

# Longer than any test here may take: what would wait so long is not waited for.
LONG_S = 600.0
JOIN_S = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(standby=False) as made:
        yield made


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy((cluster.primary.host, cluster.primary.port)) as made:
        yield made


@pytest.fixture
def store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    monkeypatch.setattr(engine, "AWAY_S", LONG_S)
    monkeypatch.setattr(readers, "READER_S", LONG_S)
    monkeypatch.setattr("holdfast.store.postgres.READER_S", LONG_S)
    with PostgresStore(f"postgresql://{USER}@127.0.0.1:{proxy.port}/{DATABASE}") as made:
        made.transact(lambda txn: txn.put(b"n", b"0"))
        yield made


def write(txn: Txn) -> None:
    txn.put(b"n", b"1")


def read(txn: Txn) -> bytes | None:
    return txn.get(b"n")


class Call:
    """A call to the store in a thread, and how it ended."""

    def __init__(self, store: PostgresStore, writes: bool) -> None:
        self._store, self._writes = store, writes
        self.error: HoldfastError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._store.transact(write) if self._writes else self._store.read(read)
        except HoldfastError as error:
            self.error = error

    def ended(self) -> bool:
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("how", ["refuses", "swallows"])
def test_a_call_ends_when_the_time_is_up(
    store: PostgresStore, proxy: Proxy, writes: bool, how: str
) -> None:
    store.read(read)
    proxy.refuse(True)
    if how == "refuses":
        proxy.cut()
    else:
        proxy.swallow()
    call = Call(store, writes)
    store.stop_within(0.5)
    assert call.ended()
    assert call.error is not None
    assert store.away_since_ns
    proxy.refuse(False)
    proxy.cut()


def test_a_server_that_is_there_is_served_as_ever_however_long_ago_the_time_was_up(
    store: PostgresStore,
) -> None:
    store.stop_within(0.0)
    store.transact(write)
    assert store.read(read) == b"1"
    assert store.away_since_ns == 0


def test_one_that_stops_comes_back_to_a_server_in_time(store: PostgresStore, proxy: Proxy) -> None:
    proxy.refuse(True)
    proxy.cut()
    store.stop_within(LONG_S)
    call = Call(store, True)
    proxy.refuse(False)
    assert call.ended()
    assert call.error is None
    assert store.read(read) == b"1"


def test_nobody_who_stops_tries_to_connect_to_a_server_that_is_known_to_be_away() -> None:
    away = Away(SYSTEM)
    with pytest.raises(Unreachable), away:
        raise Unreachable(why="refused")
    away.haste.stop_within(0.0)
    with pytest.raises(Unreachable), away:
        raise AssertionError("it was tried")


def test_haste_begins_when_it_is_told_to_and_is_over_after_that() -> None:
    haste = Haste()
    assert (haste.stopping, haste.over) == (False, False)
    haste.stop_within(LONG_S)
    assert (haste.stopping, haste.over) == (True, False)
    haste.stop_within(0.0)
    assert (haste.stopping, haste.over) == (True, True)
    assert haste._until_ns <= SYSTEM.mono_ns() + S
