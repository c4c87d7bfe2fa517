"""Task reports: attempt outcomes, retries and the answers to the worker."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.tasks import operations as tasks
from holdfast.tasks.leases import EXPIRIES_EXHAUSTED
from holdfast.tasks.model import TaskCounts
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    ReportAnswer,
    TaskGrant,
    TaskReport,
)
from holdfast.tasks.queries import list_queues
from tests.tasks.rig import LEASE_NS, UNIVERSE, TaskOperationsRig


def test_completion_report_stores_the_result(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    assert rig.complete(rig.lease_one(seq), b"result") is ReportAnswer.COMMITTED
    assert (rig.states(seq), rig.status(seq).result) == (["COMPLETED"], b"result")
    assert rig.counts() == TaskCounts(completed=1)


def test_failed_attempt_is_retried_after_its_backoff(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(backoff_ns=2 * S)
    rig.fail(rig.lease_one(seq), error="no luck")
    status = rig.status(seq)
    assert (rig.states(seq), status.failures, status.error) == (["WAITING"], 1, "no luck")
    assert S <= status.not_before_ns - rig.store.now_ns() <= 2 * S
    assert rig.lease() == []
    rig.advance_to(status.not_before_ns)
    assert rig.lease_one(seq).attempt == 2


def test_retry_backoff_grows_up_to_its_maximum(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(backoff_ns=S, backoff_ns_max=5 * S, attempts=10)
    pauses = []
    for _ in range(6):
        rig.fail(rig.lease_one(seq))
        pauses.append(rig.status(seq).not_before_ns - rig.store.now_ns())
        rig.advance_to(rig.status(seq).not_before_ns)
    assert pauses[0] <= S
    assert max(pauses) <= 5 * S
    assert pauses[-1] > pauses[0]


def test_last_failed_attempt_ends_the_task_as_failed(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(attempts=2)
    rig.fail(rig.lease_one(seq), error="first")
    rig.advance_to(rig.status(seq).not_before_ns)
    rig.fail(rig.lease_one(seq), reason="bad", error="last")
    status = rig.status(seq)
    assert (rig.states(seq), status.failures) == (["FAILED"], 2)
    assert (status.reason, status.error) == ("bad", "last")
    assert rig.record_kinds(seq)[-1] == "TaskFailed"


def test_refused_outcome_ends_the_task_without_retry(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(attempts=10)
    rig.fail(rig.lease_one(seq), AttemptOutcome.REFUSED)
    assert rig.states(seq) == ["FAILED"]


def test_released_outcome_counts_no_failure_and_no_expiry(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(attempts=1, expiries_max=2)
    rig.fail(rig.lease_one(seq), AttemptOutcome.RELEASED)
    status = rig.status(seq)
    assert (status.failures, status.expiries) == (0, 0)
    assert rig.lease_one(seq).attempt == 2


def test_exited_outcome_counts_as_an_expiry_and_quarantines_the_task(
    rig: TaskOperationsRig,
) -> None:
    seq = rig.submit_one(attempts=1)
    rig.fail(rig.lease_one(seq), AttemptOutcome.EXITED)
    status = rig.status(seq)
    assert (status.failures, status.expiries) == (0, 1)
    rig.advance_to(status.not_before_ns)
    assert rig.lease() == []
    assert rig.lease_one(seq, alone=True).suspect


def test_task_is_dead_after_expiries_max_exited_outcomes(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(expiries_max=2)
    for _ in range(2):
        rig.fail(rig.lease_one(seq, alone=True), AttemptOutcome.EXITED)
        rig.advance(60 * S)
    assert rig.states(seq) == ["DEAD"]
    assert rig.status(seq).reason == EXPIRIES_EXHAUSTED
    assert rig.record_kinds(seq)[-2:] == ["TaskFailed", "TaskDead"]


def test_repeated_completion_report_gets_the_first_answer(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert rig.complete(grant, b"one") is ReportAnswer.COMMITTED
    height = len(rig.entries())
    assert rig.complete(grant, b"two") is ReportAnswer.COMMITTED
    assert (rig.status(seq).result, len(rig.entries())) == (b"one", height)


def test_same_report_twice_in_a_batch_completes_once(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    report = TaskReport(seq, grant.lease, AttemptOutcome.OK, b"r")
    assert rig.report(report, report) == [ReportAnswer.COMMITTED, ReportAnswer.COMMITTED]
    assert rig.record_kinds(seq).count("TaskCompleted") == 1


def test_failure_report_after_completion_is_cancelled(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.complete(grant)
    assert rig.fail(grant) is ReportAnswer.CANCELLED
    assert rig.states(seq) == ["COMPLETED"]


def test_report_under_an_earlier_lease_is_cancelled_and_logged(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    old = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    new = rig.lease_one(seq, alone=True)
    assert rig.complete(old, b"late") is ReportAnswer.CANCELLED
    assert rig.states(seq) == ["LEASED"]
    assert rig.record_kinds(seq)[-1] == "TaskCancelled"
    assert rig.complete(new) is ReportAnswer.COMMITTED


def test_report_of_an_unknown_task_is_rejected_and_not_logged(rig: TaskOperationsRig) -> None:
    rig.lease_one(rig.submit_one())
    height = len(rig.entries())
    assert rig.report(TaskReport(99, 1)) == [ReportAnswer.REJECTED]
    assert len(rig.entries()) == height


@pytest.mark.parametrize("lease", [0, -1, 2, 1 << 60])
def test_report_under_a_lease_never_granted_is_rejected(rig: TaskOperationsRig, lease: int) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    assert rig.report(TaskReport(seq, lease)) == [ReportAnswer.REJECTED]
    assert rig.states(seq) == ["LEASED"]


def test_report_of_a_task_never_granted_is_rejected(rig: TaskOperationsRig) -> None:
    a, b = rig.submit(b"a", b"b")
    [grant] = rig.lease(1)
    assert grant.seq == a
    assert rig.report(TaskReport(b, grant.lease)) == [ReportAnswer.REJECTED]
    assert rig.states(b) == ["WAITING"]


def test_report_of_an_earlier_generation_is_cancelled(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    report = TaskReport(seq, grant.lease)
    assert rig.report(report, generation=rig.store.generation - 1) == [ReportAnswer.CANCELLED]
    assert rig.states(seq) == ["LEASED"]


def test_report_with_an_unknown_outcome_is_rejected(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert rig.report(TaskReport(seq, grant.lease, 17)) == [ReportAnswer.REJECTED]
    assert rig.states(seq) == ["LEASED"]


def test_reports_of_a_batch_are_answered_in_order(rig: TaskOperationsRig) -> None:
    a, b, c = rig.submit(b"a", b"b", b"c")
    grants = {grant.seq: grant.lease for grant in rig.lease()}
    answers = rig.report(
        TaskReport(a, grants[a], AttemptOutcome.FAILED),
        TaskReport(77, 1),
        TaskReport(b, grants[b]),
        TaskReport(c, 999),
    )
    assert [answer.name for answer in answers] == ["COMMITTED", "REJECTED", "COMMITTED", "REJECTED"]
    assert rig.states(a, b, c) == ["WAITING", "COMPLETED", "LEASED"]


def test_report_and_lease_is_one_log_entry(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 4)
    grants = rig.lease(2)
    height = len(rig.entries())
    reports = [TaskReport(grant.seq, grant.lease) for grant in grants]
    result = rig.transact(
        tasks.report_and_lease, rig.store.generation, reports, GrantRequest("w", ["default"], 2)
    )
    assert result.answers == [ReportAnswer.COMMITTED] * 2
    assert [grant.seq for grant in result.leased.grants] == [3, 4]
    assert len(rig.entries()) == height + 1


def test_report_truncates_a_long_error(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.fail(rig.lease_one(seq), error="e" * 100_000, reason="r" * 1000)
    status = rig.status(seq)
    assert 0 < len(status.error) < 10_000
    assert 0 < len(status.reason) <= 100


def test_large_result_of_a_report_is_stored_as_a_blob(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.complete(rig.lease_one(seq), b"r" * 100_000)
    status = rig.status(seq)
    assert (status.result, len(status.blob)) == (b"", 32)


def test_retry_backoff_counts_failures_but_not_expiries(rig: TaskOperationsRig) -> None:
    """docs/tasks.md: the backoff doubles with each failure. An expired lease is not a failure."""
    seq = rig.submit_one(backoff_ns=S, backoff_ns_max=60 * S, expiries_max=5)
    for _ in range(3):
        rig.lease_one(seq)
        rig.advance(LEASE_NS)
        rig.maintain()
    rig.fail(rig.lease_one(seq))
    pause_ns = rig.status(seq).not_before_ns - rig.store.now_ns()
    assert S // 2 - 1000 <= pause_ns <= S


def test_report_of_a_later_generation_is_rejected(rig: TaskOperationsRig) -> None:
    grants = [rig.lease_one(rig.submit_one()), *_lease_range(rig)]
    reports = [TaskReport(grant.seq, grant.lease) for grant in grants]
    height = len(rig.entries())
    answers = rig.report(*reports, generation=rig.store.generation + 1)
    assert answers == [ReportAnswer.REJECTED] * 3
    assert len(rig.entries()) == height
    assert rig.report(*reports) == [ReportAnswer.COMMITTED] * 3


def _lease_range(rig: TaskOperationsRig) -> list[TaskGrant]:
    rig.submit(b"a", b"b")
    return rig.lease(2)


def test_queue_without_stored_tasks_is_not_listed(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(queue="today", retain_ns=S)
    [grant] = rig.lease(queues=["today"])
    rig.complete(grant)
    assert [row.queue for row in rig.store.read(list_queues, UNIVERSE)] == ["today"]
    rig.advance(S)
    rig.maintain()
    assert not rig.exists(seq)
    assert rig.store.read(list_queues, UNIVERSE) == []
