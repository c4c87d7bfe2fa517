"""The group-commit log of a run: decisions join a queue in their order, and one commit takes what has gathered.

A ticket goes with each decision and is settled after the commit that carries it. So the log has the order of the
decisions, no reply is sent for a decision that is not durable, and a hundred children share an fsync. After a
commit that failed the board is ahead of the log: every ticket gets the error, nothing more is taken, and the
process ends. The next one starts from the log.

Nothing here waits or locks. `enqueue`, `take` and `settle` with an error are called under the guard of the board;
`write` is called outside of it, by one writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import HoldfastError, StoreError
from holdfast.ledger.records import LogEntry

# One commit carries about this much.
COMMIT_BYTES_MAX = 32 * 1024 * 1024
# The number of entries between two checkpoints of the board.
CHECKPOINT_ENTRIES = 2000

Put = tuple[bytes, bytes]
Append = Callable[[Sequence[LogEntry], Sequence[Put], bytes | None], object]
# Called for each decision that joins the queue; whether it has entries, which change what others may do.
OnEnqueue = Callable[[bool], None]


class Ticket:
    """Settled when the decision that it goes with is durable, or with the error that prevents it."""

    def __init__(self) -> None:
        self.settled = False
        self.error: HoldfastError | None = None

    def settle(self, error: HoldfastError | None) -> None:
        """The first word counts."""
        if not self.settled:
            self.error = error
            self.settled = True
            self.wake()

    def wake(self) -> None:
        """Tell the waiting side to look. The callers of the service say how."""


class Decided(NamedTuple):
    """One decision in the queue."""

    entries: Sequence[LogEntry]
    puts: Sequence[Put]
    ticket: Ticket | None


class Commit(NamedTuple):
    """What one append carries."""

    entries: list[LogEntry]
    puts: list[Put]
    checkpoint: bytes | None
    tickets: list[Ticket]


class GroupLog:
    """`height` is that of the last decision, durable or not. `error`: a commit failed, for good."""

    def __init__(
        self,
        append: Append,
        height: int,
        on_enqueue: OnEnqueue,
        checkpoint_entries: int = CHECKPOINT_ENTRIES,
    ) -> None:
        self.height = height
        self.error: HoldfastError | None = None
        self._append = append
        self._on_enqueue = on_enqueue
        self._checkpoint_entries = checkpoint_entries
        self._queue: list[Decided] = []
        self._since_checkpoint = 0

    @property
    def pending(self) -> int:
        """Decisions that no commit has taken yet."""
        return len(self._queue)

    def enqueue(
        self, entries: Sequence[LogEntry], puts: Sequence[Put] = (), ticket: Ticket | None = None
    ) -> None:
        """Log a decision, right after it was made."""
        if self.error is not None:
            raise self.error
        self.height += len(entries)
        self._queue.append(Decided(entries, puts, ticket))
        self._on_enqueue(bool(entries))

    def take(self, dump: Callable[[], bytes] | None, most: int | None = None) -> Commit:
        """The next commit: decisions from the front of the queue. `dump` gives the board as it is now."""
        size = count = 0
        for decided in self._queue[:most]:
            count += 1
            size += sum(len(value) for _, value in decided.puts)
            if size > COMMIT_BYTES_MAX:
                break
        taken, self._queue = self._queue[:count], self._queue[count:]
        entries = [entry for decided in taken for entry in decided.entries]
        puts = [put for decided in taken for put in decided.puts]
        self._since_checkpoint += len(entries)
        tickets = [decided.ticket for decided in taken if decided.ticket is not None]
        return Commit(entries, puts, self._checkpoint(dump), tickets)

    def write(self, commit: Commit) -> HoldfastError | None:
        """Append a commit durably; the error when that failed."""
        if not commit.entries and not commit.puts:
            return None
        try:
            self._append(commit.entries, commit.puts, commit.checkpoint)
        except HoldfastError as error:
            return error
        except Exception as error:
            return StoreError(what="log", why=f"{type(error).__name__}: {error}")
        return None

    def settle(self, commit: Commit, error: HoldfastError | None) -> None:
        """Tell the tickets of a commit how it went; a failed one is the last."""
        tickets = commit.tickets
        if error is not None:
            self.error = error
            tickets = tickets + [one.ticket for one in self._queue if one.ticket is not None]
            self._queue = []
        for ticket in tickets:
            ticket.settle(error)

    def _checkpoint(self, dump: Callable[[], bytes] | None) -> bytes | None:
        """The board as it is after exactly what was taken: only when nothing else is pending."""
        if self._since_checkpoint < self._checkpoint_entries or self._queue or dump is None:
            return None
        self._since_checkpoint = 0
        return dump()
