"""The decisions of the ledger service about one run: what children report and claim, what time takes back.

`handle` decides: it changes the board at once and says what is to be logged before the reply may be sent.
`submit` does that and hands the decision to the group log with a ticket. Callers hold whatever guards the service;
nothing here waits, and no method reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import Fenced, HoldfastError, IllegalTransition, Invalid, ValueTooLarge
from holdfast.ledger import runs
from holdfast.ledger.answers import Answer, Grant, Stop, Wait
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.classes import Policy
from holdfast.ledger.records import Halted, LogEntry, Stopped
from holdfast.ledger.service.group_log import Commit, GroupLog, Put, Ticket
from holdfast.ledger.service.messages import Claim, Move, Moved, Step
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.service.outcome_chunks import lost_rows, result_chunk
from holdfast.ledger.service.pace import Limits
from holdfast.ledger.service.succession import Succession, child_of, granted_before
from holdfast.ledger.service.waiting_claims import Reply, Rows, WaitingClaim, WaitingClaims

WAIT_MS_MAX = 5000
GRANT_BYTES_MAX = 64 * 1024 * 1024
# One report: the largest result (`row_reports.RESULT_BYTES_MAX`) and what surrounds it.
REPORT_BYTES_MAX = 96 * 1024 * 1024


class Decision(NamedTuple):
    """A reply, and what is durable before it is sent."""

    reply: Reply
    entries: Entries
    puts: list[Put]
    # Raised to the caller once what was decided before it is durable.
    failure: Exception | None = None
    # The illegal move of this request: the run's record is to say it.
    halted: Halted | None = None

    @property
    def stopped(self) -> bool:
        """A stop rule was reached: the run's record is to say it."""
        return any(isinstance(entry, Stopped) for entry in self.entries)

    @property
    def idle(self) -> bool:
        """Nothing was decided: a claim waits, and that need not be durable."""
        return (
            not (self.entries or self.puts or self.failure or self.reply.moved)
            and isinstance(self.reply.answer, Wait)
        )  # fmt: skip


class RunService:
    """One run at work. `leaving`: its driver is gone; reports are taken, nothing is handed out or begun."""

    def __init__(
        self, run_id: str, board: Board | None, log: GroupLog, metrics: RunMetrics
    ) -> None:
        self.run_id = run_id
        self.log = log
        self.metrics = metrics
        # On calls a second and tokens a minute, over all children.
        self.limits = Limits(0.0, 0.0, 0)
        self.leaving = False
        # The connections that there are, by the names of their owners.
        self.owners: set[str] = set()
        self.succession = Succession(self.owners)
        self.waiting = WaitingClaims()
        # How large a row of the input is, about.
        self.row_bytes: Callable[[int], int] = _unknown
        self._board = board

    @property
    def board(self) -> Board:
        assert self._board is not None, "the input is not sealed yet"
        return self._board

    @property
    def has_board(self) -> bool:
        return self._board is not None

    @property
    def running(self) -> bool:
        """Whether there is a board to decide on: not before the seal, not after a failed commit."""
        return self._board is not None and self.log.error is None

    # --- the log ------------------------------------------------------------------------------

    def begin(self, board: Board, entries: Sequence[LogEntry], ticket: Ticket) -> None:
        """The input is sealed: the board that its log begins with."""
        self._board = board
        self.log.enqueue(entries, (), ticket)

    def take(self, most: int | None = None) -> Commit:
        """The next commit."""
        return self.log.take(None if self._board is None else self._board.dump, most)

    def settle(self, commit: Commit, error: HoldfastError | None) -> None:
        """A commit is durable, or failed: then claims that wait are told so, too."""
        self.log.settle(commit, error)
        if error is not None:
            for waiting in self.waiting.taken(lambda _: True):
                waiting.ticket.settle(error)

    # --- starting -----------------------------------------------------------------------------

    def start(self, policy: Policy, now_ns: int, *, same_driver: bool) -> None:
        """Go on with a run from its log. Grants of another driver, which is gone, are taken back."""
        board = self.board
        if board.halted is not None:
            return
        if not same_driver:
            self._reclaimed(board.drop_all(now_ns)[1], now_ns)
        if policy != board.policy:
            self._log(board.retune(policy, now_ns)[1], now_ns=now_ns)
        if not same_driver:
            self.resume(now_ns)

    def resume(self, now_ns: int, ticket: Ticket | None = None) -> None:
        """A driver runs it again: the stop rules count anew."""
        self._log(self.board.resume(now_ns), (), ticket, now_ns=now_ns)

    # --- reports and claims -------------------------------------------------------------------

    def submit(
        self, owner: str, step: Step, data: memoryview, now_ns: int, ticket: Ticket
    ) -> Decision:
        """Decide, and log it. The reply is complete and may be sent when the ticket is settled."""
        decision = self.handle(owner, step, data, now_ns)
        claim, reply = step.claim, decision.reply
        waits = (
            claim is not None
            and step.wait_ms > 0
            and decision.failure is None
            and isinstance(reply.answer, Wait)
        )
        if not decision.idle:
            self.log.enqueue(decision.entries, decision.puts, None if waits else ticket)
        elif not waits:
            ticket.settle(None)
        if waits:
            assert claim is not None
            until_ns = now_ns + min(step.wait_ms, WAIT_MS_MAX) * 1_000_000
            self.waiting.add(WaitingClaim(owner, claim, until_ns, reply, ticket))
        if decision.entries:
            self._serve_waiting(now_ns)
        return decision

    def handle(self, owner: str, step: Step, data: memoryview, now_ns: int) -> Decision:
        """Take reports, then answer the claim. What was decided before a refusal is logged all the same."""
        board, was = self.board, self.board.halted
        reply = Reply([], None)
        entries: Entries = []
        puts: list[Put] = []
        failure: Exception | None = None
        # A step that is only answered again tells of no new calls.
        fresh = not step.moves or not all(
            board.was_taken(move.epoch, move.n) for move in step.moves
        )
        try:
            if fresh:
                entries += board.spend(step.cost, now_ns)
            self._take_reports(step.moves, data, now_ns, reply.moved, entries, puts)
            if step.claim is not None:
                reply.answer = granted_before(board, owner, step.held, now_ns)
                if reply.answer is None:
                    reply.answer, more = self._claim(owner, step.claim, now_ns)
                    entries += more
        except Exception as error:
            failure = error
        halted = board.halted if was is None else None
        if halted is not None:
            entries.append(halted)
        if fresh:
            self.metrics.took(step.calls, step.cost, step.latency, step.tokens)
            self.limits.settle(step.priced, step.tokens)
        self._count(entries, now_ns)
        return Decision(reply, entries, puts, failure, halted)

    def _take_reports(
        self,
        moves: Sequence[Move],
        data: memoryview,
        now_ns: int,
        moved: list[Moved],
        entries: Entries,
        puts: list[Put],
    ) -> None:
        """Take each report; what came of it is added to the three lists."""
        board, at = self.board, 0
        for move in moves:
            batch = data[at : at + move.size]
            at += move.size
            height = self.log.height + len(entries) + 1
            told = move.size + sum(4 * len(one.error) + len(one.raw) for one in move.others)
            if told > REPORT_BYTES_MAX:
                raise ValueTooLarge(what="report", bytes=told, max=REPORT_BYTES_MAX)
            errors = None
            if board.policy.stop.same_error:
                errors = {other.seq: other.error for other in move.others}
            try:
                taken, more = board.advance(
                    move.epoch,
                    move.n,
                    move.digest,
                    done=move.done,
                    begin=() if self.leaving else move.begin,
                    now_ns=now_ns,
                    errors=errors,
                )
            except Fenced:
                moved.append(Moved(True, 0, ""))
                continue
            stop = taken.stop or ("leaving" if self.leaving else "")
            moved.append(Moved(False, taken.held, stop))
            if not more:
                continue
            entries += more
            chunk = result_chunk(board, move, taken, batch, self.metrics.errors)
            if chunk is not None:
                page = min(done.lo for done in move.done) // board.policy.page_rows
                puts += runs.chunk_rows(self.run_id, page, height, chunk)

    def _claim(self, owner: str, claim: Claim, now_ns: int) -> tuple[Answer, Entries]:
        if self.leaving:
            return Stop("leaving"), []
        board = self.board
        hi = board.size if claim.hi < 0 else min(claim.hi, board.size)
        rows = claim.rows
        if not board.policy.batch_rows:
            # Towards the end the rest is shared out, so that no child is left with all of it.
            left = board.size - sum(board.ended)
            fair = left // (2 * max(len(self.owners), 1))
            # Rows may be whole documents: what is handed out must fit into a frame.
            next_up = board.unseen.first(claim.lo, hi) or (claim.lo, hi)
            fair = min(fair, GRANT_BYTES_MAX // self.row_bytes(next_up[0]))
            rows = max(min(rows, fair), 1)
        return board.claim(owner, rows, now_ns=now_ns, lo=claim.lo, hi=hi, begin=claim.begin)

    # --- claims that wait ---------------------------------------------------------------------

    def _serve_waiting(self, now_ns: int) -> None:
        """Answer claims that wait, the first first, as long as there are rows, or an end, for them."""
        for first in self.waiting.first():
            waiting: WaitingClaim | None = first
            while waiting is not None and self._claimable(waiting.rows, now_ns):
                if not self._answered(waiting, now_ns):
                    break
                waiting = self.waiting.next(first.rows)

    def _answered(self, waiting: WaitingClaim, now_ns: int, *, last: bool = False) -> bool:
        """Grant rows to a waiting claim and log the grant. `last`: the claim has timed out and is answered with `Wait`."""
        answer, entries = self._claim(waiting.owner, waiting.claim, now_ns)
        self._count(entries, now_ns)
        if isinstance(answer, Wait) and not last:
            if entries:
                self.log.enqueue(entries)
            return False
        waiting.reply.answer = answer
        self.waiting.remove(waiting)
        # Behind its own reports, which are in the queue or durable.
        self.log.enqueue(entries, (), waiting.ticket)
        return True

    def _claimable(self, rows: Rows, now_ns: int) -> bool:
        """Whether a child that asks for these rows would be told anything but to wait."""
        lo, hi = rows
        hi = self.board.size if hi < 0 else min(hi, self.board.size)
        return self.leaving or self.board.would_answer(lo, hi, now_ns)

    def next_due_ns(self) -> int | None:
        """When a row that claims wait for is due for its next try. None: no such row."""
        if not self.waiting or not self.board.resting:
            return None
        return self.board.resting[0][0]

    def leave(self, now_ns: int) -> None:
        """Hand out nothing more. Claims that wait are told so."""
        self.leaving = True
        if self.running:
            self._serve_waiting(now_ns)

    # --- children -----------------------------------------------------------------------------

    def heartbeat(self, epochs: Sequence[int], now_ns: int) -> list[int]:
        """Renew these grants; returns the epochs that are fenced."""
        lost = []
        for epoch in epochs:
            try:
                self.board.heartbeat(epoch, now_ns)
            except Fenced:
                lost.append(epoch)
        return lost

    def keep(self, child: str, now_ns: int) -> None:
        """The process of a child lives: renew what it holds."""
        if self.has_board:
            self.succession.keep(self.board, child, now_ns)

    def hand_over(self, child: str, now_ns: int) -> None:
        """A child is about to end; its successor takes what it holds."""
        self.keep(child, now_ns)
        self.succession.hand_over(child)

    def inherit(self, owner: str, held: list[int], now_ns: int) -> tuple[Grant, int] | None:
        """A grant of the predecessor of this child, if there is one more."""
        if self.leaving:
            return None
        if self.succession.has_predecessor(owner):
            child = child_of(owner)
            raise Invalid(what="successor", why="its predecessor is connected", owner=child)
        return self.succession.next_grant(self.board, owner, held, now_ns)

    def on_disconnect(self, owner: str, now_ns: int) -> None:
        """A connection closed: what it held is free again, before any lease runs out."""
        self.owners.discard(owner)
        for waiting in self.waiting.taken(lambda one: one.owner == owner):
            waiting.ticket.settle(None)
        if not self.running:
            return
        # Grants that outlived a service are under the name that its line had there.
        child = child_of(owner)
        if self.succession.is_handed_over(child):
            # Until a lease runs out, no other child is given its rows.
            return
        for name in self.board.owners():
            if child_of(name) == child and name not in self.owners:
                self._reclaimed(self.board.drop(name, now_ns)[1], now_ns)

    # --- time, the end ------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """What time alone brings: leases that run out, the end of a grace, claims whose time is up."""
        if not self.running:
            return
        board = self.board
        if board.halted is None:
            entries = board.expire(now_ns)[1] + board.end_grace(now_ns)[1]
            self._reclaimed(entries, now_ns)
        if board.resting and board.resting[0][0] <= now_ns:
            self._serve_waiting(now_ns)
        for waiting in self.waiting.late(now_ns):
            self._answered(waiting, now_ns, last=True)

    def cancel(self, now_ns: int, ticket: Ticket | None = None) -> bool:
        """No more rows are handed out or begun; what is begun has the grace to end. False: all has ended."""
        self._log(self.board.cancel(now_ns)[1], (), ticket, now_ns=now_ns)
        return self.board.cancelling

    def committed(self, upto: int, now_ns: int, ticket: Ticket | None = None) -> None:
        """Rows up to here are in the sink. An illegal commit halts the run: that is logged, and raised."""
        was = self.board.halted
        try:
            _, entries = self.board.commit(upto, upto - 1, now_ns)
        except IllegalTransition:
            if was is None and self.board.halted is not None:
                self._log([self.board.halted], now_ns=now_ns)
            raise
        self._log(entries, (), ticket, now_ns=now_ns)

    def _reclaimed(self, entries: Entries, now_ns: int) -> None:
        """Log what was taken back, and the rows that failed by it."""
        if entries:
            self._count(entries, now_ns)
            first, errors = self.log.height + 1, self.metrics.errors
            puts = lost_rows(self.board, self.run_id, entries, first, errors)
            self._log(entries, puts, now_ns=now_ns)

    def _log(
        self,
        entries: Sequence[LogEntry],
        puts: Sequence[Put] = (),
        ticket: Ticket | None = None,
        *,
        now_ns: int,
    ) -> None:
        self.log.enqueue(entries, puts, ticket)
        if entries:
            self._serve_waiting(now_ns)

    # --- figures ------------------------------------------------------------------------------

    def progress(self, now_ns: int, reused: int) -> runs.Progress:
        if not self.has_board:
            return runs.Progress(now_ns, self.metrics.started_ns, [0] * 8)
        board = self.board
        return self.metrics.progress(
            now_ns,
            counts=board.ledger.counts(),
            ended=board.ended,
            reused=reused,
            retries=board.retries,
            reclaims=board.reclaims,
            fenced=board.fenced,
            tasks=len(self.owners),
            height=self.log.height,
            tokens_left=self.limits.left(now_ns),
        )

    def _count(self, entries: Entries, now_ns: int) -> None:
        """What decisions mean for the figures."""
        ledger = self.board.ledger
        self.metrics.moved(entries)
        self.metrics.stand(now_ns, sum(ledger.ended), ledger.in_flight_count)


def _unknown(_: int) -> int:
    return 1
