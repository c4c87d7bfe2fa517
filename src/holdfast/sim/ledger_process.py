"""The process of a ledger service in the simulator: the shipped decisions and the shipped log, and lines to them.

`RunService` and `GroupLog` are those of `ledger.service`. As in the service on Spark, a request is decided in the
thread of the task that sends it, while the writer may be in the middle of a commit; the reply is sent when the
request's ticket is settled. Nothing yields inside a decision, so no lock is needed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from holdfast.ledger import runs
from holdfast.ledger.board import Board
from holdfast.ledger.log import RunLog
from holdfast.ledger.runs import RunRecord
from holdfast.ledger.service import group_log
from holdfast.ledger.service.group_log import Commit, GroupLog
from holdfast.ledger.service.handlers import RunService
from holdfast.ledger.service.messages import Step
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.service.waiting_claims import Reply
from holdfast.sim.actor import Life
from holdfast.sim.ledger_shape import LedgerShape, Nature
from holdfast.sim.scheduler import Task
from holdfast.store.api import Txn

# A task that waits for a reply looks this often whether the process that sends it is still there.
PATIENCE_NS = 400_000_000


class LineLost(Exception):
    """The connection broke: the request was taken, or it was not."""


class Ticket(group_log.Ticket):
    """Wakes the task that waits for the commit of its decision."""

    def __init__(self) -> None:
        super().__init__()
        self.waiter: Task | None = None

    def wake(self) -> None:
        if self.waiter is not None:
            self.waiter.wake_ns = 0


class LedgerProcess:
    """One process of the service, from the moment it has the run until it ends."""

    def __init__(
        self, life: Life, shape: LedgerShape, record: RunRecord, log: RunLog, board: Board
    ) -> None:
        self.life = life
        self.record = record
        self.log = log
        self.alive = True
        group = GroupLog(log.append, log.next_height - 1, self._enqueued, shape.checkpoint_entries)
        self.service = RunService(record.run_id, board, group, RunMetrics(life.store.now_ns()))
        self._me = life.scheduler.current
        self._commit: Commit | None = None
        # Tasks that wait for a reply.
        self._tickets: set[Ticket] = set()

    @property
    def board(self) -> Board:
        return self.service.board

    @property
    def pending(self) -> bool:
        return self.service.log.pending > 0

    def close(self) -> None:
        """The process is gone, however it ended: every line to it breaks."""
        self.alive = False
        for ticket in self._tickets:
            ticket.wake()

    # -- for tasks -----------------------------------------------------------------------------

    def step(self, life: Life, owner: str, step: Step, data: bytes) -> Reply:
        """A request and its reply. LineLost: the process ended, or its log failed, before the reply."""
        board = self.board
        if any(board.was_taken(move.epoch, move.n) for move in step.moves):
            life.seen("ledger: report sent again")
        self.service.owners.add(owner)
        ticket = Ticket()
        now_ns = self.life.store.now_ns()
        waiting = len(self.service.waiting)
        decision = self.service.submit(owner, step, memoryview(data), now_ns, ticket)
        if len(self.service.waiting) > waiting:
            life.seen("ledger: claim waits at the service")
        self._wait(life, ticket)
        if decision.failure is not None:
            raise decision.failure
        if any(moved.lost for moved in decision.reply.moved):
            life.seen("ledger: report fenced")
        return decision.reply

    def _wait(self, life: Life, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        try:
            while not ticket.settled:
                if not self.alive:
                    raise LineLost
                ticket.waiter = life.scheduler.current
                life.sleep(PATIENCE_NS)
        finally:
            self._tickets.discard(ticket)
        if ticket.error is not None:
            raise LineLost

    def beat(self, life: Life, epoch: int) -> bool:
        """False when the grant is lost."""
        now_ns = self.life.store.now_ns()
        if self.service.heartbeat([epoch], now_ns):
            return False
        service = f"{self.life.name}/{self.life.incarnation}"
        life.note("ledger.beat", run=self.record.run_id, epoch=epoch,
                  expires_ns=now_ns + self.board.policy.lease_ns, service=service)  # fmt: skip
        return True

    def gone(self, owner: str) -> None:
        """A connection closed."""
        if self.alive:
            self.service.on_disconnect(owner, self.life.store.now_ns())

    # -- for the service itself ----------------------------------------------------------------

    def start(self, *, same_driver: bool) -> None:
        now_ns = self.life.store.now_ns()
        self.service.start(self.record.policy, now_ns, same_driver=same_driver)

    def tick(self) -> None:
        self.service.tick(self.life.store.now_ns())

    def cancel(self) -> None:
        if self.board.halted is None:
            self.service.cancel(self.life.store.now_ns())

    def committed(self, upto: int) -> None:
        """Rows up to here are in the sink."""
        self.service.committed(upto, self.life.store.now_ns())

    def flush(self) -> None:
        """Until all that was decided so far is durable."""
        while self.pending:
            self.write()

    def write(self) -> None:
        """One commit of what has gathered. Raises what makes this process end."""
        group, most = self.service.log, None
        if group.pending > 1 and not self.life.calm and self.life.tape.chance(200):
            most = 1 + self.life.tape.draw(group.pending - 1)
        self._commit = commit = self.service.take(most)
        if commit.entries or commit.puts:
            # Only when nothing else is pending the board is exactly what the log will come to.
            dump = None if group.pending else self.board.dump()
            self._note("ledger.live", self.log.next_height - 1 + len(commit.entries), dump)
        error = group.write(commit)
        self._commit = None
        self.service.settle(commit, error)
        if group.error is not None:
            raise group.error

    def opened(self) -> None:
        """Tell what the log came to."""
        self._note("ledger.opened", self.service.log.height, self.board.dump())

    # -- inside --------------------------------------------------------------------------------

    def _enqueued(self, _: bool) -> None:
        if self._me is not None and self._commit is None:
            self._me.wake_ns = 0

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
        self.processes: dict[str, LedgerProcess] = {}
        self.at: LedgerProcess | None = None
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
