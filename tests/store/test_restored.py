"""After PostgreSQL's own tools have set a database back in time, `restored` makes it a new generation."""

import psycopg
import pytest

from holdfast import store as stores
from holdfast.cli import main
from holdfast.clock import S
from holdfast.durable import lease as leases
from holdfast.errors import Fenced, Invalid, NotFound, StoreBusy, StoreReplaced
from holdfast.store.api import Store, Txn
from holdfast.store.restored import LEAP, renew
from tests import postgres

TABLES = ("holdfast_row", "holdfast_commit")


@pytest.fixture
def url() -> str:
    return postgres.fresh_url()


def put(store: Store, value: bytes) -> None:
    store.transact(lambda txn: txn.put(("k",), value))


def get(store: Store) -> bytes | None:
    found: bytes | None = store.read(lambda txn: txn.get(("k",)))
    return found


def granted(store: Store, holder: str) -> leases.Lease:
    found = store.transact(leases.acquire, "r", holder, "1", 600 * S)
    assert isinstance(found, leases.Lease)
    return found


def guarded(txn: Txn, lease: leases.Lease) -> None:
    txn.require_live(lease)
    txn.put(("guarded",), b"1")


class Backup:
    """The tables as they were, to be brought back: what a restore to a point in time does."""

    def __init__(self, url: str) -> None:
        self._url = url
        with psycopg.connect(url, autocommit=True) as connection:
            for table in TABLES:
                connection.execute(f"CREATE TABLE {table}_was AS TABLE {table}")

    def bring_back(self) -> None:
        """The server was stopped for it, so every connection is gone."""
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


def test_a_restored_store_opens_as_a_new_generation(url: str) -> None:
    with stores.open(url) as store:
        put(store, b"1")
        before = store.generation
    done = renew(url)
    assert done.before == before
    with stores.open(url, bootstrap=False) as store:
        assert store.generation == done.generation > before
        assert get(store) == b"1"


def test_each_renewal_is_another_generation(url: str) -> None:
    stores.open(url).close()
    assert renew(url).generation < renew(url).generation


def test_commit_numbers_leap_beyond_those_that_were_lost(url: str) -> None:
    with stores.open(url) as store:
        put(store, b"1")
    first = renew(url).commit_no
    assert first > LEAP
    with stores.open(url) as store:
        put(store, b"2")
        assert get(store) == b"2"
    assert renew(url).commit_no > first + LEAP


def test_a_lease_from_before_the_restore_is_refused(url: str) -> None:
    with stores.open(url) as store:
        lease = granted(store, "a")
    renew(url)
    with stores.open(url) as store, pytest.raises(Fenced):
        store.transact(guarded, lease)


def test_a_process_that_outlived_the_restore_is_told_so(url: str) -> None:
    with stores.open(url) as survivor:
        put(survivor, b"kept")
        backup = Backup(url)
        put(survivor, b"lost")
        backup.bring_back()
        renew(url)
        with pytest.raises(StoreReplaced):
            put(survivor, b"from the past")
    with stores.open(url) as store:
        assert get(store) == b"kept"


def test_a_store_that_somebody_has_open_is_busy(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.store.restored.PATIENCE_S", 0.0)
    with stores.open(url) as store:
        put(store, b"1")
        generation = store.generation
        with pytest.raises(StoreBusy):
            renew(url)
    with stores.open(url) as store:
        assert store.generation == generation


def test_a_database_without_a_store_is_not_found(url: str) -> None:
    with pytest.raises(NotFound):
        renew(url)


def test_an_embedded_store_is_restored_by_another_command() -> None:
    with pytest.raises(Invalid, match="holdfast restore"):
        renew("./data")


def test_the_command_says_which_generation_it_is(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.open(url).close()
    assert main(["store", "restored", "--store", url]) == 0
    assert "generation" in capsys.readouterr().out
