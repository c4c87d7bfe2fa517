"""Long polling: requests that wait for a task to lease or for a task to end, without threads or polling.

Requests for the same queues and names share one wait queue. A notification wakes the first request, which
tries to lease. If it succeeds, it wakes the next one. So a hundred waiting requests cost one lease attempt
per task. A notification during an attempt is not lost, because each wait queue counts its notifications.

One coroutine, the listener, waits on a store subscription for all wait queues, and only while there are waiting
requests. When the set of topics grows, the server replaces the subscription. Time also notifies: when a delay
ends or a lease expires.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from holdfast import failpoints
from holdfast.clock import S
from holdfast.errors import HoldfastError, StoreClosed
from holdfast.ops.http.routes import ClientDisconnect
from holdfast.store.api import Store, reads_block
from holdfast.store.subscription import Subscription
from holdfast.tasks.leases import next_due_ns
from holdfast.tasks.model import keys_of
from holdfast.tasks.operations import LeaseResult
from holdfast.tasks.queries import finished_among, queues_with_work

# The longest wait of the listener, and the shortest one before the next due time.
LISTEN_S = 5.0
DUE_S = 0.02
# Above this number of topics, those without waiting requests are dropped.
TOPICS_MAX = 1_000
# Above this number of waiting tasks or queues, a thread reads their state.
READS_IN_LOOP_MAX = 100

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
    """Created, used and closed in the event loop."""

    def __init__(
        self,
        store: Store,
        universe: str,
        loop: asyncio.AbstractEventLoop,
        run_in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        """`run_in_thread` runs long reads, and all reads of a store that may block."""
        self._store = store
        self._universe = universe
        self._keys = keys_of(universe)
        self._loop = loop
        self._run_in_thread = run_in_thread
        self._reads_block = reads_block(store)
        self._closed = False
        # Wait queues by task queues and names, and by task seq.
        self._queues: dict[tuple[frozenset[str], frozenset[str]], WaitQueue] = {}
        self._tasks: dict[int, WaitQueue] = {}
        # The topics of the listener: those of waiting requests, and some of earlier ones.
        self._topics: set[str] = set()
        self._subscription: Subscription | None = None
        self._has_waiting = asyncio.Event()
        self._listener = loop.create_task(self._listen())

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
        """End all long polls and the listener."""
        self._closed = True
        for wait_queue in (*self._queues.values(), *self._tasks.values()):
            wait_queue.notify_all()
        if self._subscription is not None:
            self._subscription.cancel()
        self._listener.cancel()

    # -- wait queues -------------------------------------------------------------------------------

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
                self._subscribe(
                    new_topics
                    | (self._topics if len(self._topics) < TOPICS_MAX else self._waiting_topics())
                )
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

    # -- the listener ------------------------------------------------------------------------------

    def _subscribe(self, topics: set[str]) -> None:
        """Replace the subscription. The wait on the former one ends."""
        former = self._subscription
        if failpoints.armed:
            failpoints.hit("http.long_poll.subscribe", topics)
        # First: after an error the former subscription remains.
        self._subscription = self._store.subscribe(list(topics), former.since if former else 0)
        self._topics = topics
        if former is not None:
            former.cancel()

    async def _listen(self) -> None:
        while True:
            await self._has_waiting.wait()
            try:
                await self._wait_and_notify()
            except StoreClosed:
                return
            except HoldfastError:
                # The polling requests get the same error from their own attempts.
                await asyncio.sleep(LISTEN_S)
            except Exception as error:
                # Such as a thread that cannot be started: later requests need the listener.
                self._loop.call_exception_handler(
                    {"message": "the long poll listener failed", "exception": error}
                )
                await asyncio.sleep(LISTEN_S)

    async def _wait_and_notify(self) -> None:
        """Wait for a notification or a due time, then wake the affected wait queues."""
        assert self._subscription is not None, "a waiting request has subscribed"
        store = self._store
        due_ns = await self._read(1, next_due_ns, self._universe) if self._queues else None
        timeout_s = LISTEN_S
        if due_ns is not None:
            timeout_s = min(max((due_ns - store.now_ns()) / S, DUE_S), LISTEN_S)
        if failpoints.armed:
            failpoints.hit("http.long_poll.wait")
        await self._subscription.wait_async(timeout_s)
        queues = {name for key, _ in self._queues for name in key}
        tasks = list(self._tasks)
        ended = await self._read(len(tasks), finished_among, self._universe, tasks)
        if due_ns is not None and store.now_ns() >= due_ns:
            ready_queues = None  # any lease attempt promotes due tasks: wake all queues
        else:
            ready_queues = await self._read(len(queues), queues_with_work, self._universe, queues)
        self._notify(ready_queues, ended)

    async def _read(self, size: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Read in the event loop, or in a thread if the read may block or is long."""
        if failpoints.armed:
            failpoints.hit("http.long_poll.read")
        if self._reads_block or size > READS_IN_LOOP_MAX:
            return await self._run_in_thread(self._store.read, fn, *args)
        return self._store.read(fn, *args)
