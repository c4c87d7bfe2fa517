"""TopicSubscriptions: idle subscriptions of a client are bounded, and a topic with a waiter is never dropped."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast.store
from holdfast.config import IDLE_TOPICS_MAX, WriterLimits
from holdfast.store.lmdb.store import LmdbStore
from holdfast.store.lmdb.topic_subscriptions import TopicSubscriptions
from holdfast.store.subscription import Sleepers, Subscription

MODULES = ("holdfast.store.lmdb.topic_subscriptions", "holdfast.store.lmdb.writer_client")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    opened = holdfast.store.open(tmp_path / "data", limits=WriterLimits(idle_exit_s=0.2))
    assert isinstance(opened, LmdbStore)
    with opened:
        yield opened


def test_idle_topic_subscriptions_are_bounded() -> None:
    subscriptions = TopicSubscriptions()
    for n in range(IDLE_TOPICS_MAX + 10):
        assert subscriptions.add_waiter([str(n)])
        subscriptions.record({str(n): n + 1})
        subscriptions.remove_waiter([str(n)])
    assert len(subscriptions) == IDLE_TOPICS_MAX
    # The least recently used topics are dropped first, with their commits.
    for n in range(IDLE_TOPICS_MAX + 10):
        assert (str(n) in subscriptions) == (n >= 10)
        assert subscriptions.last_notified((str(n),)) == (n + 1 if n >= 10 else None)


def test_topic_with_a_waiter_is_never_dropped() -> None:
    subscriptions = TopicSubscriptions()
    many = [str(n) for n in range(3 * IDLE_TOPICS_MAX)]
    subscriptions.add_waiter(many)
    subscriptions.add_waiter(["0"])
    subscriptions.remove_waiter(["0"])
    assert all(topic in subscriptions for topic in many)
    subscriptions.remove_waiter(many)
    assert len(subscriptions) == IDLE_TOPICS_MAX


def test_take_changes_returns_each_subscription_change_once() -> None:
    subscriptions = TopicSubscriptions()
    assert subscriptions.add_waiter(["a", "b"])
    assert subscriptions.take_changes() == (["a", "b"], [])
    assert not subscriptions.add_waiter(["a"])
    subscriptions.remove_waiter(["a", "a", "b"])
    others = [f"other/{n}" for n in range(IDLE_TOPICS_MAX)]
    subscriptions.add_waiter(others)
    subscriptions.remove_waiter(others)
    # Dropped and subscribed again before the change was sent to the writer.
    assert subscriptions.add_waiter(["b"])
    watch, unwatch = subscriptions.take_changes()
    assert (sorted(watch), unwatch) == (sorted([*others, "b"]), ["a"])
    assert subscriptions.take_changes() == ([], [])
    watch, unwatch = subscriptions.take_changes(all_topics=True)
    assert (sorted(watch), unwatch) == (sorted([*others, "b"]), [])


def test_signal_handler_can_wake_sleepers_while_its_thread_adds_a_sleeper(
    store: LmdbStore,
) -> None:
    """A handler runs between two steps of the interrupted thread: here between two topics."""
    sleepers = Sleepers()

    class InterruptedTopics(tuple[str, ...]):
        def __iter__(self) -> Iterator[str]:
            for topic in super().__iter__():
                sleepers.add(in_handler)
                sleepers.wake_one_thread()
                sleepers.remove(in_handler)
                yield topic

    in_handler = Subscription(store._client, ("a",), 0)
    interrupted = Subscription(store._client, InterruptedTopics(("a", "b")), 0)

    def add_and_remove() -> None:
        sleepers.add(interrupted)
        assert "a" in sleepers
        sleepers.remove(interrupted)

    thread = threading.Thread(target=add_and_remove, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert not len(sleepers)


def test_writer_client_keeps_a_bounded_number_of_topic_subscriptions(store: LmdbStore) -> None:
    for n in range(IDLE_TOPICS_MAX * 2):
        store.wait([f"t/{n}", f"u/{n}"], 0, 0.0)
    topics = store._client.topics
    assert len(topics) == IDLE_TOPICS_MAX
    assert len(topics._commits) <= IDLE_TOPICS_MAX
    assert not len(topics.sleepers)


def test_waiting_threads_get_every_notification_while_topics_are_dropped(store: LmdbStore) -> None:
    """Pairs of threads notify each other in turn; between two turns each makes the client drop idle topics."""
    pairs, rounds = 4, 100
    finished: list[int] = []

    def notify_in_turn(pair: int, side: int) -> None:
        own, other = f"{pair}/{side}", f"{pair}/{1 - side}"
        since = store.wait(own, 0, 0.5)
        ready.wait()
        for n in range(rounds):
            if side or n:
                before, since = since, store.wait(own, since, 60.0)
                assert since != before
            for more in range(IDLE_TOPICS_MAX // 50):
                store.wait(f"{own}/{n}/{more}", 0, 0.0)
            store.transact(lambda txn: txn.notify(other))
        finished.append(pair)

    ready = threading.Barrier(2 * pairs)
    threads = [
        threading.Thread(target=notify_in_turn, args=(pair, side))
        for pair in range(pairs)
        for side in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(finished) == sorted([*range(pairs)] * 2)


def test_no_notification_is_dropped_while_waiters_come_and_go() -> None:
    """The reader thread records commits while other threads add and remove waiters of the same topics."""
    subscriptions = TopicSubscriptions()
    topics = [str(n) for n in range(64)]
    subscriptions.add_waiter(topics)
    subscriptions.remove_waiter(topics)
    stop = threading.Event()

    def wait_again() -> None:
        while not stop.is_set():
            subscriptions.add_waiter(topics)
            subscriptions.remove_waiter(topics)

    threads = [threading.Thread(target=wait_again) for _ in range(2)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for commit_no in range(1, 2_001):
            subscriptions.record(dict.fromkeys(topics, commit_no))
            dropped = [t for t in topics if subscriptions.last_notified((t,)) != commit_no]
            assert not dropped
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        for thread in threads:
            thread.join()
