"""Where calls run inside a child: threads for `def`, one event loop for `async def`.

A unit is a few rows (or one batch) of a grant. Units go in by `start`, and how they ended comes
out of one queue, `news`. A unit whose grant was lost meanwhile is dropped before it starts.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.spark.caller import BatchEnded, Caller, Ended, Origins

# Rows that ended are told at least this often while a unit of many rows is at work.
TELL_NS = 20_000_000


@dataclass(eq=False)
class Held:
    """A grant in this child's hands: rows in order, the first `begun` of them are begun."""

    epoch: int
    seqs: Sequence[int]
    attempts: Sequence[int]
    rows: Any  # list[Row], or the Arrow table of a batch
    alone: bool
    begun: int = 0
    started: int = 0
    ended: int = 0
    reported: int = 0
    n: int = 0
    dead: bool = False
    results: list[Ended] = field(default_factory=list)
    batches: list[BatchEnded] = field(default_factory=list)
    # Rows that an earlier run had first: their keys are made of where they were then.
    origins: Origins = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Unit:
    held: Held
    lo: int
    hi: int


@dataclass(frozen=True)
class News:
    """`ended` rows of a unit, and whether the unit is through."""

    unit: Unit
    ended: list[Ended]
    batch: BatchEnded | None
    last: bool


class Pool:
    """What both pools are: a queue of news, and when each running unit began."""

    def __init__(self, caller: Caller, news: queue.SimpleQueue[Any]) -> None:
        self.caller = caller
        self.news = news
        self.running: dict[int, int] = {}
        # Nothing that waits is started any more.
        self.draining = False

    def start(self, units: list[Unit]) -> None:
        raise NotImplementedError

    def oldest_ns(self) -> int | None:
        """When the unit that runs longest began."""
        return min(list(self.running.values()), default=None)

    def close(self) -> None:
        pass


class Threads(Pool):
    def __init__(self, caller: Caller, news: queue.SimpleQueue[Any], count: int) -> None:
        super().__init__(caller, news)
        self._todo: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"call-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, units: list[Unit]) -> None:
        for unit in units:
            self._todo.put(unit)

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)

    def _work(self) -> None:
        me = threading.get_ident()
        while (unit := self._todo.get()) is not None:
            if unit.held.dead or self.draining:
                continue
            self.running[me] = SYSTEM.mono_ns()
            try:
                self._run(unit)
            finally:
                self.running.pop(me, None)

    def _run(self, unit: Unit) -> None:
        held = unit.held
        if isinstance(held.rows, pa.Table):
            table = held.rows.slice(unit.lo, unit.hi - unit.lo)
            seqs = held.seqs[unit.lo : unit.hi]
            batch = self.caller.batch(seqs, table, held.attempts[unit.lo], held.origins)
            self.news.put(News(unit, [], batch, True))
            return
        one, origin = self.caller.one, held.origins.get
        ended: list[Ended] = []
        told_ns = SYSTEM.mono_ns()
        me = threading.get_ident()
        for i in range(unit.lo, unit.hi):
            if held.dead or (self.draining and ended):
                break
            seq = held.seqs[i]
            ended.append(one(seq, held.rows[i], held.attempts[i], origin(seq)))
            if not i & 15:
                now_ns = SYSTEM.mono_ns()
                self.running[me] = now_ns
                if now_ns - told_ns > TELL_NS and i + 1 < unit.hi:
                    self.news.put(News(unit, ended, None, False))
                    ended, told_ns = [], now_ns
        self.news.put(News(unit, ended, None, True))


class Loop(Pool):
    """One event loop in a thread; as many calls at once as the stage's concurrency."""

    def __init__(self, caller: Caller, news: queue.SimpleQueue[Any], count: int) -> None:
        super().__init__(caller, news)
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(count)
        self._kept: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._loop.run_forever, name="calls", daemon=True).start()

    def start(self, units: list[Unit]) -> None:
        self._loop.call_soon_threadsafe(self._start, units)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, units: list[Unit]) -> None:
        for unit in units:
            task = self._loop.create_task(self._run(unit))
            self._kept.add(task)
            task.add_done_callback(self._kept.discard)

    async def _run(self, unit: Unit) -> None:
        async with self._slots:
            held = unit.held
            if held.dead or self.draining:
                return
            self.running[id(unit)] = SYSTEM.mono_ns()
            try:
                self.news.put(await self._ended(unit))
            finally:
                self.running.pop(id(unit), None)

    def _ended(self, unit: Unit) -> Coroutine[Any, Any, News]:
        return self._batch(unit) if isinstance(unit.held.rows, pa.Table) else self._rows(unit)

    async def _batch(self, unit: Unit) -> News:
        held = unit.held
        table = held.rows.slice(unit.lo, unit.hi - unit.lo)
        seqs = held.seqs[unit.lo : unit.hi]
        attempt = held.attempts[unit.lo]
        batch = await self.caller.batch_async(seqs, table, attempt, held.origins)
        return News(unit, [], batch, True)

    async def _rows(self, unit: Unit) -> News:
        held = unit.held
        ended = [
            await self.caller.one_async(
                held.seqs[i], held.rows[i], held.attempts[i], held.origins.get(held.seqs[i])
            )
            for i in range(unit.lo, unit.hi)
        ]
        return News(unit, ended, None, True)
