"""Task administration: cancel, redrive, retention and progress."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid, NotFound
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import TaskCounts
from holdfast.tasks.operations import (
    AttemptOutcome,
    HeldLease,
    ReportAnswer,
    TaskReport,
    TaskToSubmit,
)
from tests.tasks.rig import KEYS, LEASE_NS, TaskOperationsRig

DAY = 24 * 3600 * S


def task_in_wait_state(rig: TaskOperationsRig, place: str) -> int:
    """Create a task in this wait state."""
    if place == "ready":
        return rig.submit_one()
    if place == "delayed":
        return rig.submit_one(delay_ns=S)
    if place == "retrying":
        seq = rig.submit_one(backoff_ns=S)
        rig.fail(rig.lease_one(seq))
        return seq
    if place == "blocked":
        return rig.submit_one(after=(rig.submit_one(),))
    if place == "parked":
        rig.set_limits(per_key=1)
        _, seq = rig.submit(*[TaskToSubmit(b"x", limit="a")] * 2)
        rig.lease()
        return seq
    assert place == "suspect"
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.maintain()
    return seq


WAIT_STATES = ("ready", "delayed", "retrying", "blocked", "parked", "suspect")


@pytest.mark.parametrize("place", WAIT_STATES)
def test_cancel_ends_a_task_in_every_wait_state(rig: TaskOperationsRig, place: str) -> None:
    seq = task_in_wait_state(rig, place)
    assert rig.cancel(seq, reason="not wanted") == [True]
    assert rig.states(seq) == ["DEAD"]
    assert rig.status(seq).reason == "not wanted"
    assert rig.record_kinds(seq)[-1] == "TaskDead"


@pytest.mark.parametrize("place", WAIT_STATES)
def test_cancelled_task_is_never_granted(rig: TaskOperationsRig, place: str) -> None:
    seq = task_in_wait_state(rig, place)
    rig.cancel(seq)
    rig.advance(DAY)
    assert seq not in [grant.seq for grant in rig.lease() + rig.lease(alone=True)]


def test_cancel_of_a_running_task_revokes_its_lease(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert rig.cancel(seq) == [True]
    assert rig.extend(HeldLease(seq, grant.lease)) == [0]
    assert rig.complete(grant) is ReportAnswer.CANCELLED
    assert rig.states(seq) == ["DEAD"]


def test_cancel_of_a_running_task_increments_revocations(rig: TaskOperationsRig) -> None:
    before = rig.lease_result().revocations
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.cancel(seq)
    assert rig.lease_result().revocations == before + 1


def test_cancel_of_an_ended_task_returns_false(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.complete(rig.lease_one(seq))
    assert rig.cancel(seq) == [False]
    assert rig.states(seq) == ["COMPLETED"]


def test_cancel_of_the_same_task_twice_cancels_once(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    assert rig.cancel(seq, seq) == [True, False]


def test_cancel_of_an_unknown_task_raises_not_found_and_changes_nothing(
    rig: TaskOperationsRig,
) -> None:
    seq = rig.submit_one()
    with pytest.raises(NotFound):
        rig.cancel(seq, 99)
    assert rig.states(seq) == ["WAITING"]


def test_lease_of_a_cancelled_task_does_not_expire(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.cancel(seq)
    rig.advance(LEASE_NS)
    rig.maintain()
    assert rig.record_kinds(seq) == ["TaskCreated", "LeaseGranted", "TaskDead"]


# -- redrive -------------------------------------------------------------------------------------


def submit_cancelled(rig: TaskOperationsRig, **options: object) -> int:
    seq = rig.submit_one(**options)
    rig.cancel(seq)
    return seq


def test_redrive_creates_a_new_task_with_all_attempts(rig: TaskOperationsRig) -> None:
    old = rig.submit_one(b"args", attempts=1, priority=3)
    rig.fail(rig.lease_one(old))
    [new] = rig.redrive(old)
    assert new != old
    grant = rig.lease_one(new)
    assert (grant.args, grant.attempt) == (b"args", 1)
    assert rig.status(old).redriven_by == new
    assert rig.states(old) == ["FAILED"]


def test_second_redrive_returns_the_first_new_task(rig: TaskOperationsRig) -> None:
    old = submit_cancelled(rig)
    assert rig.redrive(old) == rig.redrive(old)
    assert rig.counts() == TaskCounts(ready=1, dead=1)


def test_redrive_of_a_redriven_task(rig: TaskOperationsRig) -> None:
    old = submit_cancelled(rig)
    [new] = rig.redrive(old)
    rig.cancel(new)
    [newer] = rig.redrive(new)
    assert len({old, new, newer}) == 3


def test_redrive_of_the_same_task_twice_in_a_batch_creates_one(rig: TaskOperationsRig) -> None:
    old = submit_cancelled(rig)
    first, second = rig.redrive(old, old)
    assert first == second


def test_redriven_task_keeps_its_idempotency_key(rig: TaskOperationsRig) -> None:
    old = submit_cancelled(rig, key="k")
    [new] = rig.redrive(old)
    assert rig.submit_one(key="k") == new


def test_redriven_task_shares_large_arguments(rig: TaskOperationsRig) -> None:
    large = b"x" * 100_000
    seq = rig.submit(TaskToSubmit(large), retain_ns=S)[0]
    rig.cancel(seq)
    [new] = rig.redrive(seq)
    rig.advance(S)
    rig.maintain()
    assert not rig.exists(seq)
    assert rig.lease_one(new).args == large


@pytest.mark.parametrize("state", ["WAITING", "LEASED", "COMPLETED"])
def test_redrive_of_a_task_that_is_not_failed_or_dead_is_invalid(
    rig: TaskOperationsRig, state: str
) -> None:
    seq = rig.submit_one()
    if state != "WAITING":
        grant = rig.lease_one(seq)
        if state == "COMPLETED":
            rig.complete(grant)
    with pytest.raises(Invalid) as caught:
        rig.redrive(seq)
    assert caught.value.state == state
    assert len(rig.rows()) == 1


def test_redrive_of_an_unknown_task_raises_not_found_and_changes_nothing(
    rig: TaskOperationsRig,
) -> None:
    old = submit_cancelled(rig)
    with pytest.raises(NotFound):
        rig.redrive(old, 99)
    assert rig.status(old).redriven_by == 0


# -- retention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["completed", "failed", "dead"])
def test_ended_task_is_removed_after_its_retention(rig: TaskOperationsRig, end: str) -> None:
    seq = rig.submit_one(retain_ns=3 * S)
    grant = rig.lease_one(seq)
    if end == "completed":
        rig.complete(grant)
    elif end == "failed":
        rig.fail(grant, AttemptOutcome.REFUSED)
    else:
        rig.cancel(seq)
    removal_ns = rig.status(seq).ended_ns + 3 * S
    rig.advance_to(removal_ns - 1)
    rig.maintain()
    assert rig.exists(seq)
    rig.advance_to(removal_ns)
    assert rig.maintain() > 0
    assert not rig.exists(seq)
    assert rig.counts() == TaskCounts()


def test_open_task_is_never_removed_by_retention(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(retain_ns=0)
    rig.advance(1000 * DAY)
    rig.maintain()
    assert rig.exists(seq)


def test_retention_removes_a_bounded_number_per_step(rig: TaskOperationsRig) -> None:
    seqs = rig.submit(*[b"x"] * 100, retain_ns=S)
    rig.report(*(TaskReport(grant.seq, grant.lease) for grant in rig.lease()))
    rig.advance(S)
    for left in (70, 40, 10, 0):
        rig.maintain(30)
        assert rig.counts().completed == left
    assert not any(rig.exists(seq) for seq in seqs)


def test_retention_step_is_bounded_by_tasks_not_by_commits(rig: TaskOperationsRig) -> None:
    """Each task ends in a separate commit. A retention step is bounded by tasks, not by commits."""
    rig.submit(*[b"x"] * 100, retain_ns=S)
    for grant in rig.lease():
        rig.complete(grant)
    rig.advance(S)
    for done, left in ((60, 40), (40, 0)):
        assert rig.maintain(60) == done
        assert rig.counts().completed == left


def test_report_of_a_removed_task_is_rejected(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(retain_ns=0)
    grant = rig.lease_one(seq)
    rig.complete(grant)
    rig.advance(S)
    rig.maintain()
    assert rig.complete(grant) is ReportAnswer.REJECTED


# -- progress ------------------------------------------------------------------------------------


def test_progress_is_stored_without_a_log_entry(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    height = len(rig.entries())
    rig.transact(tasks.report_progress, [(seq, grant.lease, b"half")])
    progress_rows = rig.store.read(lambda txn: txn.scan(KEYS.progress, KEYS.progress + b"\xff"))
    assert [row for _, row in progress_rows] == [b"half"]
    assert len(rig.entries()) == height


def test_progress_under_an_expired_lease_is_ignored(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance(LEASE_NS)
    rig.transact(tasks.report_progress, [(seq, grant.lease, b"half"), (99, 1, b"what")])
    assert rig.store.read(lambda txn: txn.scan(KEYS.progress, KEYS.progress + b"\xff")) == []
