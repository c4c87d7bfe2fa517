"""A store in memory with simulated time, a queue, timers, and commits that fail on demand."""

from __future__ import annotations

from collections import deque
from typing import Any

from holdfast.clock import MS, SimClock
from holdfast.durable import queue
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.runner import Handler, Policy, Runner, Tick, Work
from holdfast.store.api import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend, MemoryTxn
from tests.postgres import PgRows, Verdict

QUEUE = "inbox"
TIMERS = "timers"

# What the next commits meet: kept and then unknown, not kept and unknown, refused, or nothing.
KEPT = "kept"
DROPPED = "dropped"
FINE = "fine"


class FaultyBackend(MemoryBackend):
    """Memory whose next commits end as `faults` says, one after the other, and then well."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: deque[str | HoldfastError] = deque()
        self.commits = 0

    def begin(self) -> FaultyTxn:
        return FaultyTxn(self)


class FaultyTxn(MemoryTxn):
    def __init__(self, backend: FaultyBackend) -> None:
        super().__init__(backend)
        self._faulty = backend

    def commit(self) -> None:
        fault = self._faulty.faults.popleft() if self._faulty.faults else FINE
        if fault in (FINE, KEPT):
            super().commit()
            self._faulty.commits += 1
        else:
            self.abort()
        if isinstance(fault, HoldfastError):
            raise fault
        if fault != FINE:
            raise CommitUnknown()


class FaultyPgRows(PgRows):
    """The same on PostgreSQL."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: deque[str | HoldfastError] = deque()

    def verdict(self) -> Verdict:
        fault = self.faults.popleft() if self.faults else FINE
        kept = fault in (FINE, KEPT)
        self.commits += kept
        if isinstance(fault, HoldfastError):
            return Verdict(kept, fault)
        return Verdict(kept, None if fault == FINE else CommitUnknown())


class Rig:
    def __init__(self, kind: str = "memory") -> None:
        self.clock = SimClock()
        self.backend: Any
        self.store: Store
        if kind == "postgres":
            self.backend = FaultyPgRows()
            self.store = self.backend.open(self.clock)
        else:
            self.backend = FaultyBackend()
            self.store = LocalStore("memory:", self.backend, self.clock)
        self.handled: list[Work] = []

    def put(self, *payloads: bytes, to: str = QUEUE) -> list[int]:
        return self.store.transact(queue.put_many, to, list(payloads), priority=0)

    def put_timer(self, payload: bytes, *, after_ms: int = 0) -> int:
        due_ns = self.store.now_ns() + after_ms * MS
        return self.store.transact(queue.put, TIMERS, payload, not_before_ns=due_ns)

    def keep(self, work: Work) -> None:
        """A handler that succeeds and remembers."""
        self.handled.append(work)

    @property
    def payloads(self) -> list[bytes]:
        return [work.payload for work in self.handled]

    def stopped_runner(self, handler: Handler | None = None, **options: Any) -> Runner:
        policy = Policy(**{name: options.pop(name) for name in list(options) if name in KNOBS})
        options = {
            "worker": "w",
            "timers": TIMERS,
            "clock": self.clock,
            "policy": policy,
            **options,
        }
        return Runner(self.store, QUEUE, handler or self.keep, **options)

    def runner(self, handler: Handler | None = None, **options: Any) -> Runner:
        runner = self.stopped_runner(handler, **options)
        runner.boot()
        return runner

    def run(self, runner: Runner, *, ticks_max: int = 100) -> Tick:
        """Tick until nothing moves, stepping over delays; the sum of it."""
        total = Tick()
        for _ in range(ticks_max):
            tick = runner.tick()
            for name in Tick.__slots__:
                setattr(total, name, getattr(total, name) + getattr(tick, name))
            counts = self.counts()
            if not (tick.moved or tick.busy or counts.delayed):
                return total
            self.clock.advance(runner.idle_sleep_ms() * MS)
        raise AssertionError(f"still moving after {ticks_max} ticks: {total}")

    def counts(self, name: str = QUEUE) -> queue.Counts:
        return self.store.read(queue.counts, name)

    def dead(self, name: str = QUEUE) -> list[queue.Dead]:
        return self.store.read(queue.dead, name)

    def fault(self, *faults: str | HoldfastError) -> None:
        self.backend.faults.extend(faults)


KNOBS = frozenset(Policy.__slots__)


class Scripted:
    """A handler that raises what it is told to, in order, and then succeeds."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = deque(errors)
        self.attempts: list[int] = []

    def __call__(self, work: Work) -> None:
        self.attempts.append(work.attempt)
        error = self.errors.popleft() if self.errors else None
        if error is not None:
            raise error


class Crash(BaseException):
    """A process that dies here."""
