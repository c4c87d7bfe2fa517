"""Call pools of a child: threads for `def`, one event loop for `async def`.

A call unit is a few rows (or one batch) of a grant. `start` submits units, and one queue, `events`,
returns their outcomes. A unit of a lost grant is dropped before it starts.
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

from holdfast import traces
from holdfast.clock import SYSTEM
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark.call_slots import CallSlot
from holdfast.spark.caller import BatchOutcome, CallOutcome, FunctionCaller, OriginsBySeq
from holdfast.spark.child_job import StageTrace

# A unit of many rows emits its outcomes at least this often.
EMIT_NS = 20_000_000


class PresetFailure(NamedTuple):
    """A row that fails without a call. `micros` is negative if no call was ever made."""

    error_class: int
    error: str
    micros: int

    def outcome(self, seq: int) -> CallOutcome:
        fail = int(RowState.TERMINAL_FAIL)
        return CallOutcome(
            seq=seq,
            state=fail,
            values=None,
            error_class=self.error_class,
            error=self.error,
            delay_ns=0,
            cost=0.0,
            micros=self.micros,
        )


@dataclass(eq=False)
class GrantedRows:
    """The rows of a grant, in order. The first `begun` rows are begun."""

    epoch: int
    seqs: Sequence[int]
    attempts: Sequence[int]
    rows: Any  # a RowReader, or the Arrow table of a batch
    isolated: bool
    begun: int = 0
    started: int = 0
    ended: int = 0
    reported: int = 0
    last_report_no: int = 0
    lost: bool = False
    # By position: rows that fail without a call.
    preset_failures: dict[int, PresetFailure] = field(default_factory=dict)
    results: list[CallOutcome] = field(default_factory=list)
    batches: list[BatchOutcome] = field(default_factory=list)
    # Rows that first occurred in an earlier run. Their idempotency keys use that position.
    origins: OriginsBySeq = field(default_factory=dict)
    # Under a token limit: the estimate of each call, by its first row.
    token_estimates: dict[int, int] = field(default_factory=dict)
    # The span of the rows in this process, and the trace context of their calls.
    span: traces.TraceSpan | None = None
    trace: bytes = b""

    @property
    def is_done(self) -> bool:
        return self.lost or self.reported >= len(self.seqs)

    def start_span(self, run: StageTrace, run_id: str) -> None:
        self.trace = run.context
        if not traces.makes_span(run.context):
            return
        attributes: dict[str, str | int | bool] = {
            "holdfast.stage": run.stage,
            "holdfast.run": run_id,
            "holdfast.first_row": self.seqs[0],
            "holdfast.rows": len(self.seqs),
        }
        self.span = traces.start_root(
            f"rows {run.stage}", traces.CONSUMER, attributes, run.context, ()
        )
        if self.span is not None:
            self.trace = self.span.context

    def end_span(self) -> None:
        if self.span is not None:
            if self.reported < len(self.seqs):
                self.span.fail("lost" if self.lost else "stopped")
            self.span.end()
            self.span = None


def fail_unconvertible(granted: GrantedRows) -> None:
    """Fail the rows that cannot be converted, unless their outcome is already known."""
    for at, why in granted.rows.conversion_errors.items():
        error = f"its input cannot be converted: {why}"
        granted.preset_failures.setdefault(at, PresetFailure(int(ErrorClass.INPUT), error, -1))


@dataclass(frozen=True, eq=False)
class CallUnit:
    granted: GrantedRows
    lo: int
    hi: int
    # Without a batch: one row per position. None: the row fails without a call.
    rows: Sequence[Any] = ()


@dataclass(frozen=True)
class PoolEvent:
    """Outcomes of a unit. `last` marks the end of the unit."""

    unit: CallUnit
    outcomes: list[CallOutcome]
    batch: BatchOutcome | None
    last: bool


class CallPool:
    """Base of both pools: an event queue, and the slots of running units."""

    def __init__(self, caller: FunctionCaller, events: queue.SimpleQueue[Any]) -> None:
        self.caller = caller
        self.events = events
        # Cell offset of the slot of each running unit.
        self.running: dict[int, int] = {}
        # No queued unit is started.
        self.draining = False
        # A call blocks all other calls.
        self.is_blocked = False

    def start(self, units: list[CallUnit]) -> None:
        raise NotImplementedError

    def stuck_calls(self, silent: dict[int, int]) -> dict[int, int]:
        """Return the calls among `silent` that are themselves stuck."""
        return silent

    def close(self) -> None:
        pass


class ThreadCallPool(CallPool):
    def __init__(
        self,
        caller: FunctionCaller,
        events: queue.SimpleQueue[Any],
        count: int,
        slots: list[CallSlot],
    ) -> None:
        super().__init__(caller, events)
        self._queue: queue.SimpleQueue[CallUnit | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._worker_loop, args=(watch,), name=f"call-{i}", daemon=True)
            for i, watch in enumerate(slots[:count])
        ]
        for thread in self._threads:
            thread.start()

    def start(self, units: list[CallUnit]) -> None:
        for unit in units:
            self._queue.put(unit)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _worker_loop(self, slot: CallSlot) -> None:
        place = slot.offset
        while (unit := self._queue.get()) is not None:
            if unit.granted.lost or self.draining:
                continue
            self.running[place] = place
            traced = traces.pass_on(unit.granted.trace)
            try:
                self._run_unit(unit, slot)
            finally:
                if traced is not None:
                    traced.leave()
                slot.end()
                self.running.pop(place, None)

    def _run_unit(self, unit: CallUnit, slot: CallSlot) -> None:
        granted = unit.granted
        if isinstance(granted.rows, pa.Table):
            batch = _preset_batch_failure(unit, self.caller)
            if batch is None:
                table = granted.rows.slice(unit.lo, unit.hi - unit.lo)
                seqs = granted.seqs[unit.lo : unit.hi]
                batch = self.caller.call_batch(
                    seqs, table, granted.attempts[unit.lo], granted.origins, slot
                )
            self.events.put(PoolEvent(unit, [], batch, True))
            return
        call_row, origin, preset_failures = (
            self.caller.call_row,
            granted.origins.get,
            granted.preset_failures,
        )
        outcomes: list[CallOutcome] = []
        emitted_ns = SYSTEM.mono_ns()
        seqs, attempts = granted.seqs, granted.attempts
        for i, row in enumerate(unit.rows, unit.lo):
            if granted.lost or (self.draining and outcomes):
                break
            seq = seqs[i]
            if preset_failures and i in preset_failures:
                outcomes.append(preset_failures[i].outcome(seq))
                continue
            outcomes.append(call_row(seq, row, attempts[i], origin(seq), slot))
            if not i & 15:
                now_ns = SYSTEM.mono_ns()
                if now_ns - emitted_ns > EMIT_NS and i + 1 < unit.hi:
                    self.events.put(PoolEvent(unit, outcomes, None, False))
                    outcomes, emitted_ns = [], now_ns
        self.events.put(PoolEvent(unit, outcomes, None, True))


class AsyncCallPool(CallPool):
    """One event loop in a thread, with as many concurrent calls as the stage's concurrency."""

    def __init__(
        self,
        caller: FunctionCaller,
        events: queue.SimpleQueue[Any],
        count: int,
        slots: list[CallSlot],
    ) -> None:
        super().__init__(caller, events)
        self._free_slots = slots[:count]
        self._offsets: dict[asyncio.Task[Any], int] = {}
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[CallUnit] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        # Units that ended in the current iteration of the loop.
        self._pending_events: list[PoolEvent] = []
        threading.Thread(target=self._loop.run_forever, name="calls", daemon=True).start()

    def start(self, units: list[CallUnit]) -> None:
        self._loop.call_soon_threadsafe(self._start, units)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, units: list[CallUnit]) -> None:
        self._waiting += units
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start queued units in order while slots are free."""
        while self._free_slots and self._waiting:
            unit = self._waiting.popleft()
            if unit.granted.lost or self.draining:
                continue
            slot = self._free_slots.pop()
            task = self._loop.create_task(self._run_unit(unit, slot))
            self.running[slot.offset] = self._offsets[task] = slot.offset
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def stuck_calls(self, silent: dict[int, int]) -> dict[int, int]:
        """Return the stuck calls. If one call blocks the loop, all calls make no progress, and only
        that one is stuck.
        """
        self.is_blocked = False
        if not silent:
            return silent
        current = asyncio.current_task(self._loop)
        offset = self._offsets.get(current) if current is not None else None
        if offset is None:
            # The loop is running, so these calls ignore cancellation.
            return silent
        self.is_blocked = offset in silent
        return {offset: silent[offset]} if self.is_blocked else {}

    async def _run_unit(self, unit: CallUnit, slot: CallSlot) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            # The context of this asyncio task ends with it.
            traces.pass_on(unit.granted.trace)
            # The grant may be lost since `_start_waiting`, because another call blocked the loop.
            if not (unit.granted.lost or self.draining):
                self._emit(await self._call_unit(unit, slot))
        finally:
            slot.end()
            self._free_slots.append(slot)
            self.running.pop(slot.offset, None)
            self._offsets.pop(task, None)
            self._start_waiting()

    def _emit(self, event: PoolEvent) -> None:
        """Queue the event of a unit. Units that end in one loop iteration are emitted together:
        each `put` wakes the executor thread, which then takes the GIL from the loop.
        """
        if not self._pending_events:
            self._loop.call_soon(self._emit_all)
        self._pending_events.append(event)

    def _emit_all(self) -> None:
        events, self._pending_events = self._pending_events, []
        self.events.put(events)

    def _call_unit(self, unit: CallUnit, slot: CallSlot) -> Coroutine[Any, Any, PoolEvent]:
        is_batch = isinstance(unit.granted.rows, pa.Table)
        return self._call_batch(unit, slot) if is_batch else self._call_rows(unit, slot)

    async def _call_batch(self, unit: CallUnit, slot: CallSlot) -> PoolEvent:
        granted = unit.granted
        batch = _preset_batch_failure(unit, self.caller)
        if batch is None:
            table = granted.rows.slice(unit.lo, unit.hi - unit.lo)
            seqs = granted.seqs[unit.lo : unit.hi]
            attempt = granted.attempts[unit.lo]
            batch = await self.caller.call_batch_async(seqs, table, attempt, granted.origins, slot)
        return PoolEvent(unit, [], batch, True)

    async def _call_rows(self, unit: CallUnit, slot: CallSlot) -> PoolEvent:
        granted = unit.granted
        outcomes = [
            granted.preset_failures[i].outcome(granted.seqs[i])
            if i in granted.preset_failures
            else await self.caller.call_row_async(
                granted.seqs[i],
                row,
                granted.attempts[i],
                granted.origins.get(granted.seqs[i]),
                slot,
            )
            for i, row in enumerate(unit.rows, unit.lo)
        ]
        return PoolEvent(unit, outcomes, None, True)


def _preset_batch_failure(unit: CallUnit, caller: FunctionCaller) -> BatchOutcome | None:
    """Return the outcome of a batch that fails without a call; None if the batch is to be called."""
    granted = unit.granted
    if unit.lo not in granted.preset_failures:
        return None
    resultless = [
        granted.preset_failures[i].outcome(granted.seqs[i]) for i in range(unit.lo, unit.hi)
    ]
    return BatchOutcome(
        [], caller.encoder.to_batch([]), resultless, 0.0, granted.preset_failures[unit.lo].micros, 1
    )
