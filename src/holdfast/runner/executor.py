"""Executors: worker threads or asyncio tasks that run the handlers of a runner, with adaptive concurrency.

    ThreadExecutor   each worker is a thread, for handlers that are plain functions
    AsyncExecutor    each worker is a task of one event loop, for handlers that are coroutines

The runner's loop submits work and drains results, and never waits. All workers take from one queue, so
no item waits behind a slow one while a worker is free. The measured latency determines how many workers
are woken: waking a worker costs more than a quick handler, and for quick handlers more workers would
only contend for the GIL. `wake_one_more` wakes another worker when the queue stalls.

A runner that extends its claims may submit more items than there are workers (prefetch): as many as the
workers complete within `PREFETCH_NS`. Quick handlers therefore never wait for a commit.

`abandon` ends a handler that is out of time or cancelled. Its asyncio task is cancelled. A worker that
does not return counts as abandoned and is replaced. The result of an abandoned handler is ignored.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from holdfast import forks
from holdfast.clock import MS, Clock
from holdfast.errors import HoldfastError
from holdfast.runner.error_policy import HandlerExited
from holdfast.runner.work import WorkOutcome

# Prefetch: expected waiting time of items that are submitted beyond the number of workers.
PREFETCH_NS = 20 * MS
# One worker is woken per this amount of queued work. Less work is left to the workers that are awake.
WORK_PER_WORKER_NS = 1 * MS
# If the workers together complete an item at least this often, no further worker is woken (GIL contention).
ENOUGH_WORKERS_NS = 60_000
# If they complete an item at least this often, surplus workers go to sleep.
SURPLUS_WORKERS_NS = 30_000
# A queue without progress for this time gets another worker.
STALL_NS = 5 * MS
# Work that waits longer than this for a worker is released, so that another process can start it.
UNSTARTED_MAX_NS = 1_000 * MS
# Quick outcomes are reported to the loop in batches of this size.
NOTIFY_BATCH = 64
# Maximum abandoned workers that are replaced, per worker of the executor's size.
ABANDONED_MAX = 100
# Weight of the latest latency in the moving average (EWMA).
_EWMA_WEIGHT = 0.05

# The end of an attempt: `HandlerCrash`, or the result of `run`, which has `work` and `latency_ns` (0 if the
# executor is to measure it).
AttemptEnd = Any


class ExecutorExhausted(HoldfastError):
    code = "hands_lost"
    hint = "handlers that never return occupy all threads: set timeouts on their blocking calls, then restart"


class WorkUnit(Protocol):
    """A unit of work for an executor: a claimed item or a leased task."""

    taken_ns: int
    began_ns: int
    dropped: bool

    @property
    def token(self) -> Any: ...
    def begin(self, now_ns: int, clock: Clock) -> None: ...


class HandlerCrash:
    """A BaseException that a handler raised, which is not an outcome."""

    __slots__ = ("error", "work")

    def __init__(self, work: Any, error: BaseException) -> None:
        self.work = work
        self.error = error


class ExecutorWorker:
    """One worker of an executor. `work` is its current unit."""

    __slots__ = ("abandoned", "borrowed", "task", "work")

    def __init__(self, *, borrowed: bool = False) -> None:
        self.work: Any = None
        self.abandoned = False
        # A thread of the caller, which runs as a worker (`run_in_caller`).
        self.borrowed = borrowed
        self.task: asyncio.Task[Any] | None = None


class Executor:
    """The base of both executors. Only the loop calls `submit`, `drain_finished`, `abandon` and `wake_one_more`."""

    # Set where workers share the GIL.
    _enough_workers_ns = 0
    _surplus_workers_ns = 0

    def __init__(
        self,
        size: int,
        *,
        on_begin: Callable[[Any], None] | None,
        on_done: Callable[[], None],
        clock: Clock,
        prefetch_max: int = 0,
    ) -> None:
        self._size = size
        self._on_begin = on_begin
        self._on_done = on_done
        self._clock = clock
        self._mono_ns = clock.mono_ns
        self._prefetch_max = prefetch_max
        self._queued: deque[Any] = deque()
        self._finished: list[AttemptEnd] = []
        self._crashes: list[HandlerCrash] = []
        self._in_progress: dict[Any, Any] = {}
        # Workers that run a unit.
        self._active: set[ExecutorWorker] = set()
        self._lock = threading.Lock()
        self._awake = 0
        self._abandoned_count = 0
        self._mean_latency_ns = 0.0
        self._last_taken_ns = 0
        # The worker that took the last unit.
        self._last_taker: ExecutorWorker | None = None

    # -- called by the loop --------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of units that may be submitted now, including prefetch."""
        usable = self._usable_workers()
        return usable + self._prefetch() - len(self._in_progress) if usable else 0

    @property
    def free_workers(self) -> int:
        """Number of further units that would start at once, without waiting for a worker."""
        return max(0, self._usable_workers() - len(self._in_progress))

    @property
    def exhausted(self) -> bool:
        """Whether no worker is usable: all are abandoned, and too many to replace them."""
        return self._usable_workers() == 0

    @property
    def busy(self) -> bool:
        return bool(self._in_progress)

    @property
    def queued_count(self) -> int:
        """Number of units that wait for a worker."""
        return len(self._queued)

    @property
    def has_finished(self) -> bool:
        """Whether `drain_finished` has results or a crash."""
        return bool(self._finished or self._crashes)

    @property
    def count(self) -> int:
        return len(self._in_progress)

    @property
    def in_progress(self) -> list[Any]:
        return list(self._in_progress.values())

    @property
    def is_stalled(self) -> bool:
        """Whether units wait although another worker could be woken."""
        return bool(self._queued) and self._awake < self._usable_workers()

    def has(self, token: object) -> bool:
        return token in self._in_progress

    def submit(self, units: Sequence[WorkUnit]) -> None:
        in_progress = self._in_progress
        for unit in units:
            in_progress[unit.token] = unit
        with self._lock:
            # With an empty queue every awake worker is busy for an unknown time, so wake one more.
            more = 0 if self._queued else 1
            self._queued.extend(units)
            self._last_taken_ns = self._clock.mono_ns()
            self._last_taker = None
        self._wake_workers(more)

    def drain_finished(self) -> list[Any]:
        """Return the finished attempts. A crash of a handler is raised first."""
        remove = self._in_progress.pop
        # Units that are no longer in progress were abandoned.
        while self._crashes:
            crash = self._crashes.pop(0)
            if remove(crash.work.token, None) is not None:
                raise crash.error
        if not self._finished:
            return []
        with self._lock:
            finished, self._finished = self._finished, []
        return [end for end in finished if remove(end.work.token, None) is not None]

    def take_unstarted(self) -> list[Any]:
        """Remove and return the units that no worker has started."""
        with self._lock:
            units = list(self._queued)
            self._queued.clear()
        for unit in units:
            del self._in_progress[unit.token]
        return units

    def take_overdue(self, waited_ns: int = UNSTARTED_MAX_NS) -> list[Any]:
        """Remove and return the unstarted units if the first one has waited for `waited_ns`."""
        with self._lock:
            if not self._queued or self._clock.mono_ns() - self._queued[0].taken_ns < waited_ns:
                return []
            # The average was too optimistic: raise it to stop prefetching until handlers are quick again.
            self._mean_latency_ns = max(self._mean_latency_ns, float(waited_ns))
        return self.take_unstarted()

    def abandon(self, unit: WorkUnit) -> None:
        """Abandon a unit, started or not. A later outcome is ignored."""
        unit.dropped = True
        self._in_progress.pop(unit.token, None)
        with self._lock:
            if unit in self._queued:
                self._queued.remove(unit)
                return
            worker = next((active for active in self._active if active.work is unit), None)
            if worker is None:
                return
            self._active.discard(worker)
            worker.abandoned = True
            self._abandoned_count += 1
            self._awake -= 1
        self._request_cancel(worker)
        self._wake_workers()

    def add_capacity(self, count: int) -> None:
        """Change the number of workers. A handler that waits for other work adds a worker while it waits."""
        with self._lock:
            self._size += count
            # The last taker may be the handler that waits.
            self._last_taker = None
        if count > 0:
            self._wake_workers(count)

    def wake_one_more(self) -> None:
        """Wake another worker if the queue has stalled."""
        now_ns = self._clock.mono_ns()
        if self.is_stalled and now_ns - self._last_taken_ns >= STALL_NS:
            self._last_taken_ns = now_ns
            # The last taker is still busy.
            self._last_taker = None
            self._wake_workers(1)

    def close(self) -> None:
        """Accept no more work. Workers end after their current unit."""
        raise NotImplementedError

    # -- called by workers ---------------------------------------------------------------------

    def _take_next(self, worker: ExecutorWorker) -> Any:
        """Take the next unit. None sends the worker to sleep."""
        with self._lock:
            return self._pick_next(worker, self._mono_ns())

    def _record_end(self, worker: ExecutorWorker, unit: WorkUnit, end: AttemptEnd) -> bool:
        """Record the end of a unit. Return False if the worker was abandoned."""
        with self._lock:
            if worker.abandoned:
                self._abandoned_count -= 1
                return False
            worker.work = None
            self._active.discard(worker)
            wake_loop = self._store_end(end, self._mono_ns())
        if wake_loop:
            self._on_done()
        return True

    def _record_end_and_take(self, worker: ExecutorWorker, end: AttemptEnd) -> Any:
        """Record the end of a unit and take the next one under one lock, which halves the overhead of quick
        handlers. None sends the worker to sleep, or ends it if it was abandoned."""
        with self._lock:
            if worker.abandoned:
                self._abandoned_count -= 1
                return None
            now_ns = self._mono_ns()
            wake_loop = self._store_end(end, now_ns)
            unit = self._pick_next(worker, now_ns)
        if wake_loop:
            self._on_done()
        return unit

    def _store_end(self, end: AttemptEnd, now_ns: int) -> bool:
        """Store an end for `drain_finished`, under the lock. Return whether to wake the loop."""
        if type(end) is HandlerCrash:
            self._crashes.append(end)
            return True
        self._finished.append(end)
        latency_ns = end.latency_ns or now_ns - end.work.began_ns
        old_ns = self._mean_latency_ns or latency_ns
        self._mean_latency_ns = mean_ns = old_ns + _EWMA_WEIGHT * (latency_ns - old_ns)
        # Without prefetch the loop does not poll between wake-ups.
        if not self._prefetch_max or not self._queued or mean_ns > WORK_PER_WORKER_NS:
            return True
        # One wake-up per batch suffices: a sleeping loop has drained all earlier outcomes.
        return len(self._finished) == NOTIFY_BATCH

    def _pick_next(self, worker: ExecutorWorker, now_ns: int) -> Any:
        """Take the next unit unless the worker should sleep, under the lock."""
        if not self._queued or (self._awake > 1 and self._is_surplus(worker, now_ns)):
            worker.work = None
            self._active.discard(worker)
            self._awake -= 1
            if not worker.borrowed:
                self._on_idle()
            return None
        if worker.work is None:
            self._active.add(worker)
        unit = worker.work = self._queued.popleft()
        self._last_taken_ns = now_ns
        self._last_taker = worker
        unit.begin(now_ns, self._clock)
        if self._on_begin is not None:
            self._on_begin(unit)
        return unit

    def _workers_to_wake(self, more: int = 0) -> int:
        """Return the number of workers to wake by the average latency, under the lock."""
        queued = len(self._queued)
        if self._prefetch_max and self._mean_latency_ns:
            wanted = max(
                int(queued * self._mean_latency_ns / WORK_PER_WORKER_NS), 1, self._awake + more
            )
            if self._completion_interval_ns < self._enough_workers_ns:
                wanted = min(wanted, max(self._awake + more, 1))
        else:
            wanted = self._awake + queued
        wake = max(0, min(wanted, self._usable_workers()) - self._awake)
        wake = min(wake, queued)
        self._awake += wake
        return wake

    @property
    def _completion_interval_ns(self) -> float:
        """The estimated interval between completions with the awake workers."""
        return self._mean_latency_ns / max(self._awake, 1)

    def _is_surplus(self, worker: ExecutorWorker, now_ns: int) -> bool:
        """Whether this worker is surplus: other awake workers empty the queue quickly enough. Workers with a
        long-running unit do not count."""
        if not self._prefetch_max or not self._mean_latency_ns:
            return False
        return (
            self._last_taker not in (None, worker)
            and self._completion_interval_ns < self._surplus_workers_ns
            and now_ns - self._last_taken_ns < self._enough_workers_ns
        )

    def _prefetch(self) -> int:
        if not self._prefetch_max or not self._mean_latency_ns:
            return 0
        return min(self._prefetch_max, int(self._size * PREFETCH_NS / self._mean_latency_ns))

    def _usable_workers(self) -> int:
        """The number of usable workers. Abandoned workers above the maximum reduce it."""
        beyond = max(0, self._abandoned_count - ABANDONED_MAX * self._size)
        return max(0, self._size - beyond)

    def _wake_workers(self, more: int = 0) -> None:
        raise NotImplementedError

    def _request_cancel(self, worker: ExecutorWorker) -> None:
        """Request an abandoned worker to stop, if its kind supports that."""

    def _on_idle(self) -> None:
        """Note that a worker goes to sleep, under the lock."""


class ThreadExecutor(Executor):
    """An executor of daemon threads: a hanging handler keeps its thread, but not the process."""

    _enough_workers_ns = ENOUGH_WORKERS_NS
    _surplus_workers_ns = SURPLUS_WORKERS_NS

    def __init__(
        self,
        size: int,
        run: Callable[[Any], Any],
        *,
        name: str,
        on_begin: Callable[[Any], None] | None,
        on_done: Callable[[], None],
        clock: Clock,
        prefetch_max: int = 0,
    ) -> None:
        super().__init__(
            size, on_begin=on_begin, on_done=on_done, clock=clock, prefetch_max=prefetch_max
        )
        self._run = run
        self._name = name
        self._wake_queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = 0
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            asleep = self._asleep
        for _ in range(asleep):
            self._wake_queue.put(None)

    def _wake_workers(self, more: int = 0) -> None:
        with self._lock:
            wake = self._workers_to_wake(more)
            woken = min(wake, self._asleep)
            self._asleep -= woken
        for _ in range(woken):
            self._wake_queue.put(None)
        for number in range(wake - woken):
            thread = threading.Thread(
                target=self._worker_loop, name=f"{self._name} {number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # The system has no more threads. The existing workers continue, and `wake_one_more` retries.
                with self._lock:
                    self._awake -= wake - woken - number
                    if not self._awake and not self._asleep:
                        raise
                return

    def run_in_caller(self, unit: WorkUnit) -> Callable[[], None] | None:
        """Register the caller's thread as a worker for a new unit. Return the function that runs this unit and
        then queued units until the queue is empty, or None if no worker is free. The loop's thread calls
        this. Another thread must then take over the loop."""
        if (self._in_progress or self._abandoned_count) and not self.free_workers:
            return None
        worker = ExecutorWorker(borrowed=True)
        self._in_progress[unit.token] = unit
        with self._lock:
            now_ns = self._last_taken_ns = unit.taken_ns
            self._awake += 1
            self._active.add(worker)
            self._last_taker = worker
            worker.work = unit
            unit.begin(now_ns, self._clock)
            if self._on_begin is not None:
                self._on_begin(unit)
        return partial(self._run_units, worker, unit)

    def _run_units(self, worker: ExecutorWorker, unit: WorkUnit | None) -> None:
        run, record_end_and_take = self._run, self._record_end_and_take
        before = forks.fork_count
        while unit is not None:
            end: AttemptEnd
            try:
                end = run(unit)
            except BaseException as crash:
                end = HandlerCrash(unit, crash)
            if forks.fork_count != before:
                forks.exit_child(end.error if isinstance(end, HandlerCrash) else None)
            unit = record_end_and_take(worker, end)

    def _worker_loop(self) -> None:
        worker = ExecutorWorker()
        while not self._closed:
            self._run_units(worker, self._take_next(worker))
            if worker.abandoned:
                return
            if not self._closed:
                self._wake_queue.get()

    def _on_idle(self) -> None:
        self._asleep += 1


class AsyncRun(Protocol):
    def __call__(self, work: Any, /) -> Awaitable[Any]: ...


class AsyncExecutor(Executor):
    """An executor of asyncio tasks on an event loop in another thread."""

    def __init__(
        self,
        size: int,
        run: AsyncRun,
        loop: asyncio.AbstractEventLoop,
        *,
        on_begin: Callable[[Any], None] | None,
        on_done: Callable[[], None],
        clock: Clock,
        prefetch_max: int = 0,
        make_failure: Callable[[Any, Exception, int], Any] = WorkOutcome,
    ) -> None:
        super().__init__(
            size, on_begin=on_begin, on_done=on_done, clock=clock, prefetch_max=prefetch_max
        )
        self._run = run
        self._make_failure = make_failure
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        return

    def _wake_workers(self, more: int = 0) -> None:
        with self._lock:
            wake = self._workers_to_wake(more)
        if wake:
            self._loop.call_soon_threadsafe(self._start_workers, wake)

    def _start_workers(self, wake: int) -> None:
        for _ in range(wake):
            task = self._loop.create_task(self._worker_loop(ExecutorWorker()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _request_cancel(self, worker: ExecutorWorker) -> None:
        self._loop.call_soon_threadsafe(self._cancel, worker)

    def _cancel(self, worker: ExecutorWorker) -> None:
        """Cancel the worker's current task. Runs in the event loop's thread."""
        if worker.task is not None:
            worker.task.cancel()

    async def _attempt(self, unit: WorkUnit) -> Any:
        return await self._run(unit)

    async def _worker_loop(self, worker: ExecutorWorker) -> None:
        unit = self._take_next(worker)
        while unit is not None:
            end: AttemptEnd
            try:
                # One task per call: context variables and cancellation do not leak into the next call.
                worker.task = self._loop.create_task(self._attempt(unit))
                if worker.abandoned:
                    worker.task.cancel()
                end = await worker.task
            except asyncio.CancelledError as crash:
                if worker.abandoned:
                    self._record_end(worker, unit, HandlerCrash(unit, crash))
                    return
                # The handler cancelled its own task: this is a failure of its item only.
                error = HandlerExited(raised=type(crash).__name__)
                end = self._make_failure(unit, error, self._clock.mono_ns() - unit.began_ns)
            except BaseException as crash:
                end = HandlerCrash(unit, crash)
            unit = self._record_end_and_take(worker, end)
