"""Runner rig: a memory or PostgreSQL store with simulated time, a queue, timers and injected commit faults."""

from __future__ import annotations

from collections import deque
from typing import Any

from holdfast.clock import MS, SimClock
from holdfast.durable import queue
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.runner import Runner, RunnerPolicy, TickStats, WorkHandler, WorkItem
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend, MemoryTxn
from tests.postgres import CommitFault, PgRows

QUEUE = "inbox"
TIMERS = "timers"

# Faults of the next commits: committed with an unknown outcome, aborted with an unknown outcome, none.
UNKNOWN_COMMITTED = "kept"
UNKNOWN_ABORTED = "dropped"
COMMIT_OK = "fine"


class FaultyBackend(MemoryBackend):
    """Memory backend. Each commit takes the next entry of `faults`; without one it succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: deque[str | HoldfastError] = deque()
        self.commits = 0

    def begin(self) -> FaultyTxn:
        return FaultyTxn(self)


class FaultyTxn(MemoryTxn):
    def __init__(self, backend: FaultyBackend) -> None:
        super().__init__(backend)
        self._faulty_backend = backend

    def commit(self) -> None:
        fault = self._faulty_backend.faults.popleft() if self._faulty_backend.faults else COMMIT_OK
        if fault in (COMMIT_OK, UNKNOWN_COMMITTED):
            super().commit()
            self._faulty_backend.commits += 1
        else:
            self.abort()
        if isinstance(fault, HoldfastError):
            raise fault
        if fault != COMMIT_OK:
            raise CommitUnknown()


class FaultyPgRows(PgRows):
    """PostgreSQL rows with the same fault queue as FaultyBackend."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: deque[str | HoldfastError] = deque()

    def next_fault(self) -> CommitFault:
        fault = self.faults.popleft() if self.faults else COMMIT_OK
        committed = fault in (COMMIT_OK, UNKNOWN_COMMITTED)
        self.commits += committed
        if isinstance(fault, HoldfastError):
            return CommitFault(committed, fault)
        return CommitFault(committed, None if fault == COMMIT_OK else CommitUnknown())


class RunnerRig:
    def __init__(self, kind: str = "memory") -> None:
        self.clock = SimClock()
        self.backend: Any
        self.store: Store
        if kind == "postgres":
            self.backend = FaultyPgRows()
            self.store = self.backend.open(self.clock)
        else:
            self.backend = FaultyBackend()
            self.store = InProcessStore("memory:", self.backend, self.clock)
        self.handled: list[WorkItem] = []

    def put(self, *payloads: bytes, to: str = QUEUE) -> list[int]:
        return self.store.transact(queue.put_many, to, list(payloads), priority=0)

    def put_timer(self, payload: bytes, *, after_ms: int = 0) -> int:
        due_ns = self.store.now_ns() + after_ms * MS
        return self.store.transact(queue.put, TIMERS, payload, not_before_ns=due_ns)

    def record_work(self, work: WorkItem) -> None:
        """A handler that succeeds and records its work item."""
        self.handled.append(work)

    @property
    def payloads(self) -> list[bytes]:
        return [work.payload for work in self.handled]

    def stopped_runner(self, handler: WorkHandler | None = None, **options: Any) -> Runner:
        policy = RunnerPolicy(
            **{name: options.pop(name) for name in list(options) if name in POLICY_FIELDS}
        )
        options = {
            "worker": "w",
            "timers": TIMERS,
            "clock": self.clock,
            "policy": policy,
            **options,
        }
        return Runner(self.store, QUEUE, handler or self.record_work, **options)

    def runner(self, handler: WorkHandler | None = None, **options: Any) -> Runner:
        runner = self.stopped_runner(handler, **options)
        runner.boot()
        return runner

    def run_until_idle(self, runner: Runner, *, ticks_max: int = 100) -> TickStats:
        """Tick until no tick makes progress and no item is delayed. Return the summed tick statistics."""
        total = TickStats()
        for _ in range(ticks_max):
            tick = runner.tick()
            for name in TickStats.__slots__:
                setattr(total, name, getattr(total, name) + getattr(tick, name))
            counts = self.counts()
            if not (tick.made_progress or tick.busy or counts.delayed):
                return total
            self.clock.advance(runner.idle_sleep_ms() * MS)
        raise AssertionError(f"still moving after {ticks_max} ticks: {total}")

    def counts(self, name: str = QUEUE) -> queue.QueueCounts:
        return self.store.read(queue.counts, name)

    def dead_letters(self, name: str = QUEUE) -> list[queue.DeadLetter]:
        return self.store.read(queue.list_dead, name)

    def inject_faults(self, *faults: str | HoldfastError) -> None:
        self.backend.faults.extend(faults)


POLICY_FIELDS = frozenset(RunnerPolicy.__slots__)


class ScriptedHandler:
    """A handler that raises the given errors in order. An entry of None, and every later call, succeeds."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.pending_errors = deque(errors)
        self.attempts: list[int] = []

    def __call__(self, work: WorkItem) -> None:
        self.attempts.append(work.attempt)
        error = self.pending_errors.popleft() if self.pending_errors else None
        if error is not None:
            raise error


class SimulatedCrash(BaseException):
    """A process crash: no handler or runner code catches it."""
