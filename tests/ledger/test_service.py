"""The core of the ledger service: its decisions, and the log that several share, without a thread or a store."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast import codec
from holdfast.clock import MS, S
from holdfast.errors import CommitUnknown, HoldfastError, IllegalTransition, Invalid
from holdfast.ledger import runs
from holdfast.ledger.answers import Finished, Grant, Stop, Wait
from holdfast.ledger.board import Board
from holdfast.ledger.classes import ErrorClass, Policy
from holdfast.ledger.records import Done, LogEntry, Range
from holdfast.ledger.service.group_log import COMMIT_BYTES_MAX, GroupLog, Put, Ticket
from holdfast.ledger.service.handlers import WAIT_MS_MAX, Decision, RunService
from holdfast.ledger.service.messages import Claim, Move, Other, Step
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.states import State

ROWS = 12
RUN = "r-1"
FAIL = int(State.TERMINAL_FAIL)


class Rig:
    """A service on a list instead of a store, at a time that the test says."""

    def __init__(self, rows: int = ROWS, checkpoint_entries: int = 2000) -> None:
        self.now_ns = S
        self.policy = Policy(attempts_max=2, page_rows=8, lease_ns=10 * S, backoff_first_ns=S)
        self.entries: list[LogEntry] = []
        self.rows: dict[bytes, bytes] = {}
        self.checkpoints: list[bytes] = []
        self.refused: HoldfastError | None = None
        board, opened = Board.open(rows, self.policy, now_ns=self.now_ns)
        self.group = GroupLog(self.append, 0, lambda _: None, checkpoint_entries)
        self.service = RunService(RUN, None, self.group, RunMetrics(self.now_ns))
        self.service.begin(board, opened, Ticket())
        self.write()

    def append(
        self, entries: Sequence[LogEntry], puts: Sequence[Put], checkpoint: bytes | None
    ) -> None:
        if self.refused is not None:
            raise self.refused
        self.entries += entries
        self.rows.update(puts)
        if checkpoint is not None:
            self.checkpoints.append(checkpoint)

    def write(self, most: int | None = None) -> None:
        commit = self.service.take(most)
        self.service.settle(commit, self.group.write(commit))

    def ask(self, owner: str, step: Step, data: bytes = b"") -> tuple[Decision, Ticket]:
        ticket = Ticket()
        return self.service.submit(owner, step, memoryview(data), self.now_ns, ticket), ticket

    def grant(self, owner: str, rows: int, begin: int) -> Grant:
        decision, _ = self.ask(owner, step(Claim(rows, begin)))
        found = decision.reply.answer
        assert isinstance(found, Grant)
        return found

    def replayed(self) -> bytes:
        return Board.replay(self.entries).dump()

    def others(self) -> list[tuple[int, int, str]]:
        """(seq, tries, error) of the stored rows without a result."""
        chunks = [codec.unpack_as(runs.Chunk, row) for row in self.rows.values()]
        return sorted(
            (one.seq, one.attempts, one.error) for chunk in chunks for one in chunk.others
        )


def step(
    claim: Claim | None = None, *moves: Move, wait_ms: int = 0, held: Sequence[int] = ()
) -> Step:
    return Step(list(moves), claim, wait_ms, len(moves), 0.0, [], list(held))


def report(
    epoch: int,
    n: int,
    done: Sequence[Done] = (),
    begin: Sequence[Range] = (),
    others: Sequence[Other] = (),
    size: int = 0,
) -> Move:
    digest = repr((epoch, n, done, begin)).encode()
    return Move(epoch, n, digest, list(done), list(begin), b"", 0, list(others), size)


def well(lo: int, hi: int) -> Done:
    return Done(lo, hi, int(State.TERMINAL_SUCCESS))


@pytest.fixture
def rig() -> Rig:
    return Rig()


# -- reports and claims --------------------------------------------------------------------------


def test_a_decision_is_a_reply_and_what_is_durable_before_it(rig: Rig) -> None:
    grant = rig.grant("child/a#1", 4, 4)
    move = report(grant.epoch, 1, [well(0, 2)], size=3)
    decision = rig.service.handle("child/a#1", step(None, move), memoryview(b"abc"), rig.now_ns)
    assert [moved.left for moved in decision.reply.moved] == [2]
    assert [type(entry).__name__ for entry in decision.entries] == ["Advanced"]
    [(key, row)] = decision.puts
    # The opening and the grant come before it in the log.
    assert key == runs.chunk_key(RUN, 0, 3)
    assert codec.unpack_as(runs.Chunk, row).batch == b"abc"


def test_a_reply_is_sent_when_its_commit_is_durable(rig: Rig) -> None:
    decision, ticket = rig.ask("child/a#1", step(Claim(4, 4)))
    assert isinstance(decision.reply.answer, Grant)
    assert not ticket.settled
    rig.write()
    assert ticket.settled
    assert ticket.error is None
    assert rig.replayed() == rig.service.board.dump()


def test_what_was_decided_before_a_refusal_is_logged(rig: Rig) -> None:
    grant = rig.grant("child/a#1", 4, 4)
    taken = report(grant.epoch, 1, [well(0, 2)])
    decision, ticket = rig.ask("child/a#1", step(Claim(1, 0, ROWS + 1, ROWS + 1), taken))
    rig.write()
    assert isinstance(decision.failure, Invalid)
    assert ticket.settled
    assert rig.replayed() == rig.service.board.dump()
    assert rig.service.board.ended == [2, 0, 0, 0]


def test_an_illegal_report_halts_the_run_in_the_log(rig: Rig) -> None:
    grant = rig.grant("child/a#1", 4, 1)
    decision, _ = rig.ask("child/a#1", step(None, report(grant.epoch, 1, [well(3, 4)])))
    rig.write()
    assert isinstance(decision.failure, IllegalTransition)
    assert decision.halted is not None
    assert rig.entries[-1] == decision.halted
    # The next one is refused, too, and adds nothing.
    again, _ = rig.ask("child/a#1", step(None, report(grant.epoch, 1, [well(0, 1)])))
    assert isinstance(again.failure, IllegalTransition)
    assert again.halted is None
    assert not again.entries


def test_an_illegal_commit_halts_the_run_in_the_log(rig: Rig) -> None:
    with pytest.raises(IllegalTransition):
        rig.service.committed(4, rig.now_ns)
    rig.write()
    assert Board.replay(rig.entries).halted == rig.service.board.halted is not None


def test_a_failure_that_is_tried_again_is_no_outcome(rig: Rig) -> None:
    transient = int(ErrorClass.TRANSIENT)
    for n in (1, 2):
        grant = rig.grant("child/a#1", 1, 1)
        other = Other(0, FAIL, transient, f"failed {n}")
        done = [Done(0, 1, FAIL, transient)]
        rig.ask("child/a#1", step(None, report(grant.epoch, 1, done, others=[other])))
        rig.now_ns += 5 * S
        rig.service.tick(rig.now_ns)
    rig.write()
    assert rig.others() == [(0, 2, "failed 2")]


def test_rows_that_a_reclaim_failed_have_an_outcome(rig: Rig) -> None:
    for _ in range(2):
        rig.service.owners.add("child/a#1")
        grant = rig.grant("child/a#1", 1, 1)
        if grant.alone:
            rig.ask("child/a#1", step(None, report(grant.epoch, 1, begin=[(0, 1)])))
        rig.service.on_disconnect("child/a#1", rig.now_ns)
    rig.write()
    [(seq, tries, error)] = rig.others()
    assert (seq, tries) == (0, 2)
    assert "its interpreter died" in error


def test_a_grant_that_the_child_never_heard_of_is_given_again(rig: Rig) -> None:
    first = rig.grant("child/a#1", 4, 2)
    again = rig.grant("child/a#2", 4, 2)
    assert (again.epoch, again.rows, again.begun) == (first.epoch, first.rows, first.begun)
    decision, _ = rig.ask("child/a#2", step(Claim(4, 2), held=[first.epoch]))
    assert isinstance(decision.reply.answer, Grant)
    assert decision.reply.answer.epoch > first.epoch


def test_a_step_that_comes_again_counts_its_calls_once(rig: Rig) -> None:
    grant = rig.grant("child/a#1", 4, 4)
    calls = rig.service.metrics.calls
    for _ in range(3):
        decision, _ = rig.ask("child/a#1", step(None, report(grant.epoch, 1, [well(0, 2)])))
        assert decision.reply.moved[0].left == 2
    assert rig.service.metrics.calls == calls + 1


def test_a_service_that_leaves_takes_reports_and_begins_nothing(rig: Rig) -> None:
    grant = rig.grant("child/a#1", 4, 2)
    rig.service.leave(rig.now_ns)
    move = report(grant.epoch, 1, [well(0, 1)], [(2, 3)])
    decision, _ = rig.ask("child/a#1", step(Claim(4, 4), move))
    assert decision.reply.moved[0].stop == "leaving"
    assert decision.reply.answer == Stop("leaving")
    assert rig.service.board.ledger.in_flight_count == 1


# -- claims that wait ----------------------------------------------------------------------------


@pytest.fixture
def busy(rig: Rig) -> Rig:
    """All rows are held by one child; three others wait."""
    rig.service.owners.add("child/a#1")
    held: list[int] = []
    while True:
        decision, _ = rig.ask("child/a#1", step(Claim(ROWS, ROWS), held=held))
        if not isinstance(decision.reply.answer, Grant):
            break
        held.append(decision.reply.answer.epoch)
    rig.write()
    return rig


def wait(rig: Rig, owner: str, claim: Claim, wait_ms: int = 1000) -> tuple[Decision, Ticket]:
    rig.service.owners.add(owner)
    return rig.ask(owner, step(claim, wait_ms=wait_ms))


def test_claims_that_wait_are_answered_in_the_order_in_which_they_came(busy: Rig) -> None:
    asked = [wait(busy, f"child/{at}#1", Claim(1, 0)) for at in range(20)]
    assert len(busy.service.waiting) == 20
    assert not busy.group.pending
    busy.service.on_disconnect("child/a#1", busy.now_ns)
    answered = [isinstance(decision.reply.answer, Grant) for decision, _ in asked]
    # Suspects are handed out one at a time.
    assert answered == [True] * sum(answered) + [False] * (20 - sum(answered))
    assert 0 < sum(answered) < 20
    assert not any(ticket.settled for _, ticket in asked)
    busy.write()
    assert [ticket.settled for _, ticket in asked] == answered
    assert busy.replayed() == busy.service.board.dump()


def test_a_decision_that_frees_nothing_answers_no_claim(busy: Rig) -> None:
    _, ticket = wait(busy, "child/b#1", Claim(1, 0))
    epoch = min(busy.service.board.grants)
    busy.ask("child/a#1", step(None, report(epoch, 1, [well(0, 1)])))
    busy.write()
    assert not ticket.settled


def test_claims_of_other_rows_do_not_stand_in_the_way(busy: Rig) -> None:
    epochs = sorted(busy.service.board.grants)
    early, _ = wait(busy, "child/b#1", Claim(1, 0, 8, 12))
    late, _ = wait(busy, "child/c#1", Claim(1, 0, 0, 1))
    busy.ask("child/a#1", step(None, report(epochs[0], 1, [well(0, 1)])))
    assert isinstance(early.reply.answer, Wait)
    assert isinstance(late.reply.answer, Finished)


def test_a_claim_whose_time_is_up_is_told_to_wait(busy: Rig) -> None:
    decision, ticket = wait(busy, "child/b#1", Claim(1, 0), wait_ms=1 << 40)
    busy.now_ns += WAIT_MS_MAX * MS - 1
    busy.service.tick(busy.now_ns)
    assert busy.service.waiting
    busy.now_ns += 1
    busy.service.tick(busy.now_ns)
    busy.write()
    assert ticket.settled
    assert isinstance(decision.reply.answer, Wait)
    assert not busy.service.waiting


def test_a_row_that_is_due_for_its_next_try_answers_a_claim() -> None:
    rig = Rig(rows=1)
    grant = rig.grant("child/a#1", 1, 1)
    kind = int(ErrorClass.TRANSIENT)
    rig.ask("child/a#1", step(None, report(grant.epoch, 1, [Done(0, 1, FAIL, kind, S)])))
    decision, ticket = wait(rig, "child/b#1", Claim(1, 0), wait_ms=4000)
    due_ns = rig.service.next_due_ns()
    assert due_ns is not None
    rig.service.tick(due_ns - 1)
    assert isinstance(decision.reply.answer, Wait)
    rig.service.tick(due_ns)
    rig.write()
    assert isinstance(decision.reply.answer, Grant)
    assert ticket.settled


@pytest.mark.parametrize("end", ["cancel", "leave"])
def test_the_end_answers_every_claim_that_waits(busy: Rig, end: str) -> None:
    asked = [wait(busy, f"child/{at}#1", Claim(1, 0)) for at in range(3)]
    if end == "cancel":
        busy.service.cancel(busy.now_ns)
    else:
        busy.service.leave(busy.now_ns)
    busy.write()
    assert all(ticket.settled for _, ticket in asked)
    assert all(isinstance(decision.reply.answer, Stop) for decision, _ in asked)


def test_a_closed_connection_claims_nothing_more(busy: Rig) -> None:
    wait(busy, "child/b#1", Claim(1, 0))
    busy.service.on_disconnect("child/b#1", busy.now_ns)
    busy.service.on_disconnect("child/a#1", busy.now_ns)
    assert busy.service.board.owners() == []


def test_a_claim_waits_behind_its_own_reports(busy: Rig) -> None:
    """A reply that says "wait" confirms reports: it is not sent before they are durable."""
    held = sorted(busy.service.board.grants)
    asked = step(Claim(1, 0), report(held[0], 1, [well(0, 1)]), wait_ms=1000, held=held)
    _, ticket = busy.ask("child/a#1", asked)
    busy.now_ns += 2 * S
    busy.service.tick(busy.now_ns)
    assert not ticket.settled
    busy.write(1)
    assert not ticket.settled
    busy.write()
    assert ticket.settled


# -- the group log -------------------------------------------------------------------------------


def test_after_a_failed_commit_every_ticket_has_its_error(busy: Rig) -> None:
    epoch = min(busy.service.board.grants)
    _, first = busy.ask("child/a#1", step(None, report(epoch, 1, [well(0, 1)])))
    _, second = busy.ask("child/a#1", step(None, report(epoch, 2, [well(1, 2)])))
    _, waiting = wait(busy, "child/b#1", Claim(1, 0))
    busy.refused = CommitUnknown(what="test")
    busy.write(1)
    assert [one.error for one in (first, second, waiting)] == [busy.refused] * 3
    assert not busy.service.running
    with pytest.raises(CommitUnknown):
        busy.ask("child/a#1", step(None, report(epoch, 3, [well(2, 3)])))
    # Time passes without a decision.
    busy.service.tick(busy.now_ns + 100 * S)
    busy.service.on_disconnect("child/a#1", busy.now_ns)
    assert not busy.group.pending


def test_a_checkpoint_is_of_a_board_without_pending_decisions() -> None:
    rig = Rig(checkpoint_entries=2)
    rig.grant("child/a#1", 2, 2)
    rig.grant("child/b#1", 2, 2)
    rig.write(1)
    assert rig.checkpoints == []
    rig.write()
    assert rig.checkpoints == [rig.replayed()]


def test_a_commit_is_cut_by_its_bytes(rig: Rig) -> None:
    half = b"x" * (COMMIT_BYTES_MAX // 2 + 1)
    for n in range(5):
        rig.group.enqueue((), [(b"%d" % n, half)])
    sizes = []
    while rig.group.pending:
        before = len(rig.rows)
        rig.write()
        sizes.append(len(rig.rows) - before)
    assert sizes == [2, 2, 1]


def test_a_commit_of_nothing_is_not_appended(rig: Rig) -> None:
    rig.refused = CommitUnknown(what="test")
    ticket = Ticket()
    rig.group.enqueue((), (), ticket)
    rig.write()
    assert ticket.settled
    assert ticket.error is None
