"""Coroutines that wait for tasks: one thread of a runtime listens for all of them.

A wait takes no thread of its own, so any number may be under way, and one that is cancelled leaves
nothing behind. What is wrong with one wait (its task was forgotten, its event loop is gone) is told to
that one alone. The thread ends when nobody has waited for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.errors import NotFound, StoreClosed
from holdfast.store.api import Store, Txn
from holdfast.tasks.rows import TASK_TOPICS, keys_of

LOOK_S = 0.5
IDLE_LOOKS = 20

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

    async def until(self, look: Look, seq: int) -> Any:
        """What `look` finds, as soon as it finds something; it is asked whenever the task may have
        ended."""
        found = self._store.read(look)
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
            found = self._store.read(look)
            return await wait.future if found is None else found
        finally:
            self._forget(wait)

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
                answers = self._store.read(_look_all, waits)
                for wait, (value, error) in zip(waits, answers, strict=True):
                    if value is not None or error is not None:
                        self._tell(wait, value, error)
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

    def _tell(self, wait: _Wait, value: Any, error: BaseException | None) -> None:
        self._forget(wait)
        # A loop that is closed: nobody waits there any more.
        with contextlib.suppress(RuntimeError):
            wait.loop.call_soon_threadsafe(_resolve, wait.future, value, error)


def _look_all(txn: Txn, waits: list[_Wait]) -> list[tuple[Any, NotFound | None]]:
    found: list[tuple[Any, NotFound | None]] = []
    for one in waits:
        try:
            found.append((one.look(txn), None))
        except NotFound as error:
            found.append((None, error))
    return found


def _resolve(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
