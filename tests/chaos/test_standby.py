"""A primary with a synchronous standby: both have every acknowledged commit, also one that was in doubt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from holdfast import store as stores
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.api import Store, Txn
from tests.pgcluster import DATABASE, USER, PostgresCluster
from tests.process.watch import until

MODULES = ("holdfast.store.postgres.store", "holdfast.store.postgres.engine")

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

SPACE = b"orders"
LONG_S = 60.0
END_FUNCTIONS = {"cancelled": "pg_cancel_backend", "terminated": "pg_terminate_backend"}


@pytest.fixture
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster() as made:
        yield made


@pytest.fixture
def store(cluster: PostgresCluster) -> Iterator[Store]:
    hosts = ",".join(f"{server.host}:{server.port}" for server in cluster.servers)
    url = f"postgresql://{USER}@{hosts}/{DATABASE}?target_session_attrs=read-write"
    with stores.open(url) as opened:
        yield opened


def put(txn: Txn, name: bytes) -> None:
    txn.put(SPACE + name, name)


def stored_names(txn: Txn) -> set[bytes]:
    return {value for _, value in txn.scan(SPACE, SPACE + b"\xff")}


class PendingPut:
    """A transaction in a separate thread, and its outcome."""

    def __init__(self, store: Store, name: bytes) -> None:
        self.error: HoldfastError | None = None
        self.acknowledged = False
        self._thread = threading.Thread(target=self._put, args=(store, name), daemon=True)
        self._thread.start()

    def _put(self, store: Store, name: bytes) -> None:
        try:
            store.transact(put, name)
            self.acknowledged = True
        except HoldfastError as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


def waiting_connections(cluster: PostgresCluster) -> set[str]:
    """Connections whose commit currently waits for the standby."""
    try:
        found: list[str] = cluster.primary.query_value(
            "SELECT array_agg(pid || ' ' || backend_start) FROM pg_stat_activity "
            "WHERE wait_event = 'SyncRep'"
        )
    except psycopg.Error:
        return set()
    return set(found or ())


def test_store_connects_to_the_new_primary_after_failover(
    cluster: PostgresCluster, store: Store
) -> None:
    store.transact(put, b"before")
    cluster.fail_over()
    store.transact(put, b"after")
    assert store.read(stored_names) == {b"before", b"after"}


@pytest.mark.deep
def test_commit_numbers_and_store_time_increase_after_a_promotion(
    cluster: PostgresCluster, store: Store
) -> None:
    first = store.wait("bell", 0, 0.0)
    store.transact(lambda txn: txn.notify("bell"))
    before_ns, version = store.now_ns(), store.wait("bell", first, LONG_S)
    cluster.fail_over()
    store.transact(lambda txn: txn.notify("bell"))
    assert store.wait("bell", version, LONG_S) > version
    assert store.now_ns() > before_ns


@pytest.mark.deep
def test_commit_is_not_acknowledged_before_the_standby_has_it(
    cluster: PostgresCluster, store: Store
) -> None:
    standby = cluster.standby
    assert standby is not None
    frozen = standby.freeze()
    pending = PendingPut(store, b"one")
    until(lambda: waiting_connections(cluster), "a commit that waits", LONG_S)
    assert not pending.acknowledged
    for process in frozen:
        process.cont()
    until(lambda: pending.ended, "the answer", LONG_S)
    assert pending.acknowledged


@pytest.mark.parametrize(
    "how", ["cancelled", "terminated", pytest.param("crashed", marks=pytest.mark.deep)]
)
def test_in_doubt_commit_is_acknowledged_only_when_the_standby_has_it(
    cluster: PostgresCluster, store: Store, how: str
) -> None:
    """The commit is only on the primary's disk when its connection ends or when its wait for the standby is cancelled.
    A read then finds it. If the store acknowledged it now, it would be lost with the primary."""
    store.transact(put, b"before")
    standby = cluster.standby
    assert standby is not None
    standby.stop()
    pending = PendingPut(store, b"doubtful")
    first = until(lambda: waiting_connections(cluster), "a commit that waits", LONG_S)
    if how in END_FUNCTIONS:
        cluster.primary.query_value(
            f"SELECT count({END_FUNCTIONS[how]}(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        )
    else:
        cluster.primary.crash()
        cluster.primary.start()
    # The store has reconnected and resolves the in-doubt commit, or it has already returned.
    until(lambda: pending.ended or waiting_connections(cluster) - first, "its look", LONG_S)
    lost = pending.acknowledged
    cluster.primary.destroy()
    standby.start()
    standby.promote()
    standby.change_settings(synchronous_standby_names="")
    cluster.primary = standby
    until(lambda: pending.ended, "the answer", LONG_S)
    assert pending.acknowledged or isinstance(pending.error, CommitUnknown)
    found = store.read(stored_names)
    assert not lost or b"doubtful" in found
    assert (b"doubtful" in found) == pending.acknowledged or pending.error is not None
    assert b"before" in found
