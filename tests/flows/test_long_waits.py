"""Long waits: a callback for each wait that exceeds a time limit, with one timer for all of them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any

from holdfast.workers.flows.long_waits import LongWaits

MODULES = ("holdfast.workers.flows.long_waits",)


class ManualLoop:
    """An event loop whose time the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.timers_set = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> None:
        self.timers_set += 1
        heapq.heappush(self.timers, (self.now_s + delay, self.timers_set, callback, args))

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.timers and self.timers[0][0] <= until_s:
            self.now_s, _, callback, args = heapq.heappop(self.timers)
            callback(*args)
        self.now_s = until_s


def test_callback_of_a_long_wait_is_called_once() -> None:
    loop: Any = ManualLoop()
    waits, called = LongWaits(1.0), []
    waits.add(lambda: called.append("first"), loop)
    loop.advance(0.9)
    assert called == []
    loop.advance(1.1)
    assert called == ["first"]
    loop.advance(5.0)
    assert called == ["first"]
    assert loop.timers == []


def test_callback_of_a_wait_that_ended_is_not_called() -> None:
    loop: Any = ManualLoop()
    waits, called = LongWaits(1.0), []

    def first() -> None:
        called.append("first")

    waits.add(first, loop)
    loop.advance(0.5)
    waits.remove(first)
    loop.advance(5.0)
    assert called == []


def test_each_wait_is_called_between_one_and_two_limits_after_its_start() -> None:
    loop: Any = ManualLoop()
    waits, called = LongWaits(1.0), {}
    begins = [0.0, 0.3, 0.9, 1.0, 1.7, 2.2]
    for begin in begins:
        loop.advance(begin - loop.now_s)
        waits.add(lambda begin=begin: called.update({begin: loop.now_s}), loop)
    loop.advance(5.0)
    assert list(called) == begins
    assert all(1.0 <= at - begin <= 2.0 for begin, at in called.items())


def test_many_short_waits_set_one_timer() -> None:
    loop: Any = ManualLoop()
    waits = LongWaits(1.0)
    for _ in range(100):
        waits.add(print, loop)
        waits.remove(print)
    assert loop.timers_set == 1


def test_waits_of_a_new_event_loop_are_called() -> None:
    """The timer of a former loop, which is closed, does not prevent the timer of this one."""
    waits = LongWaits(0.001)

    async def wait() -> None:
        called = asyncio.Event()
        waits.add(called.set, asyncio.get_running_loop())
        await called.wait()

    async def begin() -> None:
        waits.add(print, asyncio.get_running_loop())
        waits.remove(print)

    asyncio.run(begin())
    asyncio.run(wait())
