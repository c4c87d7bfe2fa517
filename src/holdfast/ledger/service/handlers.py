"""Request handlers of the ledger service for one run: reports, claims, leases and timeouts.

`decide` changes the scheduler at once and returns the entries that must be durable before the reply
is sent. `submit` also enqueues the decision in the group log with a ticket. The caller holds the
service's lock. No method blocks or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast.errors import Fenced, HoldfastError, IllegalTransition, Invalid, ValueTooLarge
from holdfast.ledger import runs
from holdfast.ledger.events import LedgerHalted, LogEntry, StopRuleReached
from holdfast.ledger.replies import ClaimAnswer, NoMoreRows, NoRowsYet, RowGrant
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import LogEntries, RunScheduler
from holdfast.ledger.service.child_handover import ChildHandover, child_of, unacknowledged_grant
from holdfast.ledger.service.group_log import DecisionTicket, GroupLog, LogCommit, RowPut
from holdfast.ledger.service.messages import ClaimRows, Exchange, GrantReport, GrantReportReply
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.service.outcome_chunks import build_chunk, reclaimed_chunk_rows
from holdfast.ledger.service.rate_limits import RunRateLimits
from holdfast.ledger.service.waiting_claims import (
    PendingReply,
    SeqInterval,
    WaitingClaim,
    WaitingClaims,
)

WAIT_MS_MAX = 5000
GRANT_BYTES_MAX = 64 * 1024 * 1024
# Maximum size of one report: the largest result (`row_reports.RESULT_BYTES_MAX`) and its envelope.
REPORT_BYTES_MAX = 96 * 1024 * 1024


class ServiceDecision(NamedTuple):
    """A reply and the data that must be durable before it is sent."""

    reply: PendingReply
    entries: LogEntries
    puts: list[RowPut]
    # Raised to the caller after the earlier decisions of the request are durable.
    failure: Exception | None = None
    # The illegal transition of this request, to be stored in the run's record.
    halted: LedgerHalted | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop rule was reached, to be stored in the run's record."""
        return any(isinstance(entry, StopRuleReached) for entry in self.entries)

    @property
    def is_waiting_only(self) -> bool:
        """Whether the request only waits for rows, which need not be durable."""
        return (
            not (self.entries or self.puts or self.failure or self.reply.report_replies)
            and isinstance(self.reply.answer, NoRowsYet)
        )  # fmt: skip


class RunService:
    """The service of one active run. `draining`: its driver is gone; reports are accepted, no row
    is granted or begun.
    """

    def __init__(
        self, run_id: str, board: RunScheduler | None, log: GroupLog, metrics: RunMetrics
    ) -> None:
        self.run_id = run_id
        self.log = log
        self.metrics = metrics
        # Limits of calls per second and tokens per minute, over all children.
        self.limits = RunRateLimits(0.0, 0.0, 0)
        self.draining = False
        # Names of the connected owners.
        self.connected_owners: set[str] = set()
        self.handover = ChildHandover(self.connected_owners)
        self.waiting = WaitingClaims()
        # Returns the approximate size of an input row.
        self.row_bytes: Callable[[int], int] = _one_byte
        self._scheduler = board

    @property
    def scheduler(self) -> RunScheduler:
        assert self._scheduler is not None, "the input is not sealed yet"
        return self._scheduler

    @property
    def has_scheduler(self) -> bool:
        return self._scheduler is not None

    @property
    def running(self) -> bool:
        """Whether decisions are possible: after the seal and before a failed commit."""
        return self._scheduler is not None and self.log.error is None

    # --- the log ------------------------------------------------------------------------------

    def start_log(
        self, board: RunScheduler, entries: Sequence[LogEntry], ticket: DecisionTicket
    ) -> None:
        """Start the log of a sealed input with the first entries of its scheduler."""
        self._scheduler = board
        self.log.enqueue(entries, (), ticket)

    def take_commit(self, limit: int | None = None) -> LogCommit:
        """Take the next commit from the log."""
        return self.log.take_commit(
            None if self._scheduler is None else self._scheduler.dump, limit
        )

    def settle_commit(self, commit: LogCommit, error: HoldfastError | None) -> None:
        """Settle a commit. A failed one also fails the waiting claims."""
        self.log.settle_commit(commit, error)
        if error is not None:
            for waiting in self.waiting.remove_matching(lambda _: True):
                waiting.ticket.settle(error)

    # --- start --------------------------------------------------------------------------------

    def continue_from_log(self, policy: RunPolicy, now_ns: int, *, same_driver: bool) -> None:
        """Continue a run from its log. Reclaims the grants of another driver, which is gone."""
        board = self.scheduler
        if board.halted is not None:
            return
        if not same_driver:
            self._log_reclaimed(board.reclaim_all(now_ns)[1], now_ns)
        if policy != board.policy:
            self._log(board.change_policy(policy, now_ns)[1], now_ns=now_ns)
        if not same_driver:
            self.resume(now_ns)

    def resume(self, now_ns: int, ticket: DecisionTicket | None = None) -> None:
        """Resume a stopped run for a driver. The stop counts restart."""
        self._log(self.scheduler.resume(now_ns), (), ticket, now_ns=now_ns)

    # --- reports and claims -------------------------------------------------------------------

    def submit(
        self, owner: str, exchange: Exchange, data: memoryview, now_ns: int, ticket: DecisionTicket
    ) -> ServiceDecision:
        """Decide and enqueue. The reply is complete and may be sent when the ticket is settled."""
        decision = self.decide(owner, exchange, data, now_ns)
        claim, reply = exchange.claim, decision.reply
        waits = (
            claim is not None
            and exchange.wait_ms > 0
            and decision.failure is None
            and isinstance(reply.answer, NoRowsYet)
        )
        if not decision.is_waiting_only:
            self.log.enqueue(decision.entries, decision.puts, None if waits else ticket)
        elif not waits:
            ticket.settle(None)
        if waits:
            assert claim is not None
            until_ns = now_ns + min(exchange.wait_ms, WAIT_MS_MAX) * 1_000_000
            self.waiting.add(WaitingClaim(owner, claim, until_ns, reply, ticket))
        if decision.entries:
            self._serve_waiting(now_ns)
        return decision

    def decide(
        self, owner: str, exchange: Exchange, data: memoryview, now_ns: int
    ) -> ServiceDecision:
        """Accept reports, then answer the claim. Decisions before a refusal are logged too."""
        board, halted_before = self.scheduler, self.scheduler.halted
        reply = PendingReply([], None)
        entries: LogEntries = []
        puts: list[RowPut] = []
        failure: Exception | None = None
        # An exchange whose reports are all repeats has no new calls.
        fresh = not exchange.reports or not all(
            board.is_report_known(move.epoch, move.report_no) for move in exchange.reports
        )
        try:
            if fresh:
                entries += board.add_cost(exchange.cost, now_ns)
            self._take_reports(exchange.reports, data, now_ns, reply.report_replies, entries, puts)
            if exchange.claim is not None:
                reply.answer = unacknowledged_grant(board, owner, exchange.known_epochs, now_ns)
                if reply.answer is None:
                    reply.answer, more = self._claim(owner, exchange.claim, now_ns)
                    entries += more
        except Exception as error:
            failure = error
        halted = board.halted if halted_before is None else None
        if halted is not None:
            entries.append(halted)
        if fresh:
            self.metrics.add_calls(exchange.calls, exchange.cost, exchange.latency, exchange.tokens)
            self.limits.settle(exchange.tokens_estimated, exchange.tokens)
        self._update_metrics(entries, now_ns)
        return ServiceDecision(reply, entries, puts, failure, halted)

    def _take_reports(
        self,
        reports: Sequence[GrantReport],
        data: memoryview,
        now_ns: int,
        replies: list[GrantReportReply],
        entries: LogEntries,
        puts: list[RowPut],
    ) -> None:
        """Accept each report and append its replies, entries and rows to the three lists."""
        board, offset = self.scheduler, 0
        for report in reports:
            batch = data[offset : offset + report.size]
            offset += report.size
            height = self.log.height + len(entries) + 1
            report_bytes = report.size + sum(
                4 * len(one.error) + len(one.raw) for one in report.resultless
            )
            if report_bytes > REPORT_BYTES_MAX:
                raise ValueTooLarge(what="report", bytes=report_bytes, max=REPORT_BYTES_MAX)
            errors = None
            if board.policy.stop_rules.same_error:
                errors = {other.seq: other.error for other in report.resultless}
            try:
                accepted, more = board.report(
                    report.epoch,
                    report.report_no,
                    report.digest,
                    done=report.done,
                    begin=() if self.draining else report.begin,
                    now_ns=now_ns,
                    errors=errors,
                )
            except Fenced:
                replies.append(GrantReportReply(True, 0, ""))
                continue
            stop = accepted.stop or ("leaving" if self.draining else "")
            replies.append(GrantReportReply(False, accepted.rows_held, stop))
            if not more:
                continue
            entries += more
            chunk = build_chunk(board, report, accepted, batch, self.metrics.errors)
            if chunk is not None:
                page = min(done.lo for done in report.done) // board.policy.page_rows
                puts += runs.chunk_rows(self.run_id, page, height, chunk)

    def _claim(self, owner: str, claim: ClaimRows, now_ns: int) -> tuple[ClaimAnswer, LogEntries]:
        if self.draining:
            return NoMoreRows("leaving"), []
        board = self.scheduler
        hi = board.size if claim.hi < 0 else min(claim.hi, board.size)
        rows = claim.rows
        if not board.policy.batch_rows:
            # Near the end, split the remaining rows between the children.
            remaining = board.size - sum(board.ended)
            fair = remaining // (2 * max(len(self.connected_owners), 1))
            # Rows may be whole documents. A grant must fit into one frame.
            next_up = board.unseen.first(claim.lo, hi) or (claim.lo, hi)
            fair = min(fair, GRANT_BYTES_MAX // self.row_bytes(next_up[0]))
            rows = max(min(rows, fair), 1)
        return board.claim(owner, rows, now_ns=now_ns, lo=claim.lo, hi=hi, begin=claim.begin)

    # --- waiting claims -----------------------------------------------------------------------

    def _serve_waiting(self, now_ns: int) -> None:
        """Answer waiting claims in FIFO order while rows or a final answer are available."""
        for first in self.waiting.queue_heads():
            waiting: WaitingClaim | None = first
            while waiting is not None and self._can_answer(waiting.rows, now_ns):
                if not self._answer_waiting(waiting, now_ns):
                    break
                waiting = self.waiting.next_waiting(first.rows)

    def _answer_waiting(
        self, waiting: WaitingClaim, now_ns: int, *, timed_out: bool = False
    ) -> bool:
        """Grant rows to a waiting claim and log the grant. A timed-out claim is answered with
        `NoRowsYet`.
        """
        answer, entries = self._claim(waiting.owner, waiting.claim, now_ns)
        self._update_metrics(entries, now_ns)
        if isinstance(answer, NoRowsYet) and not timed_out:
            if entries:
                self.log.enqueue(entries)
            return False
        waiting.reply.answer = answer
        self.waiting.remove(waiting)
        # The reports of this claim are queued before it or durable.
        self.log.enqueue(entries, (), waiting.ticket)
        return True

    def _can_answer(self, rows: SeqInterval, now_ns: int) -> bool:
        """Return whether a claim of these rows would get an answer other than to wait."""
        lo, hi = rows
        hi = self.scheduler.size if hi < 0 else min(hi, self.scheduler.size)
        return self.draining or self.scheduler.can_answer_claim(lo, hi, now_ns)

    def next_due_ns(self) -> int | None:
        """The due time of the next retry that a claim waits for; None if there is none."""
        if not self.waiting or not self.scheduler.backoff_heap:
            return None
        return self.scheduler.backoff_heap[0][0]

    def drain(self, now_ns: int) -> None:
        """Stop granting rows and answer the waiting claims."""
        self.draining = True
        if self.running:
            self._serve_waiting(now_ns)

    # --- children -----------------------------------------------------------------------------

    def heartbeat(self, epochs: Sequence[int], now_ns: int) -> list[int]:
        """Renew these grants; return the epochs that are fenced."""
        lost = []
        for epoch in epochs:
            try:
                self.scheduler.heartbeat(epoch, now_ns)
            except Fenced:
                lost.append(epoch)
        return lost

    def renew_child(self, child: str, now_ns: int) -> None:
        """Renew the grants of a child whose process is alive."""
        if self.has_scheduler:
            self.handover.renew_grants(self.scheduler, child, now_ns)

    def announce_handover(self, child: str, now_ns: int) -> None:
        """Announce that a child is about to exit and its successor takes over its grants."""
        self.renew_child(child, now_ns)
        self.handover.announce(child)

    def next_inherited_grant(
        self, owner: str, known_epochs: list[int], now_ns: int
    ) -> tuple[RowGrant, int] | None:
        """Return the next grant of this child's predecessor, or None."""
        if self.draining:
            return None
        if self.handover.is_predecessor_connected(owner):
            child = child_of(owner)
            raise Invalid(what="successor", why="its predecessor is still connected", owner=child)
        return self.handover.next_grant(self.scheduler, owner, known_epochs, now_ns)

    def on_disconnect(self, owner: str, now_ns: int) -> None:
        """Reclaim the grants of a closed connection before their lease expires."""
        self.connected_owners.discard(owner)
        for waiting in self.waiting.remove_matching(lambda claim: claim.owner == owner):
            waiting.ticket.settle(None)
        if not self.running:
            return
        # Grants from before a service restart have the owner name of the former connection.
        child = child_of(owner)
        if self.handover.is_handed_over(child):
            # Its rows stay reserved for the successor until the lease expires.
            return
        for name in self.scheduler.owners():
            if child_of(name) == child and name not in self.connected_owners:
                self._log_reclaimed(self.scheduler.reclaim_owner(name, now_ns)[1], now_ns)

    # --- time and completion ------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Apply timed changes: lease expiry, the end of the grace period, claim timeouts."""
        if not self.running:
            return
        board = self.scheduler
        if board.halted is None:
            entries = board.expire(now_ns)[1] + board.end_cancel_grace(now_ns)[1]
            self._log_reclaimed(entries, now_ns)
        if board.backoff_heap and board.backoff_heap[0][0] <= now_ns:
            self._serve_waiting(now_ns)
        for waiting in self.waiting.timed_out(now_ns):
            self._answer_waiting(waiting, now_ns, timed_out=True)

    def cancel(self, now_ns: int, ticket: DecisionTicket | None = None) -> bool:
        """Cancel the run. Begun rows get the grace period. Returns False if all rows are final."""
        self._log(self.scheduler.cancel(now_ns)[1], (), ticket, now_ns=now_ns)
        return self.scheduler.cancelling

    def mark_committed(self, upto: int, now_ns: int, ticket: DecisionTicket | None = None) -> None:
        """Record that rows up to `upto` are in the sink. An illegal commit halts the run, is logged
        and raised.
        """
        halted_before = self.scheduler.halted
        try:
            _, entries = self.scheduler.commit(upto, upto - 1, now_ns)
        except IllegalTransition:
            if halted_before is None and self.scheduler.halted is not None:
                self._log([self.scheduler.halted], now_ns=now_ns)
            raise
        self._log(entries, (), ticket, now_ns=now_ns)

    def _log_reclaimed(self, entries: LogEntries, now_ns: int) -> None:
        """Log reclaimed grants and the rows that failed by them."""
        if entries:
            self._update_metrics(entries, now_ns)
            first, errors = self.log.height + 1, self.metrics.errors
            puts = reclaimed_chunk_rows(self.scheduler, self.run_id, entries, first, errors)
            self._log(entries, puts, now_ns=now_ns)

    def _log(
        self,
        entries: Sequence[LogEntry],
        puts: Sequence[RowPut] = (),
        ticket: DecisionTicket | None = None,
        *,
        now_ns: int,
    ) -> None:
        self.log.enqueue(entries, puts, ticket)
        if entries:
            self._serve_waiting(now_ns)

    # --- metrics ------------------------------------------------------------------------------

    def progress(self, now_ns: int, reused: int) -> runs.RunProgress:
        if not self.has_scheduler:
            return runs.RunProgress(now_ns, self.metrics.started_ns, [0] * 8)
        board = self.scheduler
        return self.metrics.progress(
            now_ns,
            counts=board.ledger.counts(),
            ended=board.ended,
            reused=reused,
            retries=board.retries,
            reclaims=board.reclaims,
            fenced=board.fenced,
            tasks=len(self.connected_owners),
            height=self.log.height,
            tokens_left=self.limits.tokens_left(now_ns),
        )

    def _update_metrics(self, entries: LogEntries, now_ns: int) -> None:
        """Update the metrics from new entries."""
        ledger = self.scheduler.ledger
        self.metrics.add_final_failures(entries)
        self.metrics.update_counts(now_ns, sum(ledger.ended), ledger.in_flight_count)


def _one_byte(_: int) -> int:
    return 1
