"""Subscriptions: one cancellable wait for threads and coroutines, on every store."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.errors import Invalid, StoreClosed, StoreForked
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.subscription import Subscription, wait_once
from tests.process.watch import POLL_S, until

pytestmark = pytest.mark.timeout(60)

LONG_S = 30.0
# Far below LONG_S: the wait was ended, it did not time out. Far above the scheduling delay of a loaded machine.
SOON_S = 10.0
SUBSCRIPTIONS = 20


def notify(store: Store, *topics: str) -> None:
    def notify_all(txn: Txn) -> None:
        for topic in topics:
            txn.notify(topic)

    store.transact(notify_all)


def run_in_thread(fn: Callable[[], Any]) -> Future[Any]:
    """Run the function in a daemon thread: a wait that never ends must not block the exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def drained(store: Store, *topics: str) -> Subscription:
    """Return a subscription that has reported all earlier notifications."""
    subscription = store.subscribe(list(topics))
    source = subscription._source

    def reports_nothing() -> bool:
        # The first wait makes the store report the last commits of the topics.
        is_notified = subscription.wait(POLL_S)
        return not is_notified and source.last_notified(topics) is not None

    until(reports_nothing, "the last commits of the topics", poll_s=0)
    return subscription


def until_sleeping(store: Store, subscription: Subscription) -> None:
    """Wait until the thread of the subscription sleeps or reads."""
    source: Any = subscription._source

    def sleeps() -> bool:
        return (
            subscription.topics[0] in source.sleepers
            or getattr(source, "_reading_subscription", None) is subscription
        )

    until(sleeps, "the subscription sleeps")


def test_subscription_wait_returns_true_after_a_notification(store: Store) -> None:
    subscription = drained(store, "t")
    waiting = run_in_thread(lambda: subscription.wait(LONG_S))
    until_sleeping(store, subscription)
    notify(store, "t")
    assert waiting.result(SOON_S) is True


def test_notification_between_subscribe_and_wait_is_not_lost(store: Store) -> None:
    subscription = store.subscribe("t")
    notify(store, "t")
    assert subscription.wait(LONG_S) is True


def test_notification_between_two_waits_is_not_lost(store: Store) -> None:
    subscription = drained(store, "t")
    for _ in range(20):
        notify(store, "t")
        assert subscription.wait(LONG_S) is True
    assert subscription.wait(0.05) is False


def test_subscription_reports_a_notification_once(store: Store) -> None:
    subscription = drained(store, "t")
    notify(store, "t")
    notify(store, "t")
    while subscription.wait(0.2):
        pass
    assert subscription.since == store.wait("t", 0, LONG_S)


def test_notification_of_another_topic_does_not_end_the_wait(store: Store) -> None:
    subscription = drained(store, "t")
    notify(store, "other")
    assert subscription.wait(0.1) is False


def test_subscription_of_several_topics_is_notified_by_each(store: Store) -> None:
    subscription = drained(store, "a", "b", "c")
    for topic in ("c", "a", "b"):
        notify(store, topic)
        assert subscription.wait(LONG_S) is True


def test_subscription_since_a_commit_skips_older_notifications(store: Store) -> None:
    notify(store, "t")
    since = store.wait("t", 0, LONG_S)
    subscription = store.subscribe("t", since)
    assert subscription.wait(0.1) is False
    notify(store, "t")
    assert subscription.wait(LONG_S) is True
    assert subscription.since > since


def test_cancel_ends_a_waiting_subscription(store: Store) -> None:
    subscription = drained(store, "t")
    waiting = run_in_thread(lambda: subscription.wait(LONG_S))
    until_sleeping(store, subscription)
    subscription.cancel()
    assert waiting.result(SOON_S) is False


def test_cancelled_subscription_never_waits_again(store: Store) -> None:
    subscription = drained(store, "t")
    subscription.cancel()
    subscription.cancel()
    began = time.monotonic()
    notify(store, "t")
    assert subscription.wait(LONG_S) is False
    subscription.wait_for_wake(LONG_S)
    assert asyncio.run(subscription.wait_async(LONG_S)) is False
    assert time.monotonic() - began < SOON_S
    assert subscription.is_cancelled


def test_wake_ends_a_waiting_subscription_without_a_notification(store: Store) -> None:
    subscription = drained(store, "t")
    for _ in range(20):
        waiting = run_in_thread(lambda: subscription.wait(LONG_S))
        until_sleeping(store, subscription)
        subscription.wake()
        assert waiting.result(SOON_S) is False


def test_each_wake_ends_one_wait_in_every_interleaving(store: Store) -> None:
    """The wakes come while the thread checks, while it falls asleep, while it sleeps and between its waits."""
    rounds = 300
    subscription = drained(store, "t")
    ended = threading.Semaphore(0)

    def wait_repeatedly() -> None:
        for _ in range(rounds):
            subscription.wait(LONG_S)
            ended.release()

    waiting = run_in_thread(wait_repeatedly)
    for _ in range(rounds):
        subscription.wake()
        assert ended.acquire(timeout=SOON_S)
    waiting.result(SOON_S)


def test_wake_before_the_wait_ends_exactly_the_next_wait(store: Store) -> None:
    subscription = drained(store, "t")
    subscription.wake()
    began = time.monotonic()
    assert subscription.wait(LONG_S) is False
    assert time.monotonic() - began < SOON_S
    began = time.monotonic()
    assert subscription.wait(0.2) is False
    assert time.monotonic() - began >= 0.2


def test_wait_for_wake_ignores_notifications_and_keeps_them(store: Store) -> None:
    subscription = drained(store, "t")
    notify(store, "t")
    began = time.monotonic()
    subscription.wait_for_wake(0.2)
    assert time.monotonic() - began >= 0.2
    assert subscription.wait(LONG_S) is True
    waiting = run_in_thread(lambda: subscription.wait_for_wake(LONG_S))
    subscription.wake()
    waiting.result(SOON_S)


def test_many_subscriptions_on_one_topic_are_all_notified(store: Store) -> None:
    subscriptions = [drained(store, "t") for _ in range(SUBSCRIPTIONS)]
    for _ in range(3):
        waits = [run_in_thread(lambda one=one: one.wait(LONG_S)) for one in subscriptions]
        notify(store, "t")
        assert [wait.result(SOON_S) for wait in waits] == [True] * SUBSCRIPTIONS


def test_cancel_of_one_subscription_leaves_other_subscriptions_of_its_topic(store: Store) -> None:
    subscriptions = [drained(store, "t") for _ in range(5)]
    waits = [run_in_thread(lambda one=one: one.wait(LONG_S)) for one in subscriptions]
    for subscription in subscriptions[:3]:
        subscription.cancel()
    assert [wait.result(SOON_S) for wait in waits[:3]] == [False] * 3
    notify(store, "t")
    assert [wait.result(SOON_S) for wait in waits[3:]] == [True] * 2


def test_commits_continue_while_a_subscription_waits(store: Store) -> None:
    """On a shared connection the waiting thread receives the answers of the committing threads."""
    subscription = drained(store, "t")
    waiting = run_in_thread(lambda: subscription.wait(LONG_S))
    until_sleeping(store, subscription)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: store.transact(lambda txn: txn.put(("n", n), b"x")), range(100)))
    assert not waiting.done()
    notify(store, "t")
    assert waiting.result(SOON_S) is True


def test_wakes_cancels_and_notifications_race_without_a_lost_wake_up(store: Store) -> None:
    """Each round one of three causes ends the wait of four threads. A lost wake-up waits until the timeout."""
    rounds = 15
    began = time.monotonic()
    for n in range(rounds):
        subscriptions = [drained(store, f"t/{n % 2}") for _ in range(4)]
        waits = [run_in_thread(lambda one=one: one.wait(LONG_S)) for one in subscriptions]
        subscriptions[0].cancel()
        subscriptions[1].wake()
        notify(store, f"t/{n % 2}")
        for wait in waits:
            wait.result(LONG_S)
        for one in subscriptions:
            one.cancel()
    assert time.monotonic() - began < LONG_S


def test_close_ends_a_waiting_subscription_with_store_closed(store: Store) -> None:
    subscription = drained(store, "t")
    waiting = run_in_thread(lambda: subscription.wait(LONG_S))
    until_sleeping(store, subscription)
    store.close()
    assert isinstance(waiting.exception(SOON_S), StoreClosed)
    with pytest.raises(StoreClosed):
        subscription.wait(LONG_S)
    with pytest.raises(StoreClosed):
        store.subscribe("t").wait(LONG_S)
    subscription.cancel()


def test_wait_reports_an_earlier_notification_after_the_store_was_closed(store: Store) -> None:
    notify(store, "t")
    last = store.wait("t", 0, LONG_S)
    source = store.subscribe("t")._source
    store.close()
    assert wait_once(source, ("t",), 0, LONG_S) == last
    if isinstance(store, InProcessStore):
        assert store.wait("t", 0, LONG_S) == last
        assert store.wait("t", last, LONG_S) == last


@pytest.mark.parametrize("topics", [5, None, [5], b"t", "\ud800", ["t", "t\udcff"]])
def test_subscribe_to_a_topic_that_is_no_text_raises_invalid(store: Store, topics: Any) -> None:
    with pytest.raises(Invalid):
        store.subscribe(topics)


# -- coroutines ------------------------------------------------------------------------------------


def test_coroutine_is_woken_by_a_notification(store: Store) -> None:
    async def wait_and_notify() -> list[bool]:
        subscriptions = [drained(store, "t") for _ in range(SUBSCRIPTIONS)]
        waits = [asyncio.ensure_future(one.wait_async(LONG_S)) for one in subscriptions]
        await asyncio.sleep(0)
        await asyncio.to_thread(notify, store, "t")
        return await asyncio.wait_for(asyncio.gather(*waits), SOON_S)

    assert asyncio.run(wait_and_notify()) == [True] * SUBSCRIPTIONS


def test_notification_before_the_coroutine_waits_is_not_lost(store: Store) -> None:
    subscription = drained(store, "t")
    notify(store, "t")
    assert asyncio.run(subscription.wait_async(LONG_S)) is True
    assert asyncio.run(subscription.wait_async(0.05)) is False


def test_coroutine_notified_before_each_wait_does_not_starve_the_event_loop(store: Store) -> None:
    async def wait_repeatedly() -> int:
        subscription = drained(store, "t")
        turns_of_another = 0

        async def count_turns() -> None:
            nonlocal turns_of_another
            while True:
                await asyncio.sleep(0)
                turns_of_another += 1

        counting = asyncio.ensure_future(count_turns())
        for _ in range(20):
            notify(store, "t")
            assert await subscription.wait_async(LONG_S)
        subscription.cancel()
        for _ in range(20):
            assert not await subscription.wait_async(LONG_S)
        counting.cancel()
        return turns_of_another

    assert asyncio.run(wait_repeatedly()) >= 38


def test_cancel_and_wake_end_the_wait_of_a_coroutine(store: Store) -> None:
    async def wait_and(end: Callable[[Subscription], None]) -> bool:
        subscription = drained(store, "t")
        wait = asyncio.ensure_future(subscription.wait_async(LONG_S))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(end, subscription)
        return await asyncio.wait_for(wait, SOON_S)

    assert asyncio.run(wait_and(Subscription.cancel)) is False
    assert asyncio.run(wait_and(Subscription.wake)) is False


def test_cancelled_coroutine_leaves_its_subscription_usable(store: Store) -> None:
    async def cancel_and_wait_again() -> bool:
        subscription = drained(store, "t")
        wait = asyncio.ensure_future(subscription.wait_async(LONG_S))
        await asyncio.sleep(0.01)
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        assert not len(subscription._source.sleepers)
        await asyncio.to_thread(notify, store, "t")
        return await subscription.wait_async(LONG_S)

    assert asyncio.run(cancel_and_wait_again()) is True


def test_close_ends_the_wait_of_a_coroutine_with_store_closed(store: Store) -> None:
    async def wait_and_close() -> None:
        subscription = drained(store, "t")
        wait = asyncio.ensure_future(subscription.wait_async(LONG_S))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(store.close)
        with pytest.raises(StoreClosed):
            await asyncio.wait_for(wait, SOON_S)

    asyncio.run(wait_and_close())


# -- fork ------------------------------------------------------------------------------------------


def test_forked_child_does_not_wait_on_a_subscription_of_its_parent(store: Store) -> None:
    """A shared store raises StoreForked in the child. An in-process store waits in the child's copy. Neither
    takes a notification from the parent."""
    subscription = drained(store, "t")
    waiting = run_in_thread(lambda: subscription.wait(LONG_S))
    until_sleeping(store, subscription)
    other = store.subscribe("other")
    pid = os.fork()
    if pid == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LONG_S))
        try:
            other.wait(0.01)
            code = 2
        except StoreForked:
            other.wake()
            other.cancel()
            try:
                store.subscribe("t").wait(0.01)
            except StoreForked:
                code = 3
        finally:
            os._exit(code)
    expected = 2 if isinstance(store, InProcessStore) else 3
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == expected
    assert not waiting.done()
    notify(store, "t")
    assert waiting.result(SOON_S) is True
