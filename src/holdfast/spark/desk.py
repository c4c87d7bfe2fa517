"""The run's ledger, at work: decisions under one lock, the log behind them, answers after it.

A decision changes the board at once and its entries join a queue; one thread writes what has
gathered as one commit, and whoever waits for it is answered then. So the log has the order of the
decisions, an answer is never given for what is not durable, and a hundred tasks share an fsync. If
a commit fails the board is ahead of the log and the desk is of no more use: it is closed with that
error, and the process ends. The next one starts from the log.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from holdfast.errors import HoldfastError, StoreError
from holdfast.ledger.board import Board
from holdfast.ledger.log import RunLog
from holdfast.ledger.records import LogEntry

# One commit carries about this much.
COMMIT_BYTES_MAX = 32 * 1024 * 1024
# The board is checkpointed after so many entries.
CHECKPOINT_ENTRIES = 2000

Put = tuple[bytes, bytes]


class Ticket:
    """Waits for the commit that carries something."""

    __slots__ = ("_done", "error")

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: HoldfastError | None = None

    def settle(self, error: HoldfastError | None) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error


class Desk:
    """`lock` guards the board; `changed` tells the commit, and `on_change` the children that wait, that it moved."""

    def __init__(self, board: Board | None, log: RunLog) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.on_change: Callable[[], None] = lambda: None
        self.log = log
        self.error: HoldfastError | None = None
        self.height = log.next_height - 1
        self._board = board
        self._queue: list[tuple[list[LogEntry], list[Put], Ticket]] = []
        self._work = threading.Condition(self.lock)
        self._since_checkpoint = 0
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    @property
    def board(self) -> Board:
        assert self._board is not None, "the input is not sealed yet"
        return self._board

    @property
    def has_board(self) -> bool:
        return self._board is not None

    def begin(self, board: Board, entries: Sequence[LogEntry]) -> Ticket:
        with self.lock:
            self._board = board
            return self.enqueue(entries)

    def enqueue(self, entries: Sequence[LogEntry], puts: Sequence[Put] = ()) -> Ticket:
        """Call with the lock held, right after the decision."""
        self.check()
        ticket = Ticket()
        self.height += len(entries)
        self._queue.append((list(entries), list(puts), ticket))
        self._work.notify()
        if entries:
            self.changed.notify_all()
            self.on_change()
        return ticket

    def check(self) -> None:
        if self.error is not None:
            raise self.error

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

    def _write(self) -> None:
        while True:
            with self.lock:
                while not self._queue and not self._closing:
                    self._work.wait()
                if not self._queue:
                    return
                taken = self._take()
                checkpoint = self._checkpoint()
            entries = [entry for batch, _, _ in taken for entry in batch]
            puts = [put for _, batch, _ in taken for put in batch]
            error: HoldfastError | None = None
            if entries or puts:
                try:
                    self.log.append(entries, puts, checkpoint)
                except HoldfastError as caught:
                    error = caught
                except Exception as caught:
                    error = StoreError(what="log", why=f"{type(caught).__name__}: {caught}")
            if error is not None:
                with self.lock:
                    self.error = error
                    taken += self._queue
                    self._queue = []
                    self.changed.notify_all()
            for _, _, ticket in taken:
                ticket.settle(error)
            if error is not None:
                return

    def _take(self) -> list[tuple[list[LogEntry], list[Put], Ticket]]:
        size = count = 0
        for _, puts, _ in self._queue:
            count += 1
            size += sum(len(value) for _, value in puts)
            if size > COMMIT_BYTES_MAX:
                break
        taken, self._queue = self._queue[:count], self._queue[count:]
        self._since_checkpoint += sum(len(entries) for entries, _, _ in taken)
        return taken

    def _checkpoint(self) -> bytes | None:
        """The board as it is after exactly what was taken: only when nothing else is pending."""
        if self._since_checkpoint < CHECKPOINT_ENTRIES or self._queue or self._board is None:
            return None
        self._since_checkpoint = 0
        return self._board.dump()
