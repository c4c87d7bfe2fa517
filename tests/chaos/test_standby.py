"""A primary with a synchronous standby: what is acknowledged is with both, also when it was in doubt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

from holdfast import store as stores
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.api import Store, Txn
from tests.pgcluster import DATABASE, USER, Cluster
from tests.process.watch import until

MODULES = ("holdfast.store.postgres", "holdfast.store.pg.engine")

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(120)]

SPACE = b"orders"
LONG_S = 60.0
ENDED_BY = {"cancelled": "pg_cancel_backend", "terminated": "pg_terminate_backend"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    hosts = ",".join(f"{server.host}:{server.port}" for server in cluster.servers)
    url = f"postgresql://{USER}@{hosts}/{DATABASE}?target_session_attrs=read-write"
    with stores.open(url) as opened:
        yield opened


def put(txn: Txn, name: bytes) -> None:
    txn.put(SPACE + name, name)


def there(txn: Txn) -> set[bytes]:
    return {value for _, value in txn.scan(SPACE, SPACE + b"\xff")}


class Asked:
    """A transaction under way in a thread of its own, and what became of it."""

    def __init__(self, store: Store, name: bytes) -> None:
        self.error: HoldfastError | None = None
        self.acknowledged = False
        self._thread = threading.Thread(target=self._ask, args=(store, name), daemon=True)
        self._thread.start()

    def _ask(self, store: Store, name: bytes) -> None:
        try:
            store.transact(put, name)
            self.acknowledged = True
        except HoldfastError as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


def waiting(cluster: Cluster) -> set[str]:
    """Connections whose commit waits for the standby now."""
    try:
        found: list[str] = cluster.primary.ask(
            "SELECT array_agg(pid || ' ' || backend_start) FROM pg_stat_activity "
            "WHERE wait_event = 'SyncRep'"
        )
    except psycopg.Error:
        return set()
    return set(found or ())


def test_a_store_finds_the_new_primary_by_itself(cluster: Cluster, store: Store) -> None:
    store.transact(put, b"before")
    cluster.fail_over()
    store.transact(put, b"after")
    assert store.read(there) == {b"before", b"after"}


@pytest.mark.deep
def test_commit_numbers_and_time_go_on_after_a_promotion(cluster: Cluster, store: Store) -> None:
    first = store.wait("bell", 0, 0.0)
    store.transact(lambda txn: txn.notify("bell"))
    before_ns, heard = store.now_ns(), store.wait("bell", first, LONG_S)
    cluster.fail_over()
    store.transact(lambda txn: txn.notify("bell"))
    assert store.wait("bell", heard, LONG_S) > heard
    assert store.now_ns() > before_ns


@pytest.mark.deep
def test_nothing_is_acknowledged_while_the_standby_has_not_got_it(
    cluster: Cluster, store: Store
) -> None:
    standby = cluster.standby
    assert standby is not None
    still = standby.freeze()
    asked = Asked(store, b"one")
    until(lambda: waiting(cluster), "a commit that waits", LONG_S)
    assert not asked.acknowledged
    for process in still:
        process.cont()
    until(lambda: asked.ended, "the answer", LONG_S)
    assert asked.acknowledged


@pytest.mark.parametrize(
    "how", ["cancelled", "terminated", pytest.param("crashed", marks=pytest.mark.deep)]
)
def test_what_was_in_doubt_is_acknowledged_only_when_the_standby_has_it(
    cluster: Cluster, store: Store, how: str
) -> None:
    """The commit is on the primary's disk and nowhere else when its connection goes, or when its wait for the
    standby is cancelled. Whoever looks then finds it. Told as done, it would be lost with the primary."""
    store.transact(put, b"before")
    standby = cluster.standby
    assert standby is not None
    standby.stop()
    asked = Asked(store, b"doubtful")
    first = until(lambda: waiting(cluster), "a commit that waits", LONG_S)
    if how in ENDED_BY:
        cluster.primary.ask(
            f"SELECT count({ENDED_BY[how]}(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        )
    else:
        cluster.primary.crash()
        cluster.primary.start()
    # The store has come back and looked, and is waiting again; or it has given an answer.
    until(lambda: asked.ended or waiting(cluster) - first, "its look", LONG_S)
    lost = asked.acknowledged
    cluster.primary.lose()
    standby.start()
    standby.promote()
    standby.settle(synchronous_standby_names="")
    cluster.primary = standby
    until(lambda: asked.ended, "the answer", LONG_S)
    assert asked.acknowledged or isinstance(asked.error, CommitUnknown)
    found = store.read(there)
    assert not lost or b"doubtful" in found
    assert (b"doubtful" in found) == asked.acknowledged or asked.error is not None
    assert b"before" in found
