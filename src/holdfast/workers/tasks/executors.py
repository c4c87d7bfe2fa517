"""The executors of a task worker: a thread executor, an event loop and a process executor.

The worker creates an executor only if the app has tasks of its kind. A submitted task carries its
executor kind. The worker leases of each kind as many tasks as its executor will start soon, so no
task waits for an executor of another kind.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence

from holdfast.clock import Clock, S
from holdfast.runner.executor import (
    UNSTARTED_MAX_NS,
    AsyncExecutor,
    AsyncRun,
    Executor,
    ThreadExecutor,
)
from holdfast.tasks.leases import LEASE_BATCH_MAX
from holdfast.tasks.model import EXECUTOR_KINDS, LOOP, PROCESS, THREAD
from holdfast.workers.tasks.attempt import (
    AttemptResult,
    TaskAttempt,
    TaskDefinition,
    released_result,
    result_of_error,
    run_attempt,
    run_attempt_async,
)
from holdfast.workers.tasks.process import TaskProcessPool
from holdfast.workers.tasks.report_barrier import ReportBarrier

COROUTINES = 200
# The prefetch bound: for short tasks one batch is queued while another is reported and the next
# leased.
PREFETCH_MAX = 2 * LEASE_BATCH_MAX
# The cleanup time of cancelled coroutines when the worker stops.
CANCEL_GRACE_S = 1.0
# An event loop without progress for this long counts as blocked.
LOOP_TIMEOUT_S = 30.0


class TaskExecutors:
    """The executors by kind: threads, an event loop, processes. Created on demand of the app's
    tasks.
    """

    def __init__(
        self,
        codes: Mapping[str, TaskDefinition],
        concurrency: int,
        processes: int,
        wake: Callable[[], None],
        clock: Clock,
        commit_report: Callable[[AttemptResult], bool],
    ) -> None:
        """`commit_report` commits one report in the executor's thread and returns whether it
        succeeded.
        """
        self._executors: dict[int, Executor] = {}
        self._clock = clock
        # Kinds whose tasks had to be released unstarted.
        self._stalled: set[int] = set()
        self._ping_ns = 0
        self._closing = False
        self._processes = TaskProcessPool()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_executor: ThreadExecutor | None = None
        self._kinds = {name: executor_kind(code) for name, code in codes.items()}
        kinds = set(self._kinds.values())
        reports_each = any(code.report == "each" for code in codes.values())
        self._create_executors(
            kinds, concurrency, processes, wake, commit_report if reports_each else None
        )

    def _create_executors(
        self,
        kinds: set[int],
        concurrency: int,
        processes: int,
        wake: Callable[[], None],
        commit_report: Callable[[AttemptResult], bool] | None,
    ) -> None:
        clock = self._clock
        runs = _AttemptRuns(clock, self._processes, commit_report)
        if THREAD in kinds:
            self._thread_executor = self._executors[THREAD] = ThreadExecutor(
                concurrency,
                runs.in_thread,
                name="holdfast-task",
                on_begin=None,
                on_done=wake,
                clock=clock,
                prefetch_max=PREFETCH_MAX,
            )
        if PROCESS in kinds:
            self._executors[PROCESS] = ThreadExecutor(
                processes,
                runs.in_process,
                name="holdfast-task-process",
                on_begin=None,
                on_done=wake,
                clock=clock,
                prefetch_max=PREFETCH_MAX,
            )
        if LOOP in kinds:
            self._executors[LOOP] = self._start_loop(runs.in_loop, wake)

    def _start_loop(self, run: AsyncRun, wake: Callable[[], None]) -> AsyncExecutor:
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(
            target=self._loop.run_forever, name="holdfast-task-loop", daemon=True
        )
        self._loop_thread.start()
        return AsyncExecutor(
            COROUTINES,
            run,
            self._loop,
            on_begin=None,
            on_done=wake,
            clock=self._clock,
            prefetch_max=PREFETCH_MAX,
            make_failure=result_of_error,
        )

    @property
    def busy(self) -> bool:
        return any(executor.busy for executor in self._executors.values())

    @property
    def exhausted(self) -> bool:
        """Whether an executor has no usable thread left because its functions never returned, or
        the event loop ended or was blocked for `LOOP_TIMEOUT_S`.
        """
        return (
            any(executor.exhausted for executor in self._executors.values()) or self._is_loop_lost()
        )

    def _is_loop_lost(self) -> bool:
        if self._loop is None or self._closing:
            return False
        if not self._loop_thread.is_alive():
            return True
        now_ns, ping_ns = self._clock.mono_ns(), self._ping_ns
        if ping_ns:
            return now_ns - ping_ns > LOOP_TIMEOUT_S * S
        # Ping the loop. The callback clears the ping time.
        self._ping_ns = now_ns
        self._loop.call_soon_threadsafe(self._on_pong)
        return False

    def _on_pong(self) -> None:
        self._ping_ns = 0

    @property
    def queued_count(self) -> int:
        return sum(executor.queued_count for executor in self._executors.values())

    @property
    def has_finished(self) -> bool:
        return any(executor.has_finished for executor in self._executors.values())

    @property
    def free_slots(self) -> tuple[int, ...]:
        """The number of further tasks of each kind that may be leased."""
        slots = [0] * len(EXECUTOR_KINDS)
        for kind, executor in self._executors.items():
            room = max(executor.capacity, 0)
            if kind in self._stalled:
                # A stalled executor gets one probe task until it finishes something.
                room = 0 if executor.busy or kind == self._unresponsive_kind() else min(room, 1)
            slots[kind] = room
        # A task may have been submitted with another kind than its code has now: lease one at a
        # time.
        other = 1 if any(slots) else 0
        return tuple(slots[kind] if kind in self._executors else other for kind in EXECUTOR_KINDS)

    @property
    def idle_slots(self) -> tuple[int, ...]:
        """The number of tasks of each kind that would start immediately."""
        free_slots = self.free_slots
        return tuple(
            min(free_slots[kind], self._executors[kind].free_workers)
            if kind in self._executors
            else free_slots[kind]
            for kind in EXECUTOR_KINDS
        )

    def _unresponsive_kind(self) -> int | None:
        """The kind whose executor has not answered the last ping."""
        return LOOP if self._loop is not None and self._ping_ns else None

    @property
    def poll_s(self) -> float:
        """The longest time until the executors need supervision."""
        if any(executor.is_stalled for executor in self._executors.values()):
            return 0.005
        return UNSTARTED_MAX_NS / S if self.busy else float("inf")

    def submit(self, attempts: Sequence[TaskAttempt]) -> None:
        kinds = self._kinds
        for kind, executor in self._executors.items():
            if len(self._executors) == 1:
                of_kind = attempts
            else:
                of_kind = [attempt for attempt in attempts if kinds[attempt.grant.name] == kind]
            if kind == THREAD:
                add_capacity = executor.add_capacity
                for attempt in of_kind:
                    attempt.add_capacity = add_capacity
            if of_kind:
                executor.submit(of_kind)

    def run_in_caller(self, attempt: TaskAttempt) -> Callable[[], None] | None:
        """Return a callable that runs the attempt in the caller's thread, or None for other kinds.
        The executors must be idle.
        """
        executor = self._thread_executor
        if executor is None or self._kinds[attempt.grant.name] != THREAD:
            return None
        attempt.add_capacity = executor.add_capacity
        return executor.run_in_caller(attempt)

    def drain_finished(self) -> list[AttemptResult]:
        found: list[AttemptResult] = []
        for kind, executor in self._executors.items():
            ended = executor.drain_finished()
            if ended:
                self._stalled.discard(kind)
                found += ended
        return found

    def take_overdue(self) -> list[TaskAttempt]:
        """Remove and return attempts that were not started within `UNSTARTED_MAX_NS`."""
        found: list[TaskAttempt] = []
        for kind, executor in self._executors.items():
            late = executor.take_overdue()
            if late:
                self._stalled.add(kind)
                found += late
        return found

    def take_unstarted(self) -> list[TaskAttempt]:
        return [run for executor in self._executors.values() for run in executor.take_unstarted()]

    def abandon(self, attempt: TaskAttempt) -> None:
        attempt.dropped = True
        self._executors[executor_kind(attempt.code)].abandon(attempt)

    def wake_one_more(self) -> None:
        for executor in self._executors.values():
            executor.wake_one_more()

    def close(self) -> None:
        self._closing = True
        for executor in self._executors.values():
            executor.close()
        self._processes.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(_cancel_all_and_stop, self._loop)
            self._loop_thread.join(CANCEL_GRACE_S)
            if not self._loop_thread.is_alive():
                self._loop.close()


class _AttemptRuns:
    """The functions that run an attempt, by executor kind. With `commit_report` they also commit the
    outcome of a task with `report="each"`, under the report barrier.
    """

    def __init__(
        self,
        clock: Clock,
        processes: TaskProcessPool,
        commit_report: Callable[[AttemptResult], bool] | None,
    ) -> None:
        self._clock = clock
        self._processes = processes
        self._commit_report = commit_report
        self._barrier = ReportBarrier()
        self.in_thread = self._with_report(run_attempt)
        self.in_process = self._with_report(self._run_in_process)

    def _run_in_process(self, attempt: TaskAttempt) -> AttemptResult:
        return self._processes.run_attempt(attempt, self._clock)

    def _with_report(
        self, run: Callable[[TaskAttempt], AttemptResult]
    ) -> Callable[[TaskAttempt], AttemptResult]:
        commit_report, barrier = self._commit_report, self._barrier
        if commit_report is None:
            return run

        def run_and_report(attempt: TaskAttempt) -> AttemptResult:
            if barrier.wait() and attempt.cancelled:
                return released_result(attempt)
            result = run(attempt)
            if attempt.code.report == "each":
                with barrier.committing():
                    result.reported = commit_report(result)
            return result

        return run_and_report

    async def in_loop(self, attempt: TaskAttempt) -> AttemptResult:
        commit_report, barrier = self._commit_report, self._barrier
        if commit_report is None:
            return await run_attempt_async(attempt, self._clock)
        if await barrier.wait_async() and attempt.cancelled:
            return released_result(attempt)
        result = await run_attempt_async(attempt, self._clock)
        if attempt.code.report == "each":
            with barrier.committing():
                result.reported = await asyncio.to_thread(commit_report, result)
        return result


def _cancel_all_and_stop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all coroutines, give them time to clean up, and stop the loop."""
    remaining = asyncio.all_tasks(loop)
    for task in remaining:
        if not task.cancelling():
            task.cancel()

    async def end() -> None:
        if remaining:
            await asyncio.wait(remaining, timeout=CANCEL_GRACE_S)
        loop.stop()

    task = loop.create_task(end())
    task.add_done_callback(remaining.discard)  # the callback also keeps a reference to the task


def executor_kind(code: TaskDefinition) -> int:
    if code.asynchronous:
        return LOOP
    return PROCESS if code.isolation == "process" else THREAD
