"""A store in memory with simulated time, an app on it, workers driven tick by tick, and commits that
go wrong on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast as hf
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import S, SimClock
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.engine import Backend
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend, MemoryTxn
from holdfast.world import catalog, redrive
from holdfast.world.catalog import WorldRecord, subject_of
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.kernel import World
from tests.postgres import PgRows
from tests.world import bank

# What a commit meets. A crash is the caller's; the store goes on without it.
CRASH_BEFORE, CRASH_AFTER = "crash before", "crash after"
UNKNOWN_BEFORE, UNKNOWN_AFTER = "unknown before", "unknown after"
FAULTS = (CRASH_BEFORE, CRASH_AFTER, UNKNOWN_BEFORE, UNKNOWN_AFTER)


class Crash(KeyboardInterrupt):
    """The process dies here."""


def rows_on(kind: str) -> Any:
    """Rows of a kind of store whose commits go wrong on demand: `memory`, `postgres`."""
    return PgRows(Crash) if kind == "postgres" else FaultyBackend()


class FaultyBackend(MemoryBackend):
    """Memory whose commits end as `plan` says, by their number since `arm`."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: dict[int, str | HoldfastError] = {}
        self.commits = 0

    def arm(self, plan: dict[int, str | HoldfastError]) -> None:
        self.plan, self.commits = dict(plan), 0

    def begin(self) -> FaultyTxn:
        return FaultyTxn(self)


class FaultyTxn(MemoryTxn):
    def __init__(self, backend: FaultyBackend) -> None:
        super().__init__(backend)
        self._faulty = backend

    def commit(self) -> None:
        self._faulty.commits += 1
        fault = self._faulty.plan.pop(self._faulty.commits, None)
        if fault in (None, CRASH_AFTER, UNKNOWN_AFTER):
            super().commit()
        else:
            self.abort()
        if isinstance(fault, HoldfastError):
            raise fault
        if fault in (CRASH_BEFORE, CRASH_AFTER):
            raise Crash
        if fault is not None:
            raise CommitUnknown()


class Rig:
    def __init__(
        self,
        app: hf.App = bank.app,
        backend: Backend | PgRows | None = None,
        clock: SimClock | None = None,
    ) -> None:
        self.app = app
        self.clock = clock or SimClock()
        self.backend: Any = backend or FaultyBackend()
        self.store: Store = (
            self.backend.open(self.clock)
            if isinstance(self.backend, PgRows)
            else LocalStore("memory:", self.backend, self.clock)
        )
        self.runtime = Runtime(app, self.store, roles=(), clock=self.clock)
        self.universe = app.universe

    # -- worlds --------------------------------------------------------------------------------

    def world(self, kind: type[Any] = bank.Account, name: str = "ada") -> WorldHandle[Any]:
        """A world that exists and is assigned to worker A."""
        handle = self.runtime.world(kind, name)
        self.assign(handle)
        return handle

    def id(self, handle: WorldHandle[Any]) -> str:
        return handle.create()

    def assign(self, handle: WorldHandle[Any], worker: str = "A", priority: int = 0) -> None:
        self.store.transact(catalog.assign, self.universe, self.id(handle), worker, priority)

    def subject(self, handle: WorldHandle[Any]) -> str:
        return subject_of(self.universe, self.id(handle))

    def kernel(self, handle: WorldHandle[Any], app: hf.App | None = None) -> World:
        code = app or self.app
        program = code.programs[handle.type]
        return World(self.universe, self.id(handle), handle.name, program, code)

    def kernel_in(self, txn: Txn, handle: WorldHandle[Any]) -> World:
        """The same, inside a transaction."""
        world_id = catalog.find(txn, self.universe, handle.type, handle.name)
        assert world_id is not None
        return World(self.universe, world_id, handle.name, self.app.programs[handle.type], self.app)

    # -- workers -------------------------------------------------------------------------------

    def worker(
        self,
        name: str = "A",
        incarnation: str = "1",
        *,
        app: hf.App | None = None,
        budgets: Budgets | None = None,
        snapshots: SnapshotPolicy | None = None,
        **policy: Any,
    ) -> WorldWorker:
        code = app or self.app
        return WorldWorker(
            self.store,
            universe=self.universe,
            programs=code.programs,
            vocabulary=code,
            worker=name,
            incarnation=incarnation,
            policy=WorkerPolicy(
                budgets=budgets or Budgets(),
                snapshots=snapshots or SnapshotPolicy(),
                **policy,
            ),
            clock=self.clock,
        )

    def run(self, worker: WorldWorker | None = None, ticks_max: int = 1000) -> WorldWorker:
        """Tick until nothing is left to do, as a role does: an unknown outcome is no reason to stop."""
        worker = worker or self.worker()
        for _ in range(ticks_max):
            try:
                if not worker.tick():
                    return worker
            except CommitUnknown:
                continue
        raise AssertionError(f"still working after {ticks_max} ticks")

    def expire(self, seconds: float = 11.0) -> None:
        self.clock.advance(int(seconds * S))

    # -- looking -------------------------------------------------------------------------------

    def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self.store.read(fn, *args)

    def head(self, handle: WorldHandle[Any]) -> journal.Head:
        return self.store.read(journal.head, self.subject(handle))

    def cursor(self, handle: WorldHandle[Any]) -> int:
        return self.store.read(inbox.cursor, self.subject(handle))

    def depth(self, handle: WorldHandle[Any]) -> int:
        return self.store.read(inbox.depth, self.subject(handle))

    def bodies(self, handle: WorldHandle[Any]) -> list[bytes]:
        """The entries, byte for byte."""
        head = self.head(handle)
        found: list[journal.Entry] = self.store.read(
            journal.read, self.subject(handle), head.floor, head.height + 1, 10_000
        )
        return [entry.body for entry in found]

    def baseline(self, handle: WorldHandle[Any]) -> int:
        found: snapshot.Baseline | None = self.store.read(snapshot.baseline, self.subject(handle))
        return 0 if found is None else found.height

    def record(self, handle: WorldHandle[Any]) -> WorldRecord:
        return self.store.read(catalog.record, self.universe, self.id(handle))

    def blocker(self, handle: WorldHandle[Any]) -> str:
        found = self.record(handle).blocker
        return "" if found is None else found.code

    def hints(self, worker: str = "A") -> list[str]:
        return self.store.read(catalog.hints, self.universe, worker, 1000)

    def dead(self) -> list[queue.Dead]:
        return self.store.read(queue.dead, redrive.failures(self.universe))

    def queued(self, name: str) -> list[bytes]:
        return [payload for _, payload in self.store.read(queue.peek, name, 1000)]

    def rows(self) -> dict[bytes, bytes]:
        """Every row but the store's own about commits."""
        found = self.store.read(lambda txn: txn.scan(b"\x00", b"\xff\xff"))
        return {key: row for key, row in found if not key.startswith(schema.OUTCOME)}
