"""Several processes on one PostgreSQL store: no process uses a cached row that another process has changed."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psycopg
import pytest

from holdfast import failpoints
from holdfast.durable import queue
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.postgres import engine as engines
from holdfast.store.postgres import local_state as knowns
from holdfast.store.postgres import read_pool
from holdfast.store.postgres.store import PostgresStore
from tests.postgres import fresh_url

pytestmark = pytest.mark.timeout(120)

ACCOUNTS = 12
START = 1_000


@pytest.fixture
def url() -> str:
    return fresh_url()


@pytest.fixture
def two(url: str) -> Iterator[tuple[PostgresStore, PostgresStore]]:
    """Open two stores on one database. They share no state, like stores of two processes."""
    with PostgresStore(url) as one, PostgresStore(url) as other:
        yield one, other


def test_single_committer_needs_one_round_trip_per_commit(url: str) -> None:
    with PostgresStore(url) as store:
        for _ in range(engines.OPTIMISTIC_AFTER + 1):
            store.transact(_append_row)
        before = store.counters.round_trips
        for _ in range(10):
            store.transact(_append_row)
        assert store.counters.round_trips - before == 10


def test_alternating_committers_need_two_round_trips_per_commit(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    for store in two * 3:
        store.transact(_append_row)
    before = two[0].counters.round_trips
    for store in two * 10:
        store.transact(_append_row)
    assert two[0].counters.round_trips - before == 20
    assert two[0].read(_count_rows) == 26


def test_optimistic_commit_that_lost_the_race_is_applied_again(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    while not one.counters.optimistic:
        one.transact(_append_row)
    grown = other.transact(_append_row)
    assert one.transact(_append_row) == grown + 1
    assert one.counters.lost_races == 1


def test_empty_claim_sees_an_item_put_by_another_process(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    while not one.counters.optimistic:
        one.transact(_append_row)
    assert one.transact(queue.claim, "q", "me", 10, 60 * 10**9) == []
    other.transact(queue.put, "q", b"item")
    assert len(one.transact(queue.claim, "q", "me", 10, 60 * 10**9)) == 1


def test_claim_on_an_empty_queue_makes_no_commit(url: str) -> None:
    with PostgresStore(url) as store:
        store.transact(_append_row)
        commits = store.size()[0]
        for _ in range(10):
            store.transact(queue.claim, "q", "me", 10, 60 * 10**9)
        assert store.size()[0] == commits


def test_read_sees_earlier_commits_of_another_process(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    for n in range(20):
        one.transact(lambda txn, n=n: txn.put(b"k", b"%d" % n))
        assert other.read(lambda txn: txn.get(b"k")) == b"%d" % n
        assert other.read(lambda txn: txn.scan(b"j", b"l", 10)) == [(b"k", b"%d" % n)]


def test_read_of_cached_rows_needs_no_snapshot(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    one.transact(lambda txn: txn.put(b"k", b"1"))
    other.read(lambda txn: txn.get(b"k"))
    with failpoints.on("postgres.snapshot") as snapshot:
        one.transact(lambda txn: txn.put(b"k", b"2"))
        assert other.read(lambda txn: txn.get(b"k")) == b"2"
    assert snapshot.hits == 0


def test_function_that_raised_on_stale_reads_is_run_again(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    other.transact(lambda txn: txn.put(b"k", b"1"))
    assert one.read(lambda txn: txn.get(b"k")) == b"1"
    other.transact(lambda txn: txn.put(b"k", b"2"))

    def strict(txn: Txn) -> bytes:
        value = txn.get(b"k")
        if value != b"2":
            raise ValueError(value)
        return value

    assert one.transact(strict) == b"2"


def test_reads_of_a_transaction_are_from_one_commit(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    """A concurrent writer always writes both rows with the same value; a read never sees two values."""
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


def test_snapshot_id_is_the_commit_number_of_its_rows(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    """Each commit writes one row, so the row count of a snapshot equals its commit number."""
    one, other = two
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            other.transact(_append_row)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(100):
            snapshot = read_pool.ServerSnapshot(one._read_pool)
            rows = snapshot.scan(b"k", tuples.prefix_end(b"k"), None, False)
            assert len(rows) == snapshot.id
            snapshot.close()
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("keys_named", [engines.KEYS_NAMED_MAX, 3])
def test_random_transfers_of_several_processes_keep_the_total(
    url: str, monkeypatch: pytest.MonkeyPatch, keys_named: int
) -> None:
    """Several processes transfer amounts between accounts. Every read sees the same total.

    Some transactions read and write the rows, others use `txn.add`. A commit with more than `KEYS_NAMED_MAX` keys
    does not list them, so other processes invalidate all cached rows.
    """
    with PostgresStore(url) as store:
        for account in range(ACCOUNTS):
            store.transact(lambda txn, account=account: txn.add(_account(account), START))
        spawn = multiprocessing.get_context("spawn")
        pipes: list[Pipe] = []
        children = []
        for seed in range(3):
            ours, theirs = spawn.Pipe()
            child = spawn.Process(
                target=_run_transfers, args=(url, seed, keys_named, theirs), daemon=True
            )
            child.start()
            theirs.close()
            pipes.append(ours)
            children.append(child)
        rng = random.Random(99)
        for _ in range(60):
            _transfer(store, rng)
        moves = [pipe.recv() for pipe in pipes]
        for child in children:
            child.join(30)
        assert [count for count, _ in moves] == [60] * 3
        assert all(total == ACCOUNTS * START for _, totals in moves for total in totals)
        assert store.read(_total_balance) == ACCOUNTS * START
        assert store.read(lambda txn: txn.count(b"moves")) == 240
        numbers = [key for key, _ in store.read(lambda txn: txn.scan(b"log", b"loh"))]
        assert len(numbers) == 240


def test_process_behind_by_many_commits_resets_its_local_state(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(knowns, "COMMITS_REFRESHED_MAX", 2)
    one.transact(_append_row)
    for _ in range(10):
        other.transact(_append_row)
    assert one.transact(_append_row) == 12
    assert one.read(_count_rows) == 12


def test_cache_misses_of_a_batch_are_prefetched_together(url: str) -> None:
    with PostgresStore(url) as store:
        store.transact(lambda txn: [txn.put(b"row%d" % n, bytes(8)) for n in range(100)])
    with PostgresStore(url) as store:
        requests = [
            engines.CommitRequest(n, b"c", 0, adds={b"row%d" % n: 1, b"other%d" % n: 1})
            for n in range(100)
        ]
        before = store.counters.round_trips
        store._engine.commit(requests)
        assert store.counters.round_trips - before < 10
        assert store.read(lambda txn: [txn.count(b"row%d" % n) for n in range(100)]) == [1] * 100


def test_local_state_is_reset_after_a_failover_lost_commits(url: str) -> None:
    """A lagging standby was promoted: the last commits are lost, and their numbers are assigned again."""
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
                other.transact(_append_row)
        seen: list[bytes | None] = []

        def read_and_write(txn: Txn) -> None:
            seen.append(txn.get(b"k"))
            txn.put(b"copy", seen[-1] or b"")

        one.transact(read_and_write)
        assert one.read(lambda txn: txn.get(b"copy")) == b"kept"
        assert one._engine.history_no == 1
        assert one.wait("bell", since + 5, 30.0) > since + 5


def test_transaction_that_read_lost_commits_is_run_again(
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


def test_batch_after_a_failover_does_not_commit_stale_reads(url: str) -> None:
    with PostgresStore(url) as store:
        _remove_last_commit(store)

        def copy(txn: Txn) -> None:
            txn.put(b"copy", txn.get(b"k") or b"")

        store.transact(copy)
        assert store.read(lambda txn: txn.get(b"copy")) == b"kept"


def test_read_detects_a_failover_that_lost_commits(url: str) -> None:
    with PostgresStore(url) as store, PostgresStore(url) as other:
        _remove_last_commit(store)
        assert store.read(lambda txn: txn.get(b"k")) == b"kept"
        other.transact(lambda txn: txn.put(b"k", b"new"))
        assert store.read(lambda txn: txn.get(b"k")) == b"new"


def test_read_is_not_torn_by_a_cache_fill_of_another_thread(url: str) -> None:
    with PostgresStore(url) as other:
        _put_both_rows(other, b"1")
        with PostgresStore(url) as one:
            # One of the two rows is cached there.
            one.read(lambda txn: txn.get(b"k2"))
            found = _read_during_cache_fill(one, other)
    assert found[0] == found[1]


def _read_during_cache_fill(
    one: PostgresStore, other: PostgresStore
) -> tuple[bytes | None, bytes | None]:
    reading, filled, done = threading.Event(), threading.Event(), threading.Event()
    seen: list[tuple[bytes | None, bytes | None]] = []

    def read(txn: Txn) -> tuple[bytes | None, bytes | None]:
        reading.set()
        filled.wait(30)
        return txn.get(b"k1"), txn.get(b"k2")

    def fill(txn: Txn) -> None:
        txn.get(b"k1")
        txn.put(b"other", b"")
        filled.set()
        done.wait(30)

    reader = threading.Thread(target=lambda: seen.append(one.read(read)))
    reader.start()
    reading.wait(30)
    _put_both_rows(other, b"2")
    filler = threading.Thread(target=lambda: one.transact(fill))
    filler.start()
    reader.join(30)
    done.set()
    filler.join(30)
    return seen[0]


def test_committer_read_does_not_replace_a_newer_cached_row(
    two: tuple[PostgresStore, PostgresStore],
) -> None:
    one, other = two
    while not one.counters.optimistic:
        one.transact(_append_row)
    with psycopg.connect(one.address, autocommit=True) as server:
        server.execute("INSERT INTO holdfast_row VALUES ('n', %b)", (bytes(8),))
    once = iter([True])

    def commit_elsewhere(key: bytes) -> None:
        if key == b"n" and next(once, False):
            other.transact(lambda txn: txn.add(b"n", 1))
            one._coalesced_reads.refresh()

    with failpoints.on("postgres.row_read", calls=commit_elsewhere):
        one.transact(lambda txn: txn.add(b"n", 1))
    assert next(once, False) is False
    assert one.read(lambda txn: txn.count(b"n")) == 2
    one.transact(lambda txn: txn.add(b"n", 1))
    assert other.read(lambda txn: txn.count(b"n")) == 3


def test_commit_times_are_increasing(two: tuple[PostgresStore, PostgresStore]) -> None:
    one, other = two
    while not one.counters.optimistic:
        one.transact(_append_row)
    one._engine._store_clock.offset_ns -= (
        40_000_000  # an answer that came late: store time is a lower bound
    )
    other.transact(_append_row)
    one.read(_count_rows)
    one.transact(_append_row)
    with psycopg.connect(one.address) as server:
        times = server.execute("SELECT at_ns FROM holdfast_commit ORDER BY no").fetchall()
    assert times == sorted(times)


def test_large_commit_is_sent_once_in_parts(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent in one piece, the client library needs quadratic time and the server's idle time-out expires."""
    one, other = two
    while not one.counters.optimistic:
        one.transact(_append_row)
    sizes: list[int] = []

    def record(_: object, values: Any, more: Any = ()) -> None:
        all_values = [*values, *(value for _, others in more for value in others)]
        packed = [value for value in all_values if type(value) is engines.ByteaArray]
        sizes.append(sum(len(value.packed) for value in packed))

    monkeypatch.setattr(engines, "PART_BYTES", 10_000)
    tried, commits = one.counters.optimistic, one.counters.commits
    with (
        failpoints.on("postgres.part_sent", calls=record),
        failpoints.on("postgres.send", calls=record),
    ):
        one.transact(_put_large_rows, 50, b"x" * 3_000)
    assert 0 < max(sizes) < 15_000
    assert 150_000 < sum(sizes) < 200_000
    assert (one.counters.optimistic, one.counters.commits) == (tried, commits + 1)
    assert other.read(lambda txn: len(txn.scan(b"much", b"muci", 100))) == 50


def test_commit_sent_in_parts_publishes_all_its_keys(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(engines, "PART_BYTES", 10_000)
    one.transact(_put_large_rows, 10, b"x" * 3_000)
    values = [other.read(lambda txn, n=n: txn.get(b"much%03d" % n)) for n in range(10)]
    assert values == [b"x" * 3_000] * 10
    one.transact(_put_large_rows, 10, b"y" * 3_000)
    for n in range(10):
        assert other.read(lambda txn, n=n: txn.get(b"much%03d" % n)) == b"y" * 3_000
    with psycopg.connect(one.address) as server:
        row = server.execute("SELECT keys FROM holdfast_commit ORDER BY no DESC LIMIT 1").fetchone()
    assert row is not None
    assert sorted(row[0]) == [b"much%03d" % n for n in range(10)]


def test_commit_cut_between_its_parts_is_applied_once(
    two: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    monkeypatch.setattr(engines, "PART_BYTES", 10_000)

    def cut(connection: Any, _: object) -> None:
        connection.close()
        assert other.read(lambda txn: txn.scan(b"much", b"muci", 100)) == []
        raise psycopg.OperationalError("cut")

    with failpoints.on("postgres.part_sent", calls=cut, times=1) as part_sent:
        one.transact(lambda txn: (_put_large_rows(txn, 10, b"x" * 3_000), txn.add(b"n", 1)))
    assert part_sent.hits > 1
    assert len(other.read(lambda txn: txn.scan(b"much", b"muci", 100))) == 10
    assert other.read(lambda txn: txn.count(b"n")) == 1


def _remove_last_commit(store: PostgresStore) -> None:
    """Commit twice and remove the second commit on the server, like the promotion of a lagging standby."""
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


def _put_large_rows(txn: Txn, rows: int, value: bytes) -> None:
    for n in range(rows):
        txn.put(b"much%03d" % n, value)


def _put_both_rows(store: PostgresStore, value: bytes) -> None:
    store.transact(lambda txn: (txn.put(b"k1", value), txn.put(b"k2", value)))


def _run_transfers(url: str, seed: int, keys_named: int, pipe: Pipe) -> None:
    engines.KEYS_NAMED_MAX = keys_named
    rng = random.Random(seed)
    totals = []
    with PostgresStore(url) as store:
        for n in range(60):
            _transfer(store, rng)
            if n % 5 == 0:
                totals.append(store.read(_total_balance))
    pipe.send((60, totals))


def _transfer(store: PostgresStore, rng: random.Random) -> None:
    one, other = rng.sample(range(ACCOUNTS), 2)
    amount = rng.randrange(100)
    if rng.random() < 0.5:
        store.transact(_transfer_by_reads, one, other, amount)
    else:
        store.transact(_transfer_by_adds, one, other, amount)


def _transfer_by_reads(txn: Txn, one: int, other: int, amount: int) -> None:
    """Transfer by reading the rows, so that it conflicts with other changes of them."""
    for account, change in ((one, -amount), (other, amount)):
        balance = int.from_bytes(txn.get(_account(account)) or b"", "big", signed=True)
        txn.put(_account(account), (balance + change).to_bytes(8, "big", signed=True))
    txn.add(b"moves", 1)
    txn.append(b"log", b"")


def _transfer_by_adds(txn: Txn, one: int, other: int, amount: int) -> None:
    txn.add(_account(one), -amount)
    txn.add(_account(other), amount)
    txn.add(b"moves", 1)
    txn.append(b"log", b"")


def _total_balance(txn: Txn) -> int:
    rows = txn.scan(b"account", tuples.prefix_end(b"account"), ACCOUNTS + 1)
    return sum(int.from_bytes(value, "big", signed=True) for _, value in rows)


def _account(number: int) -> bytes:
    return b"account%03d" % number


def _append_row(txn: Txn) -> object:
    return txn.append(b"k", b"")


def _count_rows(txn: Txn) -> int:
    return len(txn.scan(b"k", tuples.prefix_end(b"k")))


def test_contended_transactions_of_many_threads_all_commit(url: str) -> None:
    refused: list[BaseException] = []

    def work(store: PostgresStore) -> None:
        try:
            for _ in range(5):
                store.transact(_increment_height)
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


def _increment_height(txn: Txn) -> None:
    txn.put(("height",), b"%d" % (_height(txn) + 1))


def _height(txn: Txn) -> int:
    return int(txn.get(("height",)) or b"0")


def test_notify_works_in_a_database_that_cannot_encode_the_topic() -> None:
    url, topic = fresh_url(encoding="LATIN1"), "q/日本"
    with PostgresStore(url) as one, PostgresStore(url) as other:
        since = other.wait(topic, 0, 0.0)
        one.transact(lambda txn: (txn.put(("n",), b"x"), txn.notify(topic)))
        assert other.wait(topic, since, 30) > since
