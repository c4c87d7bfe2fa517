"""The lock and the writer thread around the decisions of one run (`ledger.service`).

Requests decide under one lock, each in the thread of its connection; one thread writes what has gathered
as one commit, and a request is answered when its ticket is settled.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.errors import HoldfastError
from holdfast.ledger.board import Board
from holdfast.ledger.log import RunLog
from holdfast.ledger.records import LogEntry
from holdfast.ledger.service import group_log
from holdfast.ledger.service.group_log import GroupLog, Put
from holdfast.ledger.service.handlers import RunService
from holdfast.ledger.service.metrics import RunMetrics


class Ticket(group_log.Ticket):
    """Blocks a thread until the commit that carries its decision."""

    def __init__(self) -> None:
        super().__init__()
        self._done = threading.Event()

    def wake(self) -> None:
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error


class Desk:
    """`lock` guards the service; `changed` tells the commit that the ledger moved, `timer` the thread
    that lets time pass that something is due sooner than it knew."""

    def __init__(self, board: Board | None, log: RunLog) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.timer = threading.Condition(self.lock)
        self.log = log
        group = GroupLog(log.append, log.next_height - 1, self._enqueued)
        self.service = RunService(log.run_id, board, group, RunMetrics(0))
        self._work = threading.Condition(self.lock)
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    @property
    def board(self) -> Board:
        return self.service.board

    @property
    def has_board(self) -> bool:
        return self.service.has_board

    @property
    def height(self) -> int:
        return self.service.log.height

    @property
    def error(self) -> HoldfastError | None:
        return self.service.log.error

    def begin(self, board: Board, entries: Sequence[LogEntry]) -> Ticket:
        ticket = Ticket()
        with self.lock:
            self.service.begin(board, entries, ticket)
        return ticket

    def enqueue(self, entries: Sequence[LogEntry], puts: Sequence[Put] = ()) -> Ticket:
        """Call with the lock held, right after the decision."""
        ticket = Ticket()
        self.service.log.enqueue(entries, puts, ticket)
        return ticket

    def flush(self) -> None:
        """Until all that was decided is durable."""
        with self.lock:
            ticket = self.enqueue(())
        ticket.wait()

    def close(self) -> None:
        """Write what is pending, then stop."""
        with self.lock:
            self._closing = True
            self._work.notify()
        self._thread.join()

    def _enqueued(self, moved: bool) -> None:
        self._work.notify()
        if moved:
            self.changed.notify_all()

    def _write(self) -> None:
        group = self.service.log
        while True:
            with self.lock:
                while not group.pending and not self._closing:
                    self._work.wait()
                if not group.pending:
                    return
                commit = self.service.take()
            error = group.write(commit)
            if error is None:
                self.service.settle(commit, None)
                continue
            with self.lock:
                self.service.settle(commit, error)
                self.changed.notify_all()
            return
