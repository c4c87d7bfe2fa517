"""Items that wait for a time: taken, acted on and done in one commit, each by itself."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import due, queue
from holdfast.durable.bounds import TIME_NS_MAX
from holdfast.durable.queue import Counts
from holdfast.errors import Busy, Invalid
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn, operation

MODULES = ("holdfast.durable.due",)

LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)
LOG = ("log",)


@operation
def note(txn: Txn, payload: bytes, mark: bytes) -> None:
    """Writes down what it was given, in order; some payloads it does not like."""
    n = txn.count(LOG) + 1
    txn.put(LOG, schema.int_bytes(n))
    txn.put((*LOG, n), payload + mark)
    if payload.startswith(b"busy"):
        raise Busy()
    if payload.startswith(b"wrong"):
        raise Invalid(what="payload")
    if payload.startswith(b"bug"):
        raise ZeroDivisionError


def hang(store: Store, *items: tuple[bytes, int], turn_ns: int | None = None) -> list[int]:
    def put(txn: Txn) -> list[int]:
        return [
            due.hang(txn, "q", payload, at_ns, at_ns if turn_ns is None else turn_ns)
            for payload, at_ns in items
        ]

    return store.transact(put)


def work(store: Store, now_ns: int, limit: int = 100) -> int:
    def fire(txn: Txn) -> int:
        return due.work_off(txn, [("q", now_ns)], note, b"!", limit=limit)

    return store.transact(fire)


def noted(store: Store) -> list[bytes]:
    lo = tuples.pack(LOG) + b"\x00"
    rows = store.read(lambda txn: txn.scan(lo, tuples.after(tuples.pack(LOG))))
    return [row.removesuffix(b"!") for _, row in rows]


def counts(store: Store) -> Counts:
    return store.read(queue.counts, "q")


def test_what_is_due_is_acted_on_by_its_time_and_is_gone(store: Store) -> None:
    hang(store, (b"c", 30), (b"a", 10), (b"d", 40), (b"b", 20), (b"also b", 20))
    assert work(store, 30) == 4
    assert noted(store) == [b"a", b"b", b"also b", b"c"]
    assert counts(store) == Counts(delayed=1, done=4)
    assert work(store, 30) == 0
    assert work(store, 40) == 1
    assert counts(store) == Counts(done=5)


def test_its_clock_is_the_callers(sim_store: Store, clock: SimClock) -> None:
    hang(sim_store, (b"a", 10))
    clock.advance(1000 * S)
    assert work(sim_store, 9) == 0
    assert work(sim_store, 10) == 1


def test_of_several_queues_the_longest_overdue_comes_first_each_by_its_clock(store: Store) -> None:
    ahead_ns = 1000
    for n in (3, 0, 5, 2, 4, 1):
        name, clock_ns = ("q", 0) if n % 2 else ("other", ahead_ns)
        at_ns = 10 * n + clock_ns
        store.transact(due.hang, name, str(n).encode(), at_ns, at_ns)
    taken = []
    while n := store.transact(
        lambda txn: due.work_off(txn, [("q", 40), ("other", 40 + ahead_ns)], note, b"!", limit=2)
    ):
        taken.append(n)
    assert taken == [2, 2, 1]
    assert noted(store) == [b"0", b"1", b"2", b"3", b"4"]
    assert counts(store) == Counts(delayed=1, done=2)
    assert store.read(queue.counts, "other") == Counts(done=3)


def test_no_more_are_taken_than_wanted_and_the_first_are(store: Store) -> None:
    hang(store, *[(str(n).encode(), 100 - n) for n in range(50)])
    taken = []
    while n := work(store, 1000, limit=20):
        taken.append(n)
    assert taken == [20, 20, 10]
    assert noted(store) == [str(n).encode() for n in reversed(range(50))]


def test_those_taken_together_go_by_what_they_waited_for_first(store: Store) -> None:
    hang(store, (b"late", 50), turn_ns=40)
    hang(store, (b"early", 50), turn_ns=10)
    hang(store, (b"between", 50), turn_ns=20)
    work(store, 50)
    assert noted(store) == [b"early", b"between", b"late"]


def test_one_that_fails_leaves_nothing_behind_and_the_others_are_done(store: Store) -> None:
    hang(store, (b"a", 1), (b"wrong", 2), (b"b", 3), (b"bug", 4), (b"busy", 5), (b"c", 6))
    assert work(store, 10) == 6
    assert noted(store) == [b"a", b"b", b"c"]
    letters = store.read(queue.dead, "q")
    assert [(one.payload, one.code, one.failures) for one in letters] == [
        (b"wrong", "invalid", 1), (b"bug", "failed", 1),
    ]  # fmt: skip
    assert "ZeroDivisionError" in letters[1].error
    assert counts(store) == Counts(delayed=1, dead=2, done=3)


def test_one_that_may_be_tried_again_waits_for_longer_and_longer(store: Store) -> None:
    hang(store, (b"busy", 0))
    now_ns, waits = 0, []
    for failures in range(1, 30):
        assert work(store, now_ns) == 1
        [item] = _items(store)
        assert (item.failures, item.code) == (failures, "busy")
        waits.append(item.not_before_ns - now_ns)
        assert work(store, item.not_before_ns - 1) == 0
        now_ns = item.not_before_ns
    assert waits == sorted(waits)
    assert 0 < waits[0] < waits[-1] <= 60 * S
    assert counts(store) == Counts(delayed=1)


def test_what_others_have_claimed_is_theirs_until_the_claim_is_over(
    sim_store: Store, clock: SimClock
) -> None:
    now_ns = sim_store.now_ns()
    hang(sim_store, (b"a", now_ns))
    clock.advance(S)
    assert sim_store.transact(queue.claim, "q", "other", 1, 10 * S)
    assert work(sim_store, sim_store.now_ns()) == 0
    clock.advance(11 * S)
    assert work(sim_store, sim_store.now_ns()) == 1
    assert counts(sim_store) == Counts(done=1)


def test_what_was_redriven_is_acted_on_at_once(store: Store) -> None:
    hang(store, (b"wrong", 5), (b"b", 1 << 62))
    work(store, 10)
    [letter] = store.read(queue.dead, "q")
    store.transact(queue.redrive, "q", [letter.seq])
    assert work(store, 0) == 1
    assert len(store.read(queue.dead, "q")) == 1


def test_a_hung_item_can_be_withdrawn_even_when_it_is_due(store: Store) -> None:
    first, second = hang(store, (b"a", 1), (b"b", 1 << 62))
    assert store.transact(queue.withdraw, "q", first)
    assert store.transact(queue.withdraw, "q", second)
    assert work(store, 1 << 62) == 0
    assert counts(store) == Counts(done=2)


def test_a_large_payload_is_given_in_full_and_its_blob_goes(
    sim_store: Store, clock: SimClock
) -> None:
    hang(sim_store, (LARGE, 1))
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 0
    work(sim_store, 1)
    assert noted(sim_store) == [LARGE]
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_a_queue_that_is_worked_off_keeps_no_rows_but_its_counters(store: Store) -> None:
    def kept() -> int:
        prefix = schema.prefix(schema.Space.QUEUE, "q")
        return len(store.read(lambda txn: txn.scan(prefix, tuples.after(prefix))))

    hang(store, (b"a", 1))
    work(store, 1)
    few = kept()
    hang(store, *[(b"a", n) for n in range(200)])
    while work(store, 1000):
        pass
    assert kept() == few


@pytest.mark.parametrize(
    "wrong", [{"due_ns": -1}, {"due_ns": TIME_NS_MAX + 1}, {"due_ns": 1 << 63}, {"turn_ns": -1}]
)
def test_a_time_out_of_bounds_is_refused(store: Store, wrong: dict[str, int]) -> None:
    times: dict[str, Any] = {"due_ns": 1, "turn_ns": 1, **wrong}
    with pytest.raises(Invalid):
        store.transact(lambda txn: due.hang(txn, "q", b"a", **times))
    assert counts(store) == Counts()


@pytest.mark.parametrize("limit", [-1, BATCH_MAX + 1])
def test_a_limit_out_of_bounds_is_refused(store: Store, limit: int) -> None:
    with pytest.raises(Invalid):
        work(store, 1, limit=limit)


@pytest.mark.parametrize("seed", range(20))
def test_each_is_acted_on_once_and_none_early_whatever_the_times(store: Store, seed: int) -> None:
    random = Random(seed)
    now_ns, waiting, acted = 0, dict[bytes, int](), list[bytes]()
    for n in range(60):
        if random.random() < 0.6:
            name, at_ns = str(n).encode(), max(0, now_ns + random.randint(-20, 50))
            hang(store, (name, at_ns))
            waiting[name] = at_ns
        else:
            now_ns += random.randint(0, 20)
            limit = random.randint(1, 5)
            before = len(noted(store))
            taken = work(store, now_ns, limit=limit)
            fired = noted(store)[before:]
            assert len(fired) == taken == min(limit, _count(waiting.values(), now_ns))
            assert [waiting[name] for name in fired] == sorted(waiting.values())[:taken]
            acted += fired
            for name in fired:
                del waiting[name]
    assert len(set(acted)) == len(acted)
    assert counts(store) == Counts(delayed=len(waiting), done=len(acted))


def _count(times: Iterable[int], now_ns: int) -> int:
    return sum(at_ns <= now_ns for at_ns in times)


def _items(store: Store) -> list[Any]:
    keys = queue.keys_of("q")
    rows = store.read(lambda txn: txn.scan(keys.items, tuples.after(keys.items)))
    return [queue.decode(row) for _, row in rows]
