"""`queue.hasten`: an item that waits for its time is due now."""

from holdfast.clock import S
from holdfast.durable import queue
from holdfast.durable.queue import Counts
from holdfast.store.api import Store

MODULES = ("holdfast.durable.queue",)

Q = "mail"
TTL = 60 * S


def test_a_delayed_item_is_claimed_at_once(sim_store: Store) -> None:
    seq = sim_store.transact(queue.put, Q, b"late", 0, sim_store.now_ns() + 3600 * S)
    assert sim_store.transact(queue.claim, Q, "w", 1, TTL) == []
    assert sim_store.transact(queue.hasten, Q, seq)
    assert sim_store.read(queue.counts, Q) == Counts(delayed=1)
    [claim] = sim_store.transact(queue.claim, Q, "w", 1, TTL)
    assert claim.seq == seq
    assert sim_store.read(queue.counts, Q) == Counts(claimed=1)


def test_whoever_waits_for_the_queue_is_woken(sim_store: Store) -> None:
    seq = sim_store.transact(queue.put, Q, b"late", 0, sim_store.now_ns() + 3600 * S)
    seen = sim_store.wait(f"queue/{Q}", 0, 0)
    sim_store.transact(queue.hasten, Q, seq)
    assert sim_store.wait(f"queue/{Q}", seen, 0) > seen


def test_what_does_not_wait_is_left_as_it_is(sim_store: Store) -> None:
    ready = sim_store.transact(queue.put, Q, b"now")
    assert not sim_store.transact(queue.hasten, Q, ready)
    [claim] = sim_store.transact(queue.claim, Q, "w", 1, TTL)
    assert not sim_store.transact(queue.hasten, Q, ready)
    sim_store.transact(queue.ack, [claim.token])
    assert not sim_store.transact(queue.hasten, Q, ready)
    assert not sim_store.transact(queue.hasten, Q, 99)
    assert sim_store.read(queue.counts, Q) == Counts(done=1)
