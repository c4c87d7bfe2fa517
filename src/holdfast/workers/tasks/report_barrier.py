"""The report barrier of `report="each"`: no task of a worker starts while an outcome of that worker
is being committed.

Running tasks are not affected. A task that is about to start waits in its thread or in the event
loop until all finished outcomes are committed, or until its lease is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ReportBarrier:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._committing = 0
        self._async_waiters: list[Callable[[], None]] = []

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Hold the barrier during the commit of one outcome."""
        with self._changed:
            self._committing += 1
        try:
            yield
        finally:
            with self._changed:
                self._committing -= 1
                wakers: list[Callable[[], None]] = []
                if not self._committing:
                    wakers, self._async_waiters = self._async_waiters, wakers
                    self._changed.notify_all()
            for wake in wakers:
                wake()

    def wait(self) -> bool:
        """Block until a task may start. Returns whether the call had to wait."""
        if not self._committing:
            return False
        with self._changed:
            while self._committing:
                self._changed.wait()
        return True

    async def wait_async(self) -> bool:
        """`wait` for a coroutine."""
        loop = asyncio.get_running_loop()
        waited = False
        while True:
            with self._changed:
                if not self._committing:
                    return waited
                released = asyncio.Event()

                def wake(event: asyncio.Event = released) -> None:
                    loop.call_soon_threadsafe(event.set)

                self._async_waiters.append(wake)
            waited = True
            await released.wait()
