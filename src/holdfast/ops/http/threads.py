"""The threads of the HTTP server: for reads, for large bodies, for handlers of endpoints, and for handlers that wait.

Each kind has its own bound, so a kind of work that is slow delays no other.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.ops.http.problem import ServerOverloaded

READER_THREADS = 4
HANDLER_THREADS = 8
WAITING_THREADS = 32
# Larger bodies are parsed in a thread, because parsing takes a millisecond or more.
LARGE_BODY_BYTES = 64 * 1024

T = TypeVar("T")


class HttpThreads:
    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="holdfast-http-read")
        # A single thread, so that parsing of large bodies cannot dominate the GIL.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="holdfast-http-parse")
        self._handlers = ThreadPoolExecutor(HANDLER_THREADS, thread_name_prefix="holdfast-http")
        self._waiters = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="holdfast-http-wait")
        self._waiting = 0

    async def read(self, fn: Callable[..., T], *args: Any) -> T:
        """Run a blocking store read."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, fn, *args)

    async def handle(self, fn: Callable[..., T], *args: Any) -> T:
        """Run the handler of an endpoint."""
        return await _run_in(self._handlers, fn, *args)

    async def wait(self, fn: Callable[..., T], *args: Any) -> T:
        """Run a handler that may wait. Refuse it if all threads for such handlers are in use."""
        if self._waiting >= WAITING_THREADS:
            raise ServerOverloaded(what="waiting requests", max=WAITING_THREADS)
        self._waiting += 1
        try:
            return await _run_in(self._waiters, fn, *args)
        finally:
            self._waiting -= 1

    async def parse(self, size: int, fn: Callable[..., T], *args: Any) -> T:
        """Run a parser: in the event loop for a small body, in the parser thread for a large one."""
        if size < LARGE_BODY_BYTES:
            return fn(*args)
        return await asyncio.get_running_loop().run_in_executor(self._parser, fn, *args)

    def shutdown(self) -> None:
        for pool in (self._readers, self._parser, self._handlers, self._waiters):
            pool.shutdown(wait=False, cancel_futures=True)


async def _run_in(pool: ThreadPoolExecutor, fn: Callable[..., T], *args: Any) -> T:
    """Run a handler in a thread, with the trace context of its request."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, fn, *args)
