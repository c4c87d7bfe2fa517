"""The barrier of `report="each"`: no task of a worker begins while an outcome of that worker is committed.

Tasks that run already go on. The hand of a task that is about to begin waits in its thread, or its coroutine
waits in the event loop, until every outcome that has ended is committed, or its lease is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ReportGate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._committing = 0
        self._waiting: list[Callable[[], None]] = []

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Around the commit of one outcome."""
        with self._changed:
            self._committing += 1
        try:
            yield
        finally:
            with self._changed:
                self._committing -= 1
                waiting: list[Callable[[], None]] = []
                if not self._committing:
                    waiting, self._waiting = self._waiting, waiting
                    self._changed.notify_all()
            for wake in waiting:
                wake()

    def wait(self) -> bool:
        """Wait until a task may begin; whether there was anything to wait for."""
        if not self._committing:
            return False
        with self._changed:
            while self._committing:
                self._changed.wait()
        return True

    async def wait_in_loop(self) -> bool:
        """The same in the event loop."""
        loop = asyncio.get_running_loop()
        waited = False
        while True:
            with self._changed:
                if not self._committing:
                    return waited
                open_again = asyncio.Event()

                def wake(event: asyncio.Event = open_again) -> None:
                    loop.call_soon_threadsafe(event.set)

                self._waiting.append(wake)
            waited = True
            await open_again.wait()
