"""`queue.expedite`: a delayed item becomes due now."""

from holdfast.clock import S
from holdfast.durable import queue
from holdfast.durable.queue import QueueCounts
from holdfast.store.api import Store

MODULES = ("holdfast.durable.queue",)

Q = "mail"
TTL = 60 * S


def test_expedited_item_is_claimed_at_once(sim_store: Store) -> None:
    seq = sim_store.transact(queue.put, Q, b"late", 0, sim_store.now_ns() + 3600 * S)
    assert sim_store.transact(queue.claim, Q, "w", 1, TTL) == []
    assert sim_store.transact(queue.expedite, Q, seq)
    assert sim_store.read(queue.counts, Q) == QueueCounts(delayed=1)
    [claim] = sim_store.transact(queue.claim, Q, "w", 1, TTL)
    assert claim.seq == seq
    assert sim_store.read(queue.counts, Q) == QueueCounts(claimed=1)


def test_expedite_notifies_the_queue_topic(sim_store: Store) -> None:
    seq = sim_store.transact(queue.put, Q, b"late", 0, sim_store.now_ns() + 3600 * S)
    seen = sim_store.wait(f"queue/{Q}", 0, 0)
    sim_store.transact(queue.expedite, Q, seq)
    assert sim_store.wait(f"queue/{Q}", seen, 0) > seen


def test_expedite_of_an_item_that_is_not_delayed_returns_false(sim_store: Store) -> None:
    ready = sim_store.transact(queue.put, Q, b"now")
    assert not sim_store.transact(queue.expedite, Q, ready)
    [claim] = sim_store.transact(queue.claim, Q, "w", 1, TTL)
    assert not sim_store.transact(queue.expedite, Q, ready)
    sim_store.transact(queue.ack, [claim.token])
    assert not sim_store.transact(queue.expedite, Q, ready)
    assert not sim_store.transact(queue.expedite, Q, 99)
    assert sim_store.read(queue.counts, Q) == QueueCounts(done=1)
