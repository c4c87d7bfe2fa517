"""Long polling: requests that wait for a task to lease or for a task to end, without threads or polling.

Requests for the same queues and names share one wait queue. A notification wakes the first request, which
tries to lease. If it succeeds, it wakes the next one. So a hundred waiting requests cost one lease attempt
per task. A notification during an attempt is not lost, because each wait queue counts its notifications.

One thread waits on the store topics for all wait queues, and only while there are waiting requests.
`store.wait` cannot be cancelled, so the server notifies a private topic when the set of topics grows. Time
also notifies: when a delay ends or a lease expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from holdfast.clock import SYSTEM, Clock, S
from holdfast.errors import HoldfastError, StoreClosed
from holdfast.ops.http.router import ClientDisconnect
from holdfast.store.api import Store
from holdfast.tasks.leases import next_due_ns
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import LeaseResult
from holdfast.tasks.queries import finished_among, queues_with_work

# The longest wait of the listener, and the shortest one before the next due time.
LISTEN_S = 5.0
DUE_S = 0.02
# Above this number of topics, those without waiting requests are dropped.
TOPICS_MAX = 1_000

NO_GRANTS = LeaseResult([])

K = TypeVar("K")


class WaitQueue:
    """A FIFO queue of requests that wait for the same event."""

    def __init__(self) -> None:
        self.members = 0
        self.notifications = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def notify(self) -> None:
        """Notify the queue and wake its first request."""
        self.notifications += 1
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def notify_all(self) -> None:
        for _ in range(len(self._waiting) + 1):
            self.notify()

    async def wait(self, last_seen: int, timeout_s: float, disconnect: ClientDisconnect) -> None:
        """Wait for a wake-up, a notification after `seen`, a client disconnect, or the timeout."""
        if self.notifications != last_seen:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        disconnect.watch(waiter)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await waiter


class LongPoller:
    def __init__(
        self,
        store: Store,
        universe: str,
        loop: asyncio.AbstractEventLoop,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._store = store
        self._universe = universe
        self._keys = keys_of(universe)
        self._loop = loop
        self._private_topic = f"tasks/{universe}/http/{clock.entropy(8).hex()}"
        self._closed = False
        # Wait queues by task queues and names, and by task seq. Modified only in the event loop.
        self._queues: dict[tuple[frozenset[str], frozenset[str]], WaitQueue] = {}
        self._tasks: dict[int, WaitQueue] = {}
        # The topics of the listener: those of waiting requests, and some of earlier ones.
        self._topics: set[str] = set()
        self._has_waiting = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="holdfast-http-bell", daemon=True)
        self._thread.start()

    async def lease(
        self,
        queues: Iterable[str],
        names: Iterable[str],
        wait_s: float,
        attempt: Callable[[], Awaitable[LeaseResult]],
        disconnect: ClientDisconnect,
    ) -> LeaseResult:
        """Repeat the attempt until it is granted tasks or the time is up."""
        leased = await attempt()
        if leased.grants or wait_s <= 0:
            return leased
        until_s = self._loop.time() + wait_s
        key = (frozenset(queues), frozenset(names))
        with self._joined(self._queues, key, map(self._keys.queue_topic, key[0])) as wait_queue:
            try:
                while not self._closed:
                    last_seen = wait_queue.notifications
                    if disconnect.is_set:
                        break
                    leased = await attempt()
                    if leased.grants:
                        return leased
                    left_s = until_s - self._loop.time()
                    if left_s <= 0:
                        return leased
                    await wait_queue.wait(last_seen, left_s, disconnect)
                return NO_GRANTS
            finally:
                # Wake the next request: there may be more tasks, or we consumed a wake-up without an attempt.
                wait_queue.notify()

    async def until_ended(
        self,
        seq: int,
        wait_s: float,
        has_ended: Callable[[], Awaitable[bool]],
        disconnect: ClientDisconnect,
    ) -> None:
        """Wait until a task has ended or the time is up."""
        until_s = self._loop.time() + wait_s
        with self._joined(self._tasks, seq, [self._keys.task_topic(seq)]) as wait_queue:
            while not self._closed and not disconnect.is_set:
                last_seen = wait_queue.notifications
                left_s = until_s - self._loop.time()
                if left_s <= 0 or await has_ended():
                    return
                await wait_queue.wait(last_seen, left_s, disconnect)

    def close(self) -> None:
        """End all long polls and the listener. Called in the event loop."""
        self._closed = True
        self._stopped.set()
        self._has_waiting.set()
        for wait_queue in (*self._queues.values(), *self._tasks.values()):
            wait_queue.notify_all()
        with contextlib.suppress(HoldfastError):
            self._wake_listener()

    # -- wait queues, in the event loop ------------------------------------------------------------

    @contextlib.contextmanager
    def _joined(
        self, wait_queues: dict[K, WaitQueue], key: K, topics: Iterable[str]
    ) -> Iterator[WaitQueue]:
        """Join a wait queue whose topics the listener waits on."""
        wait_queue = wait_queues.setdefault(key, WaitQueue())
        wait_queue.members += 1
        try:
            new_topics = set(topics) - self._topics
            if new_topics:
                # Replaced, not modified: the listener thread may be reading it.
                self._topics = new_topics | (
                    self._topics if len(self._topics) < TOPICS_MAX else self._waiting_topics()
                )
                self._wake_listener()
            self._has_waiting.set()
            yield wait_queue
        finally:
            wait_queue.members -= 1
            if not wait_queue.members:
                del wait_queues[key]
            if not self._queues and not self._tasks and not self._closed:
                self._has_waiting.clear()

    def _waiting_topics(self) -> set[str]:
        """Return the topics of the requests that wait now."""
        queues = {self._keys.queue_topic(name) for key, _ in self._queues for name in key}
        return queues | {self._keys.task_topic(seq) for seq in self._tasks}

    def _notify(self, queues: list[str] | None, ended: list[int]) -> None:
        for (key, _), wait_queue in list(self._queues.items()):
            if queues is None or not key.isdisjoint(queues):
                wait_queue.notify()
        for seq in ended:
            if seq in self._tasks:
                self._tasks[seq].notify_all()

    def _wake_listener(self) -> None:
        self._store.submit(lambda txn: txn.notify(self._private_topic))

    # -- the listener, in its thread -----------------------------------------------------------------

    def _listen(self) -> None:
        since = 0
        while True:
            self._has_waiting.wait()
            if self._stopped.is_set():
                return
            try:
                since = self._wait_and_notify(since)
            except (StoreClosed, RuntimeError):
                return  # the store or the event loop is closed
            except HoldfastError:
                # The polling requests get the same error from their own attempts.
                self._stopped.wait(LISTEN_S)

    def _wait_and_notify(self, since: int) -> int:
        """Wait for a notification or a due time, then wake the affected wait queues."""
        store, universe = self._store, self._universe
        due_ns = store.read(next_due_ns, universe) if self._queues else None
        timeout_s = LISTEN_S
        if due_ns is not None:
            timeout_s = min(max((due_ns - store.now_ns()) / S, DUE_S), LISTEN_S)
        notified_at = store.wait([self._private_topic, *self._topics], since, timeout_s)
        if self._stopped.is_set():
            return notified_at
        queues = {name for key, _ in list(self._queues) for name in key}
        ended = store.read(finished_among, universe, list(self._tasks))
        if due_ns is not None and store.now_ns() >= due_ns:
            ready_queues: list[str] | None = (
                None  # any lease attempt promotes due tasks: wake all queues
            )
        else:
            ready_queues = store.read(queues_with_work, universe, queues)
        if ready_queues is None or ready_queues or ended:
            self._loop.call_soon_threadsafe(self._notify, ready_queues, ended)
        return notified_at
