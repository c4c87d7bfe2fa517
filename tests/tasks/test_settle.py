"""Reports: what a worker says of its attempt, and what it is told."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import Answer, End, Grant, Report
from holdfast.tasks.lease import EXPIRIES_EXHAUSTED
from holdfast.tasks.look import queues
from holdfast.tasks.rows import Counts
from tests.tasks.rig import LEASE_NS, UNIVERSE, Desk


def test_a_completed_task_keeps_its_result(desk: Desk) -> None:
    seq = desk.one()
    assert desk.complete(desk.leased(seq), b"result") is Answer.COMMITTED
    assert (desk.states(seq), desk.status(seq).result) == (["COMPLETED"], b"result")
    assert desk.counts() == Counts(completed=1)


def test_a_failed_attempt_waits_before_the_next(desk: Desk) -> None:
    seq = desk.one(backoff_ns=2 * S)
    desk.fail(desk.leased(seq), error="no luck")
    status = desk.status(seq)
    assert (desk.states(seq), status.failures, status.error) == (["WAITING"], 1, "no luck")
    assert S <= status.not_before_ns - desk.store.now_ns() <= 2 * S
    assert desk.lease() == []
    desk.until(status.not_before_ns)
    assert desk.leased(seq).attempt == 2


def test_pauses_grow_up_to_the_longest(desk: Desk) -> None:
    seq = desk.one(backoff_ns=S, backoff_ns_max=5 * S, attempts=10)
    pauses = []
    for _ in range(6):
        desk.fail(desk.leased(seq))
        pauses.append(desk.status(seq).not_before_ns - desk.store.now_ns())
        desk.until(desk.status(seq).not_before_ns)
    assert pauses[0] <= S
    assert max(pauses) <= 5 * S
    assert pauses[-1] > pauses[0]


def test_the_last_failure_is_the_end(desk: Desk) -> None:
    seq = desk.one(attempts=2)
    desk.fail(desk.leased(seq), error="first")
    desk.until(desk.status(seq).not_before_ns)
    desk.fail(desk.leased(seq), reason="bad", error="last")
    status = desk.status(seq)
    assert (desk.states(seq), status.failures) == (["FAILED"], 2)
    assert (status.reason, status.error) == ("bad", "last")
    assert desk.said(seq)[-1] == "TaskFailed"


def test_a_refusal_is_the_end_at_once(desk: Desk) -> None:
    seq = desk.one(attempts=10)
    desk.fail(desk.leased(seq), End.REFUSED)
    assert desk.states(seq) == ["FAILED"]


def test_a_released_task_is_there_again_and_nothing_was_counted(desk: Desk) -> None:
    seq = desk.one(attempts=1, expiries_max=2)
    desk.fail(desk.leased(seq), End.RELEASED)
    status = desk.status(seq)
    assert (status.failures, status.expiries) == (0, 0)
    assert desk.leased(seq).attempt == 2


def test_a_dead_process_counts_as_an_expiry_and_makes_a_suspect(desk: Desk) -> None:
    seq = desk.one(attempts=1)
    desk.fail(desk.leased(seq), End.EXITED)
    status = desk.status(seq)
    assert (status.failures, status.expiries) == (0, 1)
    desk.until(status.not_before_ns)
    assert desk.lease() == []
    assert desk.leased(seq, alone=True).suspect


def test_a_task_that_kills_its_process_too_often_is_dead(desk: Desk) -> None:
    seq = desk.one(expiries_max=2)
    for _ in range(2):
        desk.fail(desk.leased(seq, alone=True), End.EXITED)
        desk.later(60 * S)
    assert desk.states(seq) == ["DEAD"]
    assert desk.status(seq).reason == EXPIRIES_EXHAUSTED
    assert desk.said(seq)[-2:] == ["TaskFailed", "TaskDead"]


def test_completing_twice_under_the_same_lease_gets_the_first_answer_again(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert desk.complete(grant, b"one") is Answer.COMMITTED
    height = len(desk.entries())
    assert desk.complete(grant, b"two") is Answer.COMMITTED
    assert (desk.status(seq).result, len(desk.entries())) == (b"one", height)


def test_the_same_task_twice_in_a_batch_is_completed_once(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    report = Report(seq, grant.lease, End.OK, b"r")
    assert desk.settle(report, report) == [Answer.COMMITTED, Answer.COMMITTED]
    assert desk.said(seq).count("TaskCompleted") == 1


def test_a_failure_after_the_completion_is_cancelled(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.complete(grant)
    assert desk.fail(grant) is Answer.CANCELLED
    assert desk.states(seq) == ["COMPLETED"]


def test_a_report_under_an_earlier_lease_is_cancelled_and_on_record(desk: Desk) -> None:
    seq = desk.one()
    old = desk.leased(seq)
    desk.later(LEASE_NS)
    new = desk.leased(seq, alone=True)
    assert desk.complete(old, b"late") is Answer.CANCELLED
    assert desk.states(seq) == ["LEASED"]
    assert desk.said(seq)[-1] == "TaskCancelled"
    assert desk.complete(new) is Answer.COMMITTED


def test_a_report_of_an_unknown_task_is_rejected_and_not_on_record(desk: Desk) -> None:
    desk.leased(desk.one())
    height = len(desk.entries())
    assert desk.settle(Report(99, 1)) == [Answer.REJECTED]
    assert len(desk.entries()) == height


@pytest.mark.parametrize("lease", [0, -1, 2, 1 << 60])
def test_a_lease_that_was_never_given_is_rejected(desk: Desk, lease: int) -> None:
    seq = desk.one()
    desk.leased(seq)
    assert desk.settle(Report(seq, lease)) == [Answer.REJECTED]
    assert desk.states(seq) == ["LEASED"]


def test_a_task_that_was_never_granted_cannot_be_reported(desk: Desk) -> None:
    a, b = desk.submit(b"a", b"b")
    [grant] = desk.lease(1)
    assert grant.seq == a
    assert desk.settle(Report(b, grant.lease)) == [Answer.REJECTED]
    assert desk.states(b) == ["WAITING"]


def test_a_lease_of_another_generation_is_cancelled(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    report = Report(seq, grant.lease)
    assert desk.settle(report, generation=desk.store.generation - 1) == [Answer.CANCELLED]
    assert desk.states(seq) == ["LEASED"]


def test_a_way_to_end_that_there_is_not_is_rejected(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert desk.settle(Report(seq, grant.lease, 17)) == [Answer.REJECTED]
    assert desk.states(seq) == ["LEASED"]


def test_reports_of_a_batch_are_answered_each_in_its_place(desk: Desk) -> None:
    a, b, c = desk.submit(b"a", b"b", b"c")
    grants = {grant.seq: grant.lease for grant in desk.lease()}
    answers = desk.settle(
        Report(a, grants[a], End.FAILED), Report(77, 1), Report(b, grants[b]), Report(c, 999)
    )
    assert [answer.name for answer in answers] == ["COMMITTED", "REJECTED", "COMMITTED", "REJECTED"]
    assert desk.states(a, b, c) == ["WAITING", "COMPLETED", "LEASED"]


def test_a_turn_is_one_entry(desk: Desk) -> None:
    desk.submit(*[b"x"] * 4)
    grants = desk.lease(2)
    height = len(desk.entries())
    reports = [Report(grant.seq, grant.lease) for grant in grants]
    turned = desk.do(tasks.turn, "w", desk.store.generation, reports, ["default"], 2)
    assert turned.answers == [Answer.COMMITTED] * 2
    assert [grant.seq for grant in turned.leased.grants] == [3, 4]
    assert len(desk.entries()) == height + 1


def test_a_long_error_is_cut(desk: Desk) -> None:
    seq = desk.one()
    desk.fail(desk.leased(seq), error="e" * 100_000, reason="r" * 1000)
    status = desk.status(seq)
    assert 0 < len(status.error) < 10_000
    assert 0 < len(status.reason) <= 100


def test_a_large_result_is_kept_as_a_blob(desk: Desk) -> None:
    seq = desk.one()
    desk.complete(desk.leased(seq), b"r" * 100_000)
    status = desk.status(seq)
    assert (status.result, len(status.blob)) == (b"", 32)


def test_pauses_between_failures_count_failures_alone(desk: Desk) -> None:
    """docs/tasks.md: the pauses between failures double; a lease that ran out is none of them."""
    seq = desk.one(backoff_ns=S, backoff_ns_max=60 * S, expiries_max=5)
    for _ in range(3):
        desk.leased(seq)
        desk.later(LEASE_NS)
        desk.maintain()
    desk.fail(desk.leased(seq))
    pause_ns = desk.status(seq).not_before_ns - desk.store.now_ns()
    assert S // 2 - 1000 <= pause_ns <= S


def test_leases_of_a_generation_to_come_were_never_given(desk: Desk) -> None:
    grants = [desk.leased(desk.one()), *_leased_run(desk)]
    reports = [Report(grant.seq, grant.lease) for grant in grants]
    height = len(desk.entries())
    answers = desk.settle(*reports, generation=desk.store.generation + 1)
    assert answers == [Answer.REJECTED] * 3
    assert len(desk.entries()) == height
    assert desk.settle(*reports) == [Answer.COMMITTED] * 3


def _leased_run(desk: Desk) -> list[Grant]:
    desk.submit(b"a", b"b")
    return desk.lease(2)


def test_nothing_is_left_of_a_queue_whose_tasks_are_forgotten(desk: Desk) -> None:
    seq = desk.one(queue="today", retain_ns=S)
    [grant] = desk.lease(queues=["today"])
    desk.complete(grant)
    assert [row.queue for row in desk.store.read(queues, UNIVERSE)] == ["today"]
    desk.later(S)
    desk.maintain()
    assert not desk.kept(seq)
    assert desk.store.read(queues, UNIVERSE) == []
