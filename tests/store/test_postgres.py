"""The PostgreSQL store where it differs from the others: the server, the network, other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

import holdfast.store
from holdfast.errors import BadUrl, HoldfastError, NotFound, SchemaMismatch
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.pg import engine as engines
from holdfast.store.pg.server import Denied, Unreachable
from holdfast.store.postgres import PostgresStore
from holdfast.store.urls import shown
from tests.postgres import admin, fresh_url, in_database, server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def url() -> str:
    return fresh_url()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url) as opened:
        yield opened


def test_a_row_that_another_process_wrote_is_not_taken_from_the_cache(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        assert [one.transact(_grow, b"k") for _ in range(3)] == [1, 2, 3]
        assert [other.transact(_grow, b"k") for _ in range(3)] == [4, 5, 6]
        assert one.transact(_grow, b"k") == 7


def test_a_commit_with_more_keys_than_are_named_makes_others_forget_everything(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        one.transact(_grow, b"k")
        other.transact(_many, engines.KEYS_NAMED_MAX + 1)
        other.transact(_grow, b"k")
        assert one.transact(_grow, b"k") == 3


def test_a_transaction_that_read_what_another_process_changed_is_run_again(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        one.transact(lambda txn: txn.put(b"k", b"1"))
        seen: list[bytes | None] = []

        def read_and_write(txn: Txn) -> None:
            seen.append(txn.get(b"k"))
            if len(seen) == 1:
                other.transact(lambda inner: inner.put(b"k", b"2"))
            txn.put(b"copy", txn.get(b"k") or b"")

        one.transact(read_and_write)
        assert seen == [b"1", b"2"]
        assert one.read(lambda txn: txn.get(b"copy")) == b"2"


def test_what_one_process_rings_another_hears(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        since = other.wait("bell", 0, 0.0)
        one.transact(lambda txn: txn.notify("bell"))
        assert other.wait("bell", since, 30.0) > since


def test_a_commit_whose_connection_is_cut_before_it_is_sent_is_made_on_another(
    store: PostgresStore,
) -> None:
    store.transact(_grow, b"k")
    _cut(store)
    assert store.transact(_grow, b"k") == 2
    assert store.retries == 1


def test_a_listener_that_was_cut_off_takes_it_that_everything_has_rung(url: str) -> None:
    with PostgresStore(url) as store:
        since = store.wait("bell", 0, 0.0)
        store.transact(_grow, b"k")
        _terminate("%")
        assert store.wait("bell", since, 30.0) > since


def test_readers_that_were_cut_off_come_back(store: PostgresStore) -> None:
    store.transact(_grow, b"k")
    assert store.read(_grown, b"k") == 1
    _terminate("%")
    assert store.read(_grown, b"k") == 1


def test_many_threads_share_commits(store: PostgresStore) -> None:
    threads = [
        threading.Thread(target=lambda: [store.transact(_grow, b"k") for _ in range(20)])
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read(_grown, b"k") == 320
    assert store._engine.commit_no < 320


def test_a_store_is_not_made_without_bootstrap(url: str) -> None:
    with pytest.raises(NotFound):
        PostgresStore(url, bootstrap=False)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT to_regclass('holdfast_row')").fetchone() == (None,)


def test_a_store_of_a_newer_release_is_refused(url: str) -> None:
    PostgresStore(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE holdfast_row SET value = %b WHERE key = %b",
            (schema.marker(schema.SCHEMA_MAJOR + 1, 0), schema.MARKER_KEY),
        )
    with pytest.raises(SchemaMismatch):
        PostgresStore(url)


def test_a_database_that_is_not_there_is_named() -> None:
    with pytest.raises(NotFound) as raised:
        holdfast.store.open(in_database(server(18), "nowhere"))
    assert "nowhere" in str(raised.value)


def test_a_role_without_privileges_is_denied(url: str) -> None:
    with admin() as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(Denied):
        holdfast.store.open(url.replace("postgres:@", "guest:@"))


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with pytest.raises(Unreachable):
        holdfast.store.open("postgresql://127.0.0.1:1/nothing")


def test_a_url_that_says_nothing_we_know_is_refused() -> None:
    with pytest.raises(BadUrl):
        holdfast.store.open("postgresql://host/db?no_such_option=1")


def test_a_password_is_never_told() -> None:
    told = shown("postgresql://me:secret@host:5432/db")
    assert "secret" not in told
    with pytest.raises(HoldfastError) as raised:
        holdfast.store.open("postgresql://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(raised.value)


def test_old_commits_are_forgotten(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "COMMITS_KEPT", 5)
    monkeypatch.setattr(engines, "PRUNE_EVERY", 10)
    for _ in range(30):
        store.transact(_grow, b"k")
    with store._readers.lent() as connection:
        [(kept,)] = connection.execute("SELECT count(*) FROM holdfast_commit").fetchall()
    assert kept <= 15


def test_who_was_away_for_longer_than_commits_are_kept_starts_anew(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "COMMITS_KEPT", 5)
    monkeypatch.setattr(engines, "PRUNE_EVERY", 10)
    with PostgresStore(url) as one, PostgresStore(url) as other:
        one.transact(_grow, b"k")
        for _ in range(30):
            other.transact(_grow, b"k")
        assert one.transact(_grow, b"k") == 32


def _grow(txn: Txn, space: bytes) -> object:
    """The next number of a space: its counter is read where the commit is applied."""
    return txn.append(space, b"")


def _grown(txn: Txn, space: bytes) -> int:
    return len(txn.scan(space, tuples.after(space)))


def _many(txn: Txn, count: int) -> None:
    for n in range(count):
        txn.put(b"row" + n.to_bytes(4, "big"), b"")


def _cut(store: PostgresStore) -> None:
    """End the connection of the committer, on the server's side."""
    connection = store._engine._connection
    assert connection is not None
    with admin() as other:
        other.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))


def _terminate(like: str) -> None:
    with admin() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE %s AND pid <> pg_backend_pid() AND backend_type = 'client backend'",
            (like,),
        )
