"""Statements to the server and their avoidance: stale reads, topic notifications, new and invalidated rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast.store
from holdfast import failpoints
from holdfast.clock import SYSTEM
from holdfast.durable import queue
from holdfast.errors import Invalid, StoreClosed
from holdfast.store.api import Txn, read_stale
from holdfast.store.postgres import local_state as knowns
from holdfast.store.postgres import store as postgres_store
from holdfast.store.postgres.notifications import NotificationListener
from holdfast.store.postgres.store import PostgresStore
from holdfast.store.subscription import wait_once
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

WAIT_S = 20.0
LONG_NS = 10**12


@pytest.fixture
def two() -> Iterator[tuple[PostgresStore, PostgresStore]]:
    """Open two stores on one database. They share no state, like stores of two processes."""
    url = fresh_url()
    with PostgresStore(url) as one, PostgresStore(url) as other:
        yield one, other


@pytest.fixture
def asked(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[object]]:
    """Record each refresh of the first store. It listens for notifications, and its cache is current."""
    monkeypatch.setattr(postgres_store, "STALENESS_MAX_NS", LONG_NS)
    one, _ = two
    one.wait("rung", 0, 0.0)
    assert one._notifications._listening.wait(WAIT_S)
    one.read(_read_counter)
    one.read(_read_counter)
    asked: list[object] = []

    def record(reads: object) -> None:
        if reads is one._coalesced_reads:
            asked.append(None)

    with failpoints.on("postgres.refresh", calls=record):
        yield asked


def test_read_stale_of_cached_rows_does_not_query_the_server(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    assert read_stale(two[0], _read_counter) == 0
    assert not asked


def test_read_stale_sees_commits_of_the_same_process(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    two[0].transact(lambda txn: txn.add(b"n", 1))
    assert read_stale(two[0], _read_counter) == 1
    assert not asked


def test_read_stale_sees_a_notified_commit(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    since = one.wait("rung", 0, 0.0)
    other.transact(_add_and_notify)
    assert one.wait("rung", since, WAIT_S) > since
    assert read_stale(one, _read_counter) == 1
    assert asked


def test_read_stale_refreshes_while_not_listening(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    one._notifications.is_listening = False
    other.transact(lambda txn: txn.add(b"n", 1))
    assert read_stale(one, _read_counter) == 1
    assert asked


def test_read_stale_is_not_older_than_staleness_max(
    two: tuple[PostgresStore, PostgresStore],
    asked: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = two
    monkeypatch.setattr(postgres_store, "STALENESS_MAX_NS", 0)
    other.transact(lambda txn: txn.add(b"n", 1))
    assert read_stale(one, _read_counter) == 1


def test_read_stale_reads_an_uncached_row_from_the_server(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    other.transact(lambda txn: txn.put(b"unknown", b"there"))
    assert read_stale(one, lambda txn: txn.get(b"unknown")) == b"there"


def test_write_in_read_stale_raises_invalid(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    with pytest.raises(Invalid):
        read_stale(two[0], lambda txn: txn.put(b"n", b""))


def test_read_stale_on_a_memory_store_is_a_read() -> None:
    with holdfast.store.open("memory:") as store:
        store.transact(lambda txn: txn.add(b"n", 1))
        assert read_stale(store, _read_counter) == 1


def test_notify_local_wakes_only_waiters_of_its_topics(topics: NotificationListener) -> None:
    waiters = {topic: _TopicWaiterThread(topics, topic) for topic in ("mine", "yours")}
    topics.notify_local(7, ["mine"])
    assert waiters["mine"].commit_no() == 7
    assert "yours" in topics.sleepers
    assert "mine" not in topics.sleepers
    topics.notify_local(8, ["*"])
    assert waiters["yours"].commit_no() == 8
    assert not len(topics.sleepers)


def test_own_notification_from_the_server_is_ignored(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    before = one._notifications.last_remote_commit
    one.transact(_add_and_notify)
    other.transact(lambda txn: txn.notify("behind it"))
    assert one.wait("behind it", before, WAIT_S) == one._notifications.last_remote_commit
    assert one._notifications._topic_commits == {"rung": before + 1, "behind it": before + 2}
    assert one.wait("rung", before, WAIT_S) == before + 1


def test_notification_during_a_statement_of_the_listener_is_received(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    other.transact(_add_and_notify)
    since, _ = one.size()
    read_last = one._notifications._read_last_commit_no

    def ring_before(connection: Any) -> int:
        """Notify after LISTEN and after the read of the last commit number."""
        found = read_last(connection)
        other.transact(_add_and_notify)
        connection.execute("SELECT")
        return found

    one._notifications._read_last_commit_no = ring_before
    assert one.wait("rung", since, WAIT_S) == since + 1


def test_wait_for_several_topics_is_woken_by_any_of_them(topics: NotificationListener) -> None:
    waiter = _TopicWaiterThread(topics, "mine", "yours")
    topics.notify_local(7, ["yours"])
    assert waiter.commit_no() == 7
    assert not len(topics.sleepers)


def test_close_wakes_waiters_of_the_notification_listener(topics: NotificationListener) -> None:
    waiter = _TopicWaiterThread(topics, "mine")
    topics.close()
    assert waiter.commit_no() == 0


def test_rows_written_by_the_transaction_cause_no_cache_miss() -> None:
    with PostgresStore(fresh_url()) as store:
        for _ in range(3):
            store.transact(_put_and_claim)
        before = store.counters.misses
        store.transact(_put_and_claim)
        assert store.counters.misses == before


def test_invalidated_rows_are_read_in_one_statement(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    many = [b"row%d" % n for n in range(knowns.KEYS_REFRESHED_MAX + 1)]
    keys = many[:50]
    other.transact(lambda txn: [txn.put(key, b"old") for key in many])
    assert one.read(lambda txn: [txn.get(key) for key in keys]) == [b"old"] * 50
    other.transact(lambda txn: [txn.put(key, b"new") for key in many])
    statements: list[object] = []

    def record(pool: object, statement: str) -> None:
        if pool is one._read_pool:
            statements.append(statement)

    with failpoints.on("postgres.fetch", calls=record):
        assert one.read(lambda txn: [txn.get(key) for key in keys]) == [b"new"] * 50
    assert len(statements) == 1


def test_rows_assumed_to_be_inserts_replace_existing_rows(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    keys = [b"row%03d" % n for n in range(2 * knowns.INSERTS_MIN)]
    other.transact(lambda txn: [txn.put(key, b"old") for key in keys[::7]])
    one.transact(lambda txn: [txn.put(key, b"new") for key in keys])
    for store in two:
        scanned = store.read(lambda txn: txn.scan(b"row", b"rox", 1_000))
        assert scanned == [(key, b"new") for key in keys]


@pytest.fixture
def topics() -> Iterator[NotificationListener]:
    """Create a listener without a server."""

    def check_open() -> None:
        if topics._closed:
            raise StoreClosed

    topics = NotificationListener(
        "",
        "none",
        lambda connection: 0,
        b"process!",
        check_open=check_open,
        mono_ns=SYSTEM.mono_ns,
    )
    topics._started = True
    topics._thread = threading.Thread()
    topics._thread.start()
    yield topics
    topics.close()


class _TopicWaiterThread:
    """A thread that is blocked in `wait`."""

    def __init__(self, topics: NotificationListener, *names: str) -> None:
        self._commits: list[int] = []

        def wait() -> None:
            try:
                self._commits.append(wait_once(topics, names, 0, WAIT_S))
            except StoreClosed:
                self._commits.append(0)

        self._thread = threading.Thread(target=wait)
        self._thread.start()
        deadline_ns = SYSTEM.mono_ns() + int(WAIT_S * 1e9)
        while not all(name in topics.sleepers for name in names):
            assert SYSTEM.mono_ns() < deadline_ns

    def commit_no(self) -> int:
        self._thread.join(WAIT_S)
        [commit] = self._commits
        return commit


def _put_and_claim(txn: Txn) -> None:
    queue.put(txn, "jobs", b"job")
    queue.claim(txn, "jobs", "worker", 1, LONG_NS)


def _read_counter(txn: Txn) -> int:
    return txn.count(b"n")


def _add_and_notify(txn: Txn) -> None:
    txn.add(b"n", 1)
    txn.notify("rung")
