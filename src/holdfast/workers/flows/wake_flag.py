"""The wake flag of an activation: an `asyncio.Event` for one waiter, with less work per wait."""

from __future__ import annotations

import asyncio


class WakeFlag:
    __slots__ = ("_loop", "_waiter", "is_set")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        self.is_set = False

    async def wait(self) -> None:
        """Wait until the flag is set. Only one coroutine waits at a time."""
        if self.is_set:
            return
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
