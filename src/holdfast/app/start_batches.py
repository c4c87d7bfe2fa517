"""Starts of flows by coroutines, with group commit: starts that are ready in one turn of an event loop are one operation.

The operation is atomic. If the store refuses it, each start is sent alone, so that a refused start affects no other one.
A start with a key may be refused because of another flow. It is never part of a batch.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable
from typing import NamedTuple

from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.flows import operations
from holdfast.flows.model import StartedFlow
from holdfast.flows.new_flow import NewFlow
from holdfast.store.api import Store

# The most starts, and argument bytes, in one commit.
STARTS_MAX = 100
START_BYTES_MAX = 4 * 1024 * 1024


class _AwaitedStart(NamedTuple):
    new: NewFlow
    started: asyncio.Future[StartedFlow]


class StartBatches:
    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        # The starts of this turn, by event loop.
        self._joining: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_AwaitedStart]] = (
            weakref.WeakKeyDictionary()
        )
        # An event loop holds only weak references to its tasks.
        self._sends: set[asyncio.Task[None]] = set()

    async def start(self, new: NewFlow) -> StartedFlow:
        loop = asyncio.get_running_loop()
        awaited = _AwaitedStart(new, loop.create_future())
        joining = self._joining.setdefault(loop, [])
        joining.append(awaited)
        if len(joining) == 1:
            loop.call_soon(self._send_joined, loop)
        return await awaited.started

    def _send_joined(self, loop: asyncio.AbstractEventLoop) -> None:
        # A start that was cancelled in this turn is not sent.
        left = [one for one in self._joining.pop(loop) if not one.started.done()]
        while left:
            batch = _take_batch(left)
            starts = [one.new for one in batch]
            submitted = self._store.submit(operations.start, self._universe, starts)
            task = loop.create_task(self._finish(batch, submitted))
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)

    async def _finish(
        self, batch: list[_AwaitedStart], submitted: Awaitable[list[StartedFlow]]
    ) -> None:
        try:
            found = await submitted
        except BaseException as error:
            refused = isinstance(error, HoldfastError) and not isinstance(error, CommitUnknown)
            if refused and len(batch) > 1:
                await self._send_each(batch)
                return
            reported = error if isinstance(error, Exception) else CommitUnknown(why="cancelled")
            for number, one in enumerate(batch):
                # Each caller has its own error: a traceback grows where it is raised.
                _fail(one, _copy_of(reported) if number else reported)
        else:
            for one, started in zip(batch, found, strict=True):
                if not one.started.done():
                    one.started.set_result(started)

    async def _send_each(self, batch: list[_AwaitedStart]) -> None:
        with self._store.batched():
            submitted = [
                self._store.submit(operations.start, self._universe, [one.new]) for one in batch
            ]
        for one, commit in zip(batch, submitted, strict=True):
            await self._finish([one], commit)


def _take_batch(starts: list[_AwaitedStart]) -> list[_AwaitedStart]:
    """Remove the starts of one commit from the front of the list."""
    size = count = 0
    for one in starts[:STARTS_MAX]:
        size += len(one.new.args)
        if size > START_BYTES_MAX and count:
            break
        count += 1
    batch = starts[:count]
    del starts[:count]
    return batch


def _fail(one: _AwaitedStart, error: Exception) -> None:
    if not one.started.done():
        one.started.set_exception(error)


def _copy_of(error: Exception) -> Exception:
    return type(error)(**error.fields) if isinstance(error, HoldfastError) else error
