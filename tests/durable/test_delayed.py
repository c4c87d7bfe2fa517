"""Delayed items: `run_due` runs and completes due items in one commit; a failed item does not affect the rest."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from holdfast.clock import S, SimClock
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES
from holdfast.durable import delayed, queue
from holdfast.durable.queue import QueueCounts
from holdfast.durable.validation import TIME_NS_MAX
from holdfast.errors import Busy, Invalid
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn, operation

MODULES = ("holdfast.durable.delayed",)

LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)
LOG = ("log",)


@operation("testing.note")
def log_payload(txn: Txn, payload: bytes, mark: bytes) -> None:
    """Append the payload to the log. Some payloads raise an error."""
    n = txn.count(LOG) + 1
    txn.put(LOG, schema.encode_int(n))
    txn.put((*LOG, n), payload + mark)
    if payload.startswith(b"busy"):
        raise Busy()
    if payload.startswith(b"wrong"):
        raise Invalid(what="payload")
    if payload.startswith(b"bug"):
        raise ZeroDivisionError


def schedule_items(
    store: Store, *items: tuple[bytes, int], order_ns: int | None = None
) -> list[int]:
    def put(txn: Txn) -> list[int]:
        return [
            delayed.schedule(txn, "q", payload, at_ns, at_ns if order_ns is None else order_ns)
            for payload, at_ns in items
        ]

    return store.transact(put)


def run_due_items(store: Store, now_ns: int, limit: int = 100) -> int:
    def run(txn: Txn) -> int:
        return delayed.run_due(txn, [("q", now_ns)], log_payload, b"!", limit=limit)

    return store.transact(run)


def logged_payloads(store: Store) -> list[bytes]:
    lo = tuples.pack(LOG) + b"\x00"
    rows = store.read(lambda txn: txn.scan(lo, tuples.prefix_end(tuples.pack(LOG))))
    return [row.removesuffix(b"!") for _, row in rows]


def read_counts(store: Store) -> QueueCounts:
    return store.read(queue.counts, "q")


def test_run_due_runs_due_items_in_time_order_and_removes_them(store: Store) -> None:
    schedule_items(store, (b"c", 30), (b"a", 10), (b"d", 40), (b"b", 20), (b"also b", 20))
    assert run_due_items(store, 30) == 4
    assert logged_payloads(store) == [b"a", b"b", b"also b", b"c"]
    assert read_counts(store) == QueueCounts(delayed=1, done=4)
    assert run_due_items(store, 30) == 0
    assert run_due_items(store, 40) == 1
    assert read_counts(store) == QueueCounts(done=5)


def test_run_due_uses_the_time_of_its_caller(sim_store: Store, clock: SimClock) -> None:
    schedule_items(sim_store, (b"a", 10))
    clock.advance(1000 * S)
    assert run_due_items(sim_store, 9) == 0
    assert run_due_items(sim_store, 10) == 1


def test_run_due_of_several_queues_runs_the_longest_overdue_first(store: Store) -> None:
    ahead_ns = 1000
    for n in (3, 0, 5, 2, 4, 1):
        name, clock_ns = ("q", 0) if n % 2 else ("other", ahead_ns)
        at_ns = 10 * n + clock_ns
        store.transact(delayed.schedule, name, str(n).encode(), at_ns, at_ns)
    batches = []
    while n := store.transact(
        lambda txn: delayed.run_due(
            txn, [("q", 40), ("other", 40 + ahead_ns)], log_payload, b"!", limit=2
        )
    ):
        batches.append(n)
    assert batches == [2, 2, 1]
    assert logged_payloads(store) == [b"0", b"1", b"2", b"3", b"4"]
    assert read_counts(store) == QueueCounts(delayed=1, done=2)
    assert store.read(queue.counts, "other") == QueueCounts(done=3)


def test_run_due_runs_at_most_limit_items_earliest_first(store: Store) -> None:
    schedule_items(store, *[(str(n).encode(), 100 - n) for n in range(50)])
    batches = []
    while n := run_due_items(store, 1000, limit=20):
        batches.append(n)
    assert batches == [20, 20, 10]
    assert logged_payloads(store) == [str(n).encode() for n in reversed(range(50))]


def test_run_due_orders_items_of_one_time_by_their_original_time(store: Store) -> None:
    schedule_items(store, (b"late", 50), order_ns=40)
    schedule_items(store, (b"early", 50), order_ns=10)
    schedule_items(store, (b"between", 50), order_ns=20)
    run_due_items(store, 50)
    assert logged_payloads(store) == [b"early", b"between", b"late"]


def test_failed_due_item_is_rolled_back_and_later_items_run(store: Store) -> None:
    schedule_items(store, (b"a", 1), (b"wrong", 2), (b"b", 3), (b"bug", 4), (b"busy", 5), (b"c", 6))
    assert run_due_items(store, 10) == 6
    assert logged_payloads(store) == [b"a", b"b", b"c"]
    letters = store.read(queue.list_dead, "q")
    assert [(letter.payload, letter.code, letter.failures) for letter in letters] == [
        (b"wrong", "invalid", 1), (b"bug", "failed", 1),
    ]  # fmt: skip
    assert "ZeroDivisionError" in letters[1].error
    assert read_counts(store) == QueueCounts(delayed=1, dead=2, done=3)


def test_retryable_due_item_is_delayed_with_growing_backoff(store: Store) -> None:
    schedule_items(store, (b"busy", 0))
    now_ns, waits = 0, []
    for failures in range(1, 30):
        assert run_due_items(store, now_ns) == 1
        [item] = _read_items(store)
        assert (item.failures, item.code) == (failures, "busy")
        waits.append(item.not_before_ns - now_ns)
        assert run_due_items(store, item.not_before_ns - 1) == 0
        now_ns = item.not_before_ns
    assert waits == sorted(waits)
    assert 0 < waits[0] < waits[-1] <= 60 * S
    assert read_counts(store) == QueueCounts(delayed=1)


def test_run_due_skips_claimed_items_until_the_claim_expires(
    sim_store: Store, clock: SimClock
) -> None:
    now_ns = sim_store.now_ns()
    schedule_items(sim_store, (b"a", now_ns))
    clock.advance(S)
    assert sim_store.transact(queue.claim, "q", "other", 1, 10 * S)
    assert run_due_items(sim_store, sim_store.now_ns()) == 0
    clock.advance(11 * S)
    assert run_due_items(sim_store, sim_store.now_ns()) == 1
    assert read_counts(sim_store) == QueueCounts(done=1)


def test_redriven_item_is_due_at_once(store: Store) -> None:
    schedule_items(store, (b"wrong", 5), (b"b", 1 << 62))
    run_due_items(store, 10)
    [letter] = store.read(queue.list_dead, "q")
    store.transact(queue.redrive, "q", [letter.seq])
    assert run_due_items(store, 0) == 1
    assert len(store.read(queue.list_dead, "q")) == 1


def test_scheduled_item_can_be_cancelled_when_it_is_due(store: Store) -> None:
    first, second = schedule_items(store, (b"a", 1), (b"b", 1 << 62))
    assert store.transact(queue.cancel, "q", first)
    assert store.transact(queue.cancel, "q", second)
    assert run_due_items(store, 1 << 62) == 0
    assert read_counts(store) == QueueCounts(done=2)


def test_run_due_passes_a_large_payload_and_releases_its_blob(
    sim_store: Store, clock: SimClock
) -> None:
    schedule_items(sim_store, (LARGE, 1))
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 0
    run_due_items(sim_store, 1)
    assert logged_payloads(sim_store) == [LARGE]
    clock.advance(S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_run_due_leaves_no_rows_except_the_counters(store: Store) -> None:
    def count_rows() -> int:
        prefix = schema.key_prefix(schema.Space.QUEUE, "q")
        return len(store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))

    schedule_items(store, (b"a", 1))
    run_due_items(store, 1)
    few = count_rows()
    schedule_items(store, *[(b"a", n) for n in range(200)])
    while run_due_items(store, 1000):
        pass
    assert count_rows() == few


@pytest.mark.parametrize(
    "wrong",
    [{"due_ns": -1}, {"due_ns": TIME_NS_MAX + 1}, {"due_ns": 1 << 63}, {"original_due_ns": -1}],
)
def test_schedule_with_a_time_out_of_bounds_raises_invalid(
    store: Store, wrong: dict[str, int]
) -> None:
    times: dict[str, Any] = {"due_ns": 1, "original_due_ns": 1, **wrong}
    with pytest.raises(Invalid):
        store.transact(lambda txn: delayed.schedule(txn, "q", b"a", **times))
    assert read_counts(store) == QueueCounts()


@pytest.mark.parametrize("limit", [-1, BATCH_MAX + 1])
def test_run_due_with_a_limit_out_of_bounds_raises_invalid(store: Store, limit: int) -> None:
    with pytest.raises(Invalid):
        run_due_items(store, 1, limit=limit)


@pytest.mark.parametrize("seed", range(20))
def test_run_due_runs_each_item_once_and_never_early(store: Store, seed: int) -> None:
    rng = Random(seed)
    now_ns, waiting, all_run = 0, dict[bytes, int](), list[bytes]()
    for n in range(60):
        if rng.random() < 0.6:
            name, at_ns = str(n).encode(), max(0, now_ns + rng.randint(-20, 50))
            schedule_items(store, (name, at_ns))
            waiting[name] = at_ns
        else:
            now_ns += rng.randint(0, 20)
            limit = rng.randint(1, 5)
            before = len(logged_payloads(store))
            count = run_due_items(store, now_ns, limit=limit)
            run_now = logged_payloads(store)[before:]
            assert len(run_now) == count == min(limit, _count_due(waiting.values(), now_ns))
            assert [waiting[name] for name in run_now] == sorted(waiting.values())[:count]
            all_run += run_now
            for name in run_now:
                del waiting[name]
    assert len(set(all_run)) == len(all_run)
    assert read_counts(store) == QueueCounts(delayed=len(waiting), done=len(all_run))


def _count_due(times: Iterable[int], now_ns: int) -> int:
    return sum(at_ns <= now_ns for at_ns in times)


def _read_items(store: Store) -> list[Any]:
    keys = queue.keys_of("q")
    rows = store.read(lambda txn: txn.scan(keys.items, tuples.prefix_end(keys.items)))
    return [queue.decode_item(row) for _, row in rows]
