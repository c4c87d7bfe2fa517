"""ShutdownDeadline: a stopping process waits for an unreachable server until its deadline at most."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.clock import SYSTEM, S
from holdfast.errors import HoldfastError
from holdfast.store.api import Txn
from holdfast.store.postgres import engine, read_pool
from holdfast.store.postgres.server import Outage, PostgresUnreachable, ServerDenied
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.postgres.watchdog import ShutdownDeadline
from tests.chaos.proxy import Proxy
from tests.pgcluster import DATABASE, USER, PostgresCluster

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

# Longer than the time limit of any test here: a call that waits this long fails its test.
LONG_S = 600.0
JOIN_S = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as made:
        yield made


@pytest.fixture
def proxy(cluster: PostgresCluster) -> Iterator[Proxy]:
    with Proxy((cluster.primary.host, cluster.primary.port)) as made:
        yield made


@pytest.fixture
def store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresStore]:
    monkeypatch.setattr(engine, "AWAY_S", LONG_S)
    monkeypatch.setattr(read_pool, "BORROW_WAIT_S", LONG_S)
    monkeypatch.setattr("holdfast.store.postgres.store.BORROW_WAIT_S", LONG_S)
    with PostgresStore(f"postgresql://{USER}@127.0.0.1:{proxy.port}/{DATABASE}") as made:
        made.transact(lambda txn: txn.put(b"n", b"0"))
        yield made


def put_row(txn: Txn) -> None:
    txn.put(b"n", b"1")


def get_row(txn: Txn) -> bytes | None:
    return txn.get(b"n")


class StoreCallThread:
    """A store call in a thread, and its error."""

    def __init__(self, store: PostgresStore, writes: bool) -> None:
        self._store, self._writes = store, writes
        self.error: HoldfastError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._store.transact(put_row) if self._writes else self._store.read(get_row)
        except HoldfastError as error:
            self.error = error

    def has_ended(self) -> bool:
        self._thread.join(JOIN_S)
        return not self._thread.is_alive()


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("how", ["refuses", "swallows"])
def test_store_call_fails_at_the_shutdown_deadline(
    store: PostgresStore, proxy: Proxy, writes: bool, how: str
) -> None:
    store.read(get_row)
    proxy.refuse(True)
    if how == "refuses":
        proxy.cut()
    else:
        proxy.swallow()
    call = StoreCallThread(store, writes)
    store.stop_within(0.5)
    assert call.has_ended()
    assert call.error is not None
    assert store.away_since_ns
    proxy.refuse(False)
    proxy.cut()


def test_reachable_server_is_used_after_the_shutdown_deadline(
    store: PostgresStore,
) -> None:
    store.stop_within(0.0)
    store.transact(put_row)
    assert store.read(get_row) == b"1"
    assert store.away_since_ns == 0


def test_stopping_store_reconnects_before_the_shutdown_deadline(
    store: PostgresStore, proxy: Proxy
) -> None:
    proxy.refuse(True)
    proxy.cut()
    store.stop_within(LONG_S)
    call = StoreCallThread(store, True)
    proxy.refuse(False)
    assert call.has_ended()
    assert call.error is None
    assert store.read(get_row) == b"1"


def test_login_that_is_refused_after_a_successful_one_is_an_outage() -> None:
    outage = Outage(SYSTEM)
    with pytest.raises(ServerDenied), outage:
        raise ServerDenied(url="db/jobs", why="password authentication failed")
    assert outage.since_ns == 0
    with outage:
        pass
    with pytest.raises(PostgresUnreachable, match="PGPASSFILE") as refused, outage:
        raise ServerDenied(url="db/jobs", why="password authentication failed")
    assert refused.value.retryable
    assert outage.since_ns > 0


def test_no_connection_attempt_after_the_shutdown_deadline_during_an_outage() -> None:
    outage = Outage(SYSTEM)
    with pytest.raises(PostgresUnreachable), outage:
        raise PostgresUnreachable(why="refused")
    outage.shutdown_deadline.stop_within(0.0)
    with pytest.raises(PostgresUnreachable), outage:
        raise AssertionError("it was tried")


def test_shutdown_deadline_states_before_during_and_after_stop_within() -> None:
    deadline = ShutdownDeadline()
    assert (deadline.is_stopping, deadline.is_expired) == (False, False)
    deadline.stop_within(LONG_S)
    assert (deadline.is_stopping, deadline.is_expired) == (True, False)
    deadline.stop_within(0.0)
    assert (deadline.is_stopping, deadline.is_expired) == (True, True)
    assert deadline._until_ns <= SYSTEM.mono_ns() + S
