"""The log writer of one run: a lock and a writer thread around `RunService`
(`ledger.service.handlers`).

All requests of a run are decided under one lock. One thread writes the collected decisions as one group
commit, and a request is answered when its ticket is settled. Exchanges of children are posted: the
writer decides all posted exchanges and writes them in its next commit. Otherwise hundreds of threads
would contend for the lock and the GIL at every report, for a tenth of a millisecond of work each.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.errors import HoldfastError
from holdfast.ledger.events import LogEntry
from holdfast.ledger.log import RunLog
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.service import group_log
from holdfast.ledger.service.group_log import GroupLog, RowPut
from holdfast.ledger.service.handlers import RunService
from holdfast.ledger.service.metrics import RunMetrics

# Maximum number of posted exchanges that the writer decides before it writes.
POSTED_MAX = 128


class BlockingTicket(group_log.DecisionTicket):
    """A commit ticket on which a thread blocks until the commit with its decision is durable."""

    def __init__(self) -> None:
        super().__init__()
        # Unlocked when the ticket is settled.
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        self._gate.release()

    def wait(self) -> None:
        self.wait_settled()
        if self.error is not None:
            raise self.error

    @property
    def is_woken(self) -> bool:
        """Whether the waiting threads have been woken."""
        return not self._gate.locked()

    def wait_settled(self) -> None:
        with self._gate:
            pass


class ServiceLogWriter:
    """`lock` guards the service. `changed` notifies the committer that the run has changed. `timer`
    notifies the tick thread of an earlier deadline.
    """

    def __init__(self, scheduler: RunScheduler | None, log: RunLog) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.timer = threading.Condition(self.lock)
        self.log = log
        group = GroupLog(log.append, log.next_height - 1, self._on_enqueued)
        self.service = RunService(log.run_id, scheduler, group, RunMetrics(0))
        # The final prefix that the committer waits for. Below it, decisions do not wake the
        # committer.
        self.wanted_prefix = 0
        self._posted: deque[Callable[[], None]] = deque()
        # Locked while the writer is idle. A thread with work for the writer unlocks it.
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._closing = False
        self._thread = threading.Thread(target=self._write_loop, name="service-log", daemon=True)
        self._thread.start()

    @property
    def scheduler(self) -> RunScheduler:
        return self.service.scheduler

    @property
    def has_scheduler(self) -> bool:
        return self.service.has_scheduler

    @property
    def height(self) -> int:
        return self.service.log.height

    @property
    def error(self) -> HoldfastError | None:
        return self.service.log.error

    def start_log(self, scheduler: RunScheduler, entries: Sequence[LogEntry]) -> BlockingTicket:
        ticket = BlockingTicket()
        with self.lock:
            self.service.start_log(scheduler, entries, ticket)
        return ticket

    def enqueue(self, entries: Sequence[LogEntry], puts: Sequence[RowPut] = ()) -> BlockingTicket:
        """Enqueue log entries. Call it with the lock held, right after the decision."""
        ticket = BlockingTicket()
        self.service.log.enqueue(entries, puts, ticket)
        return ticket

    def post(self, decide: Callable[[], None]) -> None:
        """Schedule `decide` to run in the writer thread, with the lock held, before its next
        commit. It must not raise.
        """
        self._posted.append(decide)
        self._wake()

    def flush(self) -> None:
        """Block until all earlier decisions are durable."""
        with self.lock:
            ticket = self.enqueue(())
        ticket.wait()

    def close(self) -> None:
        """Write the pending entries, then stop."""
        self._closing = True
        self._wake()
        self._thread.join()

    def _on_enqueued(self, moved: bool) -> None:
        self._wake()
        if moved and self._may_wake_waiters():
            self.changed.notify_all()

    def _may_wake_waiters(self) -> bool:
        """Whether a thread that waits for `changed` may have work."""
        service = self.service
        if service.draining or not service.has_scheduler or service.scheduler.halted is not None:
            return True
        return service.scheduler.terminal_prefix() >= self.wanted_prefix

    def _wake(self) -> None:
        """Wake the writer. This needs no lock, because the work was queued before."""
        if self._wakeup.locked():
            with contextlib.suppress(RuntimeError):  # another thread woke it
                self._wakeup.release()

    def _write_loop(self) -> None:
        while not self._closing:
            self._wakeup.acquire()
            if not self._write_all():
                return
        self._write_all()

    def _write_all(self) -> bool:
        """Decide and write until the queues are empty. Return False when a commit failed."""
        group = self.service.log
        while self._posted or group.pending:
            with self.lock:
                for _ in range(min(len(self._posted), POSTED_MAX)):
                    self._posted.popleft()()
                commit = self.service.take_commit()
            error = group.write_commit(commit)
            if error is None:
                self.service.settle_commit(commit, None)
                continue
            with self.lock:
                self.service.settle_commit(commit, error)
                self.changed.notify_all()
                # The failed log refuses the remaining exchanges with its error.
                while self._posted:
                    self._posted.popleft()()
            return False
        return True
