"""Task upkeep: removes tasks past their retention, deletes unreferenced blobs and writes log
checkpoints.

The task worker, the HTTP server and the orchestrator all run it. One of them is enough, and
concurrent runs are safe. A commit removes at most `BATCH` tasks, so it delays other commits by a
few milliseconds. A round ends after `ROUND` tasks and checks whether a checkpoint is due, so a long
backlog does not delay checkpoints.

`TaskUpkeep` runs in a separate thread, because the worker must extend leases meanwhile.
`WorkerHeartbeat` keeps a task worker in the worker registry.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from holdfast import __version__
from holdfast.clock import S
from holdfast.config import BLOB_GRACE_NS
from holdfast.errors import HoldfastError
from holdfast.leadership import worker_registry
from holdfast.store import blobs
from holdfast.store.api import Store, Txn
from holdfast.tasks import checkpoint, queries
from holdfast.tasks import operations as tasks

# Tasks removed per commit and per round.
BATCH = 250
ROUND = 50_000
# The check interval while tasks reach the end of their retention, and while none does.
ACTIVE_INTERVAL_NS = 1 * S
IDLE_INTERVAL_NS = 10 * S
HEARTBEAT_NS = 3 * S
# How long `close` waits for a commit in progress.
STOP_S = 2.0


class UpkeepDue(NamedTuple):
    """The due upkeep steps, and the time of the next check."""

    retention: bool
    blobs: bool
    checkpoint: bool
    next_ns: int


def read_due(txn: Txn, universe: str) -> UpkeepDue:
    now_ns = txn.now_ns
    ended_ns, idle_ns = queries.next_retention_ns(txn, universe), blobs.oldest_idle_ns(txn)
    times = [
        now_ns + IDLE_INTERVAL_NS if ended_ns is None else ended_ns,
        now_ns + IDLE_INTERVAL_NS if idle_ns is None else idle_ns + BLOB_GRACE_NS,
    ]
    overdue, unused = (at_ns <= now_ns for at_ns in times)
    next_ns = min(max(min(times), now_ns + ACTIVE_INTERVAL_NS), now_ns + IDLE_INTERVAL_NS)
    return UpkeepDue(overdue, unused, checkpoint.is_due_in(txn, universe), next_ns)


def run_round(
    store: Store, universe: str, should_continue: Callable[[], bool] = lambda: True
) -> bool:
    """Run one round. Returns whether more work may remain. Stops early if `should_continue` returns
    False.
    """
    due_now = store.read(read_due, universe)
    more = due_now.retention and _repeat_step(
        should_continue, lambda: store.transact(tasks.maintain, universe, BATCH)
    )
    if due_now.blobs or due_now.retention:
        more |= _repeat_step(
            should_continue, lambda: store.transact(blobs.collect, BLOB_GRACE_NS, BATCH)
        )
    if due_now.checkpoint and should_continue():
        checkpoint.create(store, universe, should_continue)
    return more


def _repeat_step(should_continue: Callable[[], bool], step: Callable[[], int]) -> bool:
    """Repeat a step until it processes less than a batch. Returns whether more work may remain."""
    remaining = ROUND
    while remaining > 0:
        if not should_continue():
            return True
        done = step()
        if done < BATCH:
            return False
        remaining -= done
    return True


class TaskUpkeep:
    """Runs rounds in a background thread, started by the loop that calls `start_if_due`."""

    def __init__(
        self, store: Store, universe: str, *, with_blobs: bool = True, inline: bool = False
    ) -> None:
        """`with_blobs=False` if the owner deletes unreferenced blobs in its own loop. `inline` runs rounds in the
        thread of the owner."""
        self._store = store
        self._universe = universe
        self._with_blobs = with_blobs
        self._inline = inline
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # The store time of the next check.
        self.next_ns = 0

    def start_if_due(self, now_ns: int) -> None:
        if now_ns < self.next_ns or self._stopping.is_set():
            return
        if self._thread is not None and self._thread.is_alive():
            self.next_ns = now_ns + ACTIVE_INTERVAL_NS
            return
        due_now = self._store.read(read_due, self._universe)
        self.next_ns = due_now.next_ns
        if due_now.retention or due_now.checkpoint or (due_now.blobs and self._with_blobs):
            if self._inline:
                self._run_rounds()
                return
            self._thread = threading.Thread(
                target=self._run_rounds, name="holdfast-task-upkeep", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _should_continue(self) -> bool:
        return not self._stopping.is_set()

    def _run_rounds(self) -> None:
        # After a store error, the next check tries again.
        with contextlib.suppress(HoldfastError):
            while (
                run_round(self._store, self._universe, self._should_continue)
                and self._should_continue()
            ):
                pass


class WorkerHeartbeat:
    """The entry of a task worker in the worker registry. `next_ns` is the time of the next beat, `draining` whether an
    operator drains the worker, as of the last one."""

    def __init__(self, store: Store, universe: str, worker: str, incarnation: str) -> None:
        self.next_ns = 0
        self.draining = False
        self._store = store
        self._universe = universe
        self._worker = worker
        self._incarnation = incarnation

    def send_if_due(self, now_ns: int, leased_count: int) -> None:
        if now_ns < self.next_ns:
            return
        record: worker_registry.WorkerRecord = self._store.transact(
            worker_registry.heartbeat,
            self._universe,
            self._worker,
            self._incarnation,
            roles=("task",),
            leases=leased_count,
            version=__version__,
        )
        self.draining = record.draining
        self.next_ns = now_ns + HEARTBEAT_NS

    def remove(self) -> None:
        """Remove the worker from the registry."""
        self._store.transact(
            worker_registry.remove, self._universe, self._worker, self._incarnation
        )
