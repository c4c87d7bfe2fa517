"""Coroutines that wait for tasks: one thread of a runtime listens for all of them.

A wait takes no thread of its own, so any number may be under way, and one that is cancelled leaves
nothing behind. The thread ends when nobody has waited for a while.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.errors import StoreClosed
from holdfast.store.api import Store, Txn
from holdfast.tasks.rows import TASK_TOPICS, keys_of

LOOK_S = 0.5
IDLE_LOOKS = 20

Look = Callable[[Txn], Any]


class _Wait(NamedTuple):
    look: Look
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class Waiting:
    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._topics = [keys_of(universe).task_topic(n) for n in range(TASK_TOPICS)]
        self._lock = threading.Lock()
        self._waits: list[_Wait] = []
        self._running = False

    async def until(self, look: Look) -> Any:
        """What `look` finds, as soon as it finds something; it is asked whenever tasks end."""
        found = self._store.read(look)
        if found is not None:
            return found
        loop = asyncio.get_running_loop()
        wait = _Wait(look, loop, loop.create_future())
        with self._lock:
            self._waits.append(wait)
            if not self._running:
                self._running = True
                threading.Thread(target=self._listen, name="holdfast-results", daemon=True).start()
        try:
            # It may have ended before anybody was told of this wait.
            found = self._store.read(look)
            return await wait.future if found is None else found
        finally:
            with self._lock:
                if wait in self._waits:
                    self._waits.remove(wait)

    def _listen(self) -> None:
        since = idle = 0
        while True:
            with self._lock:
                waits = list(self._waits)
                idle = 0 if waits else idle + 1
                if idle > IDLE_LOOKS:
                    self._running = False
                    return
            try:
                found = self._store.read(_look_all, waits)
                for wait, one in zip(waits, found, strict=True):
                    if one is not None:
                        wait.loop.call_soon_threadsafe(_resolve, wait.future, one, None)
                since = self._store.wait(self._topics, since, LOOK_S)
            except Exception as error:
                for wait in waits:
                    _tell(wait, error)
                with self._lock:
                    self._waits = [one for one in self._waits if one not in waits]
                    if isinstance(error, StoreClosed) or not self._waits:
                        self._running = False
                        return


def _look_all(txn: Txn, waits: list[_Wait]) -> list[Any]:
    return [one.look(txn) for one in waits]


def _tell(wait: _Wait, error: Exception) -> None:
    try:
        wait.loop.call_soon_threadsafe(_resolve, wait.future, None, error)
    except RuntimeError:
        return  # its loop is closed: nobody waits there any more


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
