"""Task dependencies: `after` blocks a task until its dependencies end."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.tasks.dependents import DEPENDENCY_FAILED
from holdfast.tasks.model import TaskCounts
from holdfast.tasks.operations import AttemptOutcome, TaskToSubmit
from holdfast.tasks.unit_of_work import DEPENDENTS_MAX
from tests.tasks.rig import TaskOperationsRig


def test_dependent_is_granted_when_all_dependencies_completed(rig: TaskOperationsRig) -> None:
    a, b = rig.submit(b"a", b"b")
    seq = rig.submit_one(after=(a, b))
    assert rig.counts() == TaskCounts(ready=2, blocked=1)
    first, second = rig.lease()
    rig.complete(first)
    assert rig.lease() == []
    rig.complete(second)
    assert rig.lease_one(seq).seq == seq


def test_after_may_name_earlier_tasks_of_the_batch(rig: TaskOperationsRig) -> None:
    a, b, c = rig.submit(b"a", TaskToSubmit(b"b", after=(-1,)), TaskToSubmit(b"c", after=(-1, -2)))
    for seq in (a, b, c):
        [grant] = rig.lease()
        assert grant.seq == seq
        rig.complete(grant)
    assert rig.states(a, b, c) == ["COMPLETED"] * 3


def test_dependency_named_twice_is_counted_once(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    seq = rig.submit_one(after=(a, a))
    rig.complete(rig.lease_one(a))
    assert rig.lease_one(seq)


def test_completed_dependency_does_not_block(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    rig.complete(rig.lease_one(a))
    assert rig.lease_one(rig.submit_one(after=(a,)))


@pytest.mark.parametrize("how", ["failed", "dead"])
def test_dependent_of_a_failed_or_dead_task_is_dead(rig: TaskOperationsRig, how: str) -> None:
    a = rig.submit_one()
    seq = rig.submit_one(after=(a,))
    if how == "failed":
        rig.fail(rig.lease_one(a), AttemptOutcome.REFUSED)
    else:
        rig.cancel(a)
    assert rig.states(seq) == ["DEAD"]
    assert rig.status(seq).reason == DEPENDENCY_FAILED


def test_task_submitted_after_a_dead_dependency_is_dead(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    rig.cancel(a)
    seq = rig.submit_one(after=(a,))
    assert rig.record_kinds(seq) == ["TaskCreated", "TaskDead"]


def test_dependents_of_a_dead_task_in_the_same_batch_are_dead(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    rig.cancel(a)
    seqs = rig.submit(
        TaskToSubmit(b"b", after=(a,)),
        TaskToSubmit(b"c", after=(-1,)),
        TaskToSubmit(b"d", after=(-2,)),
    )
    assert rig.states(*seqs) == ["DEAD"] * 3


def test_dependent_of_a_live_and_a_dead_task_is_dead(rig: TaskOperationsRig) -> None:
    alive, gone = rig.submit(b"a", b"b")
    rig.cancel(gone)
    seq = rig.submit_one(after=(alive, gone))
    assert rig.states(seq) == ["DEAD"]
    rig.complete(rig.lease_one(alive))
    assert rig.states(seq) == ["DEAD"]


def test_two_dead_dependencies_log_one_task_dead(rig: TaskOperationsRig) -> None:
    a, b = rig.submit(b"a", b"b")
    seq = rig.submit_one(after=(a, b))
    rig.cancel(a, b)
    assert rig.record_kinds(seq).count("TaskDead") == 1


def test_dependent_stays_blocked_during_a_retry_of_its_dependency(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    seq = rig.submit_one(after=(a,))
    rig.fail(rig.lease_one(a))
    assert rig.states(a, seq) == ["WAITING", "WAITING"]
    rig.advance_to(rig.status(a).not_before_ns)
    rig.complete(rig.lease_one(a))
    assert rig.lease_one(seq)


def test_cancelled_dependent_is_not_unblocked(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    seq = rig.submit_one(after=(a,))
    rig.cancel(seq)
    rig.complete(rig.lease_one(a))
    assert rig.lease() == []
    assert rig.record_kinds(seq) == ["TaskCreated", "TaskDead"]


def test_dependent_with_a_delay_waits_for_dependency_and_delay(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    seq = rig.submit_one(after=(a,), delay_ns=10 * S)
    rig.complete(rig.lease_one(a))
    assert rig.counts() == TaskCounts(delayed=1, completed=1)
    rig.advance(10 * S)
    assert rig.lease_one(seq)


def test_dependents_are_released_in_bounded_transactions(rig: TaskOperationsRig) -> None:
    a = rig.submit_one()
    count = DEPENDENTS_MAX * 5 // 2
    rig.submit(*[TaskToSubmit(b"x", after=(a,))] * count)
    rig.complete(rig.lease_one(a))
    assert rig.counts().blocked == count - DEPENDENTS_MAX
    transactions = 1
    while rig.counts().blocked:
        before = rig.counts().blocked
        rig.maintain()
        assert before - rig.counts().blocked <= DEPENDENTS_MAX
        transactions += 1
    assert transactions == 3
    assert rig.counts() == TaskCounts(ready=count, completed=1)


def test_dependents_are_released_after_their_dependency_is_removed(rig: TaskOperationsRig) -> None:
    a = rig.submit_one(retain_ns=0)
    count = DEPENDENTS_MAX * 5 // 2
    rig.submit(*[TaskToSubmit(b"x", after=(a,))] * count)
    rig.complete(rig.lease_one(a))
    rig.advance(S)
    while rig.maintain():
        pass
    assert not rig.exists(a)
    assert rig.counts() == TaskCounts(ready=count)


def test_chain_of_5000_dependents_ends_in_bounded_transactions(rig: TaskOperationsRig) -> None:
    count = 5000
    rig.submit(b"x", *[TaskToSubmit(b"x", after=(-n,)) for n in range(1, count)])
    rig.cancel(1)
    transactions = 1
    while rig.counts().dead < count:
        before = rig.counts().dead
        rig.maintain()
        assert 0 < rig.counts().dead - before <= DEPENDENTS_MAX
        transactions += 1
    assert transactions >= count // DEPENDENTS_MAX
    assert rig.counts() == TaskCounts(dead=count)
