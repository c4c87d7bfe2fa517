"""The machine's store: the real engine on real rows, and all that can be done to it from outside.

It can be taken over (the engine is opened again, as when a writer process died), rebooted, backed
up, restored as a new generation, and opened under a schema marker that it must refuse. Transactions
that come close together share one commit, as the writer's group commit does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from holdfast import codec
from holdfast.clock import MS, SimClock
from holdfast.errors import HoldfastError, StoreFull, StoreReplaced
from holdfast.sim.audit import audit
from holdfast.sim.faults import Plan
from holdfast.sim.history import History
from holdfast.sim.record import Sent
from holdfast.sim.scheduler import Scheduler, Task
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.engine import Answer, Backend, Engine, Request, Snapshot, WriteTxn

URL = "sim:"
# A transaction that waits for others to share its commit waits this long.
LINGER_NS = 20 * MS


class ClosableBackend(Backend, Protocol):
    def close(self) -> None: ...


class CommitEngine(Protocol):
    """What is asked of an engine here: the one of embedded stores, or the one of PostgreSQL."""

    topics: dict[str, int]

    @property
    def generation(self) -> int: ...

    def now_ns(self) -> int: ...
    def commit(self, requests: Sequence[Request]) -> list[Answer]: ...


class SimStore:
    def __init__(
        self,
        make_backend: Callable[[], ClosableBackend],
        scheduler: Scheduler,
        clock: SimClock,
        history: History,
        plan: Plan,
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
        self.opened = 0  # how many stores there have been: a restore makes another one
        self.full = False
        self._make_backend = make_backend
        # Rows, and when the last commit was, if they do not say.
        self._backups: list[tuple[list[Row], int]] = []
        self._waiters: list[tuple[list[str], int, Task]] = []
        self._batch: list[Sent] = []
        self.disk = _Disk(make_backend(), self)
        self.engine = self._open()

    def _open(self, *, bootstrap: bool = True) -> CommitEngine:
        own = getattr(self.disk.inner, "engine", None)
        if own is None:
            return Engine(self.disk, self.clock, bootstrap=bootstrap)
        made: CommitEngine = own(self.clock, self.disk, bootstrap=bootstrap)
        return made

    def engine_now_ns(self) -> int:
        """Store time: right after a commit, the time that the commit was judged by."""
        return self.engine.now_ns()

    def rows(self) -> list[Row]:
        snapshot = self.disk.snapshot()
        try:
            return snapshot.scan(b"\x00", b"\xff\xff", None, False)
        finally:
            snapshot.close()

    def state_hash(self) -> str:
        return _hash(self.rows())

    def content_hash(self) -> str:
        """Of all rows but those that an engine keeps for itself: engines differ in these."""
        own = (schema.META_KEY, schema.OUTCOME)
        return _hash([row for row in self.rows() if not row[0].startswith(own)])

    def audit(self) -> None:
        self.note("audit", {"wall_ns": self.clock.wall_ns()}, value=audit(self.rows()))

    def note(self, op: str, args: dict[str, Any] | None = None, *, value: Any = None) -> None:
        self.history.add(self.engine.now_ns(), op, args, value=value)

    # -- what is done to it ----------------------------------------------------------------------

    def takeover(self) -> None:
        """The writer died, another opened the same rows. Clients notice nothing but conflicts."""
        self.engine = self._open(bootstrap=False)
        self.note("takeover")

    def reboot(self, *, wall_step_ns: int) -> None:
        """The machine starts anew, maybe with a wrong wall clock. Whoever was on it is dead."""
        before = self.clock.boot_ns()
        self.clock.reboot()
        self.clock.step_wall(wall_step_ns)
        self.scheduler.rebase(before - self.clock.boot_ns())
        self._batch.clear()
        self.engine = self._open(bootstrap=False)
        self.note("reboot", {"wall_step_ns": wall_step_ns})

    def backup(self) -> int:
        self._backups.append((self.rows(), getattr(self.disk.inner, "committed_ns", 0)))
        self.note("backup", {"id": len(self._backups)})
        return len(self._backups)

    def restore(self, backup: int) -> None:
        """What `holdfast restore` does: the backup's rows, no outcomes, a generation never seen."""
        self.audit()
        for sent in self._batch:
            sent.error = StoreReplaced(path=URL)
        self._batch.clear()
        generation = self.engine.generation + 1
        kept, committed_ns = self._backups[backup - 1]
        rows = dict(kept)
        meta = codec.unpack_as(schema.Meta, rows[schema.META_KEY])
        outcomes = [key for key in rows if key.startswith(schema.OUTCOME)]
        times = [codec.unpack(rows.pop(key))[2] for key in outcomes]
        floor_ns = max([meta.floor_ns, committed_ns, *times])
        rows[schema.META_KEY] = codec.pack(schema.Meta(meta.store_id, generation, "", 0, floor_ns))
        self.disk.inner.close()
        self.disk.inner = self._make_backend()
        txn = self.disk.inner.begin()
        txn.put_many(sorted(rows.items()))
        txn.commit()
        self.engine = self._open(bootstrap=False)
        self.opened += 1
        self.note("restore", {"id": backup, "generation": generation})

    def try_boot(self, marker: bytes | None, *, bootstrap: bool) -> None:
        """Open the rows under another schema marker, as a wrong version would, and tell."""
        key = schema.MARKER_KEY
        genuine = dict(self.rows())[key]
        _set(self.disk.inner, key, marker)
        before = self.state_hash()
        try:
            self._open(bootstrap=bootstrap)
            outcome = "opened"
        except HoldfastError as error:
            outcome = error.code
        after = self.state_hash()
        _set(self.disk.inner, key, genuine)
        args = {"marker": marker, "bootstrap": bootstrap, "expected": schema.marker()}
        self.note("boot", args, value={"outcome": outcome, "changed": before != after})
        # The ids of the two writes above are not in the engine's ring.
        self.takeover()

    # -- for handles -----------------------------------------------------------------------------

    def commit(self, sent: Sent, *, linger: bool, full: bool = False) -> Answer:
        """Apply a transaction, at times together with those of others that come soon after."""
        self._batch.append(sent)
        if linger:
            self.scheduler.sleep(LINGER_NS)
        if sent.answer is None and sent.error is None:
            self._flush(full)
        if sent.error is not None:
            raise sent.error
        assert sent.answer is not None
        return sent.answer

    def _flush(self, full: bool) -> None:
        """One durable commit for all that were sent; whoever is dead by now gets no answer."""
        batch, self._batch = self._batch, []
        if len(batch) > 1:
            self.note("group", {"size": len(batch)})
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
            sent.answered(answer)
        if self._waiters:
            self._ring()

    def wait(self, topics: list[str], since: int, timeout_ns: int) -> int:
        task = self.scheduler.current
        if self._last(topics) <= since and timeout_ns > 0 and task is not None:
            self._waiters.append((topics, since, task))
            try:
                self.scheduler.sleep(timeout_ns)
            finally:
                self._waiters = [waiter for waiter in self._waiters if waiter[2] is not task]
        return max(self._last(topics), since)

    def _last(self, topics: list[str]) -> int:
        return max((self.engine.topics.get(topic, 0) for topic in topics), default=0)

    def close(self) -> None:
        self.disk.inner.close()

    def _ring(self) -> None:
        for topics, since, task in self._waiters:
            if self._last(topics) > since:
                task.wake_ns = 0


class _Disk:
    """The backend, with a disk that can be full. It is swapped when a backup is restored."""

    def __init__(self, inner: ClosableBackend, shared: SimStore) -> None:
        self.inner = inner
        self._shared = shared

    @property
    def is_full(self) -> bool:
        return self._shared.full

    def begin(self) -> WriteTxn:
        txn = self.inner.begin()
        return _FullTxn(txn) if self.is_full else txn

    def snapshot(self) -> Snapshot:
        return self.inner.snapshot()

    def last_id(self) -> int:
        return self.inner.last_id()

    def typed(self, error: Exception) -> HoldfastError | None:
        return self.inner.typed(error)


class _FullTxn:
    """Takes every write, and finds at the end that there is no room for it."""

    def __init__(self, inner: WriteTxn) -> None:
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


def _hash(rows: list[Row]) -> str:
    state = hashlib.sha256()
    for key, value in rows:
        state.update(len(key).to_bytes(4, "big") + key + len(value).to_bytes(4, "big") + value)
    return state.hexdigest()


def _set(backend: Backend, key: bytes, value: bytes | None) -> None:
    txn = backend.begin()
    if value is None:
        txn.delete(key)
    else:
        txn.put_many([(key, value)])
    txn.commit()
