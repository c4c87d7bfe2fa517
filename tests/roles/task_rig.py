"""Task workers on a store in memory, driven step by step while time is moved by hand. When a test ends
its workers leave in good order, and the rows are verified against the log."""

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
from holdfast.roles.task_worker import TaskWorker
from holdfast.store.local import LocalStore
from holdfast.tasks import recount, verify
from holdfast.tasks.rows import Counts, counts_of, keys_of
from tests.world.rig import Crash, FaultyBackend

T = TypeVar("T")

# Between two looks, and how long anything may take before the test fails.
POLL_S = 0.0005
LONG_S = 30.0


class Shift:
    def __init__(self, *tasks: hf.Task[Any, Any], queues: tuple[hf.Queue, ...] = ()) -> None:
        self.clock = SimClock()
        self.backend = FaultyBackend()
        self.store = LocalStore("memory:", self.backend, self.clock)
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
        """A worker that does nothing until it is stepped, or started."""
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

    def until(
        self,
        condition: Callable[[], T],
        what: str,
        *workers: TaskWorker,
        tick_ns: int = 0,
    ) -> T:
        """Step the workers, and let so much time pass at each step, until the condition holds."""
        deadline = time.monotonic() + LONG_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {LONG_S} s"
            self._step(workers)
            self.clock.advance(tick_ns)
            time.sleep(POLL_S)
        return found

    def pass_time(self, seconds: float, *workers: TaskWorker, tick_ns: int = 100 * MS) -> None:
        """Let so much time pass, and the workers notice."""
        until_ns = self.clock.boot_ns() + int(seconds * S)
        while self.clock.boot_ns() < until_ns:
            self._step(workers)
            self.clock.advance(tick_ns)
        self._step(workers)

    def _step(self, workers: tuple[TaskWorker, ...]) -> None:
        for worker in workers:
            worker.wake()
            try:
                worker.step()
            except Crash:
                # What stands belongs to a connection, and is gone with it.
                if worker._standing is not None:
                    worker._standing.withdraw()
                raise

    def stop(self, worker: TaskWorker) -> None:
        """Let it leave in good order."""
        with suppress(HoldfastError):
            worker.request_stop()
        if worker.running:
            worker.join(LONG_S)
        else:
            worker.run()
        assert not worker.running
        self.workers.remove(worker)

    # -- looking -------------------------------------------------------------------------------

    def counts(self, queue: str = "default") -> Counts:
        return self.store.read(counts_of, keys_of(self.app.universe), queue)

    def assert_sound(self) -> None:
        universe = self.app.universe
        found = self.store.read(lambda txn: list(verify.differences(txn, universe)))
        assert not found, found
        counted = self.store.read(lambda txn: list(recount.differences(txn, universe)))
        assert not counted, counted


@contextmanager
def shift(*tasks: hf.Task[Any, Any], queues: tuple[hf.Queue, ...] = ()) -> Iterator[Shift]:
    made = Shift(*tasks, queues=queues)
    try:
        yield made
    finally:
        made.backend.arm({})
        for worker in list(made.workers):
            made.stop(worker)
    for worker in made.workers:
        assert worker.failure is None, worker.failure
    made.assert_sound()


class Gates:
    """Where tasks wait until they are let go, and who is there."""

    def __init__(self) -> None:
        self.inside: list[Any] = []
        self.came: list[Any] = []
        self.most = 0
        self._lock = threading.Lock()
        self._gates: dict[Any, threading.Event] = {}

    def gate(self, name: Any) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(name, threading.Event())

    def open(self, *names: Any) -> None:
        for name in names:
            self.gate(name).set()

    def pass_through(self, name: Any) -> None:
        """Be seen inside until the gate is opened."""
        with self._lock:
            self.inside.append(name)
            self.came.append(name)
            self.most = max(self.most, len(self.inside))
        assert self.gate(name).wait(LONG_S), f"nobody let {name} go"
        with self._lock:
            self.inside.remove(name)
