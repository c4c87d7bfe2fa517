"""Several processes on one store: nobody takes for known what another has changed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psycopg
import pytest

from holdfast.durable import queue
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.pg import engine as engines
from holdfast.store.pg import known as knowns
from holdfast.store.pg import readers, rows
from holdfast.store.pg.server import Unreachable
from holdfast.store.postgres import PostgresStore
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(120)

ACCOUNTS = 12
START = 1_000


@pytest.fixture
def url() -> str:
    return fresh_url()


@pytest.fixture
def two(url: str) -> Iterator[tuple[PostgresStore, PostgresStore]]:
    """Two stores in one process share nothing, as if they were in two."""
    with PostgresStore(url) as one, PostgresStore(url) as other:
        yield one, other


def test_who_commits_alone_does_it_in_one_round_trip(url: str) -> None:
    with PostgresStore(url) as store:
        for _ in range(engines.ALONE_AFTER + 1):
            store.transact(_grow)
        before = store.counters.round_trips
        for _ in range(10):
            store.transact(_grow)
        assert store.counters.round_trips - before == 10


def test_those_who_commit_by_turns_need_two_round_trips(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    for store in two * 3:
        store.transact(_grow)
    before = two[0].counters.round_trips
    for store in two * 10:
        store.transact(_grow)
    assert two[0].counters.round_trips - before == 20
    assert two[0].read(_grown) == 26


def test_who_is_forestalled_applies_it_again(two: tuple[PostgresStore, PostgresStore]) -> None:
    one, other = two
    while not one.counters.at_once:
        one.transact(_grow)
    grown = other.transact(_grow)
    assert one.transact(_grow) == grown + 1
    assert one.counters.forestalled == 1


def test_an_operation_that_finds_nothing_is_not_misled_by_what_was_known(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    while not one.counters.at_once:
        one.transact(_grow)
    assert one.transact(queue.claim, "q", "me", 10, 60 * 10**9) == []
    other.transact(queue.put, "q", b"item")
    assert len(one.transact(queue.claim, "q", "me", 10, 60 * 10**9)) == 1


def test_what_finds_nothing_to_do_makes_no_commit(url: str) -> None:
    with PostgresStore(url) as store:
        store.transact(_grow)
        commits = store.size()[0]
        for _ in range(10):
            store.transact(queue.claim, "q", "me", 10, 60 * 10**9)
        assert store.size()[0] == commits


def test_a_read_sees_what_another_process_committed_before_it(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    for n in range(20):
        one.transact(lambda txn, n=n: txn.put(b"k", b"%d" % n))
        assert other.read(lambda txn: txn.get(b"k")) == b"%d" % n
        assert other.read(lambda txn: txn.scan(b"j", b"l", 10)) == [(b"k", b"%d" % n)]


def test_reads_of_what_is_known_need_no_snapshot(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    one.transact(lambda txn: txn.put(b"k", b"1"))
    other.read(lambda txn: txn.get(b"k"))

    def refuse(self: readers.Snapshot, *_: object) -> None:
        raise AssertionError("a snapshot was asked")

    monkeypatch.setattr(readers.Snapshot, "_ask", refuse)
    one.transact(lambda txn: txn.put(b"k", b"2"))
    assert other.read(lambda txn: txn.get(b"k")) == b"2"


def test_a_function_that_raises_because_of_what_is_out_of_date_is_run_again(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    other.transact(lambda txn: txn.put(b"k", b"1"))
    assert one.read(lambda txn: txn.get(b"k")) == b"1"
    other.transact(lambda txn: txn.put(b"k", b"2"))

    def strict(txn: Txn) -> bytes:
        found = txn.get(b"k")
        if found != b"2":
            raise ValueError(found)
        return found

    assert one.transact(strict) == b"2"


def test_what_a_transaction_read_is_as_of_one_commit(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    """Two rows that are always written together are never seen apart, while others write them."""
    one, other = two
    stop = threading.Event()

    def write() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            value = b"%d" % n
            other.transact(lambda txn, value=value: (txn.put(b"k1", value), txn.put(b"k2", value)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(150):
            assert len(set(one.read(lambda txn: (txn.get(b"k1"), txn.get(b"k2"))))) == 1
            rows = one.read(lambda txn: txn.scan(b"k", b"l", 5))
            assert len({value for _, value in rows}) <= 1
    finally:
        stop.set()
        writer.join()


def test_the_number_of_a_snapshot_is_that_of_its_rows(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    """Each commit writes one row more, so the number of the last one is theirs."""
    one, other = two
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            other.transact(_grow)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            snapshot = readers.Snapshot(one._readers)
            rows = snapshot.scan(b"k", tuples.after(b"k"), None, False)
            assert len(rows) == snapshot.id
            snapshot.close()
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("keys_named", [engines.KEYS_NAMED_MAX, 3])
def test_processes_that_commit_at_random_agree(
    url: str, monkeypatch: pytest.MonkeyPatch, keys_named: int
) -> None:
    """Money is moved between accounts, by transactions that read and by operations; none is made or lost,
    and whoever reads sees all of it. With few keys named, others often forget everything."""
    with PostgresStore(url) as store:
        for account in range(ACCOUNTS):
            store.transact(lambda txn, account=account: txn.add(_account(account), START))
        spawn = multiprocessing.get_context("spawn")
        pipes: list[Pipe] = []
        children = []
        for seed in range(3):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(
                target=_move_money, args=(url, seed, keys_named, theirs), daemon=True
            )
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        pick = random.Random(99)
        for _ in range(60):
            _step(store, pick)
        moves = [pipe.recv() for pipe in pipes]
        for child in children:
            child.join(30)
        assert [count for count, _ in moves] == [60] * 3
        assert all(total == ACCOUNTS * START for _, totals in moves for total in totals)
        assert store.read(_total) == ACCOUNTS * START
        assert store.read(lambda txn: txn.count(b"moves")) == 240
        numbers = [key for key, _ in store.read(lambda txn: txn.scan(b"log", b"loh"))]
        assert len(numbers) == 240


def test_a_process_that_was_behind_by_many_commits_starts_anew(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(knowns, "REFRESHED_MAX", 2)
    one.transact(_grow)
    for _ in range(10):
        other.transact(_grow)
    assert one.transact(_grow) == 12
    assert one.read(_grown) == 12


def test_misses_of_a_batch_are_asked_for_together(url: str) -> None:
    with PostgresStore(url) as store:
        store.transact(lambda txn: [txn.put(b"row%d" % n, bytes(8)) for n in range(100)])
    with PostgresStore(url) as store:
        requests = [
            engines.Request(n, b"c", 0, adds={b"row%d" % n: 1, b"other%d" % n: 1})
            for n in range(100)
        ]
        before = store.counters.round_trips
        store._engine.commit(requests)
        assert store.counters.round_trips - before < 10
        assert store.read(lambda txn: [txn.count(b"row%d" % n) for n in range(100)]) == [1] * 100


def test_a_history_that_was_lost_is_not_built_upon(url: str) -> None:
    """A standby that lagged was promoted: the last commits are not there, and their numbers are given anew."""
    with PostgresStore(url) as one:
        one.transact(lambda txn: txn.put(b"k", b"kept"))
        since = one.wait("bell", 0, 0.0)
        for _ in range(5):
            one.transact(lambda txn: txn.put(b"k", b"lost"))
        with psycopg.connect(url, autocommit=True) as server:
            server.execute("DELETE FROM holdfast_commit WHERE no > 1")
            server.execute("UPDATE holdfast_row SET value = 'kept' WHERE key = 'k'")
        one._engine._disconnect()
        with PostgresStore(url) as other:
            for _ in range(3):
                other.transact(_grow)
        seen: list[bytes | None] = []

        def read_and_write(txn: Txn) -> None:
            seen.append(txn.get(b"k"))
            txn.put(b"copy", seen[-1] or b"")

        one.transact(read_and_write)
        assert one.read(lambda txn: txn.get(b"copy")) == b"kept"
        assert one._engine.history == 1
        assert one.wait("bell", since + 5, 30.0) > since + 5


def test_a_transaction_that_read_a_history_that_is_lost_is_run_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresStore(url) as store:
        store.transact(lambda txn: txn.put(b"k", b"1"))
        store.transact(lambda txn: txn.put(b"k", b"2"))
        seen: list[bytes | None] = []

        def read_and_write(txn: Txn) -> None:
            seen.append(txn.get(b"k"))
            if len(seen) == 1:
                with psycopg.connect(url, autocommit=True) as server:
                    server.execute("UPDATE holdfast_row SET value = '1' WHERE key = 'k'")
                    server.execute("UPDATE holdfast_commit SET at_ns = at_ns + 1 WHERE no = 2")
                store._engine._disconnect()
                store._engine._connect()
            txn.put(b"copy", seen[-1] or b"")

        store.transact(read_and_write)
        assert seen == [b"2", b"1"]


def test_the_batch_that_finds_a_failover_does_not_commit_what_was_read_before(url: str) -> None:
    with PostgresStore(url) as store:
        _lose_a_commit(store)

        def copy(txn: Txn) -> None:
            txn.put(b"copy", txn.get(b"k") or b"")

        store.transact(copy)
        assert store.read(lambda txn: txn.get(b"copy")) == b"kept"


def test_who_only_reads_finds_that_the_server_has_another_history(url: str) -> None:
    with PostgresStore(url) as store, PostgresStore(url) as other:
        _lose_a_commit(store)
        assert store.read(lambda txn: txn.get(b"k")) == b"kept"
        other.transact(lambda txn: txn.put(b"k", b"new"))
        assert store.read(lambda txn: txn.get(b"k")) == b"new"


def test_a_read_is_not_torn_by_what_another_thread_has_learned(url: str) -> None:
    with PostgresStore(url) as other:
        _both(other, b"1")
        with PostgresStore(url) as one:
            # Of the two rows one is known there.
            one.read(lambda txn: txn.get(b"k2"))
            found = _read_while_another_learns(one, other)
    assert found[0] == found[1]


def _read_while_another_learns(
    one: PostgresStore, other: PostgresStore
) -> tuple[bytes | None, bytes | None]:
    reading, learned, done = threading.Event(), threading.Event(), threading.Event()
    seen: list[tuple[bytes | None, bytes | None]] = []

    def read(txn: Txn) -> tuple[bytes | None, bytes | None]:
        reading.set()
        learned.wait(30)
        return txn.get(b"k1"), txn.get(b"k2")

    def learn(txn: Txn) -> None:
        txn.get(b"k1")
        txn.put(b"other", b"")
        learned.set()
        done.wait(30)

    reader = threading.Thread(target=lambda: seen.append(one.read(read)))
    reader.start()
    reading.wait(30)
    _both(other, b"2")
    learner = threading.Thread(target=lambda: one.transact(learn))
    learner.start()
    reader.join(30)
    done.set()
    learner.join(30)
    return seen[0]


def test_what_the_committer_reads_does_not_replace_what_is_newer(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    while not one.counters.at_once:
        one.transact(_grow)
    with psycopg.connect(one.address, autocommit=True) as server:
        server.execute("INSERT INTO holdfast_row VALUES ('n', %b)", (bytes(8),))
    whole = rows.ask
    once = iter([True])

    def ask(connection: Any, counters: Any, statement: str, *values: Any) -> list[Any]:
        found = whole(connection, counters, statement, *values)
        if values == (b"n",) and next(once, False):
            other.transact(lambda txn: txn.add(b"n", 1))
            one._asking.refresh()
        return found

    monkeypatch.setattr(rows, "ask", ask)
    one.transact(lambda txn: txn.add(b"n", 1))
    assert next(once, False) is False
    assert one.read(lambda txn: txn.count(b"n")) == 2
    one.transact(lambda txn: txn.add(b"n", 1))
    assert other.read(lambda txn: txn.count(b"n")) == 3


def test_the_times_of_commits_only_rise(two: tuple[PostgresStore, PostgresStore]) -> None:
    one, other = two
    while not one.counters.at_once:
        one.transact(_grow)
    one._engine._timing.offset_ns -= (
        40_000_000  # an answer that came late: store time is a lower bound
    )
    other.transact(_grow)
    one.read(_grown)
    one.transact(_grow)
    with psycopg.connect(one.address) as server:
        times = server.execute("SELECT at_ns FROM holdfast_commit ORDER BY no").fetchall()
    assert times == sorted(times)


def test_a_large_commit_is_sent_once_and_in_parts(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece the library takes time by the square of it, and then the server's patience is over."""
    one, other = two
    while not one.counters.at_once:
        one.transact(_grow)
    sizes: list[int] = []
    whole = engines.ask_all

    def ask_all(connection: Any, counters: Any, asked: Any) -> Any:
        packed = [value for _, values in asked for value in values if type(value) is engines.Arrays]
        sizes.append(sum(len(value.packed) for value in packed))
        return whole(connection, counters, asked)

    monkeypatch.setattr(engines, "ask_all", ask_all)
    monkeypatch.setattr(engines, "PART_BYTES", 10_000)
    tried, commits = one.counters.at_once, one.counters.commits
    one.transact(_write_much, 50, b"x" * 3_000)
    assert 0 < max(sizes) < 15_000
    assert 150_000 < sum(sizes) < 200_000
    assert (one.counters.at_once, one.counters.commits) == (tried, commits + 1)
    assert other.read(lambda txn: len(txn.scan(b"much", b"muci", 100))) == 50


def test_of_a_commit_sent_in_parts_others_learn_every_key(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(engines, "PART_BYTES", 10_000)
    one.transact(_write_much, 10, b"x" * 3_000)
    known = [other.read(lambda txn, n=n: txn.get(b"much%03d" % n)) for n in range(10)]
    assert known == [b"x" * 3_000] * 10
    one.transact(_write_much, 10, b"y" * 3_000)
    for n in range(10):
        assert other.read(lambda txn, n=n: txn.get(b"much%03d" % n)) == b"y" * 3_000
    with psycopg.connect(one.address) as server:
        row = server.execute("SELECT keys FROM holdfast_commit ORDER BY no DESC LIMIT 1").fetchone()
    assert row is not None
    assert sorted(row[0]) == [b"much%03d" % n for n in range(10)]


def test_of_a_commit_that_is_cut_between_its_parts_nothing_happens_twice(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(engines, "PART_BYTES", 10_000)
    whole = engines.ask_all
    once = iter([True])

    def ask_all(connection: Any, counters: Any, asked: Any) -> Any:
        found = whole(connection, counters, asked)
        if asked[0][0] == engines._AHEAD and next(once, False):
            connection.close()
            assert other.read(lambda txn: txn.scan(b"much", b"muci", 100)) == []
            raise psycopg.OperationalError("cut")
        return found

    monkeypatch.setattr(engines, "ask_all", ask_all)
    one.transact(lambda txn: (_write_much(txn, 10, b"x" * 3_000), txn.add(b"n", 1)))
    assert next(once, False) is False
    assert len(other.read(lambda txn: txn.scan(b"much", b"muci", 100))) == 10
    assert other.read(lambda txn: txn.count(b"n")) == 1


@pytest.mark.parametrize("leads", [True, False])
def test_an_interrupt_while_others_ask_holds_nobody_up(leads: bool) -> None:
    """The main thread is interrupted in the middle of asking for all, or while another asks for it."""
    entered, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def serve(wishes: list[Any]) -> None:
        calls.append(len(wishes))
        if len(calls) == 1:
            entered.set()
            go_on.wait(30)

    together = readers._Together(serve)
    ended: list[str] = []

    def other() -> None:
        try:
            together.want(())
            ended.append("served")
        except Unreachable:
            ended.append("told")

    struck = threading.Event()

    def interrupt(*_: object) -> None:
        if not struck.is_set():
            struck.set()
            raise KeyboardInterrupt

    def meanwhile() -> None:
        entered.wait(30)
        if leads:
            helper.start()
        while not together._waiting:
            pass
        # A signal that comes just before it begins to wait does not end the wait.
        while not struck.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)
            struck.wait(0.01)

    helper = threading.Thread(target=other)
    before = signal.signal(signal.SIGUSR1, interrupt)
    watcher = threading.Thread(target=meanwhile)
    try:
        watcher.start()
        if not leads:
            helper.start()
            entered.wait(30)
        with pytest.raises(KeyboardInterrupt):
            together.want(())
        watcher.join(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
    go_on.set()
    helper.join(30)
    assert ended == ["served"]
    together.want(())
    assert not together._busy


def _lose_a_commit(store: PostgresStore) -> None:
    """Write, and set the server back by one commit, as a standby is that was promoted too early."""
    store.transact(lambda txn: txn.put(b"k", b"kept"))
    store.transact(lambda txn: txn.put(b"k", b"lost"))
    assert store.read(lambda txn: txn.get(b"k")) == b"lost"
    with psycopg.connect(store.address, autocommit=True) as server:
        server.execute("DELETE FROM holdfast_commit WHERE no > 1")
        server.execute("UPDATE holdfast_row SET value = 'kept' WHERE key = 'k'")
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def _write_much(txn: Txn, rows: int, value: bytes) -> None:
    for n in range(rows):
        txn.put(b"much%03d" % n, value)


def _both(store: PostgresStore, value: bytes) -> None:
    store.transact(lambda txn: (txn.put(b"k1", value), txn.put(b"k2", value)))


def _move_money(url: str, seed: int, keys_named: int, pipe: Pipe) -> None:
    engines.KEYS_NAMED_MAX = keys_named
    pick = random.Random(seed)
    totals = []
    with PostgresStore(url) as store:
        for n in range(60):
            _step(store, pick)
            if n % 5 == 0:
                totals.append(store.read(_total))
    pipe.send((60, totals))


def _step(store: PostgresStore, pick: random.Random) -> None:
    one, other = pick.sample(range(ACCOUNTS), 2)
    amount = pick.randrange(100)
    if pick.random() < 0.5:
        store.transact(_move_reading, one, other, amount)
    else:
        store.transact(_move_adding, one, other, amount)


def _move_reading(txn: Txn, one: int, other: int, amount: int) -> None:
    """By rows that were read, so that it conflicts with whoever else changes them."""
    for account, change in ((one, -amount), (other, amount)):
        was = int.from_bytes(txn.get(_account(account)) or b"", "big", signed=True)
        txn.put(_account(account), (was + change).to_bytes(8, "big", signed=True))
    txn.add(b"moves", 1)
    txn.append(b"log", b"")


def _move_adding(txn: Txn, one: int, other: int, amount: int) -> None:
    txn.add(_account(one), -amount)
    txn.add(_account(other), amount)
    txn.add(b"moves", 1)
    txn.append(b"log", b"")


def _total(txn: Txn) -> int:
    rows = txn.scan(b"account", tuples.after(b"account"), ACCOUNTS + 1)
    return sum(int.from_bytes(value, "big", signed=True) for _, value in rows)


def _account(number: int) -> bytes:
    return b"account%03d" % number


def _grow(txn: Txn) -> object:
    return txn.append(b"k", b"")


def _grown(txn: Txn) -> int:
    return len(txn.scan(b"k", tuples.after(b"k")))


def test_threads_that_want_one_key_take_turns_and_none_is_refused(url: str) -> None:
    refused: list[BaseException] = []

    def work(store: PostgresStore) -> None:
        try:
            for _ in range(5):
                store.transact(_rise)
        except BaseException as error:
            refused.append(error)

    with PostgresStore(url) as store:
        threads = [threading.Thread(target=work, args=(store,)) for _ in range(80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not refused
        assert store.read(_height) == 400


def _rise(txn: Txn) -> None:
    txn.put(("height",), b"%d" % (_height(txn) + 1))


def _height(txn: Txn) -> int:
    return int(txn.get(("height",)) or b"0")


def test_a_topic_rings_across_processes_in_a_database_that_cannot_encode_it() -> None:
    url, topic = fresh_url(encoding="LATIN1"), "q/日本"
    with PostgresStore(url) as one, PostgresStore(url) as other:
        since = other.wait(topic, 0, 0.0)
        one.transact(lambda txn: (txn.put(("n",), b"x"), txn.notify(topic)))
        assert other.wait(topic, since, 30) > since
