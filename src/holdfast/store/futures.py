"""Commit futures: the result of `submit`, for threads (`result`) and asyncio tasks (`await`).

The receiver completes futures in batches: a `CompletionBatch` wakes each event loop once per received
frame, not once per task.
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

    from holdfast.store.api import Settable


class CommitFuture:
    __slots__ = (
        "_done",
        "_ensure_sent",
        "_error",
        "_event",
        "_notified_event",
        "_value",
        "_waiters",
    )

    def __init__(self, ensure_sent: Callable[[], None] | None = None) -> None:
        """`ensure_sent` flushes the request before a thread or task waits for it."""
        self._ensure_sent = ensure_sent
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._event: threading.Event | None = None
        self._notified_event: Settable | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def done(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        if not self._done:
            with _event_lock:
                if self._event is None:
                    self._event = threading.Event()
            if self._ensure_sent is not None:
                self._ensure_sent()
            # Check `_done` after setting the event: the completer uses the opposite order.
            if not self._done and not self._event.wait(timeout):
                raise Timeout(waited_s=timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def notify_event(self, event: Settable) -> None:
        """Set the event on completion, for a caller that waits for several futures."""
        self._notified_event = event
        if self._ensure_sent is not None:
            self._ensure_sent()
        # Check after setting the event, as in `result`.
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
            if self._ensure_sent is not None:
                self._ensure_sent()
            if not self._done:
                yield from waiter
        return self.result()


class CompletionBatch:
    """A batch of futures that complete together."""

    def __init__(self) -> None:
        self._loop_waiters: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def complete(
        self, future: CommitFuture, value: Any = None, error: BaseException | None = None
    ) -> None:
        future._value, future._error = value, error
        future._done = True
        if future._event is not None:
            future._event.set()
        if future._notified_event is not None:
            future._notified_event.set()
        for loop, waiter in future._waiters:
            self._loop_waiters.setdefault(loop, []).append(waiter)

    def wake(self) -> None:
        """Wake the event loops. Call it once, after the last `complete`."""
        if not self._loop_waiters:
            return
        loop_waiters, self._loop_waiters = self._loop_waiters, {}
        for loop, waiters in loop_waiters.items():
            try:
                loop.call_soon_threadsafe(_set_results, waiters)
            except RuntimeError:
                continue  # the loop is closed and has no waiters


def complete_one(
    future: CommitFuture, value: Any = None, error: BaseException | None = None
) -> None:
    """Complete a single future."""
    batch = CompletionBatch()
    batch.complete(future, value, error)
    batch.wake()


class CallbackThread:
    """A thread for user code that must not run in the thread that receives answers."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run the job in the thread. The job reports its own outcome."""
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run_jobs, name="holdfast-callbacks", daemon=True
                )
                self._thread.start()
        self._jobs.put(job)

    def _run_jobs(self) -> None:
        while True:
            self._jobs.get()()


def _set_results(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


_event_lock = threading.Lock()


def _reset_lock_in_child() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _event_lock
    _event_lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_lock_in_child)
