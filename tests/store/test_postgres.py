"""PostgresStore: behaviour beyond the conformance suite (server, network, other processes)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psycopg
import pytest

import holdfast.store
from holdfast.errors import BadUrl, HoldfastError, NotFound, SchemaMismatch
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.postgres import engine as engines
from holdfast.store.postgres.server import PostgresUnreachable, ServerDenied
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.urls import redact
from tests.postgres import admin, fresh_url, in_database, server

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def url() -> str:
    return fresh_url(empty=True)


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    with PostgresStore(url) as opened:
        yield opened


def test_row_written_by_another_process_invalidates_the_cache(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        assert [one.transact(_append_row, b"k") for _ in range(3)] == [1, 2, 3]
        assert [other.transact(_append_row, b"k") for _ in range(3)] == [4, 5, 6]
        assert one.transact(_append_row, b"k") == 7


def test_commit_with_too_many_keys_invalidates_all_rows_of_other_processes(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        one.transact(_append_row, b"k")
        other.transact(_put_many_rows, engines.KEYS_NAMED_MAX + 1)
        other.transact(_append_row, b"k")
        assert one.transact(_append_row, b"k") == 3


def test_transaction_reruns_after_a_conflicting_commit_of_another_process(url: str) -> None:
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


def test_notify_wakes_a_wait_in_another_process(url: str) -> None:
    with PostgresStore(url) as one, PostgresStore(url) as other:
        since = other.wait("bell", 0, 0.0)
        one.transact(lambda txn: txn.notify("bell"))
        assert other.wait("bell", since, 30.0) > since


def test_commit_is_retried_on_a_new_connection_when_cut_before_the_send(
    store: PostgresStore,
) -> None:
    store.transact(_append_row, b"k")
    _terminate_committer(store)
    assert store.transact(_append_row, b"k") == 2
    assert store.retries == 1


def test_listener_treats_all_topics_as_notified_after_a_disconnect(url: str) -> None:
    with PostgresStore(url) as store:
        since = store.wait("bell", 0, 0.0)
        store.transact(_append_row, b"k")
        _terminate("%")
        assert store.wait("bell", since, 30.0) > since


def test_read_pool_reconnects_after_a_disconnect(store: PostgresStore) -> None:
    store.transact(_append_row, b"k")
    assert store.read(_count_rows, b"k") == 1
    _terminate("%")
    assert store.read(_count_rows, b"k") == 1


def test_transactions_of_many_threads_share_group_commits(store: PostgresStore) -> None:
    threads = [
        threading.Thread(target=lambda: [store.transact(_append_row, b"k") for _ in range(20)])
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read(_count_rows, b"k") == 320
    assert store._engine.commit_no < 320


def test_open_without_bootstrap_raises_not_found_for_an_empty_database(url: str) -> None:
    with pytest.raises(NotFound):
        PostgresStore(url, bootstrap=False)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT to_regclass('holdfast_row')").fetchone() == (None,)


def test_store_with_a_newer_schema_marker_raises_schema_mismatch(url: str) -> None:
    PostgresStore(url).close()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "UPDATE holdfast_row SET value = %b WHERE key = %b",
            (schema.encode_marker(schema.SCHEMA_MAJOR + 1, 0), schema.MARKER_KEY),
        )
    with pytest.raises(SchemaMismatch):
        PostgresStore(url)


def test_missing_database_raises_not_found_with_its_name() -> None:
    with pytest.raises(NotFound) as raised:
        holdfast.store.open(in_database(server(18), "nowhere"))
    assert "nowhere" in str(raised.value)


def test_role_without_privileges_raises_server_denied(url: str) -> None:
    with admin() as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
    with pytest.raises(ServerDenied):
        holdfast.store.open(url.replace("postgres:@", "guest:@"))


def test_missing_server_raises_postgres_unreachable() -> None:
    with pytest.raises(PostgresUnreachable):
        holdfast.store.open("postgresql://127.0.0.1:1/nothing")


def test_url_with_an_unknown_option_raises_bad_url() -> None:
    with pytest.raises(BadUrl):
        holdfast.store.open("postgresql://host/db?no_such_option=1")


def test_password_is_redacted_from_url_and_errors() -> None:
    redacted = redact("postgresql://me:secret@host:5432/db")
    assert "secret" not in redacted
    with pytest.raises(HoldfastError) as raised:
        holdfast.store.open("postgresql://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(raised.value)


def test_old_commit_records_are_pruned(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "COMMITS_KEPT", 5)
    monkeypatch.setattr(engines, "PRUNE_EVERY", 10)
    for _ in range(30):
        store.transact(_append_row, b"k")
    with store._read_pool.borrowed() as connection:
        [(kept,)] = connection.execute("SELECT count(*) FROM holdfast_commit").fetchall()
    assert kept <= 15


def test_process_behind_the_pruned_commits_resets_its_local_state(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "COMMITS_KEPT", 5)
    monkeypatch.setattr(engines, "PRUNE_EVERY", 10)
    with PostgresStore(url) as one, PostgresStore(url) as other:
        one.transact(_append_row, b"k")
        for _ in range(30):
            other.transact(_append_row, b"k")
        assert one.transact(_append_row, b"k") == 32


def _append_row(txn: Txn, space: bytes) -> object:
    """Append a row and return its number. The counter is read when the commit is applied."""
    return txn.append(space, b"")


def _count_rows(txn: Txn, space: bytes) -> int:
    return len(txn.scan(space, tuples.prefix_end(space)))


def _put_many_rows(txn: Txn, count: int) -> None:
    for n in range(count):
        txn.put(b"row" + n.to_bytes(4, "big"), b"")


def _terminate_committer(store: PostgresStore) -> None:
    """Terminate the committer's backend on the server."""
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
