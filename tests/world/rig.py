"""The rig of world tests: an app on an in-memory or PostgreSQL store with a simulated clock,
workers driven tick by tick, and commits that fail on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holdfast as hf
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S, SimClock
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.engine import StoreBackend
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend, MemoryTxn
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, redrive
from holdfast.world.catalog import WorldRecord, subject_of
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.reducer import WorldSpec
from tests.postgres import PgRows
from tests.world import bank

# Faults injected into a commit. A crash ends the calling worker only; the store stays usable.
CRASH_BEFORE, CRASH_AFTER = "crash before", "crash after"
UNKNOWN_BEFORE, UNKNOWN_AFTER = "unknown before", "unknown after"
FAULTS = (CRASH_BEFORE, CRASH_AFTER, UNKNOWN_BEFORE, UNKNOWN_AFTER)


class Crash(KeyboardInterrupt):
    """Simulated death of the worker process."""


def make_backend(kind: str) -> Any:
    """Return a backend whose commits fail on demand. `kind` is `memory` or `postgres`."""
    return PgRows(Crash) if kind == "postgres" else FaultyBackend()


class FaultyBackend(MemoryBackend):
    """In-memory backend with injected commit faults. `plan` maps a commit number, counted since
    `arm`, to a fault."""

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


class WorldRig:
    def __init__(
        self,
        app: hf.App = bank.app,
        backend: StoreBackend | PgRows | None = None,
        clock: SimClock | None = None,
    ) -> None:
        self.app = app
        self.clock = clock or SimClock()
        self.backend: Any = backend or FaultyBackend()
        self.store: Store = (
            self.backend.open(self.clock)
            if isinstance(self.backend, PgRows)
            else InProcessStore("memory:", self.backend, self.clock)
        )
        self.runtime = Runtime(app, self.store, roles=(), clock=self.clock)
        self.universe = app.universe

    # -- worlds --------------------------------------------------------------------------------

    def world(self, kind: type[Any] = bank.BankAccount, name: str = "ada") -> WorldHandle[Any]:
        """Create a world and assign it to worker A."""
        handle = self.runtime.world(kind, name)
        self.assign(handle)
        return handle

    def id(self, handle: WorldHandle[Any]) -> str:
        return handle.create()

    def assign(self, handle: WorldHandle[Any], worker: str = "A", priority: int = 0) -> None:
        self.store.transact(catalog.assign, self.universe, self.id(handle), worker, priority)

    def subject(self, handle: WorldHandle[Any]) -> str:
        return subject_of(self.universe, self.id(handle))

    def world_spec(self, handle: WorldHandle[Any], app: hf.App | None = None) -> WorldSpec:
        code = app or self.app
        definition = code.programs[handle.type]
        return WorldSpec(self.universe, self.id(handle), handle.name, definition, code)

    def world_spec_in(self, txn: Txn, handle: WorldHandle[Any]) -> WorldSpec:
        """Same as `world_spec`, inside a transaction."""
        world_id = catalog.find_id(txn, self.universe, handle.type, handle.name)
        assert world_id is not None
        return WorldSpec(
            self.universe, world_id, handle.name, self.app.programs[handle.type], self.app
        )

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
            policy=WorldWorkerPolicy(
                budgets=budgets or Budgets(),
                snapshots=snapshots or SnapshotPolicy(),
                **policy,
            ),
            clock=self.clock,
        )

    def run(self, worker: WorldWorker | None = None, ticks_max: int = 1000) -> WorldWorker:
        """Tick the worker until it is idle. An in-doubt commit is retried, as in the worker
        service."""
        worker = worker or self.worker()
        for _ in range(ticks_max):
            try:
                if not worker.tick():
                    return worker
            except CommitUnknown:
                continue
        raise AssertionError(f"still working after {ticks_max} ticks")

    def advance_clock(self, seconds: float = 11.0) -> None:
        self.clock.advance(int(seconds * S))

    # -- inspection ----------------------------------------------------------------------------

    def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self.store.read(fn, *args)

    def head(self, handle: WorldHandle[Any]) -> journal.JournalHead:
        return self.store.read(journal.head, self.subject(handle))

    def cursor(self, handle: WorldHandle[Any]) -> int:
        return self.store.read(inbox.cursor, self.subject(handle))

    def inbox_depth(self, handle: WorldHandle[Any]) -> int:
        return self.store.read(inbox.depth, self.subject(handle))

    def entry_bodies(self, handle: WorldHandle[Any]) -> list[bytes]:
        """Return the encoded bodies of all journal entries."""
        head = self.head(handle)
        entries: list[journal.ChainedEntry] = self.store.read(
            journal.read, self.subject(handle), head.floor, head.height + 1, 10_000
        )
        return [entry.body for entry in entries]

    def baseline(self, handle: WorldHandle[Any]) -> int:
        baseline: snapshot.Baseline | None = self.store.read(
            snapshot.baseline, self.subject(handle)
        )
        return 0 if baseline is None else baseline.height

    def record(self, handle: WorldHandle[Any]) -> WorldRecord:
        return self.store.read(catalog.get_record, self.universe, self.id(handle))

    def blocker_code(self, handle: WorldHandle[Any]) -> str:
        blocker = self.record(handle).blocker
        return "" if blocker is None else blocker.code

    def runnable(self, worker: str = "A") -> list[str]:
        return self.store.read(catalog.list_runnable, self.universe, worker, 1000)

    def failed_events(self) -> list[queue.DeadLetter]:
        return self.store.read(queue.list_dead, redrive.failed_events_queue(self.universe))

    def queued(self, name: str) -> list[bytes]:
        return [payload for _, payload in self.store.read(queue.peek, name, 1000)]

    def rows(self) -> dict[bytes, bytes]:
        """Return all rows except the store's commit outcomes."""
        scanned = self.store.read(lambda txn: txn.scan(b"\x00", b"\xff\xff"))
        return {key: row for key, row in scanned if not key.startswith(schema.OUTCOME)}
