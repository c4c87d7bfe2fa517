"""Process of a task worker: the product's worker, its tasks and its flow activations on one thread.

The loop of the process runs the worker's steps, coroutines of tasks, activations and steps of flows
in turn. Plain functions run in the loop, too. The seed picks faults around the call of a task and
of a step: the process dies before the call, or after it and before its outcome is recorded. Faults
at commits are those of `faulting_client`. `call_protection` bounds the faults of one call.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

from holdfast.app.app import App
from holdfast.app.runtime import Runtime, register_definitions
from holdfast.errors import StoreReplaced
from holdfast.flows.model import TASK_PREFIX
from holdfast.runner.executor import AsyncExecutor
from holdfast.sim.actor import Actor, Incarnation, ProcessHalted
from holdfast.sim.process_loop import InlineThreads, ProcessLoop
from holdfast.sim.processes import SHUTDOWN_MILLE, call_tolerating_errors
from holdfast.workers.flows.activation import FlowEnvironment
from holdfast.workers.flows.definition import RecordedValues, definitions_in
from holdfast.workers.flows.step_runs import LocalWork, StepRun, invoke_step
from holdfast.workers.tasks.attempt import (
    AttemptResult,
    TaskAttempt,
    TaskDefinition,
    result_of_error,
    run_attempt,
    run_attempt_async,
)
from holdfast.workers.tasks.executors import TaskExecutors
from holdfast.workers.tasks.upkeep import TaskUpkeep
from holdfast.workers.tasks.worker import TaskWorker

# One in this many calls of a task or step suffers each fault.
CALL_FAULT_ODDS = 16
BEFORE, AFTER = 1, 2
# Attempts that one process runs at a time.
CONCURRENCY = 4


class CallFaults:
    """Kills the process before or after a call, as the tape picks."""

    def __init__(self, incarnation: Incarnation, *, enabled: bool) -> None:
        self._incarnation = incarnation
        self._enabled = enabled

    def draw(self) -> int:
        if not self._enabled or self._incarnation.faults_stopped:
            return 0
        return self._incarnation.tape.draw_fault(CALL_FAULT_ODDS, (BEFORE, AFTER).__contains__)

    def before(self, fault: int, what: str) -> None:
        if fault == BEFORE:
            self._crash("crash before the call", what)

    def after(self, fault: int, what: str) -> None:
        if fault == AFTER:
            self._crash("crash after the call", what)

    def _crash(self, kind: str, what: str) -> None:
        self._incarnation.record("fault", kind=kind, call=what)
        current = self._incarnation.scheduler.current
        assert current is not None
        self._incarnation.scheduler.kill(current)


class TaskWorkerProcess(Actor):
    """Process of a task worker of an app."""

    def __init__(
        self,
        name: str,
        app: App,
        *,
        call_faults: bool = True,
        stubs: Callable[[Incarnation], CallStubs] | None = None,
    ) -> None:
        """`stubs` replaces the functions of tasks and steps."""
        super().__init__(name)
        self.app = app
        self.call_faults = call_faults
        self.stubs = stubs or CallStubs

    def run_process(self, incarnation: Incarnation) -> None:
        try:
            self._run(incarnation)
        except StoreReplaced:
            raise ProcessHalted from None

    def _run(self, incarnation: Incarnation) -> None:
        runtime = Runtime(
            self.app,
            incarnation.store,
            roles=(),
            worker=f"{self.name}.{incarnation.incarnation_id}",
            clock=incarnation.clock,
        )
        while not call_tolerating_errors(incarnation, _prepare, runtime):
            pass
        loop = ProcessLoop(incarnation.store, incarnation.scheduler, incarnation.clock)
        faults = CallFaults(incarnation, enabled=self.call_faults)
        calls = SimulatedCalls(incarnation, faults, self.stubs(incarnation))
        definitions = self._definitions(runtime, calls)
        register_definitions(runtime, definitions)
        worker = InlineTaskWorker(
            incarnation.store,
            universe=runtime.universe,
            codes=definitions,
            worker=self.name,
            incarnation=runtime.incarnation,
            queues=runtime.task_queues(),
            concurrency=CONCURRENCY,
            clock=incarnation.clock,
            loop=loop,
            calls=calls,
        )
        try:
            loop.run(_serve(incarnation, worker, loop))
        finally:
            runtime.close()

    def _definitions(self, runtime: Runtime, calls: SimulatedCalls) -> Mapping[str, TaskDefinition]:
        """Copies of the tasks, so that `hf.world` finds the runtime of this process, and the flows."""
        app = self.app
        codes = {name: flow.within(runtime.universe, app) for name, flow in app.flows.items()}
        environment = FlowEnvironment(
            runtime.store,
            runtime.universe,
            InlineThreads(),
            RecordedValues(runtime.clock),
            calls.invoke_step,
        )
        tasks = {name: copy.copy(task) for name, task in self.app.tasks.items()}
        for task in tasks.values():
            task.fn = calls.stubs.task_function(task)
        return {**tasks, **definitions_in(environment, codes)}


class CallStubs:
    """The functions of tasks and steps in a process: the user's own. A subclass replaces them."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    def task_function(self, task: Any) -> Callable[..., Any]:
        fn: Callable[..., Any] = task.fn
        return fn

    def step_work(self, work: LocalWork, run: StepRun) -> LocalWork:
        return work


class SimulatedCalls:
    """Calls of tasks and steps with faults around them. The history records each call."""

    def __init__(self, incarnation: Incarnation, faults: CallFaults, stubs: CallStubs) -> None:
        self._incarnation = incarnation
        self._faults = faults
        self.stubs = stubs

    async def run_attempt(self, attempt: TaskAttempt) -> AttemptResult:
        clock = self._incarnation.clock
        if attempt.grant.name.startswith(TASK_PREFIX):
            return await run_attempt_async(attempt, clock)
        with self._calling(attempt.idempotency_key):
            fault, what = self._faults.draw(), attempt.grant.name
            self._faults.before(fault, what)
            self._incarnation.record(
                "task.call", name=what, key=attempt.idempotency_key, attempt=attempt.attempt
            )
            if attempt.code.asynchronous:
                result = await run_attempt_async(attempt, clock)
            else:
                result = run_attempt(attempt, clock)
            self._faults.after(fault, what)
            return result

    async def invoke_step(self, work: LocalWork, run: StepRun, threads: Executor) -> Any:
        with self._calling(run.idempotency_key):
            fault, what = self._faults.draw(), f"{run.name}#{run.occurrence}"
            self._faults.before(fault, what)
            self._incarnation.record(
                "step.call",
                flow=run.flow_id,
                step=what,
                key=run.idempotency_key,
                attempt=run.attempt,
            )
            try:
                result = await invoke_step(self.stubs.step_work(work, run), run, threads)
            except Exception:
                self._faults.after(fault, what)
                raise
            self._faults.after(fault, what)
            return result

    def _calling(self, key: str) -> AbstractContextManager[None]:
        return self._incarnation.simulation.call_protection.calling(self._incarnation, key)


class InlineTaskWorker(TaskWorker):
    """Task worker without threads."""

    def __init__(self, *args: Any, loop: ProcessLoop, calls: SimulatedCalls, **kwargs: Any) -> None:
        self._process_loop = loop
        self._calls = calls
        # Set when an attempt has ended.
        self.finished = asyncio.Event()
        super().__init__(*args, **kwargs)

    def _create_executors(
        self, codes: Mapping[str, TaskDefinition], concurrency: int, processes: int
    ) -> TaskExecutors:
        return InlineTaskExecutors(
            self._process_loop,
            self._calls,
            codes=codes,
            concurrency=concurrency,
            processes=concurrency,
            wake=self.finished.set,
            clock=self._clock,
            commit_report=self._reports.commit_one,
        )

    def _create_upkeep(self) -> TaskUpkeep:
        return TaskUpkeep(self.store, self.identity.universe, inline=True)

    def _pause(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def sleep_s(self) -> float:
        return max(self._sleep_s(), 0.001)

    def shut_down(self) -> None:
        """Release all tasks and end."""
        self.skip_grace()
        self._stopping.set()
        self._shut_down()


class InlineTaskExecutors(TaskExecutors):
    """Executors of all kinds on the loop of the process."""

    def __init__(self, loop: ProcessLoop, calls: SimulatedCalls, **options: Any) -> None:
        self._process_loop = loop
        self._calls = calls
        super().__init__(**options)

    def _create_executors(
        self,
        kinds: set[int],
        concurrency: int,
        processes: int,
        wake: Callable[[], None],
        commit_report: Callable[[AttemptResult], bool] | None,
    ) -> None:
        async def run(attempt: TaskAttempt) -> AttemptResult:
            result = await self._calls.run_attempt(attempt)
            if commit_report is not None and attempt.code.report == "each":
                result.reported = commit_report(result)
            return result

        for kind in sorted(kinds):
            self._executors[kind] = AsyncExecutor(
                concurrency,
                run,
                self._process_loop,
                on_begin=None,
                on_done=wake,
                clock=self._clock,
                make_failure=result_of_error,
            )


def _prepare(runtime: Runtime) -> bool:
    """Do what a task worker does at its start."""
    runtime.prepare_tasks()
    return True


async def _serve(incarnation: Incarnation, worker: InlineTaskWorker, loop: ProcessLoop) -> None:
    """Run the steps of a worker, and its attempts between them, until it is stopped or killed."""
    topics = worker.identity.topics
    while True:
        since = loop.last_notified(topics)
        more = worker.step()
        if not incarnation.faults_stopped and incarnation.tape.chance(SHUTDOWN_MILLE):
            incarnation.count_coverage("task stopped in good order")
            call_tolerating_errors(incarnation, worker.shut_down)
            return
        if more:
            await asyncio.sleep(0)
            continue
        await _wait_for_work(worker, loop, since)
        worker.look_for_tasks()


async def _wait_for_work(worker: InlineTaskWorker, loop: ProcessLoop, since: int) -> None:
    """Wait until an attempt has ended, a topic is notified or a time is due."""
    if not worker.finished.is_set():
        waits = [
            loop.create_task(worker.finished.wait()),
            loop.create_task(loop.wait_for_topics(worker.identity.topics, since, worker.sleep_s())),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    worker.finished.clear()
