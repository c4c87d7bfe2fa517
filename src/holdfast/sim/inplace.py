"""Effects in place: a pool without threads, and coroutines in simulated time.

A coroutine runs in an event loop of its own, in the thread of whoever calls it, until it is done. When
nothing in it can go on, the loop sleeps as every actor does: others run meanwhile, and time leaps if
nobody can. So `asyncio.sleep`, time-outs and tasks work as they are, and take no time.

Real sockets get a moment of real time before simulated time goes on without them.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.app.declare import Call, Effect
from holdfast.clock import Clock, S
from holdfast.errors import Timeout

# The real time that sockets get before simulated time leaps.
SOCKETS_S = 0.05
# A coroutine that waits for nothing that there is, looks so often.
BLOCKED_S = 1.0


def in_place(
    effect: Effect[Any, Any],
    fn: Callable[..., Any],
    clock: Clock,
    now_ns: Callable[[], int],
) -> Effect[Any, Any]:
    """The effect, done by this function in the thread that asks for it, one at a time."""
    made = copy.copy(effect)
    made.concurrency = 1
    made.asynchronous = False

    def done(call: Call, *args: Any) -> Any:
        result = fn(call, *args)
        if not inspect.isawaitable(result):
            return result
        return run(result, clock, (call.deadline_ns - now_ns()) / S)

    made.fn = done
    return made


def run(result: Awaitable[Any], clock: Clock, timeout_s: float) -> Any:
    """What an awaitable comes to, in simulated time; Timeout if it takes too long."""
    loop = _Loop(clock)
    try:
        value, raised = loop.run_until_complete(_within(result, timeout_s))
    finally:
        _abandon(loop)
    if raised is not None:
        raise raised
    return value


def _abandon(loop: asyncio.AbstractEventLoop) -> None:
    """A process that died leaves its tasks where they are, and nobody is to complain."""
    for task in asyncio.all_tasks(loop):
        setattr(task, "_log_destroy_pending", False)  # noqa: B010
    loop.close()


async def _within(result: Awaitable[Any], timeout_s: float) -> tuple[Any, BaseException | None]:
    try:
        return await asyncio.wait_for(_caught(result), timeout_s)
    except TimeoutError:
        return None, Timeout(what="effect", waited_s=timeout_s)


async def _caught(result: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What it raises, as a value: a loop takes some errors for the end of its own."""
    try:
        return await result, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self._simulated = clock
        super().__init__(_Selector(clock))

    def time(self) -> float:
        return self._simulated.mono_ns() / 1e9


class _Selector(selectors.DefaultSelector):
    """Waits in simulated time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._simulated = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        # The loop has one socket of its own.
        sockets = len(self.get_map()) > 1
        ready = super().select(SOCKETS_S if sockets and timeout != 0 else 0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        self._simulated.sleep(BLOCKED_S if timeout is None else timeout)
        return super().select(0)
