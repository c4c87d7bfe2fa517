"""A ledger service's inside, as the tasks see it: the real board and log, and a desk between them.

The rule is the one that the service on Spark follows: a decision changes the board at once and its
entries join a queue; one writer commits what has gathered, in order; whoever asked is answered when
that is durable; after a failed commit the board is ahead of the log and of no more use.

As there, decisions are made in the thread of whoever asks, while the writer may be in the middle of
a commit. Nothing yields inside a decision, so no lock is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from holdfast import codec
from holdfast.errors import (
    Conflict,
    Fenced,
    HoldfastError,
    IllegalTransition,
    Invalid,
    StoreFull,
)
from holdfast.ledger import runs
from holdfast.ledger.answers import Answer, Taken
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.log import RunLog
from holdfast.ledger.records import Advanced, Done, LogEntry, Range, Reclaimed
from holdfast.ledger.runs import RunRecord
from holdfast.ledger.states import State
from holdfast.sim.actor import Life
from holdfast.sim.ledger_shape import LedgerShape, Nature
from holdfast.sim.scheduler import Task
from holdfast.store.api import Txn

Put = tuple[bytes, bytes]

# Whoever waits for a commit looks this often whether the process that makes it is still there.
PATIENCE_NS = 400_000_000
TRIES_MAX = 3
EXPIRED_CLASS = 3


class LineLost(Exception):
    """The connection broke: whether the request was taken, nobody here knows."""


class Move(NamedTuple):
    """A report of one grant: rows that ended, with the results of those that have one."""

    epoch: int
    n: int
    done: list[Done]
    begin: list[Range]
    results: list[tuple[int, str]]

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(repr(self).encode()).digest()[:8]


class Claim(NamedTuple):
    rows: int
    begin: int
    lo: int
    hi: int | None


class Stepped(NamedTuple):
    """`moved` has None for a report that was fenced."""

    moved: list[Taken | None]
    answer: Answer | None


class Ticket:
    """Waits for the commit that carries something."""

    def __init__(self) -> None:
        self.done = False
        self.error: HoldfastError | None = None
        self.waiter: Task | None = None

    def settle(self, error: HoldfastError | None) -> None:
        self.done, self.error = True, error
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None:
            self.waiter.wake_ns = 0


class Office:
    """One process of the service, from the moment it has the run until it ends."""

    def __init__(
        self, life: Life, shape: LedgerShape, record: RunRecord, log: RunLog, board: Board
    ) -> None:
        self.life = life
        self.shape = shape
        self.record = record
        self.log = log
        self.board = board
        self.alive = True
        # Whether an illegal move is in the log, or on its way there.
        self.halting = board.halted is not None
        self._me = life.scheduler.current
        self._queue: list[tuple[list[LogEntry], list[Put], Ticket]] = []
        self._writing: list[Ticket] = []
        self._height = log.next_height - 1
        self._since_checkpoint = 0

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def close(self) -> None:
        """The process is gone, however it ended: every line to it breaks."""
        self.alive = False
        for ticket in (*self._writing, *(ticket for _, _, ticket in self._queue)):
            ticket.wake()

    # -- for tasks -----------------------------------------------------------------------------

    def step(self, life: Life, owner: str, moves: Sequence[Move], claim: Claim | None) -> Stepped:
        """Decide at once; answer when it is durable. What is refused is told no sooner."""
        moved: list[Taken | None] = []
        entries: Entries = []
        puts: list[Put] = []
        answer: Answer | None = None
        failure: HoldfastError | None = None
        try:
            for move in moves:
                self._move(life, move, moved, entries, puts)
            if claim is not None:
                now_ns = self.life.store.now_ns()
                answer, more = self.board.claim(
                    owner, claim.rows, now_ns=now_ns, lo=claim.lo, hi=claim.hi, begin=claim.begin
                )
                entries += more
        except (IllegalTransition, Invalid) as refused:
            # What was decided before is on the board, so it is logged all the same.
            failure = refused
        ticket = self._enqueue([*entries, *self._halted()], puts)
        self._wait(life, ticket)
        if failure is not None:
            raise failure
        return Stepped(moved, answer)

    def _move(
        self,
        life: Life,
        move: Move,
        moved: list[Taken | None],
        entries: Entries,
        puts: list[Put],
    ) -> None:
        height = self._height + len(entries) + 1
        try:
            taken, more = self.board.advance(
                move.epoch,
                move.n,
                move.digest,
                done=move.done,
                begin=move.begin,
                now_ns=self.life.store.now_ns(),
            )
        except Fenced:
            life.seen("ledger: report fenced")
            moved.append(None)
            return
        if not more:
            life.seen("ledger: report sent again")
        moved.append(taken)
        entries += more
        puts += self._chunks(move, more, height)

    def _wait(self, life: Life, ticket: Ticket) -> None:
        while not ticket.done:
            if not self.alive:
                raise LineLost
            ticket.waiter = life.scheduler.current
            life.sleep(PATIENCE_NS)
        if ticket.error is not None:
            raise LineLost

    def beat(self, life: Life, epoch: int) -> bool:
        """False when the grant is lost."""
        try:
            expires_ns = self.board.heartbeat(epoch, self.life.store.now_ns())
        except Fenced:
            return False
        service = f"{self.life.name}/{self.life.incarnation}"
        life.note("ledger.beat", run=self.record.run_id, epoch=epoch, expires_ns=expires_ns,
                  service=service)  # fmt: skip
        return True

    def gone(self, owner: str) -> None:
        """A connection closed: what it held is free again, before any lease runs out."""
        if self.alive:
            _, entries = self.board.drop(owner, self.life.store.now_ns())
            self._reclaimed(entries)

    def give_back(self, epoch: int) -> None:
        _, entries = self.board.drop_epoch(epoch, self.life.store.now_ns())
        self._reclaimed(entries)

    # -- for the service itself ----------------------------------------------------------------

    def tick(self) -> None:
        """What time alone brings: leases that run out, the end of a grace."""
        if self.board.halted is not None:
            return
        now_ns = self.life.store.now_ns()
        _, entries = self.board.expire(now_ns)
        _, more = self.board.end_grace(now_ns)
        self._reclaimed([*entries, *more])

    def drop_all(self) -> None:
        if self.board.halted is None:
            _, entries = self.board.drop_all(self.life.store.now_ns())
            self._reclaimed(entries)

    def halt(self) -> None:
        """Log the illegal move that the board has refused."""
        self._enqueue(self._halted())

    def _halted(self) -> list[LogEntry]:
        """The entry of an illegal move, once."""
        if self.board.halted is None or self.halting:
            return []
        self.halting = True
        return [self.board.halted]

    def cancel(self) -> None:
        if self.board.halted is None:
            _, entries = self.board.cancel(self.life.store.now_ns())
            self._enqueue(entries)

    def committed(self, upto: int) -> None:
        """Rows up to here are in the sink."""
        _, entries = self.board.commit(upto, upto - 1, self.life.store.now_ns())
        self._enqueue(entries)

    def flush(self) -> None:
        """Until all that was decided so far is durable."""
        while self._queue:
            self.write()

    def write(self) -> None:
        """One commit of what has gathered. Raises what makes this process end."""
        count = len(self._queue)
        if count > 1 and not self.life.calm and self.life.tape.chance(200):
            count = 1 + self.life.tape.draw(count - 1)
        taken, self._queue = self._queue[:count], self._queue[count:]
        entries = [entry for batch, _, _ in taken for entry in batch]
        puts = [put for _, batch, _ in taken for put in batch]
        self._writing = [ticket for _, _, ticket in taken]
        self._since_checkpoint += len(entries)
        # Only when nothing else is pending the board is exactly what the log will come to.
        dump = None if self._queue else self.board.dump()
        checkpoint = None
        if self._since_checkpoint >= self.shape.checkpoint_entries and dump is not None:
            self._since_checkpoint, checkpoint = 0, dump
        error: HoldfastError | None = None
        if entries or puts:
            self._note("ledger.live", self.log.next_height - 1 + len(entries), dump)
            error = self._append(entries, puts, checkpoint)
        for ticket in self._writing:
            ticket.settle(error)
        self._writing = []
        if error is not None:
            raise error

    def opened(self) -> None:
        """Tell what the log came to."""
        self._note("ledger.opened", self._height, self.board.dump())

    # -- inside --------------------------------------------------------------------------------

    def _append(
        self, entries: list[LogEntry], puts: list[Put], checkpoint: bytes | None
    ) -> HoldfastError | None:
        for _ in range(TRIES_MAX):
            try:
                self.log.append(entries, puts, checkpoint)
                return None
            except (StoreFull, Conflict) as refused:
                # Nothing was written: the same may be sent again.
                error: HoldfastError = refused
                self.life.seen("ledger: log refused, sent again")
            except HoldfastError as lost:
                return lost
        return error

    def _enqueue(self, entries: Sequence[LogEntry], puts: Sequence[Put] = ()) -> Ticket:
        ticket = Ticket()
        if not self.alive:
            return ticket
        self._height += len(entries)
        self._queue.append((list(entries), list(puts), ticket))
        if self._me is not None and not self._writing:
            self._me.wake_ns = 0
        return ticket

    def _reclaimed(self, entries: Entries) -> None:
        if entries:
            self._enqueue(entries, self._lost(entries))

    def _chunks(self, move: Move, entries: Entries, height: int) -> list[Put]:
        """What is kept of a report: results, and how the rows without one ended, if for good."""
        if not entries or not move.done:
            return []
        [entry] = entries
        assert isinstance(entry, Advanced)
        others = [
            runs.Other(seq, done.code, 0, done.error_class, "")
            for done in entry.done
            if done.code != State.TERMINAL_SUCCESS
            for seq in range(done.lo, done.hi)
        ]
        if not others and not move.results:
            return []
        page = min(done.lo for done in move.done) // self.shape.page_rows
        batch = msgspec.msgpack.encode(move.results)
        return [self._chunk(page, height, batch, others)]

    def _lost(self, entries: Entries) -> list[Put]:
        """Rows that a reclaim failed for good have nobody to report them: it is done here."""
        puts: list[Put] = []
        for height, entry in enumerate(entries, self._height + 1):
            if isinstance(entry, Reclaimed) and entry.failed:
                rows = [seq for lo, hi in entry.failed for seq in range(lo, hi)]
                others = [runs.Other(seq, 5, 0, EXPIRED_CLASS, "") for seq in rows]
                puts.append(self._chunk(rows[0] // self.shape.page_rows, height, b"", others))
        return puts

    def _chunk(self, page: int, height: int, batch: bytes, others: list[runs.Other]) -> Put:
        chunk = runs.Chunk(0, b"", batch, others, [], 0.0, 0, [])
        return runs.chunk_key(self.record.run_id, page, height), codec.pack(chunk)

    def _note(self, op: str, height: int, dump: bytes | None) -> None:
        if dump is None:
            self.life.note(op, run=self.record.run_id, height=height)
            return
        ledger = self.board.ledger
        self.life.note(
            op,
            run=self.record.run_id,
            height=height,
            digest=hashlib.sha256(dump).hexdigest(),
            state=ledger.state.tobytes(),
            attempts=ledger.attempts.tobytes(),
            counts=ledger.counts(),
            counters=ledger.counters(),
            ended=list(ledger.ended),
            prefix=self.board.terminal_prefix(),
        )


class Outside:
    """What is not on the store, and outlives every process: the address, the sink, the rows."""

    def __init__(self, shape: LedgerShape) -> None:
        self.shape = shape
        self.offices: dict[str, Office] = {}
        self.at: Office | None = None
        self.natures: dict[str, list[Nature]] = {}
        self.versions: dict[str, int] = {}
        self.calls = 0
        self.runs = 0
        self.resting = False

    def version(self, run_id: str) -> int:
        """The last version that the sink holds; -1 is none."""
        return self.versions.get(run_id, -1)

    def nature(self, run_id: str, seq: int) -> Nature:
        natures = self.natures.get(run_id)
        return natures[seq] if natures else Nature.FINE


def successes(txn: Txn, run_id: str, lo: int, hi: int, page_rows: int) -> list[tuple[int, str]]:
    """For the commit: results of a final interval, in order."""
    found: list[Any] = []
    for page in range(lo // page_rows, (hi - 1) // page_rows + 1):
        for _, chunk in runs.chunks(txn, run_id, page):
            found += msgspec.msgpack.decode(chunk.batch) if chunk.batch else []
    return sorted((seq, value) for seq, value in found if lo <= seq < hi)
