"""Co-located process: hosts worlds, runs their effects and fires their timers, with fused commits.

The services are the product's, connected by a `FusedCommitter` (`workers.world.fused_commit`). The
threads of the world worker and of the effect pool are simulated by turns: the worker ticks, the
runners tick, the executor's threads process their work, and a submitted transaction stays in flight
for some turns before it is answered. The timer worker has its own simulated thread, which
interleaves with the other threads at every store call. The simulation therefore covers worlds that are
hosted, paused, deleted or lost during a step in flight, timers that are cancelled, replaced or
fired by another process during a commit in flight, and crashes in between.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from holdfast.app.app import App
from holdfast.clock import MS, S
from holdfast.durable.queue import topic
from holdfast.runner import Runner, RunnerPolicy
from holdfast.runner.executor import Executor, ExecutorWorker
from holdfast.runner.wakeup import Wakeup
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.processes import (
    NEVER_DEAD_EXPIRIES_MIN,
    SHUTDOWN_MILLE,
    WorldWorkerProcess,
    boot_runner,
    call_tolerating_errors,
    stop_runners,
)
from holdfast.sim.scheduler import Scheduler, SimThread
from holdfast.store.api import Store
from holdfast.store.futures import CommitFuture, complete_one
from holdfast.workers.effects.pool import EffectAdapter, EffectWorkerPool
from holdfast.workers.timers.worker import TimerWorker
from holdfast.workers.world import fused_commit
from holdfast.workers.world.fused_commit import FusedCommitter, TimerBatch
from holdfast.workers.world.worker import WorldWorker

EXECUTOR_THREADS = 3
# Per mille of turns after which the oldest transaction in flight is answered.
ANSWERED_MILLE = 400
# Sleep while an answer is awaited.
ANSWER_WAIT_NS = 3 * MS
IDLE_S_MAX = 0.5
# Per mille of timer commits that are submitted some time after the scan for due timers.
LATE_COMMIT_MILLE = 400
LATE_COMMIT_MS_MAX = 150


class ColocatedProcess(Actor):
    """A world worker, an effect worker pool and a timer worker in one process."""

    def __init__(
        self,
        world_worker: WorldWorkerProcess,
        app: App,
        effects_of: Callable[[Incarnation], Mapping[str, EffectAdapter]],
        policy_overrides: Mapping[str, Any],
    ) -> None:
        super().__init__(world_worker.name)
        self.world_worker = world_worker
        self.app = app
        self.effects_of = effects_of
        self.policy_overrides = dict(policy_overrides)

    def run_process(self, incarnation: Incarnation) -> None:
        under_way = _InFlight(incarnation)
        worker = self.world_worker.build_role(incarnation)
        assert isinstance(worker, WorldWorker)
        # Only fused commits are submitted asynchronously.
        worker.store = cast(Store, under_way)
        incarnation.store.loss_prone = (fused_commit.commit_fused,)
        pool = self._pool(incarnation)
        pool.set_commit_owner(worker.committer)
        bell = _SimWakeup(incarnation.scheduler)
        # `run` sets these in its thread. Cycles stay in flight while other threads run.
        worker._wakeup = cast(Wakeup, bell)
        worker.committer.open(bell)
        timers = _ColocatedTimerWorker(incarnation, self.app.universe, worker.committer)
        incarnation.spawn_thread("timers", timers.run_thread)
        for runner in pool.runners:
            while not call_tolerating_errors(incarnation, boot_runner, runner):
                pass
        topics = [*worker.topics, *(topic(runner._queue) for runner in pool.runners)]
        since = 0
        while True:
            since = call_tolerating_errors(incarnation, incarnation.store.wait, topics, since, 0.0)
            turns = [worker.tick, *(runner.tick for runner in pool.runners)]
            ends = [call_tolerating_errors(incarnation, turn) for turn in turns]
            if under_way.has_in_flight:
                incarnation.count_coverage("household: a step under way")
                under_way.wait()
                continue
            if not incarnation.faults_stopped and incarnation.tape.chance(SHUTDOWN_MILLE):
                incarnation.count_coverage("household stopped in good order")
                stop_runners(incarnation, pool)
                call_tolerating_errors(incarnation, worker.shut_down)
                return
            moved = ends[0] or any(tick is not None and tick.made_progress for tick in ends[1:])
            if not moved and not any(runner.has_unsettled for runner in pool.runners):
                idle_ms = min(
                    call_tolerating_errors(incarnation, one.idle_sleep_ms) or 0
                    for one in pool.runners
                )
                idle_s = min(
                    idle_ms / 1000,
                    call_tolerating_errors(incarnation, worker.sleep_s) or 0.0,
                    IDLE_S_MAX,
                )
                with bell.sleeping() as undisturbed:
                    if undisturbed:
                        since = call_tolerating_errors(
                            incarnation, incarnation.store.wait, topics, since, max(idle_s, 0.01)
                        )

    def _pool(self, incarnation: Incarnation) -> EffectWorkerPool:
        pool = EffectWorkerPool(
            incarnation.store,
            universe=self.app.universe,
            adapters=self.effects_of(incarnation),
            worker=f"{self.name}.{incarnation.incarnation_id}",
            inline=True,
            clock=incarnation.clock,
        )
        for runner in pool.runners:
            if runner.policy.expiries_max < NEVER_DEAD_EXPIRIES_MIN:
                runner.set_policy(dataclasses.replace(runner.policy, **self.policy_overrides))
                _use_sim_executor(runner, incarnation)
        return pool


class _SimExecutor(Executor):
    """Executor that runs some of its work each time finished work is collected."""

    def __init__(self, runner: Runner, incarnation: Incarnation) -> None:
        super().__init__(
            EXECUTOR_THREADS,
            on_begin=runner.hooks.began,
            on_done=lambda: None,
            clock=incarnation.clock,
            prefetch_max=0,
        )
        self._run = runner._attempt
        self._incarnation = incarnation

    def drain_finished(self) -> list[Any]:
        for _ in range(self._incarnation.tape.draw(EXECUTOR_THREADS + 1)):
            hand = ExecutorWorker()
            work = self._take_next(hand)
            if work is None:
                break
            self._record_end(hand, work, self._run(work))
        return super().drain_finished()

    def close(self) -> None:
        return

    def _wake_workers(self, more: int = 0) -> None:
        return


def _use_sim_executor(runner: Runner, incarnation: Incarnation) -> None:
    def hire(policy: RunnerPolicy) -> Executor:
        return _SimExecutor(runner, incarnation)

    runner._concurrency = EXECUTOR_THREADS
    runner._make_executor = hire  # type: ignore[method-assign]


class _SimWakeup:
    """Ends the idle sleep of the main loop, and no other sleep of it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.event = threading.Event()
        self._scheduler = scheduler
        self._sleeping_thread: SimThread | None = None

    def set(self) -> None:
        self.event.set()
        if self._sleeping_thread is not None:
            self._sleeping_thread.wake_ns = 0

    @contextmanager
    def sleeping(self) -> Iterator[bool]:
        """Yields whether the loop may sleep: the wake-up was not set since the last sleep."""
        undisturbed = not self.event.is_set()
        self._sleeping_thread = self._scheduler.current
        try:
            yield undisturbed
        finally:
            self._sleeping_thread = None
            self.event.clear()


class _ColocatedTimerWorker(TimerWorker):
    """The timer worker, in its own simulated thread."""

    def __init__(self, incarnation: Incarnation, universe: str, carriage: FusedCommitter) -> None:
        super().__init__(cast(Store, incarnation.store), universe=universe, clock=incarnation.clock)
        self._incarnation = incarnation
        self.set_commit_owner(carriage)

    def run_thread(self) -> None:
        incarnation, since = self._incarnation, 0
        while True:
            since = call_tolerating_errors(
                incarnation, incarnation.store.wait, self.topics, since, 0.0
            )
            if not call_tolerating_errors(incarnation, self.tick):
                idle_s = max(call_tolerating_errors(incarnation, self.sleep_s) or 0.0, 0.0)
                since = call_tolerating_errors(
                    incarnation, incarnation.store.wait, self.topics, since, idle_s
                )

    def _submit_fused(self, batch: TimerBatch) -> None:
        if self._incarnation.tape.chance(LATE_COMMIT_MILLE):
            self._incarnation.sleep(self._incarnation.tape.draw(LATE_COMMIT_MS_MAX) * MS)
        super()._submit_fused(batch)

    def _await_answer(self, batch: TimerBatch, committer: FusedCommitter) -> None:
        if batch.answered.is_set():
            return
        batch.answered = answered = _SimEvent(self._incarnation.scheduler)
        super()._await_answer(batch, committer)
        if not answered.is_set():
            # The product waits a second time only if the commit could not be cancelled.
            end = "not answered in time" if answered.waits > 1 else "taken back"
            self._incarnation.count_coverage(f"household: a round of timers {end}")


class _SimEvent(threading.Event):
    """Event whose `wait` yields to the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._waiting_thread: SimThread | None = None
        self.waits = 0

    def set(self) -> None:
        super().set()
        if self._waiting_thread is not None:
            self._waiting_thread.wake_ns = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits += 1
        if not self.is_set():
            self._waiting_thread = self._scheduler.current
            self._scheduler.sleep(int(timeout * S))
            self._waiting_thread = None
        return self.is_set()


class _InFlight:
    """Store client whose submitted transactions are applied and answered later."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._sent: deque[tuple[_DelayedAnswer, Callable[[], Any]]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._incarnation.store, name)

    @property
    def has_in_flight(self) -> bool:
        return bool(self._sent)

    def submit(self, fn: Callable[..., Any], *args: Any) -> CommitFuture:
        future = _DelayedAnswer(self.answer_oldest)
        self._sent.append((future, lambda: self._incarnation.store.transact(fn, *args)))
        return future

    def wait(self) -> None:
        self._incarnation.sleep(ANSWER_WAIT_NS)
        if self._incarnation.tape.chance(ANSWERED_MILLE):
            self.answer_oldest()

    def answer_oldest(self) -> None:
        """Apply the oldest transaction. They share one connection, so they stay in order."""
        if self._sent:
            future, run = self._sent.popleft()
            try:
                complete_one(future, run())
            except Exception as error:
                complete_one(future, error=error)


class _DelayedAnswer(CommitFuture):
    """Future whose `result` advances the simulation until it is answered."""

    def __init__(self, answer_oldest: Callable[[], None]) -> None:
        super().__init__()
        self._answer_oldest = answer_oldest

    def result(self, timeout: float | None = None) -> Any:
        while not self._done:
            self._answer_oldest()
        return super().result(timeout)
