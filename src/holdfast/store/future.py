"""The answer of `submit`: waited for by threads (`result`) and by asyncio tasks (`await`) alike.

Whoever completes futures does so by the batch: `Completions` wakes an event loop once for all of
its tasks that an arriving frame answers, not once for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from holdfast.errors import Timeout

if TYPE_CHECKING:
    import asyncio


class Submitted:
    __slots__ = ("_callbacks", "_done", "_error", "_event", "_value", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._event: threading.Event | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._callbacks: list[Callable[[Submitted], None]] = []

    def done(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> Any:
        if not self._done:
            if self._event is None:
                self._event = threading.Event()
            # Looked at after the event is in place: the completer looks in the other order.
            if not self._done and not self._event.wait(timeout):
                raise Timeout(waited_s=timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except BaseException as error:
            if error is not self._error:
                raise
        return self._error

    def add_done_callback(self, callback: Callable[[Submitted], None]) -> None:
        self._callbacks.append(callback)
        if self._done:
            self._call_back()

    def __await__(self) -> Generator[Any, None, Any]:
        if not self._done:
            import asyncio

            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, waiter))
            if not self._done:
                yield from waiter
        return self.result()

    def _call_back(self) -> None:
        while self._callbacks:
            self._callbacks.pop()(self)


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
        for loop, waiter in future._waiters:
            self._wakes.setdefault(loop, []).append(waiter)
        if future._callbacks:
            future._call_back()

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


def _resume(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
