"""Where calls run inside a child: threads for `def`, one event loop for `async def`.

A unit is a few rows (or one batch) of a grant. Units go in by `start`, and how they ended comes
out of one queue, `news`. A unit whose grant was lost meanwhile is dropped before it starts.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from holdfast.clock import SYSTEM
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.states import State
from holdfast.spark.call_slots import Watch
from holdfast.spark.caller import BatchEnded, Caller, Ended, Origins

# Rows that ended are told at least this often while a unit of many rows is at work.
TELL_NS = 20_000_000


class Settled(NamedTuple):
    """A row that fails without a call; `micros` is below 0 when none was ever made."""

    error_class: int
    error: str
    micros: int

    def ended(self, seq: int) -> Ended:
        fail = int(State.TERMINAL_FAIL)
        return Ended(seq, fail, None, self.error_class, self.error, 0, 0.0, self.micros)


@dataclass(eq=False)
class Held:
    """A grant in this child's hands: rows in order, the first `begun` of them are begun."""

    epoch: int
    seqs: Sequence[int]
    attempts: Sequence[int]
    rows: Any  # RowReader, or the Arrow table of a batch
    alone: bool
    begun: int = 0
    started: int = 0
    ended: int = 0
    reported: int = 0
    n: int = 0
    dead: bool = False
    # By place: rows that are not called.
    settled: dict[int, Settled] = field(default_factory=dict)
    results: list[Ended] = field(default_factory=list)
    batches: list[BatchEnded] = field(default_factory=list)
    # Rows that an earlier run had first: their keys are made of where they were then.
    origins: Origins = field(default_factory=dict)
    # Under a limit of tokens: the estimate of each call, by its first row.
    prices: dict[int, int] = field(default_factory=dict)


def settle_unfit(held: Held) -> None:
    """Rows that cannot be converted fail with the reason, unless it is known already how they end."""
    for at, why in held.rows.unfit.items():
        told = f"its input cannot be converted: {why}"
        held.settled.setdefault(at, Settled(int(ErrorClass.INPUT), told, -1))


@dataclass(frozen=True, eq=False)
class Unit:
    held: Held
    lo: int
    hi: int
    # Of a unit that is no batch: one for each place. None: it is settled, and not called.
    rows: Sequence[Any] = ()


@dataclass(frozen=True)
class News:
    """`ended` rows of a unit, and whether the unit is through."""

    unit: Unit
    ended: list[Ended]
    batch: BatchEnded | None
    last: bool


class Pool:
    """What both pools are: a queue of news, and the slots of the units that run."""

    def __init__(self, caller: Caller, news: queue.SimpleQueue[Any]) -> None:
        self.caller = caller
        self.news = news
        # The place of the slot of each unit that runs.
        self.running: dict[int, int] = {}
        # Nothing that waits is started any more.
        self.draining = False
        # Calls stop each other from going on.
        self.blocked = False

    def start(self, units: list[Unit]) -> None:
        raise NotImplementedError

    def stuck(self, silent: dict[int, int]) -> dict[int, int]:
        """Which of the calls that have been silent for too long are stuck themselves."""
        return silent

    def close(self) -> None:
        pass


class Threads(Pool):
    def __init__(
        self, caller: Caller, news: queue.SimpleQueue[Any], count: int, watches: list[Watch]
    ) -> None:
        super().__init__(caller, news)
        self._todo: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(watch,), name=f"call-{i}", daemon=True)
            for i, watch in enumerate(watches[:count])
        ]
        for thread in self._threads:
            thread.start()

    def start(self, units: list[Unit]) -> None:
        for unit in units:
            self._todo.put(unit)

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)

    def _work(self, watch: Watch) -> None:
        place = watch.place
        while (unit := self._todo.get()) is not None:
            if unit.held.dead or self.draining:
                continue
            self.running[place] = place
            try:
                self._run(unit, watch)
            finally:
                watch.end()
                self.running.pop(place, None)

    def _run(self, unit: Unit, watch: Watch) -> None:
        held = unit.held
        if isinstance(held.rows, pa.Table):
            batch = _settled_batch(unit, self.caller)
            if batch is None:
                table = held.rows.slice(unit.lo, unit.hi - unit.lo)
                seqs = held.seqs[unit.lo : unit.hi]
                batch = self.caller.batch(seqs, table, held.attempts[unit.lo], held.origins, watch)
            self.news.put(News(unit, [], batch, True))
            return
        one, origin, settled = self.caller.one, held.origins.get, held.settled
        ended: list[Ended] = []
        told_ns = SYSTEM.mono_ns()
        seqs, attempts = held.seqs, held.attempts
        for i, row in enumerate(unit.rows, unit.lo):
            if held.dead or (self.draining and ended):
                break
            seq = seqs[i]
            if settled and i in settled:
                ended.append(settled[i].ended(seq))
                continue
            ended.append(one(seq, row, attempts[i], origin(seq), watch))
            if not i & 15:
                now_ns = SYSTEM.mono_ns()
                if now_ns - told_ns > TELL_NS and i + 1 < unit.hi:
                    self.news.put(News(unit, ended, None, False))
                    ended, told_ns = [], now_ns
        self.news.put(News(unit, ended, None, True))


class Loop(Pool):
    """One event loop in a thread; as many calls at once as the stage's concurrency."""

    def __init__(
        self, caller: Caller, news: queue.SimpleQueue[Any], count: int, watches: list[Watch]
    ) -> None:
        super().__init__(caller, news)
        self._free = watches[:count]
        self._places: dict[asyncio.Task[Any], int] = {}
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[Unit] = deque()
        self._kept: set[asyncio.Task[None]] = set()
        # Units that ended in this round of the loop.
        self._ended_now: list[News] = []
        threading.Thread(target=self._loop.run_forever, name="calls", daemon=True).start()

    def start(self, units: list[Unit]) -> None:
        self._loop.call_soon_threadsafe(self._start, units)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, units: list[Unit]) -> None:
        self._waiting += units
        self._fill()

    def _fill(self) -> None:
        """Start what waits, in the order that it came, while slots are free."""
        while self._free and self._waiting:
            unit = self._waiting.popleft()
            if unit.held.dead or self.draining:
                continue
            watch = self._free.pop()
            task = self._loop.create_task(self._run(unit, watch))
            self.running[watch.place] = self._places[task] = watch.place
            self._kept.add(task)
            task.add_done_callback(self._kept.discard)

    def stuck(self, silent: dict[int, int]) -> dict[int, int]:
        """A call that blocks the loop makes all of them silent; then it is the one that is stuck."""
        self.blocked = False
        if not silent:
            return silent
        now = asyncio.current_task(self._loop)
        place = self._places.get(now) if now is not None else None
        if place is None:
            # The loop goes on: these do not let themselves be cancelled.
            return silent
        self.blocked = place in silent
        return {place: silent[place]} if self.blocked else {}

    async def _run(self, unit: Unit, watch: Watch) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            # The grant may be lost since `_fill`: another call may have blocked the loop.
            if not (unit.held.dead or self.draining):
                self._tell(await self._ended(unit, watch))
        finally:
            watch.end()
            self._free.append(watch)
            self.running.pop(watch.place, None)
            self._places.pop(task, None)
            self._fill()

    def _tell(self, news: News) -> None:
        """Units that end in one round of the loop are told together: each `put` wakes the executor's
        thread, which then takes the interpreter from the loop."""
        if not self._ended_now:
            self._loop.call_soon(self._tell_all)
        self._ended_now.append(news)

    def _tell_all(self) -> None:
        told, self._ended_now = self._ended_now, []
        self.news.put(told)

    def _ended(self, unit: Unit, watch: Watch) -> Coroutine[Any, Any, News]:
        is_batch = isinstance(unit.held.rows, pa.Table)
        return self._batch(unit, watch) if is_batch else self._rows(unit, watch)

    async def _batch(self, unit: Unit, watch: Watch) -> News:
        held = unit.held
        batch = _settled_batch(unit, self.caller)
        if batch is None:
            table = held.rows.slice(unit.lo, unit.hi - unit.lo)
            seqs = held.seqs[unit.lo : unit.hi]
            attempt = held.attempts[unit.lo]
            batch = await self.caller.batch_async(seqs, table, attempt, held.origins, watch)
        return News(unit, [], batch, True)

    async def _rows(self, unit: Unit, watch: Watch) -> News:
        held = unit.held
        ended = [
            held.settled[i].ended(held.seqs[i])
            if i in held.settled
            else await self.caller.one_async(
                held.seqs[i], row, held.attempts[i], held.origins.get(held.seqs[i]), watch
            )
            for i, row in enumerate(unit.rows, unit.lo)
        ]
        return News(unit, ended, None, True)


def _settled_batch(unit: Unit, caller: Caller) -> BatchEnded | None:
    """A batch that is not called; None when it is to be."""
    held = unit.held
    if unit.lo not in held.settled:
        return None
    others = [held.settled[i].ended(held.seqs[i]) for i in range(unit.lo, unit.hi)]
    return BatchEnded([], caller.encoder.batch([]), others, 0.0, held.settled[unit.lo].micros, 1)
