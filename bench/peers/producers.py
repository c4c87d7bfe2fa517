"""The producers of every system: many callers at once, and a fixed pace.

It imports none of our code: the peers' interpreter runs it, too. An enqueued task carries the time
just before the call, by the clock of `tally`. A call returns when the task is durable.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any


async def by_tasks(
    enqueue: Callable[[int], Awaitable[Any]], callers: int, seconds: float
) -> dict[str, Any]:
    """`callers` coroutines. Each enqueues its next task when its last one is durable."""
    count, began = 0, time.perf_counter()

    async def call() -> None:
        nonlocal count
        while time.perf_counter() - began < seconds:
            await enqueue(time.monotonic_ns())
            count += 1

    await asyncio.gather(*(call() for _ in range(callers)))
    return rate(count, began)


def by_threads(enqueue: Callable[[int], Any], callers: int, seconds: float) -> dict[str, Any]:
    counts = [0] * callers
    began = time.perf_counter()

    def call(at: int) -> None:
        while time.perf_counter() - began < seconds:
            enqueue(time.monotonic_ns())
            counts[at] += 1

    threads = [threading.Thread(target=call, args=(at,)) for at in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rate(sum(counts), began)


async def in_batches(
    enqueue: Callable[[list[int]], Awaitable[Any]], count: int, size: int
) -> dict[str, Any]:
    """Enqueue sequential batches."""
    began = time.perf_counter()
    for at in range(0, count, size):
        await enqueue([time.monotonic_ns()] * min(size, count - at))
    return rate(count, began)


async def paced(
    enqueue: Callable[[int], Awaitable[Any]], count: int, per_s: float
) -> dict[str, Any]:
    """Enqueue at a fixed pace. Returns the times of each send and of its acknowledgement."""
    due, acks = time.perf_counter(), []
    for _ in range(count):
        due += 1 / per_s
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        sent_ns = time.monotonic_ns()
        await enqueue(sent_ns)
        acks.append((sent_ns, time.monotonic_ns()))
    return {"count": count, "acks": acks}


def paced_calls(enqueue: Callable[[int], Any], count: int, per_s: float) -> dict[str, Any]:
    due, acks = time.perf_counter(), []
    for _ in range(count):
        due += 1 / per_s
        time.sleep(max(due - time.perf_counter(), 0))
        sent_ns = time.monotonic_ns()
        enqueue(sent_ns)
        acks.append((sent_ns, time.monotonic_ns()))
    return {"count": count, "acks": acks}


def on_loop(
    loop: asyncio.AbstractEventLoop, bodies: Mapping[str, Callable[..., Awaitable[Any]]]
) -> dict[str, Callable[..., Any]]:
    """Wrap a coroutine function for `answers.serve`. All of them share one event loop."""

    def call(body: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        return lambda **asked: loop.run_until_complete(body(**asked))

    return {name: call(body) for name, body in bodies.items()}


def rate(count: int, began: float) -> dict[str, Any]:
    took = time.perf_counter() - began
    return {"rate": count / took, "count": count, "took_s": took}
