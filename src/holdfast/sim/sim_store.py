"""Simulated store: the real commit engine on real rows, and the environment's actions on it.

It supports takeover (the engine is reopened, as after the death of a writer process), reboot,
backup, restore as a new generation, and opening under a schema marker that it must refuse.
Transactions that arrive close together share a commit, as in the writer's group commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from holdfast import codec
from holdfast.clock import MS, SimClock
from holdfast.errors import HoldfastError, StoreFull, StoreReplaced
from holdfast.sim.faults import FaultPlan
from holdfast.sim.history import History
from holdfast.sim.history_recorder import SentTransaction
from holdfast.sim.row_decoder import decode_rows
from holdfast.sim.scheduler import Scheduler, SimThread
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.engine import BackendSnapshot, BackendWriteTxn, StoreBackend, StoreEngine
from holdfast.store.requests import CommitAnswer, CommitRequest

URL = "sim:"
# Delay of a transaction that waits to share a commit.
GROUP_COMMIT_DELAY_NS = 20 * MS


class ClosableBackend(StoreBackend, Protocol):
    def close(self) -> None: ...


class CommitEngine(Protocol):
    """Interface of a commit engine: the embedded one or the PostgreSQL one."""

    topics: dict[str, int]

    @property
    def generation(self) -> int: ...

    def now_ns(self) -> int: ...
    def commit(self, requests: Sequence[CommitRequest]) -> list[CommitAnswer]: ...


class SimStore:
    def __init__(
        self,
        make_backend: Callable[[], ClosableBackend],
        scheduler: Scheduler,
        clock: SimClock,
        history: History,
        plan: FaultPlan,
        *,
        lease_ns: int,
        group: bool,
    ) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.history = history
        self.plan = plan
        self.lease_ns = lease_ns
        self.group = group
        self.store_no = 0  # number of stores opened so far: each restore creates a new one
        self.full = False
        self._make_backend = make_backend
        # Rows, and the time of the last commit if the rows do not hold it.
        self._backups: list[tuple[list[Row], int]] = []
        self._waiters: list[tuple[list[str], int, SimThread]] = []
        self._batch: list[SentTransaction] = []
        self.disk = _SimDisk(make_backend(), self)
        self.engine = self._open()

    def _open(self, *, bootstrap: bool = True) -> CommitEngine:
        make_engine = getattr(self.disk.inner, "engine", None)
        if make_engine is None:
            return StoreEngine(self.disk, self.clock, bootstrap=bootstrap)
        engine: CommitEngine = make_engine(self.clock, self.disk, bootstrap=bootstrap)
        return engine

    def engine_now_ns(self) -> int:
        """Store time. Right after a commit it is the time used to validate that commit."""
        return self.engine.now_ns()

    def rows(self) -> list[Row]:
        snapshot = self.disk.snapshot()
        try:
            return snapshot.scan(b"\x00", b"\xff\xff", None, False)
        finally:
            snapshot.close()

    def state_hash(self) -> str:
        return _hash_rows(self.rows())

    def content_hash(self) -> str:
        """Hash of all rows except those private to an engine, in which engines differ."""
        own = (schema.META_KEY, schema.OUTCOME)
        return _hash_rows([row for row in self.rows() if not row[0].startswith(own)])

    def record_audit(self) -> None:
        self.record("audit", {"wall_ns": self.clock.wall_ns()}, value=decode_rows(self.rows()))

    def record(self, op: str, args: dict[str, Any] | None = None, *, value: Any = None) -> None:
        self.history.add(self.engine.now_ns(), op, args, value=value)

    # -- actions of the environment
    # ------------------------------------------------------------------

    def takeover(self) -> None:
        """Replace the dead writer: reopen the same rows. Clients notice only conflicts."""
        self.engine = self._open(bootstrap=False)
        self.record("takeover")

    def reboot(self, *, wall_step_ns: int) -> None:
        """Reboot the machine, possibly with a wrong wall clock. All its processes are dead."""
        before = self.clock.boot_ns()
        self.clock.reboot()
        self.clock.step_wall(wall_step_ns)
        self.scheduler.shift_wakeups(before - self.clock.boot_ns())
        self._batch.clear()
        self.engine = self._open(bootstrap=False)
        self.record("reboot", {"wall_step_ns": wall_step_ns})

    def backup(self) -> int:
        self._backups.append((self.rows(), getattr(self.disk.inner, "committed_ns", 0)))
        self.record("backup", {"id": len(self._backups)})
        return len(self._backups)

    def restore(self, backup: int) -> None:
        """Restore as `holdfast restore` does: the backup's rows, no outcomes, a new generation."""
        self.record_audit()
        for sent in self._batch:
            sent.error = StoreReplaced(path=URL)
        self._batch.clear()
        generation = self.engine.generation + 1
        backup_rows, committed_ns = self._backups[backup - 1]
        rows = dict(backup_rows)
        meta = codec.unpack_as(schema.StoreMeta, rows[schema.META_KEY])
        outcomes = [key for key in rows if key.startswith(schema.OUTCOME)]
        times = [codec.unpack(rows.pop(key))[2] for key in outcomes]
        floor_ns = max([meta.floor_ns, committed_ns, *times])
        rows[schema.META_KEY] = codec.pack(
            schema.StoreMeta(meta.store_id, generation, "", 0, floor_ns)
        )
        self.disk.inner.close()
        self.disk.inner = self._make_backend()
        txn = self.disk.inner.begin()
        txn.put_many(sorted(rows.items()))
        txn.commit()
        self.engine = self._open(bootstrap=False)
        self.store_no += 1
        self.record("restore", {"id": backup, "generation": generation})

    def try_marker(self, marker: bytes | None, *, bootstrap: bool) -> None:
        """Open the rows under another schema marker, as a wrong version would, and record the
        outcome."""
        key = schema.MARKER_KEY
        genuine = dict(self.rows())[key]
        _put_directly(self.disk.inner, key, marker)
        before = self.state_hash()
        try:
            self._open(bootstrap=bootstrap)
            outcome = "opened"
        except HoldfastError as error:
            outcome = error.code
        after = self.state_hash()
        _put_directly(self.disk.inner, key, genuine)
        args = {"marker": marker, "bootstrap": bootstrap, "expected": schema.encode_marker()}
        self.record("boot", args, value={"outcome": outcome, "changed": before != after})
        # The engine does not know the ids of the two writes above, so it is reopened.
        self.takeover()

    # -- for clients
    # ---------------------------------------------------------------------------------

    def commit(
        self, transaction: SentTransaction, *, wait_for_group: bool, full: bool = False
    ) -> CommitAnswer:
        """Apply a transaction, at times together with transactions that arrive soon after."""
        self._batch.append(transaction)
        if wait_for_group:
            self.scheduler.sleep(GROUP_COMMIT_DELAY_NS)
        if transaction.answer is None and transaction.error is None:
            self._flush(full)
        if transaction.error is not None:
            raise transaction.error
        assert transaction.answer is not None
        return transaction.answer

    def _flush(self, full: bool) -> None:
        """Commit all sent transactions durably in one batch. Dead senders receive no answer."""
        batch, self._batch = self._batch, []
        if len(batch) > 1:
            self.record("group", {"size": len(batch)})
        self.full = full
        try:
            answers = self.engine.commit([sent.request for sent in batch])
        except HoldfastError as error:
            for sent in batch:
                sent.error = error
            return
        finally:
            self.full = False
        for sent, answer in zip(batch, answers, strict=True):
            sent.on_answer(answer)
        if self._waiters:
            self._wake_waiters()

    def wait(self, topics: list[str], since: int, timeout_ns: int) -> int:
        task = self.scheduler.current
        if self._last_notified(topics) <= since and timeout_ns > 0 and task is not None:
            self._waiters.append((topics, since, task))
            try:
                self.scheduler.sleep(timeout_ns)
            finally:
                self._waiters = [waiter for waiter in self._waiters if waiter[2] is not task]
        return max(self._last_notified(topics), since)

    def _last_notified(self, topics: list[str]) -> int:
        return max((self.engine.topics.get(topic, 0) for topic in topics), default=0)

    def close(self) -> None:
        self.disk.inner.close()

    def _wake_waiters(self) -> None:
        for topics, since, task in self._waiters:
            if self._last_notified(topics) > since:
                task.wake_ns = 0


class _SimDisk:
    """Backend with a disk that can be full. A restore replaces the inner backend."""

    def __init__(self, inner: ClosableBackend, shared: SimStore) -> None:
        self.inner = inner
        self._shared = shared

    @property
    def is_full(self) -> bool:
        return self._shared.full

    def begin(self) -> BackendWriteTxn:
        txn = self.inner.begin()
        return _DiskFullTxn(txn) if self.is_full else txn

    def snapshot(self) -> BackendSnapshot:
        return self.inner.snapshot()

    def last_id(self) -> int:
        return self.inner.last_id()

    def to_store_error(self, error: Exception) -> HoldfastError | None:
        return self.inner.to_store_error(error)


class _DiskFullTxn:
    """Accepts every write and fails at the commit because the disk is full."""

    def __init__(self, inner: BackendWriteTxn) -> None:
        self._inner = inner
        self.id = inner.id
        self.get = inner.get
        self.scan = inner.scan
        self.put_many = inner.put_many
        self.delete = inner.delete
        self.abort = inner.abort

    def commit(self) -> None:
        self._inner.abort()
        raise StoreFull(path=URL, why="injected")


def _hash_rows(rows: list[Row]) -> str:
    state = hashlib.sha256()
    for key, value in rows:
        state.update(len(key).to_bytes(4, "big") + key + len(value).to_bytes(4, "big") + value)
    return state.hexdigest()


def _put_directly(backend: StoreBackend, key: bytes, value: bytes | None) -> None:
    txn = backend.begin()
    if value is None:
        txn.delete(key)
    else:
        txn.put_many([(key, value)])
    txn.commit()
