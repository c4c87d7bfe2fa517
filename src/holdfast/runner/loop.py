"""The loop of a runner: calls `tick`, sleeps when idle, starts and stops.

The loop sleeps on its `Wakeup` while no item is due or the executor is full. When the store refuses
requests, or a claim returns nothing although an item was due, it backs off exponentially and never spins.

At every end except a crash, the loop finishes and settles the items in progress if possible. The runner
is STOPPED afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holdfast import failpoints
from holdfast.clock import MS, S
from holdfast.durable.queue import topic
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner.boot import NotRunning, RunnerState
from holdfast.runner.demand import ClaimDemand
from holdfast.runner.error_policy import is_transient
from holdfast.runner.tick import TickStats
from holdfast.runner.wakeup import Wakeup
from holdfast.store.api import Store

if TYPE_CHECKING:
    from holdfast.runner.runner import Runner

# Maximum wait for the result of a commit handoff before the next tick.
HANDOFF_WAIT_MS = 20


class RunnerLoop:
    def __init__(
        self,
        runner: Runner,
        store: Store,
        queues: Sequence[str],
        demand: ClaimDemand,
        *,
        sleep: Callable[[float], object] | None,
    ) -> None:
        self._runner = runner
        self._store = store
        self._topics = [topic(queue) for queue in queues]
        self._demand = demand
        self._sleep = sleep
        self._running = threading.Lock()
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            raise Invalid(what="runner", worker=self._runner.worker, why="it runs already")
        # Acquired here and not in the new thread, so that no other thread runs the loop in between.
        self._acquire()
        self.failure = None
        self._thread = threading.Thread(
            target=self._thread_main, name=self._runner.worker, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads
            self._running.release()
            raise

    def run(self) -> None:
        if self._runner.state is RunnerState.STOPPED:
            raise NotRunning(worker=self._runner.worker)
        self._acquire()
        self._run()

    def wake(self) -> None:
        wakeup = self._wakeup
        if wakeup is not None:
            wakeup.set()

    def join(self, timeout_s: float | None) -> bool:
        thread = self._thread
        if thread is not None:
            if thread is threading.current_thread():
                return False
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        if self.failure is not None:
            raise self.failure
        return True

    def finish(self, timeout_s: float | None) -> bool:
        """Join the thread. Without a thread, finish here the items that ticks have left unsettled."""
        ended = self.join(timeout_s)
        if ended and self._runner.state is RunnerState.STOPPING:
            self.run()
        return ended

    def _acquire(self) -> None:
        if not self._running.acquire(blocking=False):
            raise Invalid(what="runner", worker=self._runner.worker, why="it runs already")

    def _run(self) -> None:
        try:
            if self._sleep is None:
                self._wakeup = Wakeup(self._store, self._topics)
            self._tick_until_stopped()
        finally:
            self._runner.halt()
            if self._wakeup is not None:
                self._wakeup.close()
            self._running.release()

    def _thread_main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    def _tick_until_stopped(self) -> None:
        runner = self._runner
        try:
            while runner.state is RunnerState.RUNNING or runner.has_unsettled:
                self._pause_after(runner.tick())
        except Exception as error:
            if runner.logged_error is not error:
                runner.hooks.loop_error(error)
            runner.request_stop()
            with contextlib.suppress(Exception):
                while runner.has_unsettled:
                    self._pause_after(runner.tick())
            raise

    def _pause_after(self, tick: TickStats) -> None:
        runner = self._runner
        if failpoints.armed:
            failpoints.hit("runner.ticked", runner)
        stopping = runner.state is not RunnerState.RUNNING
        if stopping and not runner.has_unsettled:
            return
        if runner.awaits_handoff and self._wakeup is not None:
            # The handoff returns with new claims.
            self._wakeup.wait_local(min(HANDOFF_WAIT_MS / 1000, runner.next_check_s()))
            return
        longest_ns = runner.policy.idle_sleep_max_ms * MS
        can_claim = runner.capacity > 0 and not stopping
        demand, busy = self._demand, bool(tick.busy)
        if demand.repeats_at_once(made_progress=tick.made_progress, busy=busy, can_claim=can_claim):
            return
        idle_ns = self._idle_ns() if can_claim else longest_ns
        sleep_ns = demand.sleep_ns(busy=busy, idle_ns=idle_ns, longest_ns=longest_ns)
        if sleep_ns:
            self._pause(min(sleep_ns / S, runner.next_check_s()))

    def _idle_ns(self) -> int:
        try:
            return self._runner.idle_sleep_ns()
        except HoldfastError as error:
            if not is_transient(error):
                raise
            return 0

    def _pause(self, seconds: float) -> None:
        if self._sleep is not None:
            self._sleep(seconds)
        elif self._wakeup is not None:
            self._wakeup.wait(seconds)
