"""The core of the ledger service: its decisions and its group-commit log, without threads or a store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast import codec
from holdfast.clock import MS, S
from holdfast.errors import CommitUnknown, HoldfastError, IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.events import FinishedRange, LogEntry, Range
from holdfast.ledger.replies import AllRowsFinal, NoMoreRows, NoRowsYet, RowGrant
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.service.group_log import COMMIT_BYTES_MAX, DecisionTicket, GroupLog, RowPut
from holdfast.ledger.service.handlers import WAIT_MS_MAX, RunService, ServiceDecision
from holdfast.ledger.service.messages import ClaimRows, Exchange, GrantReport, ResultlessRowReport
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.states import RowState

ROWS = 12
RUN = "r-1"
FAIL = int(RowState.TERMINAL_FAIL)


class RunServiceRig:
    """A run service on a list instead of a store, with a manual clock."""

    def __init__(self, rows: int = ROWS, checkpoint_entries: int = 2000) -> None:
        self.now_ns = S
        self.policy = RunPolicy(attempts_max=2, page_rows=8, lease_ns=10 * S, backoff_first_ns=S)
        self.entries: list[LogEntry] = []
        self.rows: dict[bytes, bytes] = {}
        self.checkpoints: list[bytes] = []
        self.append_error: HoldfastError | None = None
        board, opened = RunScheduler.open(rows, self.policy, now_ns=self.now_ns)
        self.group = GroupLog(self.append, 0, lambda _: None, checkpoint_entries)
        self.service = RunService(RUN, None, self.group, RunMetrics(self.now_ns))
        self.service.start_log(board, opened, DecisionTicket())
        self.write_commit()

    def append(
        self, entries: Sequence[LogEntry], puts: Sequence[RowPut], checkpoint: bytes | None
    ) -> None:
        if self.append_error is not None:
            raise self.append_error
        self.entries += entries
        self.rows.update(puts)
        if checkpoint is not None:
            self.checkpoints.append(checkpoint)

    def write_commit(self, limit: int | None = None) -> None:
        commit = self.service.take_commit(limit)
        self.service.settle_commit(commit, self.group.write_commit(commit))

    def submit(
        self, owner: str, exchange: Exchange, data: bytes = b""
    ) -> tuple[ServiceDecision, DecisionTicket]:
        ticket = DecisionTicket()
        return self.service.submit(owner, exchange, memoryview(data), self.now_ns, ticket), ticket

    def grant(self, owner: str, rows: int, begin: int) -> RowGrant:
        decision, _ = self.submit(owner, make_exchange(ClaimRows(rows, begin)))
        answer = decision.reply.answer
        assert isinstance(answer, RowGrant)
        return answer

    def replayed_dump(self) -> bytes:
        return RunScheduler.replay(self.entries).dump()

    def resultless_rows(self) -> list[tuple[int, int, str]]:
        """(seq, attempts, error) of the stored rows without a result."""
        chunks = [codec.unpack_as(runs.OutcomeChunk, row) for row in self.rows.values()]
        return sorted(
            (resultless.seq, resultless.attempts, resultless.error)
            for chunk in chunks
            for resultless in chunk.resultless
        )


def make_exchange(
    claim: ClaimRows | None = None,
    *reports: GrantReport,
    wait_ms: int = 0,
    known_epochs: Sequence[int] = (),
) -> Exchange:
    return Exchange(list(reports), claim, wait_ms, len(reports), 0.0, [], list(known_epochs))


def make_report(
    epoch: int,
    report_no: int,
    done: Sequence[FinishedRange] = (),
    begin: Sequence[Range] = (),
    resultless: Sequence[ResultlessRowReport] = (),
    size: int = 0,
) -> GrantReport:
    digest = repr((epoch, report_no, done, begin)).encode()
    return GrantReport(
        epoch=epoch,
        report_no=report_no,
        digest=digest,
        done=list(done),
        begin=list(begin),
        seqs=b"",
        lo=0,
        resultless=list(resultless),
        size=size,
    )


def succeeded(lo: int, hi: int) -> FinishedRange:
    return FinishedRange(lo, hi, int(RowState.TERMINAL_SUCCESS))


@pytest.fixture
def rig() -> RunServiceRig:
    return RunServiceRig()


# -- reports and claims --------------------------------------------------------------------------


def test_decision_has_a_reply_log_entries_and_rows_to_put(rig: RunServiceRig) -> None:
    grant = rig.grant("child/a#1", 4, 4)
    grant_report = make_report(grant.epoch, 1, [succeeded(0, 2)], size=3)
    decision = rig.service.decide(
        "child/a#1", make_exchange(None, grant_report), memoryview(b"abc"), rig.now_ns
    )
    assert [report_reply.rows_left for report_reply in decision.reply.report_replies] == [2]
    assert [type(entry).__name__ for entry in decision.entries] == ["RowsReported"]
    [(key, row)] = decision.puts
    # The log already has the opening and the grant.
    assert key == runs.chunk_key(RUN, 0, 3)
    assert codec.unpack_as(runs.OutcomeChunk, row).batch == b"abc"


def test_ticket_settles_after_its_commit_is_written(rig: RunServiceRig) -> None:
    decision, ticket = rig.submit("child/a#1", make_exchange(ClaimRows(4, 4)))
    assert isinstance(decision.reply.answer, RowGrant)
    assert not ticket.settled
    rig.write_commit()
    assert ticket.settled
    assert ticket.error is None
    assert rig.replayed_dump() == rig.service.scheduler.dump()


def test_reports_accepted_before_a_refused_claim_are_logged(rig: RunServiceRig) -> None:
    grant = rig.grant("child/a#1", 4, 4)
    accepted = make_report(grant.epoch, 1, [succeeded(0, 2)])
    decision, ticket = rig.submit(
        "child/a#1", make_exchange(ClaimRows(1, 0, ROWS + 1, ROWS + 1), accepted)
    )
    rig.write_commit()
    assert isinstance(decision.failure, Invalid)
    assert ticket.settled
    assert rig.replayed_dump() == rig.service.scheduler.dump()
    assert rig.service.scheduler.ended == [2, 0, 0, 0]


def test_illegal_report_logs_the_halt_of_the_run(rig: RunServiceRig) -> None:
    grant = rig.grant("child/a#1", 4, 1)
    decision, _ = rig.submit(
        "child/a#1", make_exchange(None, make_report(grant.epoch, 1, [succeeded(3, 4)]))
    )
    rig.write_commit()
    assert isinstance(decision.failure, IllegalTransition)
    assert decision.halted is not None
    assert rig.entries[-1] == decision.halted
    # The next report is refused, too, and adds no entry.
    again, _ = rig.submit(
        "child/a#1", make_exchange(None, make_report(grant.epoch, 1, [succeeded(0, 1)]))
    )
    assert isinstance(again.failure, IllegalTransition)
    assert again.halted is None
    assert not again.entries


def test_illegal_commit_logs_the_halt_of_the_run(rig: RunServiceRig) -> None:
    with pytest.raises(IllegalTransition):
        rig.service.mark_committed(4, rig.now_ns)
    rig.write_commit()
    assert RunScheduler.replay(rig.entries).halted == rig.service.scheduler.halted is not None


def test_retried_failure_is_not_stored_as_an_outcome(rig: RunServiceRig) -> None:
    transient = int(ErrorClass.TRANSIENT)
    for n in (1, 2):
        grant = rig.grant("child/a#1", 1, 1)
        other = ResultlessRowReport(0, FAIL, transient, f"failed {n}")
        done = [FinishedRange(0, 1, FAIL, transient)]
        rig.submit(
            "child/a#1", make_exchange(None, make_report(grant.epoch, 1, done, resultless=[other]))
        )
        rig.now_ns += 5 * S
        rig.service.tick(rig.now_ns)
    rig.write_commit()
    assert rig.resultless_rows() == [(0, 2, "failed 2")]


def test_rows_failed_by_a_reclaim_have_a_stored_outcome(rig: RunServiceRig) -> None:
    for _ in range(2):
        rig.service.connected_owners.add("child/a#1")
        grant = rig.grant("child/a#1", 1, 1)
        if grant.isolated:
            rig.submit(
                "child/a#1", make_exchange(None, make_report(grant.epoch, 1, begin=[(0, 1)]))
            )
        rig.service.on_disconnect("child/a#1", rig.now_ns)
    rig.write_commit()
    [(seq, tries, error)] = rig.resultless_rows()
    assert (seq, tries) == (0, 2)
    assert "its interpreter died" in error


def test_unacknowledged_grant_is_sent_again(rig: RunServiceRig) -> None:
    first = rig.grant("child/a#1", 4, 2)
    again = rig.grant("child/a#2", 4, 2)
    assert (again.epoch, again.rows, again.begun) == (first.epoch, first.rows, first.begun)
    decision, _ = rig.submit(
        "child/a#2", make_exchange(ClaimRows(4, 2), known_epochs=[first.epoch])
    )
    assert isinstance(decision.reply.answer, RowGrant)
    assert decision.reply.answer.epoch > first.epoch


def test_repeated_exchange_counts_its_calls_once(rig: RunServiceRig) -> None:
    grant = rig.grant("child/a#1", 4, 4)
    calls = rig.service.metrics.calls
    for _ in range(3):
        decision, _ = rig.submit(
            "child/a#1", make_exchange(None, make_report(grant.epoch, 1, [succeeded(0, 2)]))
        )
        assert decision.reply.report_replies[0].rows_left == 2
    assert rig.service.metrics.calls == calls + 1


def test_draining_service_accepts_reports_and_begins_no_row(rig: RunServiceRig) -> None:
    grant = rig.grant("child/a#1", 4, 2)
    rig.service.drain(rig.now_ns)
    grant_report = make_report(grant.epoch, 1, [succeeded(0, 1)], [(2, 3)])
    decision, _ = rig.submit("child/a#1", make_exchange(ClaimRows(4, 4), grant_report))
    assert decision.reply.report_replies[0].stop == "leaving"
    assert decision.reply.answer == NoMoreRows("leaving")
    assert rig.service.scheduler.ledger.in_flight_count == 1


# -- waiting claims ------------------------------------------------------------------------------


@pytest.fixture
def busy(rig: RunServiceRig) -> RunServiceRig:
    """All rows are granted to one child."""
    rig.service.connected_owners.add("child/a#1")
    known_epochs: list[int] = []
    while True:
        decision, _ = rig.submit(
            "child/a#1", make_exchange(ClaimRows(ROWS, ROWS), known_epochs=known_epochs)
        )
        if not isinstance(decision.reply.answer, RowGrant):
            break
        known_epochs.append(decision.reply.answer.epoch)
    rig.write_commit()
    return rig


def wait_for_rows(
    rig: RunServiceRig, owner: str, claim: ClaimRows, wait_ms: int = 1000
) -> tuple[ServiceDecision, DecisionTicket]:
    rig.service.connected_owners.add(owner)
    return rig.submit(owner, make_exchange(claim, wait_ms=wait_ms))


def test_waiting_claims_are_answered_in_fifo_order(busy: RunServiceRig) -> None:
    waiting = [wait_for_rows(busy, f"child/{at}#1", ClaimRows(1, 0)) for at in range(20)]
    assert len(busy.service.waiting) == 20
    assert not busy.group.pending
    busy.service.on_disconnect("child/a#1", busy.now_ns)
    answered = [isinstance(decision.reply.answer, RowGrant) for decision, _ in waiting]
    # Suspect rows are granted one at a time.
    assert answered == [True] * sum(answered) + [False] * (20 - sum(answered))
    assert 0 < sum(answered) < 20
    assert not any(ticket.settled for _, ticket in waiting)
    busy.write_commit()
    assert [ticket.settled for _, ticket in waiting] == answered
    assert busy.replayed_dump() == busy.service.scheduler.dump()


def test_decision_that_frees_no_row_answers_no_waiting_claim(busy: RunServiceRig) -> None:
    _, ticket = wait_for_rows(busy, "child/b#1", ClaimRows(1, 0))
    epoch = min(busy.service.scheduler.grants)
    busy.submit("child/a#1", make_exchange(None, make_report(epoch, 1, [succeeded(0, 1)])))
    busy.write_commit()
    assert not ticket.settled


def test_waiting_claim_of_another_range_does_not_block_later_claims(busy: RunServiceRig) -> None:
    epochs = sorted(busy.service.scheduler.grants)
    early, _ = wait_for_rows(busy, "child/b#1", ClaimRows(1, 0, 8, 12))
    late, _ = wait_for_rows(busy, "child/c#1", ClaimRows(1, 0, 0, 1))
    busy.submit("child/a#1", make_exchange(None, make_report(epochs[0], 1, [succeeded(0, 1)])))
    assert isinstance(early.reply.answer, NoRowsYet)
    assert isinstance(late.reply.answer, AllRowsFinal)


def test_waiting_claim_times_out_with_no_rows_yet(busy: RunServiceRig) -> None:
    decision, ticket = wait_for_rows(busy, "child/b#1", ClaimRows(1, 0), wait_ms=1 << 40)
    busy.now_ns += WAIT_MS_MAX * MS - 1
    busy.service.tick(busy.now_ns)
    assert busy.service.waiting
    busy.now_ns += 1
    busy.service.tick(busy.now_ns)
    busy.write_commit()
    assert ticket.settled
    assert isinstance(decision.reply.answer, NoRowsYet)
    assert not busy.service.waiting


def test_due_retry_answers_a_waiting_claim() -> None:
    rig = RunServiceRig(rows=1)
    grant = rig.grant("child/a#1", 1, 1)
    kind = int(ErrorClass.TRANSIENT)
    rig.submit(
        "child/a#1",
        make_exchange(None, make_report(grant.epoch, 1, [FinishedRange(0, 1, FAIL, kind, S)])),
    )
    decision, ticket = wait_for_rows(rig, "child/b#1", ClaimRows(1, 0), wait_ms=4000)
    due_ns = rig.service.next_due_ns()
    assert due_ns is not None
    rig.service.tick(due_ns - 1)
    assert isinstance(decision.reply.answer, NoRowsYet)
    rig.service.tick(due_ns)
    rig.write_commit()
    assert isinstance(decision.reply.answer, RowGrant)
    assert ticket.settled


@pytest.mark.parametrize("end", ["cancel", "leave"])
def test_cancel_and_drain_answer_every_waiting_claim(busy: RunServiceRig, end: str) -> None:
    waiting = [wait_for_rows(busy, f"child/{at}#1", ClaimRows(1, 0)) for at in range(3)]
    if end == "cancel":
        busy.service.cancel(busy.now_ns)
    else:
        busy.service.drain(busy.now_ns)
    busy.write_commit()
    assert all(ticket.settled for _, ticket in waiting)
    assert all(isinstance(decision.reply.answer, NoMoreRows) for decision, _ in waiting)


def test_disconnect_removes_the_waiting_claim_of_its_owner(busy: RunServiceRig) -> None:
    wait_for_rows(busy, "child/b#1", ClaimRows(1, 0))
    busy.service.on_disconnect("child/b#1", busy.now_ns)
    busy.service.on_disconnect("child/a#1", busy.now_ns)
    assert busy.service.scheduler.owners() == []


def test_waiting_claim_is_answered_after_its_reports_are_durable(busy: RunServiceRig) -> None:
    """A "wait" reply confirms the reports of its exchange, so it is sent after they are durable."""
    known_epochs = sorted(busy.service.scheduler.grants)
    exchange = make_exchange(
        ClaimRows(1, 0),
        make_report(known_epochs[0], 1, [succeeded(0, 1)]),
        wait_ms=1000,
        known_epochs=known_epochs,
    )
    _, ticket = busy.submit("child/a#1", exchange)
    busy.now_ns += 2 * S
    busy.service.tick(busy.now_ns)
    assert not ticket.settled
    busy.write_commit(1)
    assert not ticket.settled
    busy.write_commit()
    assert ticket.settled


# -- the group log -------------------------------------------------------------------------------


def test_failed_commit_fails_every_ticket(busy: RunServiceRig) -> None:
    epoch = min(busy.service.scheduler.grants)
    _, first = busy.submit(
        "child/a#1", make_exchange(None, make_report(epoch, 1, [succeeded(0, 1)]))
    )
    _, second = busy.submit(
        "child/a#1", make_exchange(None, make_report(epoch, 2, [succeeded(1, 2)]))
    )
    _, waiting = wait_for_rows(busy, "child/b#1", ClaimRows(1, 0))
    busy.append_error = CommitUnknown(what="test")
    busy.write_commit(1)
    assert [ticket.error for ticket in (first, second, waiting)] == [busy.append_error] * 3
    assert not busy.service.running
    with pytest.raises(CommitUnknown):
        busy.submit("child/a#1", make_exchange(None, make_report(epoch, 3, [succeeded(2, 3)])))
    # A tick and a disconnect add no decision.
    busy.service.tick(busy.now_ns + 100 * S)
    busy.service.on_disconnect("child/a#1", busy.now_ns)
    assert not busy.group.pending


def test_checkpoint_waits_until_no_decision_is_pending() -> None:
    rig = RunServiceRig(checkpoint_entries=2)
    rig.grant("child/a#1", 2, 2)
    rig.grant("child/b#1", 2, 2)
    rig.write_commit(1)
    assert rig.checkpoints == []
    rig.write_commit()
    assert rig.checkpoints == [rig.replayed_dump()]


def test_take_commit_is_bounded_by_commit_bytes_max(rig: RunServiceRig) -> None:
    half = b"x" * (COMMIT_BYTES_MAX // 2 + 1)
    for n in range(5):
        rig.group.enqueue((), [(b"%d" % n, half)])
    sizes = []
    while rig.group.pending:
        before = len(rig.rows)
        rig.write_commit()
        sizes.append(len(rig.rows) - before)
    assert sizes == [2, 2, 1]


def test_empty_commit_is_not_appended(rig: RunServiceRig) -> None:
    rig.append_error = CommitUnknown(what="test")
    ticket = DecisionTicket()
    rig.group.enqueue((), (), ticket)
    rig.write_commit()
    assert ticket.settled
    assert ticket.error is None
