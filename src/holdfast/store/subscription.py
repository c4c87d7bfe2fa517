"""Subscriptions to topics: one cancellable wait for threads and coroutines, the same on every store.

    with store.subscribe(["queue/mail"]) as subscription:
        while not stopping:
            work()                      # read the state: a notification is a hint
            subscription.wait(10.0)     # or, in a coroutine: await subscription.wait_async(10.0)

A subscription remembers the last commit that it reported, so a notification between two waits is not lost.
`wake` and `cancel` end the wait from any thread. A closed store ends it with the error of every later call.

A store is the `TopicSource` of its subscriptions: it records the last commit of each topic and then wakes the
`Sleepers` of the notified topics.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from holdfast.clock import S

if TYPE_CHECKING:
    import asyncio


class TopicSource(Protocol):
    @property
    def sleepers(self) -> Sleepers: ...

    def mono_ns(self) -> int: ...

    def check(self) -> None:
        """Raise the error of a store that is closed, forked or gone."""

    def last_notified(self, topics: tuple[str, ...]) -> int | None:
        """The last commit that notified one of the topics; None while that is unknown."""

    def is_new(self, last: int, since: int) -> bool:
        """Whether a wait that has reported the commit `since` must report `last`."""

    def sleep(self, subscription: Subscription, last: int | None, timeout_s: float) -> None:
        """Block the thread until the subscription is woken, a topic has another commit than `last`, or the timeout.
        May return earlier."""

    def interrupt(self, subscription: Subscription) -> bool:
        """End `sleep` of a thread that reads the connection. Return False for a thread that sleeps on its gate, the
        lock of its subscription: releasing the gate ends that sleep."""

    def start_delivery(self) -> None:
        """Deliver notifications without a thread in `sleep`, for coroutines."""

    def release(self, subscription: Subscription) -> None:
        """Forget a cancelled subscription."""


class Answerable(Protocol):
    """A parked transaction. Its answer releases the gate, the lock on which the waiting thread sleeps."""

    @property
    def gate(self) -> threading.Lock: ...
    @property
    def is_answered(self) -> bool: ...


class Subscription:
    """The topics that one consumer waits for. One thread or one coroutine at a time may wait."""

    __slots__ = (
        "_is_cancelled",
        "_is_woken",
        "_loop_waiter",
        "_parked",
        "_source",
        "gate",
        "is_shared",
        "since",
        "topics",
    )

    def __init__(
        self,
        source: TopicSource,
        topics: tuple[str, ...],
        since: int,
        *,
        parked: Answerable | None = None,
        is_shared: bool = True,
    ) -> None:
        """`parked` ends the wait with its answer. `is_shared`: other threads may call `wake` and `cancel`."""
        self._source = source
        self.topics = topics
        # The last commit that a wait reported. A wait compares the commits of the topics with it.
        self.since = since
        self._parked = parked
        self.is_shared = is_shared
        self._is_woken = False
        self._is_cancelled = False
        self._loop_waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        # The thread in `wait` sleeps on this lock. A notification releases it.
        if parked is not None:
            self.gate = parked.gate
        else:
            self.gate = threading.Lock()
            self.gate.acquire()

    def wait(self, timeout: float) -> bool:
        """Block until a topic is notified, `wake` or `cancel` is called, or the timeout ends.

        Return whether a topic was notified since the last wait.
        """
        source = self._source
        deadline_ns = source.mono_ns() + int(timeout * S)
        while True:
            if self._parked is not None and self._parked.is_answered:
                return False
            if self.is_shared:
                # Another thread may hold the locks of the source in a forked child, which inherits a subscription.
                source.check()
            last = source.last_notified(self.topics)
            if self._take_notification(last):
                return True
            if not self.is_shared:
                source.check()
            if self._take_wake_up():
                return False
            remaining_s = (deadline_ns - source.mono_ns()) / S
            if remaining_s <= 0:
                return False
            source.sleep(self, last, remaining_s)

    async def wait_async(self, timeout: float) -> bool:
        """`wait` for a coroutine. It blocks no thread, and it suspends the coroutine at least once."""
        import asyncio

        source = self._source
        # First: in a forked child another thread may hold the locks of the source.
        source.check()
        source.start_delivery()
        # A coroutine that is notified before each wait would starve the event loop.
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout
        while True:
            source.check()
            last = source.last_notified(self.topics)
            if self._take_notification(last):
                return True
            remaining_s = deadline_s - loop.time()
            if self._take_wake_up() or remaining_s <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._loop_waiter = loop, waiter
            try:
                source.sleepers.add(self)
                # Check after registration: the notifying thread uses the opposite order.
                if not self.is_due(last):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(remaining_s):
                            await waiter
            finally:
                self._loop_waiter = None
                source.sleepers.remove(self)

    def wait_for_wake(self, timeout: float) -> None:
        """Block until `wake` or `cancel` is called or the timeout ends. Notifications do not end it."""
        self.gate.acquire(blocking=False)
        # Check after the gate is closed: `wake` uses the opposite order.
        if not self.is_woken:
            self.gate.acquire(timeout=timeout)
        self._take_wake_up()

    def wake(self) -> None:
        """End the current wait, or else the next one."""
        self._is_woken = True
        # A thread that does not wait for its gate checks the wake-up before it sleeps on it.
        if not self._source.interrupt(self):
            self.end_sleep()

    def cancel(self) -> None:
        """End the current wait and every later one."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.wake()
            self._source.release(self)

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()

    # -- for the store ---------------------------------------------------------------------------

    def end_sleep(self) -> bool:
        """End a sleep on the gate or in an event loop, after which the wait checks its conditions again. Return
        whether a thread may have slept."""
        waiter = self._loop_waiter
        if waiter is not None:
            # RuntimeError: the event loop is closed and has no waiting coroutine.
            with contextlib.suppress(RuntimeError):
                waiter[0].call_soon_threadsafe(_set_result, waiter[1])
        return release_once(self.gate)

    @property
    def is_woken(self) -> bool:
        """Whether `wake` or `cancel` ends the wait."""
        return self._is_woken or self._is_cancelled

    def is_due(self, last: int | None) -> bool:
        """Whether a wait that has seen the commit `last` must not sleep."""
        return (
            self.is_woken
            or self._source.last_notified(self.topics) != last
            or (self._parked is not None and self._parked.is_answered)
        )

    def _take_notification(self, last: int | None) -> bool:
        if last is None or self._is_cancelled or not self._source.is_new(last, self.since):
            return False
        self.since = last
        return True

    def _take_wake_up(self) -> bool:
        if self._is_woken:
            # Only if it was set: otherwise this would erase a wake-up after the check.
            self._is_woken = False
            return True
        return self._is_cancelled


class Sleepers:
    """The subscriptions whose threads or coroutines sleep, by topic."""

    def __init__(self) -> None:
        # Reentrant: a signal handler that uses the store may run in a thread that holds the lock. Lists are replaced,
        # because the handler may also add and remove a sleeper.
        self._lock = threading.RLock()
        self._by_topic: dict[str, list[Subscription]] = {}

    def __len__(self) -> int:
        return len(self._by_topic)

    def __contains__(self, topic: str) -> bool:
        return topic in self._by_topic

    def add(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                self._by_topic[topic] = [*self._by_topic.get(topic, ()), subscription]

    def remove(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                others = [one for one in self._by_topic.get(topic, ()) if one is not subscription]
                if others:
                    self._by_topic[topic] = others
                else:
                    self._by_topic.pop(topic, None)

    def wake(self, topics: Iterable[str]) -> None:
        """Wake the sleepers of these topics. The commits of the topics are recorded before."""
        if not self._by_topic:
            return
        with self._lock:
            woken = [sleeper for topic in topics for sleeper in self._by_topic.get(topic, ())]
        for subscription in woken:
            subscription.end_sleep()

    def wake_all(self) -> None:
        self.wake(list(self._by_topic))

    def wake_one_thread(self) -> None:
        """Wake one sleeping thread."""
        if not self._by_topic:
            return
        with self._lock:
            sleeping = [sleeper for sleepers in self._by_topic.values() for sleeper in sleepers]
        for subscription in sleeping:
            if subscription.end_sleep():
                return


def sleep_on_gate(
    source: TopicSource, subscription: Subscription, last: int | None, timeout_s: float
) -> None:
    """`TopicSource.sleep` of a store with its own notifying thread."""
    subscription.gate.acquire(blocking=False)
    try:
        source.sleepers.add(subscription)
        # Check after registration: the notifying thread uses the opposite order.
        if not subscription.is_due(last):
            subscription.gate.acquire(timeout=timeout_s)
    finally:
        source.sleepers.remove(subscription)


def release_once(lock: threading.Lock) -> bool:
    """Release the lock and return whether it was locked. No context manager: this runs for every answer."""
    try:
        lock.release()
    except RuntimeError:
        return False
    return True


def wait_once(
    source: TopicSource,
    topics: tuple[str, ...],
    since: int,
    timeout: float,
    parked: Answerable | None = None,
) -> int:
    """`Store.wait`: one wait without a kept subscription."""
    subscription = Subscription(source, topics, since, parked=parked, is_shared=False)
    subscription.wait(timeout)
    return subscription.since


def _set_result(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
