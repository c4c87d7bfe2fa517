"""The group-commit log of a run: decisions queue in order, and one commit carries all that are
queued.

Each decision may have a ticket, which is settled after its commit. The log therefore has the order
of the decisions, no reply is sent before its decision is durable, and many children share one
fsync. After a failed commit the scheduler is ahead of the log. Every ticket gets the error, the log
accepts no further decision, and the process exits. Its successor starts from the log.

This module neither waits nor locks. The lock of the scheduler guards `enqueue`, `take_commit` and
`settle_commit`. A single writer calls `write_commit` without the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import HoldfastError, StoreError
from holdfast.ledger.events import LogEntry

# Approximate maximum size of one commit.
COMMIT_BYTES_MAX = 32 * 1024 * 1024
# The number of entries between two checkpoints of the scheduler.
CHECKPOINT_ENTRIES = 2000

RowPut = tuple[bytes, bytes]
Append = Callable[[Sequence[LogEntry], Sequence[RowPut], bytes | None], object]
# Called for each queued decision. The flag is true if it has entries, which may unblock other
# requests.
OnEnqueue = Callable[[bool], None]


class DecisionTicket:
    """A completion handle of one decision. It is settled when the decision is durable or has
    failed.
    """

    def __init__(self) -> None:
        self.settled = False
        self.error: HoldfastError | None = None

    def settle(self, error: HoldfastError | None) -> None:
        """Settle the ticket. Only the first call has an effect."""
        if not self.settled:
            self.error = error
            self.settled = True
            self.wake()

    def wake(self) -> None:
        """Wake the waiting side. Subclasses implement it."""


class QueuedDecision(NamedTuple):
    """One queued decision."""

    entries: Sequence[LogEntry]
    puts: Sequence[RowPut]
    ticket: DecisionTicket | None


class LogCommit(NamedTuple):
    """The content of one append."""

    entries: list[LogEntry]
    puts: list[RowPut]
    checkpoint: bytes | None
    tickets: list[DecisionTicket]


class GroupLog:
    """`height` is the height of the last decision, durable or not. `error` is set after a failed
    commit.
    """

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
        self._queue: list[QueuedDecision] = []
        self._since_checkpoint = 0

    @property
    def pending(self) -> int:
        """Decisions that no commit carries yet."""
        return len(self._queue)

    def enqueue(
        self,
        entries: Sequence[LogEntry],
        puts: Sequence[RowPut] = (),
        ticket: DecisionTicket | None = None,
    ) -> None:
        """Queue a decision. Call it directly after the decision was made."""
        if self.error is not None:
            raise self.error
        self.height += len(entries)
        self._queue.append(QueuedDecision(entries, puts, ticket))
        self._on_enqueue(bool(entries))

    def take_commit(self, dump: Callable[[], bytes] | None, limit: int | None = None) -> LogCommit:
        """Take decisions from the front of the queue for the next commit. `dump` encodes the
        scheduler's state.
        """
        size = count = 0
        for decided in self._queue[:limit]:
            count += 1
            size += sum(len(value) for _, value in decided.puts)
            if size > COMMIT_BYTES_MAX:
                break
        carried, self._queue = self._queue[:count], self._queue[count:]
        entries = [entry for decided in carried for entry in decided.entries]
        puts = [put for decided in carried for put in decided.puts]
        self._since_checkpoint += len(entries)
        tickets = [decided.ticket for decided in carried if decided.ticket is not None]
        return LogCommit(entries, puts, self._checkpoint_if_due(dump), tickets)

    def write_commit(self, commit: LogCommit) -> HoldfastError | None:
        """Append a commit durably; return the error if it failed."""
        if not commit.entries and not commit.puts:
            return None
        try:
            self._append(commit.entries, commit.puts, commit.checkpoint)
        except HoldfastError as error:
            return error
        except Exception as error:
            return StoreError(what="log", why=f"{type(error).__name__}: {error}")
        return None

    def settle_commit(self, commit: LogCommit, error: HoldfastError | None) -> None:
        """Settle the tickets of a commit. A failed commit also fails the queue and closes the log."""
        tickets = commit.tickets
        if error is not None:
            self.error = error
            tickets = tickets + [one.ticket for one in self._queue if one.ticket is not None]
            self._queue = []
        for ticket in tickets:
            ticket.settle(error)

    def _checkpoint_if_due(self, dump: Callable[[], bytes] | None) -> bytes | None:
        """Dump the state if a checkpoint is due and no decision is queued, so that it matches the
        commit.
        """
        if self._since_checkpoint < self._checkpoint_entries or self._queue or dump is None:
            return None
        self._since_checkpoint = 0
        return dump()
