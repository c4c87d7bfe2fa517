"""Tasks of a ledger run: they claim, begin, call and report rows, and crash in every way.

A task resends a report until it is acknowledged. The number of the report identifies the duplicate.
Some rows kill the task that runs them. At times a task sleeps past its lease and continues as a
zombie, loses its connection, releases its grant, or (if the seed enables it) sends contradictory
reports for a row, which must halt the run.
"""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import NamedTuple

import msgspec

from holdfast.clock import MS
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ledger.events import FinishedRange, Range
from holdfast.ledger.replies import AllRowsFinal, ClaimAnswer, NoMoreRows, NoRowsYet, RowGrant
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.service.messages import (
    ClaimRows,
    Exchange,
    GrantReport,
    GrantReportReply,
    ResultlessRowReport,
)
from holdfast.ledger.service.waiting_claims import PendingReply
from holdfast.ledger.states import RowState
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.run_parameters import GRANT_NS, RowBehaviour
from tests.simulation.ledger_process import ConnectionLost, LedgerEnvironment, LedgerProcess

# Time that a claim may wait at the service.
WAIT_MS = 300


class _GrantedRow(NamedTuple):
    seq: int
    attempt: int


class SentReport(NamedTuple):
    """A report of one grant: the header and the attached results."""

    move: GrantReport
    data: bytes


def build_report(
    epoch: int,
    n: int,
    done: list[FinishedRange],
    begin: list[Range],
    results: list[tuple[int, str]],
) -> SentReport:
    others = [
        ResultlessRowReport(seq, one.code, one.error_class, "", one.delay_ns)
        for one in done
        if one.code != RowState.TERMINAL_SUCCESS
        for seq in range(one.lo, one.hi)
    ]
    data = msgspec.msgpack.encode(results) if results else b""
    digest = hashlib.sha256(repr((epoch, n, done, begin, results)).encode()).digest()[:8]
    report = GrantReport(
        epoch=epoch,
        report_no=n,
        digest=digest,
        done=done,
        begin=begin,
        seqs=b"",
        lo=min((one.lo for one in done), default=0),
        resultless=others,
        size=len(data),
    )
    return SentReport(report, data)


class LedgerWorker(Actor):
    """A task that processes rows until it dies."""

    def __init__(self, name: str, outside: LedgerEnvironment) -> None:
        super().__init__(name)
        self.outside = outside
        # Grants known to this incarnation.
        self.grants: list[int] = []

    def run_process(self, incarnation: Incarnation) -> None:
        owner = f"{self.name}/{incarnation.incarnation_id}"
        self.grants = []
        while True:
            process = self.connect(incarnation, "")
            if process is None:
                incarnation.pause(ms=300)
                continue
            run_id = process.record.run_id
            try:
                reply = self.send(incarnation, owner, process, None, self.build_claim(incarnation))
            except ConnectionLost:
                self.on_connection_lost(incarnation, owner, process)
                continue
            answer = reply.answer
            while isinstance(answer, RowGrant):
                self.grants.append(answer.epoch)
                answer = self._work(incarnation, owner, run_id, answer)
            if isinstance(answer, NoRowsYet):
                incarnation.count_coverage(f"ledger: wait for {answer.why}")
                incarnation.pause(ms=150)
            elif isinstance(answer, AllRowsFinal | NoMoreRows):
                incarnation.pause(ms=400)

    def build_claim(self, incarnation: Incarnation) -> ClaimRows:
        """Build a claim: for any rows, or for the rows of one partition."""
        shape = self.outside.parameters
        begin = shape.begin_rows * incarnation.tape.draw(2)
        if not shape.partitions or incarnation.tape.chance(300):
            return ClaimRows(shape.claim_rows, begin)
        size = -(-shape.rows // shape.partitions)
        lo = incarnation.tape.draw(shape.partitions) * size
        return ClaimRows(shape.claim_rows, begin, min(lo, shape.rows), min(lo + size, shape.rows))

    def _work(
        self, incarnation: Incarnation, owner: str, run_id: str, grant: RowGrant
    ) -> ClaimAnswer | None:
        """Process a grant. Return the service's answer to the claim sent with its last report."""
        work = _GrantProcessing(incarnation, self, owner, run_id, grant)
        try:
            work.run()
        except ConnectionLost:
            incarnation.count_coverage("ledger: task gave up its grant")
            return None
        return work.next_answer

    def connect(self, incarnation: Incarnation, run_id: str) -> LedgerProcess | None:
        """Return the service process at the address, at times one that has been replaced."""
        process = self.outside.current_process
        if len(self.outside.processes) > 1 and incarnation.tape.chance(100):
            process = incarnation.tape.pick(list(self.outside.processes.values()))
        if process is None or not process.alive:
            return None
        return process if run_id in ("", process.record.run_id) else None

    def send(
        self,
        incarnation: Incarnation,
        owner: str,
        process: LedgerProcess,
        sent: SentReport | None,
        claim: ClaimRows | None,
    ) -> PendingReply:
        """Send one request. ConnectionLost: it may or may not have been processed."""
        lost = 0 if incarnation.faults_stopped else self.outside.parameters.lost_answer_mille
        incarnation.scheduler.yield_()
        if not process.alive or (lost and incarnation.tape.chance(lost // 2)):
            raise ConnectionLost
        moves, data = ([sent.move], sent.data) if sent is not None else ([], b"")
        wait_ms = WAIT_MS if claim is not None and not moves and incarnation.tape.chance(400) else 0
        calls = sum(done.hi - done.lo for move in moves for done in move.done)
        step = Exchange(moves, claim, wait_ms, calls, 0.0, [], self.grants)
        reply = process.exchange(incarnation, owner, step, data)
        if lost and incarnation.tape.chance(lost):
            incarnation.count_coverage("ledger: answer lost")
            raise ConnectionLost
        if claim is not None and isinstance(reply.answer, AllRowsFinal):
            hi = None if claim.hi < 0 else claim.hi
            incarnation.record("ledger.finished", run=process.record.run_id, lo=claim.lo, hi=hi)
        return reply

    def on_connection_lost(
        self, incarnation: Incarnation, owner: str, process: LedgerProcess
    ) -> None:
        """Let the service, if it is alive, detect the closed connection at some time."""
        if incarnation.tape.chance(400):
            incarnation.count_coverage("ledger: connection closed")
            process.on_disconnect(owner)
        incarnation.pause(ms=100)


class _GrantProcessing:
    """Processing of one grant."""

    def __init__(
        self, incarnation: Incarnation, task: LedgerWorker, owner: str, run_id: str, grant: RowGrant
    ) -> None:
        self.incarnation = incarnation
        self.task = task
        self.owner = owner
        self.run_id = run_id
        self.epoch = grant.epoch
        rows = [_GrantedRow(s, p.attempt) for p in grant.ranges for s in range(p.lo, p.hi)]
        self.begun, self.idle = rows[: grant.begun], rows[grant.begun :]
        self.done: list[FinishedRange] = []
        self.results: list[tuple[int, str]] = []
        self.last_report = 0
        # The answer to the claim sent with the last report.
        self.next_answer: ClaimAnswer | None = None

    def run(self) -> None:
        shape, incarnation = self.task.outside.parameters, self.incarnation
        while self.begun or self.idle:
            if not incarnation.faults_stopped and incarnation.tape.chance(15):
                process = self.task.connect(incarnation, self.run_id)
                if process is not None and not self.begun and not self.done:
                    incarnation.count_coverage("ledger: grant given back")
                    process.on_disconnect(self.owner)
                    return
            if not incarnation.faults_stopped and incarnation.tape.chance(60):
                self._claim_ahead()
            while self.begun:
                self._call(self.begun.pop(0))
                if len(self.done) >= shape.flush_rows:
                    break
            if not self._report():
                return

    def _call(self, row: _GrantedRow) -> None:
        incarnation, outside = self.incarnation, self.task.outside
        if not incarnation.faults_stopped and incarnation.tape.chance(
            outside.parameters.pause_mille
        ):
            incarnation.count_coverage("ledger: task slept past its lease")
            incarnation.sleep(GRANT_NS * 3 // 2)
        elif incarnation.tape.chance(200):
            self._heartbeat()
        outside.calls += 1
        key = f"{self.run_id}/{row.seq}"
        incarnation.record("ledger.call", run=self.run_id, seq=row.seq, attempt=row.attempt,
                  epoch=self.epoch, key=key)  # fmt: skip
        kind = outside.behaviour(self.run_id, row.seq)
        if kind is RowBehaviour.POISON:
            incarnation.count_coverage("ledger: row killed its task")
            current = incarnation.scheduler.current
            assert current is not None
            # The service detects the closed connection at once, or not before the lease expires.
            process = self.task.connect(incarnation, self.run_id)
            if process is not None and incarnation.tape.chance(700):
                process.on_disconnect(self.owner)
            incarnation.scheduler.kill(current)
        incarnation.scheduler.yield_()
        self._finish_row(row, kind)

    def _finish_row(self, row: _GrantedRow, kind: RowBehaviour) -> None:
        code, error, delay_ns = RowState.TERMINAL_SUCCESS, ErrorClass.NONE, 0
        if kind is RowBehaviour.SKIPPED:
            code = RowState.TERMINAL_SKIP
        elif kind is RowBehaviour.WRONG:
            code, error = RowState.TERMINAL_FAIL, ErrorClass.INPUT
        elif kind is RowBehaviour.STUBBORN or (kind is RowBehaviour.FLAKY and row.attempt == 1):
            code, error = RowState.TERMINAL_FAIL, ErrorClass.TRANSIENT
            delay_ns = self.incarnation.tape.draw(3) * 150 * MS
        else:
            self.results.append((row.seq, f"{row.seq}.{self.task.outside.calls}"))
        self.done.append(FinishedRange(row.seq, row.seq + 1, int(code), int(error), delay_ns))

    def _report(self) -> bool:
        """Report finished rows and begin the next ones. False if the grant is lost."""
        shape, incarnation = self.task.outside.parameters, self.incarnation
        room = max(shape.begin_rows - len(self.begun), 0)
        begin, self.idle = self.idle[:room], self.idle[room:]
        if not self.done and not begin:
            return True
        self.last_report += 1
        results = [one for one in self.results if any(d.lo == one[0] for d in self.done)]
        sent = build_report(self.epoch, self.last_report, self.done, _ranges(begin), results)
        self.done, self.results = [], []
        last = not self.begun and not begin and not self.idle
        moved = self._send_until_acked(sent, self._next_claim(last))
        if moved.lost:
            incarnation.count_coverage("ledger: zombie stopped")
            return False
        self._record_ack(sent.move, moved)
        if not moved.stop:
            self.begun += begin
        else:
            incarnation.count_coverage("ledger: told to stop")
            self.idle = []
        if not incarnation.faults_stopped and incarnation.tape.chance(40):
            self._send_duplicate(sent)
        if (
            sent.move.done
            and incarnation.tape.chance(shape.illegal_action_mille)
            and not incarnation.faults_stopped
        ):
            self._contradict(sent.move)
        return True

    def _next_claim(self, last: bool) -> ClaimRows | None:
        """Return the claim to send with a report: at times, for the next grant at the end of
        one."""
        incarnation, shape = self.incarnation, self.task.outside.parameters
        if isinstance(self.next_answer, RowGrant):
            return None
        if not incarnation.faults_stopped and incarnation.tape.chance(20):
            # An interval outside the run: the claim is refused, the report is accepted.
            incarnation.count_coverage("ledger: claim refused, report taken")
            return ClaimRows(1, 0, shape.rows + 1, shape.rows + 1)
        return self.task.build_claim(incarnation) if last and incarnation.tape.chance(500) else None

    def _claim_ahead(self) -> None:
        """Claim the next grant while this one is being processed."""
        process = self.task.connect(self.incarnation, self.run_id)
        if process is None or isinstance(self.next_answer, RowGrant):
            return
        try:
            reply = self.task.send(
                self.incarnation, self.owner, process, None, self.task.build_claim(self.incarnation)
            )
        except ConnectionLost:
            return
        self.next_answer = reply.answer
        if isinstance(self.next_answer, RowGrant):
            self.incarnation.count_coverage("ledger: grant claimed ahead")

    def _send_until_acked(self, sent: SentReport, claim: ClaimRows | None) -> GrantReportReply:
        """Resend until acknowledged. The report number identifies duplicates."""
        incarnation, task = self.incarnation, self.task
        while True:
            process = task.connect(incarnation, self.run_id)
            if process is None:
                at = task.outside.current_process
                if at is not None and at.alive and at.record.run_id != self.run_id:
                    raise ConnectionLost  # the run has ended
                incarnation.pause(ms=200)
                continue
            try:
                reply = task.send(incarnation, self.owner, process, sent, claim)
                if claim is not None:
                    self.next_answer = reply.answer
                return reply.report_replies[0]
            except (ConnectionLost, Invalid):
                # Invalid: a replaced service that missed earlier reports or the claim.
                claim = None
                task.on_connection_lost(incarnation, self.owner, process)
            except IllegalTransition:
                raise ConnectionLost from None

    def _send_duplicate(self, sent: SentReport) -> None:
        """Send a duplicate request. Its answer must equal the first one."""
        process = self.task.connect(self.incarnation, self.run_id)
        if process is None:
            return
        try:
            reply = self.task.send(self.incarnation, self.owner, process, sent, None)
        except (ConnectionLost, IllegalTransition, Invalid):
            return
        self._record_ack(sent.move, reply.report_replies[0])

    def _record_ack(self, move: GrantReport, moved: GrantReportReply) -> None:
        if not moved.lost:
            reply = {"left": moved.rows_left, "stop": moved.stop}
            self.incarnation.record("ledger.acked", run=self.run_id, epoch=self.epoch, n=move.report_no,
                           digest=move.digest, told=reply)  # fmt: skip

    def _contradict(self, move: GrantReport) -> None:
        """Send a report that contradicts the first one. This must halt the run."""
        process = self.task.connect(self.incarnation, self.run_id)
        if process is None:
            return
        other = [FinishedRange(d.lo, d.hi, int(RowState.TERMINAL_SKIP)) for d in move.done]
        n = move.report_no + self.incarnation.tape.draw(2)
        wrong = build_report(self.epoch, n, other, [], [])
        self.incarnation.record("ledger.careless", run=self.run_id)
        try:
            reply = self.task.send(self.incarnation, self.owner, process, wrong, None)
            self._record_ack(wrong.move, reply.report_replies[0])
        except IllegalTransition:
            self.incarnation.count_coverage("ledger: halted by an illegal report")
            raise ConnectionLost from None
        except (ConnectionLost, Invalid):
            return

    def _heartbeat(self) -> None:
        process = self.task.connect(self.incarnation, self.run_id)
        if process is not None and not process.heartbeat(self.incarnation, self.epoch):
            self.incarnation.count_coverage("ledger: heartbeat fenced")


def _ranges(rows: list[_GrantedRow]) -> list[Range]:
    """Merge adjacent rows into ranges."""
    found = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1].seq - pair[0]):
        seqs = [row.seq for _, row in group]
        found.append((seqs[0], seqs[-1] + 1))
    return found
