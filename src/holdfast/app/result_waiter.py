"""The result waiter: one listener thread per runtime serves all coroutines that wait for tasks.

The listener has one subscription to the topics of all tasks, and one for each topic with a wait, which selects the
waits to check. A wait needs no thread, so the number of waits is not limited, and a cancelled wait leaves no state. An
error of one wait (its task was deleted, its event loop is closed) affects only that wait. The thread ends after a time
without waits, or with an error, which all waits get.

A read from a remote store may take seconds and must not block an event loop. For such stores a second
thread reads for all coroutines and batches the waiting requests into one read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.store.api import Store, Txn, reads_block
from holdfast.store.subscription import Subscription
from holdfast.tasks.model import TASK_TOPICS

LISTEN_S = 0.5
IDLE_ROUNDS_MAX = 20
READER_IDLE_S = 10.0

ReadFunction = Callable[[Txn], Any]


class _Wait(NamedTuple):
    read: ReadFunction
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    topic_index: int


# A future with its value or error.
_Resolved = tuple[asyncio.Future[Any], Any, BaseException | None]


class ResultWaiter:
    def __init__(
        self, store: Store, check: Callable[[], None], topic: Callable[[int], str]
    ) -> None:
        """`check` raises if a role of this process failed. `topic` is the topic of a seq."""
        self._store = store
        self._check = check
        self._topics = [topic(n) for n in range(TASK_TOPICS)]
        self._lock = threading.Lock()
        # By topic: the listener checks only waits whose topic was notified.
        self._waits: dict[int, dict[int, _Wait]] = {}
        self._running = False
        self._reads_block = reads_block(store)
        self._reader = _ReaderThread(self._evaluate)
        self._long_reader = _ReaderThread(self._evaluate_each)

    async def until(self, read: ReadFunction, seq: int, timeout: float | None = None) -> Any:
        """Wait until `read` returns a value, and return it. `read` runs whenever the task may have ended. Return None
        after `timeout` seconds. Without time left, `read` still runs once."""
        if timeout is None:
            return await self._until(read, seq)
        if timeout <= 0:
            return await self.read(read)
        try:
            async with asyncio.timeout(timeout) as limit:
                return await self._until(read, seq)
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    async def _until(self, read: ReadFunction, seq: int) -> Any:
        value = None if self._reads_block else self._store.read(read)
        if value is not None:
            return value
        loop = asyncio.get_running_loop()
        wait = _Wait(read, loop, loop.create_future(), seq % TASK_TOPICS)
        with self._lock:
            self._waits.setdefault(wait.topic_index, {})[id(wait)] = wait
            if not self._running:
                self._running = True
                threading.Thread(target=self._listen, name="holdfast-results", daemon=True).start()
        try:
            # The task may have ended before this wait was registered.
            if self._reads_block:
                self._reader.put(wait)
                return await wait.future
            value = self._store.read(read)
            return await wait.future if value is None else value
        finally:
            self._remove(wait)

    async def read(self, read_function: ReadFunction) -> Any:
        """Run `store.read` for a coroutine without blocking the event loop."""
        if not self._reads_block:
            return self._store.read(read_function)
        return await self._read_in(self._reader, read_function)

    async def read_alone(self, read_function: ReadFunction) -> Any:
        """Run a long `store.read` in a thread, with its own snapshot."""
        return await self._read_in(self._long_reader, read_function)

    async def _read_in(self, reader: _ReaderThread, read_function: ReadFunction) -> Any:
        loop = asyncio.get_running_loop()
        wait = _Wait(lambda txn: (read_function(txn),), loop, loop.create_future(), 0)
        reader.put(wait)
        [value] = await wait.future
        return value

    def _remove(self, wait: _Wait) -> None:
        with self._lock:
            waits = self._waits.get(wait.topic_index, {})
            waits.pop(id(wait), None)
            if not waits:
                self._waits.pop(wait.topic_index, None)

    def _listen(self) -> None:
        try:
            with contextlib.ExitStack() as subscriptions:
                subscription = subscriptions.enter_context(self._store.subscribe(self._topics))
                by_topic: dict[int, Subscription] = {}
                idle_rounds = 0
                while True:
                    with self._lock:
                        idle_rounds = 0 if self._waits else idle_rounds + 1
                        if idle_rounds > IDLE_ROUNDS_MAX:
                            self._running = False
                            return
                        topics = list(self._waits)
                    for topic in topics:
                        if topic not in by_topic:
                            of_topic = self._store.subscribe(self._topics[topic])
                            by_topic[topic] = subscriptions.enter_context(of_topic)
                    self._evaluate(self._notified(by_topic, topics))
                    self._check()
                    subscription.wait(LISTEN_S)
        except BaseException as error:
            for wait in self._end_all():
                _resolve_soon(wait, None, error)

    def _notified(self, by_topic: dict[int, Subscription], topics: list[int]) -> list[_Wait]:
        """Return the waits whose topic was notified since the last call."""
        notified: list[_Wait] = []
        for topic in topics:
            if by_topic[topic].wait(0.0):
                with self._lock:
                    notified += self._waits.get(topic, {}).values()
        return notified

    def _end_all(self) -> list[_Wait]:
        """End the listener. Remove and return the waits. A later wait starts a new listener."""
        with self._lock:
            self._running = False
            waits = [wait for by_id in self._waits.values() for wait in by_id.values()]
            self._waits = {}
            return waits

    def _evaluate(self, waits: list[_Wait]) -> None:
        """Evaluate all waits in one read and resolve those with a value or an error. Each event loop is woken once."""
        if not waits:
            return
        results = self._store.read(_evaluate_all, waits)
        by_loop: dict[asyncio.AbstractEventLoop, list[_Resolved]] = {}
        for wait, (value, error) in zip(waits, results, strict=True):
            if value is not None or error is not None:
                self._remove(wait)
                by_loop.setdefault(wait.loop, []).append((wait.future, value, error))
        for loop, resolved in by_loop.items():
            # RuntimeError: the event loop is closed and has no waiting coroutine.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve_all, resolved)

    def _evaluate_each(self, waits: list[_Wait]) -> None:
        """Evaluate each wait in its own read. An error of one read does not affect other waits."""
        for wait in waits:
            if wait.future.cancelled():
                continue
            try:
                _resolve_soon(wait, self._store.read(wait.read), None)
            except BaseException as error:
                _resolve_soon(wait, None, error)


class _ReaderThread:
    """A reader thread that evaluates all queued waits in one read. It ends after READER_IDLE_S without
    requests."""

    def __init__(self, evaluate: Callable[[list[_Wait]], None]) -> None:
        self._evaluate = evaluate
        self._condition = threading.Condition()
        self._waits: list[_Wait] = []
        self._running = False

    def put(self, wait: _Wait) -> None:
        with self._condition:
            self._waits.append(wait)
            self._condition.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="holdfast-reads", daemon=True).start()

    def _run(self) -> None:
        while waits := self._take_waits():
            try:
                self._evaluate(waits)
            except BaseException as error:
                for wait in waits:
                    _resolve_soon(wait, None, error)

    def _take_waits(self) -> list[_Wait]:
        with self._condition:
            if not self._waits:
                self._condition.wait(READER_IDLE_S)
            waits, self._waits = self._waits, []
            self._running = bool(waits)
            return waits


def _evaluate_all(txn: Txn, waits: list[_Wait]) -> list[tuple[Any, HoldfastError | None]]:
    results: list[tuple[Any, HoldfastError | None]] = []
    for wait in waits:
        try:
            results.append((wait.read(txn), None))
        except (NotFound, Invalid) as error:
            results.append((None, error))
    return results


def _resolve_soon(wait: _Wait, value: Any, error: BaseException | None) -> None:
    # RuntimeError: the event loop is closed and has no waiting coroutine.
    with contextlib.suppress(RuntimeError):
        wait.loop.call_soon_threadsafe(_resolve, wait.future, value, error)


def _resolve_all(resolved: list[_Resolved]) -> None:
    for future, value, error in resolved:
        _resolve(future, value, error)


def _resolve(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
