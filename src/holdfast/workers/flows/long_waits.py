"""Long waits: a callback for each wait that exceeds a time limit. One timer of the event loop serves all waits.

Most waits of activations end after a few milliseconds. A timer for each of them costs more than the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class LongWaits:
    def __init__(self, after_s: float) -> None:
        """A callback is called once, between one and two times `after_s` after its wait began."""
        self._after_s = after_s
        # The start of each wait, oldest first.
        self._began: dict[Callable[[], None], float] = {}
        # The loop whose timer is set.
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, callback: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._began[callback] = loop.time()
        if self._loop is not loop:
            self._set_timer(loop)

    def remove(self, callback: Callable[[], None]) -> None:
        self._began.pop(callback, None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.call_later(self._after_s, self._check, loop)

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = None
        until_s = loop.time() - self._after_s
        for callback, began_s in list(self._began.items()):
            if began_s > until_s:
                break
            del self._began[callback]
            callback()
        if self._began:
            self._set_timer(loop)
