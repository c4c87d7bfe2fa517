"""The lock and the writer thread around the decisions of one run (`ledger.service`).

Requests are decided under one lock; one thread writes what has gathered as one commit, and a request is answered
when its ticket is settled. Steps of children are posted: the writer decides all that were posted and writes them in
its next commit. Hundreds of threads that each took the lock for a
tenth of a millisecond would hand it, and the interpreter, from one to the next at every report.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.errors import HoldfastError
from holdfast.ledger.board import Board
from holdfast.ledger.log import RunLog
from holdfast.ledger.records import LogEntry
from holdfast.ledger.service import group_log
from holdfast.ledger.service.group_log import GroupLog, Put
from holdfast.ledger.service.handlers import RunService
from holdfast.ledger.service.metrics import RunMetrics

# Reports that the writer decides before it writes.
POSTED_MAX = 128


class Ticket(group_log.Ticket):
    """Blocks a thread until the commit that carries its decision."""

    def __init__(self) -> None:
        super().__init__()
        # Free once it is settled.
        self._gate = threading.Lock()
        self._gate.acquire()

    def wake(self) -> None:
        self._gate.release()

    def wait(self) -> None:
        self.until_settled()
        if self.error is not None:
            raise self.error

    @property
    def answered(self) -> bool:
        """Whether threads that wait for it have gone on."""
        return not self._gate.locked()

    def until_settled(self) -> None:
        with self._gate:
            pass


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
        # The final prefix that the commit waits for: below it a decision is no news to it.
        self.wanted_prefix = 0
        self._posted: deque[Callable[[], None]] = deque()
        # Locked while the writer has nothing to do: whoever has work for it unlocks it.
        self._bell = threading.Lock()
        self._bell.acquire()
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

    def post(self, decide: Callable[[], None]) -> None:
        """Have the writer call this with the lock held, before its next commit. It must not raise."""
        self._posted.append(decide)
        self._ring()

    def flush(self) -> None:
        """Until all that was decided is durable."""
        with self.lock:
            ticket = self.enqueue(())
        ticket.wait()

    def close(self) -> None:
        """Write what is pending, then stop."""
        self._closing = True
        self._ring()
        self._thread.join()

    def _enqueued(self, moved: bool) -> None:
        self._ring()
        if moved and self._is_news():
            self.changed.notify_all()

    def _is_news(self) -> bool:
        """Whether a thread that waits for `changed` may have something to do."""
        service = self.service
        if service.leaving or not service.has_board or service.board.halted is not None:
            return True
        return service.board.terminal_prefix() >= self.wanted_prefix

    def _ring(self) -> None:
        """Wake the writer. Needs no lock: what it is to do was put in its place before."""
        if self._bell.locked():
            with contextlib.suppress(RuntimeError):  # another thread rang
                self._bell.release()

    def _write(self) -> None:
        while not self._closing:
            self._bell.acquire()
            if not self._write_all():
                return
        self._write_all()

    def _write_all(self) -> bool:
        """Decide and write until nothing is left; False when a commit failed."""
        group = self.service.log
        while self._posted or group.pending:
            with self.lock:
                for _ in range(min(len(self._posted), POSTED_MAX)):
                    self._posted.popleft()()
                commit = self.service.take()
            error = group.write(commit)
            if error is None:
                self.service.settle(commit, None)
                continue
            with self.lock:
                self.service.settle(commit, error)
                self.changed.notify_all()
                # They are refused with the error.
                while self._posted:
                    self._posted.popleft()()
            return False
        return True
