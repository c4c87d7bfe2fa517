"""Task workers on a memory store, driven step by step under simulated time. At the end of a test the
workers shut down, and the rows are verified against the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import holdfast as hf
from holdfast.app.runtime import Runtime
from holdfast.clock import MS, S, SimClock
from holdfast.errors import HoldfastError
from holdfast.store.in_process import InProcessStore
from holdfast.tasks import consistency, replay_check
from holdfast.tasks.model import TaskCounts, get_counts, keys_of
from holdfast.workers.tasks.worker import TaskWorker
from tests.world.rig import Crash, FaultyBackend

T = TypeVar("T")

# The poll interval, and the time limit of a wait.
POLL_S = 0.0005
TIMEOUT_S = 30.0


class TaskRig:
    def __init__(self, *tasks: hf.Task[Any, Any], queues: tuple[hf.Queue, ...] = ()) -> None:
        self.clock = SimClock()
        self.backend = FaultyBackend()
        self.store = InProcessStore("memory:", self.backend, self.clock)
        self.app = hf.App("jobs", tasks=tasks, queues=queues)
        self.rt = Runtime(self.app, self.store, roles=(), clock=self.clock)
        self.workers: list[TaskWorker] = []

    def worker(
        self,
        name: str = "w",
        *,
        tasks: tuple[hf.Task[Any, Any], ...] | None = None,
        queues: tuple[str, ...] = ("default",),
        stop_grace_s: float = 0.0,
        **options: Any,
    ) -> TaskWorker:
        """Return a worker that is not started. A test steps or starts it."""
        app = self.app if tasks is None else hf.App("jobs", tasks=tasks)
        made = TaskWorker(
            self.store,
            universe=self.app.universe,
            codes=app.tasks,
            worker=name,
            incarnation=self.clock.entropy(8).hex(),
            queues=queues,
            stop_grace_s=stop_grace_s,
            clock=self.clock,
            **options,
        )
        self.workers.append(made)
        return made

    def step_until(
        self,
        condition: Callable[[], T],
        description: str,
        *workers: TaskWorker,
        tick_ns: int = 0,
    ) -> T:
        """Step the workers until the condition holds. Each step advances the clock by `tick_ns`."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (result := condition()):
            assert time.monotonic() < deadline, f"{description}: not within {TIMEOUT_S} s"
            self._step_workers(workers)
            self.clock.advance(tick_ns)
            time.sleep(POLL_S)
        return result

    def pass_time(self, seconds: float, *workers: TaskWorker, tick_ns: int = 100 * MS) -> None:
        """Step the workers for this simulated time."""
        until_ns = self.clock.boot_ns() + int(seconds * S)
        while self.clock.boot_ns() < until_ns:
            self._step_workers(workers)
            self.clock.advance(tick_ns)
        self._step_workers(workers)

    def _step_workers(self, workers: tuple[TaskWorker, ...]) -> None:
        for worker in workers:
            worker.look_for_tasks()
            try:
                worker.step()
            except Crash:
                # A parked request belongs to a connection and ends with it.
                parked = worker._parked._parked
                if parked is not None:
                    parked.cancel()
                raise

    def stop(self, worker: TaskWorker) -> None:
        """Stop a worker and wait for its shutdown."""
        with suppress(HoldfastError):
            worker.request_stop()
        if worker.running:
            worker.join(TIMEOUT_S)
        else:
            worker.run()
        assert not worker.running
        self.workers.remove(worker)

    # -- queries -------------------------------------------------------------------------------

    def counts(self, queue: str = "default") -> TaskCounts:
        return self.store.read(get_counts, keys_of(self.app.universe), queue)

    def assert_consistent(self) -> None:
        universe = self.app.universe
        replay_differences = self.store.read(
            lambda txn: list(replay_check.find_differences(txn, universe))
        )
        assert not replay_differences, replay_differences
        derived_differences = self.store.read(
            lambda txn: list(consistency.find_differences(txn, universe))
        )
        assert not derived_differences, derived_differences


@contextmanager
def open_task_rig(
    *tasks: hf.Task[Any, Any], queues: tuple[hf.Queue, ...] = ()
) -> Iterator[TaskRig]:
    rig = TaskRig(*tasks, queues=queues)
    try:
        yield rig
    finally:
        rig.backend.arm({})
        for worker in list(rig.workers):
            rig.stop(worker)
    for worker in rig.workers:
        assert worker.failure is None, worker.failure
    rig.assert_consistent()


class TaskGates:
    """Gates that block tasks until a test opens them. Records the running and the started tasks."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.started: list[Any] = []
        self.running_max = 0
        self._lock = threading.Lock()
        self._gates: dict[Any, threading.Event] = {}

    def gate(self, name: Any) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def open(self, *names: Any) -> None:
        for name in names:
            self.gate(name).set()

    def wait_at_gate(self, name: Any) -> None:
        """Count as running until the gate opens."""
        with self._lock:
            self.running.append(name)
            self.started.append(name)
            self.running_max = max(self.running_max, len(self.running))
        assert self.gate(name).wait(TIMEOUT_S), f"nobody let {name} go"
        with self._lock:
            self.running.remove(name)
