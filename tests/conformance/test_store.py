"""The conformance suite: the contract of every Store implementation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from holdfast.config import IDLE_TOPICS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX
from holdfast.errors import (
    Fenced,
    Invalid,
    KeyTooLarge,
    NotFound,
    StoreClosed,
    Timeout,
    ValueTooLarge,
)
from holdfast.store import engine as engines
from holdfast.store import schema, tuples
from holdfast.store.api import LeaseGuard, Store, Txn
from holdfast.store.postgres import notifications as pg_topics
from tests import probe_operations as probe

MODULES = ("holdfast.store",)

pytestmark = pytest.mark.usefixtures("probe_writers")


def put(txn: Txn, key: tuples.Key, value: bytes) -> None:
    txn.put(key, value)


# -- rows ----------------------------------------------------------------------------------------


def test_get_returns_the_value_that_was_put(store: Store) -> None:
    store.transact(put, ("a", 1), b"x")
    assert store.read(lambda txn: txn.get(("a", 1))) == b"x"
    assert store.read(lambda txn: txn.get(("a", 2))) is None


def test_tuple_and_its_packed_bytes_are_the_same_key(store: Store) -> None:
    store.transact(put, ("a", 1), b"x")
    assert store.read(lambda txn: txn.get(tuples.pack(("a", 1)))) == b"x"


def test_delete_removes_a_row_and_is_idempotent(store: Store) -> None:
    store.transact(put, ("a",), b"x")
    store.transact(lambda txn: txn.delete(("a",)))
    store.transact(lambda txn: txn.delete(("a",)))
    assert store.read(lambda txn: txn.get(("a",))) is None


def test_scan_is_half_open_ordered_limited_and_reversible(store: Store) -> None:
    def fill(txn: Txn) -> None:
        for n in (3, 1, 2, 5, 4):
            txn.put(("s", n), b"%d" % n)

    store.transact(fill)

    def values(**options: object) -> list[bytes]:
        rows = store.read(lambda txn: txn.scan(("s", 2), ("s", 5), **options))  # type: ignore[arg-type]
        return [value for _, value in rows]

    assert values() == [b"2", b"3", b"4"]
    assert values(limit=2) == [b"2", b"3"]
    assert values(reverse=True) == [b"4", b"3", b"2"]
    assert values(reverse=True, limit=1) == [b"4"]
    assert values(limit=0) == []
    assert store.read(lambda txn: txn.scan(("s", 9), ("s", 1))) == []


def test_transaction_sees_its_own_writes_in_get_and_scan(store: Store) -> None:
    store.transact(put, ("s", 1), b"old")
    store.transact(put, ("s", 2), b"old")

    def look(txn: Txn) -> tuple[object, ...]:
        txn.put(("s", 1), b"new")
        txn.delete(("s", 2))
        txn.put(("s", 3), b"new")
        rows = [value for _, value in txn.scan(("s",), ("t",))]
        last = [value for _, value in txn.scan(("s",), ("t",), limit=1, reverse=True)]
        return txn.get(("s", 1)), txn.get(("s", 2)), rows, last

    assert store.transact(look) == (b"new", None, [b"new", b"new"], [b"new"])


def test_scan_limit_does_not_count_rows_deleted_in_the_transaction(store: Store) -> None:
    def fill(txn: Txn) -> None:
        for n in range(6):
            txn.put(("s", n), b"%d" % n)

    store.transact(fill)

    def look(txn: Txn) -> list[bytes]:
        txn.delete(("s", 0))
        txn.delete(("s", 1))
        return [value for _, value in txn.scan(("s",), ("t",), limit=2)]

    assert store.transact(look) == [b"2", b"3"]


# -- atomicity -----------------------------------------------------------------------------------


def test_transaction_that_raises_writes_no_row(store: Store) -> None:
    def half(txn: Txn) -> None:
        txn.put(("a",), b"x")
        txn.add(("n",), 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.transact(half)
    assert store.read(lambda txn: (txn.get(("a",)), txn.count(("n",)))) == (None, 0)


def test_write_in_read_raises_invalid(store: Store) -> None:
    with pytest.raises(Invalid):
        store.read(put, ("a",), b"x")
    assert store.read(lambda txn: txn.get(("a",))) is None


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (b"k" * (KEY_BYTES_MAX + 1), b"", KeyTooLarge),
        (b"", b"", Invalid),
        (("t" * KEY_BYTES_MAX,), b"", KeyTooLarge),
        (b"k", b"v" * (VALUE_BYTES_MAX + 1), ValueTooLarge),
        (b"k", "text", Invalid),
        (1.5, b"", Invalid),
        ((1.5,), b"", Invalid),
        ((1 << 65,), b"", Invalid),
    ],
)
def test_put_of_a_bad_key_or_value_fails_the_transaction(
    store: Store, key: object, value: object, error: type[Exception]
) -> None:
    def both(txn: Txn) -> None:
        txn.put(b"good", b"x")
        txn.put(key, value)  # type: ignore[arg-type]

    with pytest.raises(error):
        store.transact(both)
    assert store.read(lambda txn: txn.get(b"good")) is None


def test_put_accepts_the_largest_key_and_an_empty_value(store: Store) -> None:
    key = b"k" * KEY_BYTES_MAX
    store.transact(put, key, b"")  # type: ignore[arg-type]
    assert store.read(lambda txn: txn.get(key)) == b""


# -- append and counters ---------------------------------------------------------------------------


def test_append_numbers_start_at_one_and_are_never_reused(store: Store) -> None:
    space = ("log",)
    assert [store.transact(lambda txn: txn.append(space, b"x")) for _ in range(3)] == [1, 2, 3]
    store.transact(lambda txn: txn.delete((*space, 3)))
    assert store.transact(lambda txn: txn.append(space, b"y")) == 4
    assert store.read(lambda txn: txn.get((*space, 4))) == b"y"


def test_append_number_read_before_the_commit_raises_invalid(store: Store) -> None:
    def peek(txn: Txn) -> None:
        _ = txn.append(("log",), b"x").value

    with pytest.raises(Invalid):
        store.transact(peek)
    assert store.read(lambda txn: txn.scan(("log",), ("loh",))) == []


def test_counter_is_the_sum_of_adds_and_may_be_negative(store: Store) -> None:
    store.transact(lambda txn: txn.add(("n",), 5))
    store.transact(lambda txn: (txn.add(("n",), -7), txn.add(("n",), 1)))
    assert store.read(lambda txn: txn.count(("n",))) == -1


def test_append_numbers_of_many_threads_are_dense_and_unique(store: Store) -> None:
    numbers: list[int] = []

    def work() -> None:
        for _ in range(20):
            numbers.append(store.transact(lambda txn: txn.append(("log",), b"x")))

    run_threads(work, 8)
    assert sorted(numbers) == list(range(1, 161))


# -- serializable ----------------------------------------------------------------------------------


def test_read_modify_write_of_many_threads_loses_no_update(store: Store) -> None:
    def increment(txn: Txn) -> None:
        txn.put(("n",), b"%d" % (int(txn.get(("n",)) or b"0") + 1))

    def work() -> None:
        for _ in range(15):
            store.transact(increment)

    run_threads(work, 6)
    assert store.read(lambda txn: txn.get(("n",))) == b"90"


def test_insert_into_a_scanned_range_conflicts(store: Store) -> None:
    """Each thread adds the row after the last one: without range validation two threads would write one key."""

    def add_next(txn: Txn) -> None:
        rows = txn.scan(("q",), ("r",))
        txn.put(("q", len(rows)), b"x")

    def work() -> None:
        for _ in range(10):
            store.transact(add_next)

    run_threads(work, 6)
    assert len(store.read(lambda txn: txn.scan(("q",), ("r",)))) == 60


# -- operations --------------------------------------------------------------------------------


def test_transact_runs_an_operation_and_returns_its_result(store: Store) -> None:
    assert store.transact(probe.twice, 3, ["a", "b"]) == {"n": 6, "names": ["a", "b"]}
    assert store.transact(probe.twice, n=3, names=[]) == {"n": 12, "names": []}


def test_operation_takes_keyword_only_arguments_only_by_keyword(store: Store) -> None:
    assert store.transact(probe.keywords, "a", second=2, first=1) == ["a", 1, 2]
    assert store.transact(lambda txn: probe.keywords(txn, "a", first=1)) == ["a", 1, 7]
    with pytest.raises(Invalid, match="too many positional arguments"):
        store.transact(probe.keywords, "a", 1, 2)  # type: ignore[call-arg, misc]


def test_operation_in_a_transaction_sees_its_writes_and_returns_after_commit(
    store: Store,
) -> None:
    def both(txn: Txn) -> object:
        txn.add(("probe",), 10)
        return probe.twice(txn, 1, [])

    assert store.transact(both) == {"n": 12, "names": []}


def test_operation_that_raises_rolls_back_the_transaction(store: Store) -> None:
    def both(txn: Txn) -> None:
        txn.put(("a",), b"x")
        probe.refuse(txn, "mail")

    with pytest.raises(NotFound) as caught:
        store.transact(both)
    assert caught.value.fields == {"what": "mail"}
    assert store.read(lambda txn: (txn.get(("a",)), txn.get(("probe", "half")))) == (None, None)


@pytest.mark.parametrize("name", ["\ud800", object(), 1 << 80])
def test_operation_with_unencodable_arguments_raises_invalid(store: Store, name: object) -> None:
    with pytest.raises(Invalid):
        store.transact(probe.twice, 1, [name])
    assert store.read(lambda txn: txn.count(("probe",))) == 0


def test_concurrent_operations_never_conflict(store: Store) -> None:
    def work() -> None:
        for _ in range(10):
            store.transact(probe.twice, 1, [])

    run_threads(work, 8)
    assert store.read(lambda txn: txn.count(("probe",))) == 160


# -- lease guards --------------------------------------------------------------------------------


class StaticLease:
    def __init__(self, fence: bytes, generation: int = 1) -> None:
        self.guard = LeaseGuard("r", b"fence", fence, b"expiry", generation)


def write_lease(txn: Txn, fence: bytes, ttl_ns: int) -> None:
    txn.put(b"fence", fence)
    txn.put(b"expiry", schema.encode_int(txn.now_ns + ttl_ns))


@pytest.mark.parametrize(
    ("held", "ttl_ns"), [(b"2", 10**12), (b"1", -1), (b"1", 0)], ids=["taken", "past", "now"]
)
def test_write_under_a_lost_or_expired_lease_is_fenced(
    store: Store, held: bytes, ttl_ns: int
) -> None:
    store.transact(write_lease, held, ttl_ns)

    def guarded(txn: Txn) -> None:
        txn.require_live(StaticLease(b"1"))
        txn.put(("a",), b"x")

    with pytest.raises(Fenced):
        store.transact(guarded)
    assert store.read(lambda txn: txn.get(("a",))) is None


def test_write_under_a_live_lease_commits(store: Store) -> None:
    store.transact(write_lease, b"1", 10**12)

    def guarded(txn: Txn) -> None:
        txn.require_live(StaticLease(b"1"))
        txn.put(("a",), b"x")

    store.transact(guarded)
    assert store.read(lambda txn: txn.get(("a",))) == b"x"


def test_lease_of_another_generation_is_fenced(store: Store) -> None:
    store.transact(write_lease, b"1", 10**12)
    with pytest.raises(Fenced):
        store.transact(lambda txn: txn.require_live(StaticLease(b"1", store.generation + 1)))


def test_lease_renewal_does_not_conflict_with_a_guarded_write(store: Store) -> None:
    store.transact(write_lease, b"1", 10**12)

    def guarded(txn: Txn) -> None:
        txn.require_live(StaticLease(b"1"))
        store.transact(lambda other: other.put(b"expiry", schema.encode_int(other.now_ns + 10**12)))
        runs.append(1)
        txn.put(("a",), b"x")

    runs: list[int] = []
    store.transact(guarded)
    assert runs == [1]


# -- time ------------------------------------------------------------------------------------------


def test_store_time_never_decreases(store: Store) -> None:
    times = []
    for _ in range(50):
        times.append(store.now_ns())
        times.append(store.transact(probe.now))
    commits = times[1::2]
    assert commits == sorted(set(commits))


# -- waiting ---------------------------------------------------------------------------------------


def test_wait_is_woken_by_notify(store: Store) -> None:
    since = store.wait("t", 0, 0.05)
    woken: list[int] = []
    waiting = threading.Thread(target=lambda: woken.append(store.wait("t", since, 30)))
    waiting.start()
    store.transact(lambda txn: txn.notify("t"))
    waiting.join(30)
    assert woken
    assert woken[0] > since


def test_wait_returns_at_once_after_an_earlier_notify(store: Store) -> None:
    since = store.wait("t", 0, 0.05)
    store.transact(lambda txn: (txn.notify("t"), txn.put(("a",), b"x")))
    assert store.wait("t", since, 30) > since


def test_wait_ends_at_its_timeout_despite_notify_of_other_topics(store: Store) -> None:
    since = store.wait("t", 0, 0.05)
    store.transact(lambda txn: txn.notify("other"))
    assert store.wait("t", since, 0.1) == since


@pytest.mark.parametrize("topic", [5, None, [5], b"t", "\ud800", ["t", "t\udcff"]])
def test_wait_for_a_topic_that_is_no_text_raises_invalid(store: Store, topic: object) -> None:
    with pytest.raises(Invalid):
        store.wait(topic, 0, 0.01)  # type: ignore[arg-type]


def test_notify_with_an_unencodable_topic_fails_only_its_transaction(store: Store) -> None:
    def write(txn: Txn, n: int) -> None:
        txn.put(("n", n), b"x")
        txn.notify("t\ud800" if n == 7 else "t")

    with store.batched():
        futures = [store.submit(write, n) for n in range(16)]
    errors = [type(future.exception(30)) for future in futures]  # type: ignore[attr-defined]
    assert errors == [Invalid if n == 7 else type(None) for n in range(16)]
    rows = store.read(lambda txn: txn.scan(("n",), ("o",)))
    assert len(rows) == 15


def test_notify_wakes_waiters_of_a_non_ascii_topic(store: Store) -> None:
    topic = "q/日本/é\x00"
    since = store.wait(topic, 0, 0.05)
    store.transact(lambda txn: txn.notify(topic))
    assert store.wait(topic, since, 30) > since


def test_wait_for_several_topics_is_woken_by_any_of_them(store: Store) -> None:
    since = store.wait(["t", "u"], 0, 0.05)
    store.transact(lambda txn: txn.notify("u"))
    since = store.wait(["t", "u"], since, 30)
    assert since > 0
    assert store.wait(["t", "u"], since, 0.1) == since


def test_wait_after_its_subscription_was_dropped_misses_no_notification(store: Store) -> None:
    """Waits for many other topics make the client drop its subscription of this topic."""
    since = store.wait("t", 0, 0.05)
    for n in range(IDLE_TOPICS_MAX + 1):
        store.wait(f"other/{n}", 0, 0.0)
    store.transact(lambda txn: txn.notify("t"))
    assert store.wait("t", since, 30) > since


def test_wait_misses_no_notification_beyond_topics_max(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TOPICS_MAX", 10)
    monkeypatch.setattr(pg_topics, "TOPICS_MAX", 10)
    since = store.wait("t", 0, 0.05)
    store.transact(lambda txn: txn.notify("t"))
    for n in range(30):
        store.transact(put_and_notify, n)
    assert store.wait("t", since, 30) > since


def put_and_notify(txn: Txn, n: int) -> None:
    txn.put(("n", n), b"x")
    txn.notify(f"other/{n}")


def test_notify_of_an_aborted_transaction_wakes_no_waiter(store: Store) -> None:
    since = store.wait("t", 0, 0.05)

    def refused(txn: Txn) -> None:
        txn.notify("t")
        probe.refuse(txn, "x")

    with pytest.raises(NotFound):
        store.transact(refused)
    assert store.wait("t", since, 0.1) == since


# -- submit ----------------------------------------------------------------------------------------


def test_submit_returns_a_future_with_result_and_await(store: Store) -> None:
    futures = [store.submit(lambda txn: txn.append(("log",), b"x")) for _ in range(20)]
    assert sorted(future.result(30) for future in futures) == list(range(1, 21))

    async def many() -> list[int]:
        tasks = [store.submit(lambda txn: txn.append(("log",), b"x")) for _ in range(20)]
        return [await task for task in tasks]

    assert sorted(asyncio.run(many())) == list(range(21, 41))


def test_transactions_inside_batched_are_answered_independently(store: Store) -> None:
    with store.batched():
        futures = [store.submit(lambda txn: txn.append(("log",), b"x")) for _ in range(40)]
        refused = store.submit(probe.refuse, "x")
    assert sorted(future.result(30) for future in futures) == list(range(1, 41))
    with pytest.raises(NotFound):
        refused.result(30)


def test_submitted_transaction_is_retried_on_conflict(store: Store) -> None:
    def increment(txn: Txn) -> None:
        txn.put(("n",), b"%d" % (int(txn.get(("n",)) or b"0") + 1))

    futures = [store.submit(increment) for _ in range(30)]
    for future in futures:
        future.result(30)
    assert store.read(lambda txn: txn.get(("n",))) == b"30"


def test_future_raises_the_error_of_its_transaction(store: Store) -> None:
    with pytest.raises(NotFound):
        store.submit(probe.refuse, "x").result(30)
    with pytest.raises(ZeroDivisionError):
        store.submit(lambda txn: 1 // 0).result(30)


# -- open and close --------------------------------------------------------------------------------


def test_closed_store_raises_store_closed(store: Store) -> None:
    store.close()
    with pytest.raises(StoreClosed):
        store.transact(put, ("a",), b"x")
    with pytest.raises(StoreClosed):
        store.read(lambda txn: txn.get(("a",)))


def test_committed_rows_survive_a_reopen(reopen: Callable[[], Store]) -> None:
    store = reopen()
    store.transact(put, ("a",), b"x")
    number = store.transact(lambda txn: txn.append(("log",), b"x"))
    before_ns = store.transact(probe.now)
    store = reopen()
    assert store.read(lambda txn: txn.get(("a",))) == b"x"
    assert store.transact(lambda txn: txn.append(("log",), b"x")) == number + 1
    assert store.transact(probe.now) > before_ns


def test_schema_marker_has_the_eight_specified_bytes(reopen: Callable[[], Store]) -> None:
    store = reopen()
    marker = store.read(lambda txn: txn.get(b"runner.schema.version"))
    assert marker == b"RSV0" + bytes([schema.SCHEMA_MAJOR, 0, schema.SCHEMA_MINOR, 0])


def test_result_of_an_unfinished_future_raises_timeout() -> None:
    from holdfast.store.futures import CommitFuture

    with pytest.raises(Timeout):
        CommitFuture().result(0.01)


# -- threads ---------------------------------------------------------------------------------------


def run_threads(work: Callable[[], None], count: int) -> None:
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
