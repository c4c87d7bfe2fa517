"""The answer of `submit`: waited for by threads (`result`) and by asyncio tasks (`await`) alike.

Whoever completes futures does so by the batch: `Completions` wakes an event loop once for all of
its tasks that an arriving frame answers, not once for each.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from holdfast.errors import Timeout

if TYPE_CHECKING:
    import asyncio


class Submitted:
    __slots__ = ("_done", "_error", "_event", "_nudge", "_told", "_value", "_waiters")

    def __init__(self, nudge: Callable[[], None] | None = None) -> None:
        """`nudge` makes sure that what is waited for is under way."""
        self._nudge = nudge
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._event: threading.Event | None = None
        self._told: threading.Event | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def done(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        if not self._done:
            with _making_events:
                if self._event is None:
                    self._event = threading.Event()
            if self._nudge is not None:
                self._nudge()
            # Looked at after the event is in place: the completer looks in the other order.
            if not self._done and not self._event.wait(timeout):
                raise Timeout(waited_s=timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def tell(self, event: threading.Event) -> None:
        """Set an event when it is done: for one who waits for several things at once."""
        self._told = event
        if self._nudge is not None:
            self._nudge()
        # Looked at after it is in place, as in `result`.
        if self._done:
            event.set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except BaseException as error:
            if error is not self._error:
                raise
        return self._error

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            import asyncio

            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, waiter))
            if self._nudge is not None:
                self._nudge()
            if not self._done:
                yield from waiter
        return self.result()


class Completions:
    """Futures that complete together."""

    def __init__(self) -> None:
        self._wakes: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def complete(
        self, future: Submitted, value: Any = None, error: BaseException | None = None
    ) -> None:
        future._value, future._error = value, error
        future._done = True
        if future._event is not None:
            future._event.set()
        if future._told is not None:
            future._told.set()
        for loop, waiter in future._waiters:
            self._wakes.setdefault(loop, []).append(waiter)

    def wake(self) -> None:
        """Wake the event loops. Call it once, after the last `complete`."""
        if not self._wakes:
            return
        wakes, self._wakes = self._wakes, {}
        for loop, waiters in wakes.items():
            try:
                loop.call_soon_threadsafe(_resume, waiters)
            except RuntimeError:
                continue  # the loop was closed: nobody waits there any more


def complete(future: Submitted, value: Any = None, error: BaseException | None = None) -> None:
    """Complete one future alone."""
    alone = Completions()
    alone.complete(future, value, error)
    alone.wake()


class Aside:
    """A thread for the user's code that must not run where answers are read."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], None]) -> None:
        """Do this later, elsewhere. The job itself says how it ended."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-aside", daemon=True
                )
                self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            self._jobs.get()()


def _resume(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


_making_events = threading.Lock()


def _forget_lock() -> None:
    """A thread that held it is not there in a forked child."""
    global _making_events
    _making_events = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
