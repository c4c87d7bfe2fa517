"""Notifications: every transaction that makes a task available notifies the topic of its queue only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.clock import S
from holdfast.tasks import operations as tasks
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from tests.tasks.rig import KEYS, LEASE_NS, TaskOperationsRig


def last_notified_commit(rig: TaskOperationsRig, queue: str = "default") -> int:
    """The last commit that notified the topic of a queue."""
    return rig.store.wait(KEYS.queue_topic(queue), 0, 0.0)


def notifies_queue(
    rig: TaskOperationsRig, action: Callable[[], object], queue: str = "default"
) -> bool:
    before = last_notified_commit(rig, queue)
    action()
    return last_notified_commit(rig, queue) > before


def test_submit_notifies_only_the_queue_of_the_task(rig: TaskOperationsRig) -> None:
    rig.submit_one(queue="other")
    rig.submit_one()
    before = last_notified_commit(rig, "other")
    assert notifies_queue(rig, lambda: rig.submit_one())
    assert last_notified_commit(rig, "other") == before


def test_submit_of_a_delayed_task_notifies_its_queue(rig: TaskOperationsRig) -> None:
    assert notifies_queue(rig, lambda: rig.submit_one(delay_ns=S))


def test_maintain_notifies_the_queue_of_a_due_task(rig: TaskOperationsRig) -> None:
    rig.submit_one(delay_ns=S)
    rig.advance(S)
    assert notifies_queue(rig, rig.maintain)


def test_failed_attempt_notifies_its_queue(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert notifies_queue(rig, lambda: rig.fail(grant))


def test_released_task_notifies_its_queue(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert notifies_queue(rig, lambda: rig.fail(grant, AttemptOutcome.RELEASED))


def test_expired_lease_notifies_its_queue(rig: TaskOperationsRig) -> None:
    rig.lease_one(rig.submit_one())
    rig.advance(LEASE_NS)
    assert notifies_queue(rig, rig.maintain)


def test_unblocked_dependent_notifies_its_queue(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.submit_one(after=(seq,), queue="other")
    grant = rig.lease_one(seq)
    assert notifies_queue(rig, lambda: rig.complete(grant), "other")


@pytest.mark.parametrize("limit", ["", "a"])
def test_freed_concurrency_slot_notifies_its_queue(rig: TaskOperationsRig, limit: str) -> None:
    rig.set_limits(concurrency=1)
    rig.submit(TaskToSubmit(b"x", limit=limit), TaskToSubmit(b"y"))
    [grant] = rig.lease()
    assert notifies_queue(rig, lambda: rig.complete(grant))


def test_freed_limit_key_notifies_its_queue(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    rig.submit(*[TaskToSubmit(b"x", limit="a")] * 2)
    [grant] = rig.lease()
    assert notifies_queue(rig, lambda: rig.complete(grant))


def test_cancel_notifies_the_queue_of_its_limit_key(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    first, *_ = rig.submit(*[TaskToSubmit(b"x", limit="a")] * 2)
    rig.lease()
    assert notifies_queue(rig, lambda: rig.cancel(first))


def test_changed_limit_notifies_its_queue(rig: TaskOperationsRig) -> None:
    rig.set_limits(concurrency=1)
    rig.submit(b"x", b"y")
    rig.lease()
    assert notifies_queue(rig, lambda: rig.set_limits(concurrency=2))


def test_redrive_notifies_its_queue(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.cancel(seq)
    assert notifies_queue(rig, lambda: rig.redrive(seq))


def test_unroutable_task_notifies_its_queue(rig: TaskOperationsRig) -> None:
    rig.submit_one(name="old")
    assert notifies_queue(rig, lambda: rig.lease(names=["new"]))


def test_cancel_of_a_leased_task_notifies_the_revoked_topic(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    before = rig.store.wait(KEYS.revoked_topic, 0, 0.0)
    rig.cancel(seq)
    assert rig.store.wait(KEYS.revoked_topic, 0, 0.0) > before


@pytest.mark.parametrize("end", ["completed", "failed", "dead"])
def test_end_of_a_task_notifies_its_task_topic(rig: TaskOperationsRig, end: str) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    topic = KEYS.task_topic(seq)
    before = rig.store.wait(topic, 0, 0.0)
    if end == "completed":
        rig.complete(grant)
    elif end == "failed":
        rig.fail(grant, AttemptOutcome.REFUSED)
    else:
        rig.cancel(seq)
    assert rig.store.wait(topic, 0, 0.0) > before


def test_completion_without_new_work_does_not_notify(rig: TaskOperationsRig) -> None:
    rig.submit(b"x", b"y")
    first, _ = rig.lease()
    assert not notifies_queue(rig, lambda: rig.report(TaskReport(first.seq, first.lease)))


def test_lease_does_not_notify(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    assert not notifies_queue(
        rig, lambda: rig.transact(tasks.lease, GrantRequest("w", ["default"], 5))
    )
