"""What a process asks the server for, and what it need not: glances, topics, rows that are new or were lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast.store
from holdfast.clock import SYSTEM
from holdfast.durable import queue
from holdfast.errors import Invalid
from holdfast.store import postgres
from holdfast.store.api import Txn, glance
from holdfast.store.pg import known as knowns
from holdfast.store.pg.topics import Topics
from holdfast.store.postgres import PostgresStore
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(60)

WAIT_S = 20.0
LONG_NS = 10**12


@pytest.fixture
def two() -> Iterator[tuple[PostgresStore, PostgresStore]]:
    """Two stores in one process share nothing, as if they were in two."""
    url = fresh_url()
    with PostgresStore(url) as one, PostgresStore(url) as other:
        yield one, other


@pytest.fixture
def asked(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """How often the first of two has asked what others have committed. It listens, and knows all."""
    monkeypatch.setattr(postgres, "GLANCE_NS", LONG_NS)
    one, _ = two
    one.wait("rung", 0, 0.0)
    assert one._topics._listening.wait(WAIT_S)
    one.read(_number)
    one.read(_number)
    asked: list[object] = []
    whole = one._asking.refresh

    def refresh() -> None:
        asked.append(None)
        whole()

    monkeypatch.setattr(one._asking, "refresh", refresh)
    return asked


def test_a_glance_at_what_is_known_asks_nobody(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    assert glance(two[0], _number) == 0
    assert not asked


def test_a_glance_shows_what_its_own_process_has_committed(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    two[0].transact(lambda txn: txn.add(b"n", 1))
    assert glance(two[0], _number) == 1
    assert not asked


def test_a_glance_shows_what_has_rung(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    since = one.wait("rung", 0, 0.0)
    other.transact(_add_and_ring)
    assert one.wait("rung", since, WAIT_S) > since
    assert glance(one, _number) == 1
    assert asked


def test_a_glance_asks_while_nobody_listens(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    one._topics.hearing = False
    other.transact(lambda txn: txn.add(b"n", 1))
    assert glance(one, _number) == 1
    assert asked


def test_a_glance_is_never_older_than_its_bound(
    two: tuple[PostgresStore, PostgresStore],
    asked: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = two
    monkeypatch.setattr(postgres, "GLANCE_NS", 0)
    other.transact(lambda txn: txn.add(b"n", 1))
    assert glance(one, _number) == 1


def test_a_glance_that_meets_an_unknown_row_reads_it(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    other.transact(lambda txn: txn.put(b"unknown", b"there"))
    assert glance(one, lambda txn: txn.get(b"unknown")) == b"there"


def test_writing_in_a_glance_is_refused(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    with pytest.raises(Invalid):
        glance(two[0], lambda txn: txn.put(b"n", b""))


def test_a_glance_at_a_store_without_a_server_is_a_read() -> None:
    with holdfast.store.open("memory:") as store:
        store.transact(lambda txn: txn.add(b"n", 1))
        assert glance(store, _number) == 1


def test_a_ring_wakes_those_alone_whose_topic_it_is(topics: Topics) -> None:
    waiters = {topic: _Waiter(topics, topic) for topic in ("mine", "yours")}
    topics.ring(7, ["mine"])
    assert waiters["mine"].ended() == 7
    assert set(topics._waiting) == {"yours"}
    topics.ring(8, ["*"])
    assert waiters["yours"].ended() == 8
    assert not topics._waiting


def test_what_a_process_rings_itself_it_does_not_hear_of_from_the_server(
    two: tuple[PostgresStore, PostgresStore], asked: list[object]
) -> None:
    one, other = two
    before = one._topics.heard
    one.transact(_add_and_ring)
    other.transact(lambda txn: txn.notify("behind it"))
    assert one.wait("behind it", before, WAIT_S) == one._topics.heard
    assert one._topics._rung == {"rung": before + 1, "behind it": before + 2}
    assert one.wait("rung", before, WAIT_S) == before + 1


def test_what_rings_while_the_listener_asks_something_is_heard(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    other.transact(_add_and_ring)
    since, _ = one.size()
    last = one._topics._last

    def ring_before(connection: Any) -> int:
        """After it has begun to listen, and after it has looked."""
        found = last(connection)
        other.transact(_add_and_ring)
        connection.execute("SELECT")
        return found

    one._topics._last = ring_before
    assert one.wait("rung", since, WAIT_S) == since + 1


def test_one_who_waits_for_several_topics_is_woken_by_any(topics: Topics) -> None:
    waiter = _Waiter(topics, "mine", "yours")
    topics.ring(7, ["yours"])
    assert waiter.ended() == 7
    assert not topics._waiting


def test_those_who_wait_are_let_go_when_topics_are_closed(topics: Topics) -> None:
    waiter = _Waiter(topics, "mine")
    topics.close()
    assert waiter.ended() == 0


def test_what_a_transaction_has_written_itself_is_not_asked_for() -> None:
    with PostgresStore(fresh_url()) as store:
        for _ in range(3):
            store.transact(_put_and_claim)
        before = store.counters.misses
        store.transact(_put_and_claim)
        assert store.counters.misses == before


def test_rows_that_others_wrote_are_asked_for_together(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    many = [b"row%d" % n for n in range(knowns.REFRESHED_KEYS_MAX + 1)]
    keys = many[:50]
    other.transact(lambda txn: [txn.put(key, b"old") for key in many])
    assert one.read(lambda txn: [txn.get(key) for key in keys]) == [b"old"] * 50
    other.transact(lambda txn: [txn.put(key, b"new") for key in many])
    asked: list[object] = []
    whole = one._readers.ask

    def ask(statement: str, values: Any) -> list[Any]:
        asked.append(statement)
        return whole(statement, values)

    monkeypatch.setattr(one._readers, "ask", ask)
    assert one.read(lambda txn: [txn.get(key) for key in keys]) == [b"new"] * 50
    assert len(asked) == 1


def test_rows_that_were_taken_for_new_are_replaced_if_they_are_there(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    keys = [b"row%03d" % n for n in range(2 * knowns.NEW_MIN)]
    other.transact(lambda txn: [txn.put(key, b"old") for key in keys[::7]])
    one.transact(lambda txn: [txn.put(key, b"new") for key in keys])
    for store in two:
        found = store.read(lambda txn: txn.scan(b"row", b"rox", 1_000))
        assert found == [(key, b"new") for key in keys]


@pytest.fixture
def topics() -> Iterator[Topics]:
    """Of no server."""
    topics = Topics("", "none", lambda connection: 0, b"process!")
    topics._started = True
    topics._thread = threading.Thread()
    topics._thread.start()
    yield topics
    topics.close()


class _Waiter:
    """A thread that waits, and by now sleeps."""

    def __init__(self, topics: Topics, *names: str) -> None:
        self._found: list[int] = []
        self._thread = threading.Thread(
            target=lambda: self._found.append(topics.wait(names, 0, WAIT_S, SYSTEM.mono_ns))
        )
        self._thread.start()
        deadline_ns = SYSTEM.mono_ns() + int(WAIT_S * 1e9)
        while not all(name in topics._waiting for name in names):
            assert SYSTEM.mono_ns() < deadline_ns

    def ended(self) -> int:
        self._thread.join(WAIT_S)
        [found] = self._found
        return found


def _put_and_claim(txn: Txn) -> None:
    queue.put(txn, "jobs", b"job")
    queue.claim(txn, "jobs", "worker", 1, LONG_NS)


def _number(txn: Txn) -> int:
    return txn.count(b"n")


def _add_and_ring(txn: Txn) -> None:
    txn.add(b"n", 1)
    txn.notify("rung")
