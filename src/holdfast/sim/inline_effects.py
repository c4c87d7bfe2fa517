"""Inline effects: effect calls without threads, and coroutines in simulated time.

A coroutine runs to completion in its own event loop, in the caller's thread. When it cannot
proceed, the loop sleeps as an actor does: other actors run meanwhile, and the clock jumps if none
can. `asyncio.sleep`, time-outs and tasks therefore work unchanged and take no real time.

Real sockets get a short real-time wait before simulated time proceeds without them.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.app.definitions import Call, Effect
from holdfast.clock import Clock, S
from holdfast.errors import Timeout

# Real time that sockets get before the simulated clock jumps.
SOCKET_WAIT_S = 0.05
# Poll interval of a coroutine that waits without a time-out.
BLOCKED_POLL_S = 1.0


def inline_effect(
    effect: Effect[Any, Any],
    fn: Callable[..., Any],
    clock: Clock,
    now_ns: Callable[[], int],
) -> Effect[Any, Any]:
    """Copy the effect so that `fn` runs in the caller's thread, one call at a time."""
    inlined = copy.copy(effect)
    inlined.concurrency = 1
    inlined.asynchronous = False

    def done(call: Call, *args: Any) -> Any:
        result = fn(call, *args)
        if not inspect.isawaitable(result):
            return result
        return run_awaitable(result, clock, (call.deadline_ns - now_ns()) / S)

    inlined.fn = done
    return inlined


def run_awaitable(result: Awaitable[Any], clock: Clock, timeout_s: float) -> Any:
    """Run an awaitable in simulated time. Raise Timeout if it takes too long."""
    loop = _SimEventLoop(clock)
    try:
        value, raised = loop.run_until_complete(_with_timeout(result, timeout_s))
    finally:
        _close_quietly(loop)
    if raised is not None:
        raise raised
    return value


def _close_quietly(loop: asyncio.AbstractEventLoop) -> None:
    """Close the loop of a dead process without warnings about its pending tasks."""
    for task in asyncio.all_tasks(loop):
        setattr(task, "_log_destroy_pending", False)  # noqa: B010
    loop.close()


async def _with_timeout(
    result: Awaitable[Any], timeout_s: float
) -> tuple[Any, BaseException | None]:
    try:
        return await asyncio.wait_for(_exception_as_value(result), timeout_s)
    except TimeoutError:
        return None, Timeout(what="effect", waited_s=timeout_s)


async def _exception_as_value(result: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return a raised exception as a value: an event loop treats some exceptions as its own end."""
    try:
        return await result, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return None, error


class _SimEventLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self._simulated = clock
        super().__init__(SimSelector(clock.sleep))

    def time(self) -> float:
        return self._simulated.mono_ns() / 1e9


class SimSelector(selectors.DefaultSelector):
    """Selector that waits in simulated time, with `sleep`."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self._sleep = sleep

    def select(self, timeout: float | None = None) -> list[Any]:
        # The loop itself owns one socket.
        sockets = len(self.get_map()) > 1
        ready = super().select(SOCKET_WAIT_S if sockets and timeout != 0 else 0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        self._sleep(BLOCKED_POLL_S if timeout is None else timeout)
        return super().select(0)
