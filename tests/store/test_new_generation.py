"""start_new_generation: a new store generation after PostgreSQL tools restored the database to an earlier state."""

import psycopg
import pytest

from holdfast import store as stores
from holdfast.cli import main
from holdfast.clock import S
from holdfast.durable import lease as leases
from holdfast.errors import Fenced, Invalid, NotFound, StoreBusy, StoreReplaced
from holdfast.store.admin.new_generation import COMMIT_NO_LEAP, start_new_generation
from holdfast.store.api import Store, Txn
from tests import postgres

TABLES = ("holdfast_row", "holdfast_commit")


@pytest.fixture
def url() -> str:
    return postgres.fresh_url()


def put(store: Store, value: bytes) -> None:
    store.transact(lambda txn: txn.put(("k",), value))


def get(store: Store) -> bytes | None:
    value: bytes | None = store.read(lambda txn: txn.get(("k",)))
    return value


def acquire_lease(store: Store, holder: str) -> leases.Lease:
    lease = store.transact(leases.acquire, "r", holder, "1", 600 * S)
    assert isinstance(lease, leases.Lease)
    return lease


def put_guarded_by(txn: Txn, lease: leases.Lease) -> None:
    txn.require_live(lease)
    txn.put(("guarded",), b"1")


class TableCopies:
    """A copy of the tables; `restore` simulates a point-in-time recovery."""

    def __init__(self, url: str) -> None:
        self._url = url
        with psycopg.connect(url, autocommit=True) as connection:
            for table in TABLES:
                connection.execute(f"CREATE TABLE {table}_was AS TABLE {table}")

    def restore(self) -> None:
        """Restore the tables and terminate all connections, as a server restart does."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            with connection.transaction():
                for table in TABLES:
                    connection.execute(f"TRUNCATE {table}")
                    connection.execute(f"INSERT INTO {table} TABLE {table}_was")
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND application_name LIKE 'holdfast%' "
                "AND datname = current_database()"
            )


def test_restored_store_opens_with_the_new_generation(url: str) -> None:
    with stores.open(url) as store:
        put(store, b"1")
        before = store.generation
    done = start_new_generation(url)
    assert done.former == before
    with stores.open(url, bootstrap=False) as store:
        assert store.generation == done.generation > before
        assert get(store) == b"1"


def test_each_start_new_generation_returns_a_higher_generation(url: str) -> None:
    stores.open(url).close()
    assert start_new_generation(url).generation < start_new_generation(url).generation


def test_start_new_generation_raises_commit_numbers_by_the_leap(url: str) -> None:
    with stores.open(url) as store:
        put(store, b"1")
    first = start_new_generation(url).commit_no
    assert first > COMMIT_NO_LEAP
    with stores.open(url) as store:
        put(store, b"2")
        assert get(store) == b"2"
    assert start_new_generation(url).commit_no > first + COMMIT_NO_LEAP


def test_lease_of_the_former_generation_is_fenced(url: str) -> None:
    with stores.open(url) as store:
        lease = acquire_lease(store, "a")
    start_new_generation(url)
    with stores.open(url) as store, pytest.raises(Fenced):
        store.transact(put_guarded_by, lease)


def test_process_connected_before_the_restore_gets_store_replaced(url: str) -> None:
    with stores.open(url) as survivor:
        put(survivor, b"kept")
        backup = TableCopies(url)
        put(survivor, b"lost")
        backup.restore()
        start_new_generation(url)
        with pytest.raises(StoreReplaced):
            put(survivor, b"from the past")
    with stores.open(url) as store:
        assert get(store) == b"kept"


def test_start_new_generation_of_an_open_store_raises_store_busy(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.store.admin.new_generation.LOCK_WAIT_S", 0.0)
    with stores.open(url) as store:
        put(store, b"1")
        generation = store.generation
        with pytest.raises(StoreBusy):
            start_new_generation(url)
    with stores.open(url) as store:
        assert store.generation == generation


def test_start_new_generation_without_a_store_raises_not_found(url: str) -> None:
    with pytest.raises(NotFound):
        start_new_generation(url)


def test_start_new_generation_of_an_embedded_store_raises_invalid() -> None:
    with pytest.raises(Invalid, match="holdfast restore"):
        start_new_generation("./data")


def test_store_restored_command_prints_the_generation(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.open(url).close()
    assert main(["store", "restored", "--store", url]) == 0
    assert "generation" in capsys.readouterr().out
