"""Coroutines that wait for tasks: one thread of a runtime listens for all of them.

A wait takes no thread of its own, so any number may be under way, and one that is cancelled leaves
nothing behind. What is wrong with one wait (its task was forgotten, its event loop is gone) is told to
that one alone. The thread ends when nobody has waited for a while.

A store behind a network may take seconds to answer a read. There an event loop reads nothing itself: a second
thread reads for all its coroutines, as many as have come together by one read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.errors import HoldfastError, Invalid, NotFound, StoreClosed
from holdfast.store.api import Store, Txn, reads_block
from holdfast.tasks.rows import TASK_TOPICS, keys_of

LOOK_S = 0.5
IDLE_LOOKS = 20
READER_IDLE_S = 10.0

Look = Callable[[Txn], Any]


class _Wait(NamedTuple):
    look: Look
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    topic: int


class Waiting:
    def __init__(self, store: Store, universe: str, check: Callable[[], None]) -> None:
        """`check` raises if nobody in this process does the work any more."""
        self._store = store
        self._check = check
        self._topics = [keys_of(universe).task_topic(n) for n in range(TASK_TOPICS)]
        self._lock = threading.Lock()
        # By topic: only those are looked at whose topic has rung, or who have just come.
        self._waits: dict[int, dict[int, _Wait]] = {}
        self._fresh: set[int] = set()
        self._running = False
        self._blocks = reads_block(store)
        self._reader = _Reader(self._answer)

    async def until(self, look: Look, seq: int) -> Any:
        """What `look` finds, as soon as it finds something; it is asked whenever the task may have
        ended."""
        found = None if self._blocks else self._store.read(look)
        if found is not None:
            return found
        loop = asyncio.get_running_loop()
        wait = _Wait(look, loop, loop.create_future(), seq % TASK_TOPICS)
        with self._lock:
            self._waits.setdefault(wait.topic, {})[id(wait)] = wait
            self._fresh.add(wait.topic)
            if not self._running:
                self._running = True
                threading.Thread(target=self._listen, name="holdfast-results", daemon=True).start()
        try:
            # It may have ended before anybody was told of this wait.
            if self._blocks:
                self._reader.put(wait)
                return await wait.future
            found = self._store.read(look)
            return await wait.future if found is None else found
        finally:
            self._forget(wait)

    async def read(self, look: Look) -> Any:
        """`store.read`, for a coroutine: the event loop goes on meanwhile."""
        if not self._blocks:
            return self._store.read(look)
        loop = asyncio.get_running_loop()
        wait = _Wait(lambda txn: (look(txn),), loop, loop.create_future(), 0)
        self._reader.put(wait)
        [found] = await wait.future
        return found

    def _forget(self, wait: _Wait) -> None:
        with self._lock:
            waits = self._waits.get(wait.topic, {})
            waits.pop(id(wait), None)
            if not waits:
                self._waits.pop(wait.topic, None)

    def _rung(self, heard: dict[int, int]) -> list[_Wait]:
        """Those whose topic has rung since it was last looked at, and those who have just come."""
        with self._lock:
            topics, fresh = list(self._waits), self._fresh
            self._fresh = set()
        found: list[_Wait] = []
        for topic in topics:
            was = heard.get(topic, 0)
            heard[topic] = self._store.wait(self._topics[topic], was, 0.0)
            if heard[topic] > was or topic in fresh:
                with self._lock:
                    found += self._waits.get(topic, {}).values()
        return found

    def _listen(self) -> None:
        since = idle = 0
        heard: dict[int, int] = {}
        while True:
            with self._lock:
                idle = 0 if self._waits else idle + 1
                if idle > IDLE_LOOKS:
                    self._running = False
                    return
            waits: list[_Wait] = []
            try:
                waits = self._rung(heard)
                self._answer(waits)
                self._check()
                since = self._store.wait(self._topics, since, LOOK_S)
            except BaseException as trouble:
                # Whoever was told already does not hear of it.
                with self._lock:
                    waits = [one for held in self._waits.values() for one in held.values()]
                for wait in waits:
                    self._tell(wait, None, trouble)
                if isinstance(trouble, StoreClosed):
                    with self._lock:
                        self._running = False
                        return

    def _answer(self, waits: list[_Wait]) -> None:
        """Look for all of them, and tell those for whom there is something."""
        answers = self._store.read(_look_all, waits)
        for wait, (value, error) in zip(waits, answers, strict=True):
            if value is not None or error is not None:
                self._tell(wait, value, error)

    def _tell(self, wait: _Wait, value: Any, error: BaseException | None) -> None:
        self._forget(wait)
        _resolve_soon(wait, value, error)


class _Reader:
    """A thread that answers waits, all that have come since it last did by one read. It ends when it has had
    nothing to do for a while."""

    def __init__(self, answer: Callable[[list[_Wait]], None]) -> None:
        self._answer = answer
        self._came = threading.Condition()
        self._waits: list[_Wait] = []
        self._running = False

    def put(self, wait: _Wait) -> None:
        with self._came:
            self._waits.append(wait)
            self._came.notify()
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="holdfast-reads", daemon=True).start()

    def _run(self) -> None:
        while waits := self._take():
            try:
                self._answer(waits)
            except BaseException as error:
                for wait in waits:
                    _resolve_soon(wait, None, error)

    def _take(self) -> list[_Wait]:
        with self._came:
            if not self._waits:
                self._came.wait(READER_IDLE_S)
            waits, self._waits = self._waits, []
            self._running = bool(waits)
            return waits


def _look_all(txn: Txn, waits: list[_Wait]) -> list[tuple[Any, HoldfastError | None]]:
    found: list[tuple[Any, HoldfastError | None]] = []
    for one in waits:
        try:
            found.append((one.look(txn), None))
        except (NotFound, Invalid) as error:
            found.append((None, error))
    return found


def _resolve_soon(wait: _Wait, value: Any, error: BaseException | None) -> None:
    # The loop is closed: no coroutine waits there.
    with contextlib.suppress(RuntimeError):
        wait.loop.call_soon_threadsafe(_resolve, wait.future, value, error)


def _resolve(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
