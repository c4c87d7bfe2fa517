"""What every store does, whatever is below it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from holdfast.config import KEY_BYTES_MAX, VALUE_BYTES_MAX, WATCHED_IDLE_MAX
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
from holdfast.store import probe, schema, tuples
from holdfast.store.api import Guard, Store, Txn
from holdfast.store.pg import topics as pg_topics

MODULES = ("holdfast.store",)


def put(txn: Txn, key: tuples.Key, value: bytes) -> None:
    txn.put(key, value)


# -- rows ----------------------------------------------------------------------------------------


def test_what_was_put_is_read_back(store: Store) -> None:
    store.transact(put, ("a", 1), b"x")
    assert store.read(lambda txn: txn.get(("a", 1))) == b"x"
    assert store.read(lambda txn: txn.get(("a", 2))) is None


def test_a_tuple_and_its_packed_bytes_are_the_same_key(store: Store) -> None:
    store.transact(put, ("a", 1), b"x")
    assert store.read(lambda txn: txn.get(tuples.pack(("a", 1)))) == b"x"


def test_a_deleted_row_is_gone_and_deleting_again_is_no_error(store: Store) -> None:
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
        found = store.read(lambda txn: txn.scan(("s", 2), ("s", 5), **options))  # type: ignore[arg-type]
        return [value for _, value in found]

    assert values() == [b"2", b"3", b"4"]
    assert values(limit=2) == [b"2", b"3"]
    assert values(reverse=True) == [b"4", b"3", b"2"]
    assert values(reverse=True, limit=1) == [b"4"]
    assert values(limit=0) == []
    assert store.read(lambda txn: txn.scan(("s", 9), ("s", 1))) == []


def test_a_transaction_sees_its_own_writes_in_gets_and_scans(store: Store) -> None:
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


def test_a_limited_scan_looks_behind_its_own_deletions(store: Store) -> None:
    def fill(txn: Txn) -> None:
        for n in range(6):
            txn.put(("s", n), b"%d" % n)

    store.transact(fill)

    def look(txn: Txn) -> list[bytes]:
        txn.delete(("s", 0))
        txn.delete(("s", 1))
        return [value for _, value in txn.scan(("s",), ("t",), limit=2)]

    assert store.transact(look) == [b"2", b"3"]


# -- all or nothing ------------------------------------------------------------------------------


def test_a_function_that_raises_leaves_no_trace(store: Store) -> None:
    def half(txn: Txn) -> None:
        txn.put(("a",), b"x")
        txn.add(("n",), 1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.transact(half)
    assert store.read(lambda txn: (txn.get(("a",)), txn.count(("n",)))) == (None, 0)


def test_a_read_that_writes_is_refused_and_writes_nothing(store: Store) -> None:
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
def test_bad_keys_and_values_are_refused_and_change_nothing(
    store: Store, key: object, value: object, error: type[Exception]
) -> None:
    def both(txn: Txn) -> None:
        txn.put(b"good", b"x")
        txn.put(key, value)  # type: ignore[arg-type]

    with pytest.raises(error):
        store.transact(both)
    assert store.read(lambda txn: txn.get(b"good")) is None


def test_the_largest_key_and_an_empty_value_are_accepted(store: Store) -> None:
    key = b"k" * KEY_BYTES_MAX
    store.transact(put, key, b"")  # type: ignore[arg-type]
    assert store.read(lambda txn: txn.get(key)) == b""


# -- append and counters ---------------------------------------------------------------------------


def test_append_numbers_from_one_and_never_gives_a_number_twice(store: Store) -> None:
    space = ("log",)
    assert [store.transact(lambda txn: txn.append(space, b"x")) for _ in range(3)] == [1, 2, 3]
    store.transact(lambda txn: txn.delete((*space, 3)))
    assert store.transact(lambda txn: txn.append(space, b"y")) == 4
    assert store.read(lambda txn: txn.get((*space, 4))) == b"y"


def test_an_appended_number_is_known_only_after_the_commit(store: Store) -> None:
    def peek(txn: Txn) -> None:
        _ = txn.append(("log",), b"x").value

    with pytest.raises(Invalid):
        store.transact(peek)
    assert store.read(lambda txn: txn.scan(("log",), ("loh",))) == []


def test_counters_add_up_and_may_fall_below_zero(store: Store) -> None:
    store.transact(lambda txn: txn.add(("n",), 5))
    store.transact(lambda txn: (txn.add(("n",), -7), txn.add(("n",), 1)))
    assert store.read(lambda txn: txn.count(("n",))) == -1


def test_appends_of_many_threads_are_dense_and_unique(store: Store) -> None:
    given: list[int] = []

    def work() -> None:
        for _ in range(20):
            given.append(store.transact(lambda txn: txn.append(("log",), b"x")))

    run_threads(work, 8)
    assert sorted(given) == list(range(1, 161))


# -- serializable ----------------------------------------------------------------------------------


def test_read_modify_write_of_many_threads_loses_nothing(store: Store) -> None:
    def increment(txn: Txn) -> None:
        txn.put(("n",), b"%d" % (int(txn.get(("n",)) or b"0") + 1))

    def work() -> None:
        for _ in range(15):
            store.transact(increment)

    run_threads(work, 6)
    assert store.read(lambda txn: txn.get(("n",))) == b"90"


def test_a_row_that_appears_in_a_scanned_range_is_noticed(store: Store) -> None:
    """Each thread adds the row after the last: without range validation two would collide."""

    def add_next(txn: Txn) -> None:
        rows = txn.scan(("q",), ("r",))
        txn.put(("q", len(rows)), b"x")

    def work() -> None:
        for _ in range(10):
            store.transact(add_next)

    run_threads(work, 6)
    assert len(store.read(lambda txn: txn.scan(("q",), ("r",)))) == 60


# -- operations --------------------------------------------------------------------------------


def test_an_operation_runs_alone_and_answers_plainly(store: Store) -> None:
    assert store.transact(probe.twice, 3, ["a", "b"]) == {"n": 6, "names": ["a", "b"]}
    assert store.transact(probe.twice, n=3, names=[]) == {"n": 12, "names": []}


def test_an_operation_inside_a_transaction_sees_its_writes_and_answers_after_the_commit(
    store: Store,
) -> None:
    def both(txn: Txn) -> object:
        txn.add(("probe",), 10)
        return probe.twice(txn, 1, [])

    assert store.transact(both) == {"n": 12, "names": []}


def test_an_operation_that_raises_undoes_the_whole_transaction(store: Store) -> None:
    def both(txn: Txn) -> None:
        txn.put(("a",), b"x")
        probe.refuse(txn, "mail")

    with pytest.raises(NotFound) as caught:
        store.transact(both)
    assert caught.value.fields == {"what": "mail"}
    assert store.read(lambda txn: (txn.get(("a",)), txn.get(("probe", "half")))) == (None, None)


@pytest.mark.parametrize("name", ["\ud800", object(), 1 << 80])
def test_arguments_that_cannot_travel_are_refused(store: Store, name: object) -> None:
    with pytest.raises(Invalid):
        store.transact(probe.twice, 1, [name])
    assert store.read(lambda txn: txn.count(("probe",))) == 0


def test_contending_operations_never_conflict(store: Store) -> None:
    def work() -> None:
        for _ in range(10):
            store.transact(probe.twice, 1, [])

    run_threads(work, 8)
    assert store.read(lambda txn: txn.count(("probe",))) == 160


# -- liveness ------------------------------------------------------------------------------------


class Lease:
    def __init__(self, fence: bytes, generation: int = 1) -> None:
        self.guard = Guard("r", b"fence", fence, b"expiry", generation)


def grant(txn: Txn, fence: bytes, ttl_ns: int) -> None:
    txn.put(b"fence", fence)
    txn.put(b"expiry", schema.int_bytes(txn.now_ns + ttl_ns))


@pytest.mark.parametrize(
    ("held", "ttl_ns"), [(b"2", 10**12), (b"1", -1), (b"1", 0)], ids=["taken", "past", "now"]
)
def test_a_write_under_a_dead_lease_is_fenced_and_changes_nothing(
    store: Store, held: bytes, ttl_ns: int
) -> None:
    store.transact(grant, held, ttl_ns)

    def guarded(txn: Txn) -> None:
        txn.require_live(Lease(b"1"))
        txn.put(("a",), b"x")

    with pytest.raises(Fenced):
        store.transact(guarded)
    assert store.read(lambda txn: txn.get(("a",))) is None


def test_a_write_under_a_live_lease_goes_through(store: Store) -> None:
    store.transact(grant, b"1", 10**12)

    def guarded(txn: Txn) -> None:
        txn.require_live(Lease(b"1"))
        txn.put(("a",), b"x")

    store.transact(guarded)
    assert store.read(lambda txn: txn.get(("a",))) == b"x"


def test_a_lease_of_another_generation_is_fenced(store: Store) -> None:
    store.transact(grant, b"1", 10**12)
    with pytest.raises(Fenced):
        store.transact(lambda txn: txn.require_live(Lease(b"1", store.generation + 1)))


def test_renewing_does_not_conflict_with_guarded_work(store: Store) -> None:
    store.transact(grant, b"1", 10**12)

    def guarded(txn: Txn) -> None:
        txn.require_live(Lease(b"1"))
        store.transact(lambda other: other.put(b"expiry", schema.int_bytes(other.now_ns + 10**12)))
        runs.append(1)
        txn.put(("a",), b"x")

    runs: list[int] = []
    store.transact(guarded)
    assert runs == [1]


# -- time ------------------------------------------------------------------------------------------


def test_store_time_never_runs_backwards(store: Store) -> None:
    seen = []
    for _ in range(50):
        seen.append(store.now_ns())
        seen.append(store.transact(probe.now))
    commits = seen[1::2]
    assert commits == sorted(set(commits))


# -- waiting ---------------------------------------------------------------------------------------


def test_a_waiter_is_woken_by_a_notification(store: Store) -> None:
    since = store.wait("t", 0, 0.05)
    woken: list[int] = []
    waiting = threading.Thread(target=lambda: woken.append(store.wait("t", since, 30)))
    waiting.start()
    store.transact(lambda txn: txn.notify("t"))
    waiting.join(30)
    assert woken
    assert woken[0] > since


def test_a_notification_before_the_wait_is_not_missed(store: Store) -> None:
    since = store.wait("t", 0, 0.05)
    store.transact(lambda txn: (txn.notify("t"), txn.put(("a",), b"x")))
    assert store.wait("t", since, 30) > since


def test_a_wait_ends_when_its_time_is_up_and_other_topics_do_not_wake_it(store: Store) -> None:
    since = store.wait("t", 0, 0.05)
    store.transact(lambda txn: txn.notify("other"))
    assert store.wait("t", since, 0.1) == since


@pytest.mark.parametrize("topic", [5, None, [5], b"t", "\ud800", ["t", "t\udcff"]])
def test_a_topic_that_is_no_text_is_refused(store: Store, topic: object) -> None:
    with pytest.raises(Invalid):
        store.wait(topic, 0, 0.01)  # type: ignore[arg-type]


def test_a_notification_that_cannot_be_encoded_fails_its_transaction_alone(store: Store) -> None:
    def write(txn: Txn, n: int) -> None:
        txn.put(("n", n), b"x")
        txn.notify("t\ud800" if n == 7 else "t")

    with store.together():
        futures = [store.submit(write, n) for n in range(16)]
    errors = [type(future.exception(30)) for future in futures]  # type: ignore[attr-defined]
    assert errors == [Invalid if n == 7 else type(None) for n in range(16)]
    found = store.read(lambda txn: txn.scan(("n",), ("o",)))
    assert len(found) == 15


def test_a_topic_of_any_language_wakes_its_waiters(store: Store) -> None:
    topic = "q/日本/é\x00"
    since = store.wait(topic, 0, 0.05)
    store.transact(lambda txn: txn.notify(topic))
    assert store.wait(topic, since, 30) > since


def test_a_wait_for_several_topics_ends_with_any_of_them(store: Store) -> None:
    since = store.wait(["t", "u"], 0, 0.05)
    store.transact(lambda txn: txn.notify("u"))
    since = store.wait(["t", "u"], since, 30)
    assert since > 0
    assert store.wait(["t", "u"], since, 0.1) == since


def test_a_topic_that_was_forgotten_meanwhile_misses_no_notification(store: Store) -> None:
    """So many other topics are waited for that a client watches this one no more."""
    since = store.wait("t", 0, 0.05)
    for n in range(WATCHED_IDLE_MAX + 1):
        store.wait(f"other/{n}", 0, 0.0)
    store.transact(lambda txn: txn.notify("t"))
    assert store.wait("t", since, 30) > since


def test_a_notification_is_not_missed_when_the_store_forgets_topics(
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


def test_an_aborted_transaction_wakes_nobody(store: Store) -> None:
    since = store.wait("t", 0, 0.05)

    def refused(txn: Txn) -> None:
        txn.notify("t")
        probe.refuse(txn, "x")

    with pytest.raises(NotFound):
        store.transact(refused)
    assert store.wait("t", since, 0.1) == since


# -- submit ----------------------------------------------------------------------------------------


def test_submitted_transactions_answer_by_result_and_by_await(store: Store) -> None:
    futures = [store.submit(lambda txn: txn.append(("log",), b"x")) for _ in range(20)]
    assert sorted(future.result(30) for future in futures) == list(range(1, 21))

    async def many() -> list[int]:
        tasks = [store.submit(lambda txn: txn.append(("log",), b"x")) for _ in range(20)]
        return [await task for task in tasks]

    assert sorted(asyncio.run(many())) == list(range(21, 41))


def test_what_is_submitted_together_is_answered_each_for_itself(store: Store) -> None:
    with store.together():
        futures = [store.submit(lambda txn: txn.append(("log",), b"x")) for _ in range(40)]
        refused = store.submit(probe.refuse, "x")
    assert sorted(future.result(30) for future in futures) == list(range(1, 41))
    with pytest.raises(NotFound):
        refused.result(30)


def test_a_submitted_transaction_is_run_again_on_conflict(store: Store) -> None:
    def increment(txn: Txn) -> None:
        txn.put(("n",), b"%d" % (int(txn.get(("n",)) or b"0") + 1))

    futures = [store.submit(increment) for _ in range(30)]
    for future in futures:
        future.result(30)
    assert store.read(lambda txn: txn.get(("n",))) == b"30"


def test_a_submitted_failure_surfaces_in_the_future(store: Store) -> None:
    with pytest.raises(NotFound):
        store.submit(probe.refuse, "x").result(30)
    with pytest.raises(ZeroDivisionError):
        store.submit(lambda txn: 1 // 0).result(30)


# -- open and close --------------------------------------------------------------------------------


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    with pytest.raises(StoreClosed):
        store.transact(put, ("a",), b"x")
    with pytest.raises(StoreClosed):
        store.read(lambda txn: txn.get(("a",)))


def test_what_was_committed_is_there_after_reopening(reopen: Callable[[], Store]) -> None:
    store = reopen()
    store.transact(put, ("a",), b"x")
    number = store.transact(lambda txn: txn.append(("log",), b"x"))
    before_ns = store.transact(probe.now)
    store = reopen()
    assert store.read(lambda txn: txn.get(("a",))) == b"x"
    assert store.transact(lambda txn: txn.append(("log",), b"x")) == number + 1
    assert store.transact(probe.now) > before_ns


def test_the_schema_marker_is_the_eight_bytes_of_the_document(reopen: Callable[[], Store]) -> None:
    store = reopen()
    marker = store.read(lambda txn: txn.get(b"runner.schema.version"))
    assert marker == b"RSV0" + bytes([schema.SCHEMA_MAJOR, 0, schema.SCHEMA_MINOR, 0])


def test_a_future_that_is_not_done_times_out() -> None:
    from holdfast.store.future import Submitted

    with pytest.raises(Timeout):
        Submitted().result(0.01)


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
