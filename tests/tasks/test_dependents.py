"""Tasks that wait for others."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.tasks.coordinator import End, New
from holdfast.tasks.decision import DEPENDENTS_MAX
from holdfast.tasks.dependents import DEPENDENCY_FAILED
from holdfast.tasks.rows import Counts
from tests.tasks.rig import Desk


def test_a_dependent_is_granted_when_all_others_have_completed(desk: Desk) -> None:
    a, b = desk.submit(b"a", b"b")
    seq = desk.one(after=(a, b))
    assert desk.counts() == Counts(ready=2, blocked=1)
    first, second = desk.lease()
    desk.complete(first)
    assert desk.lease() == []
    desk.complete(second)
    assert desk.leased(seq).seq == seq


def test_those_of_a_batch_wait_for_each_other(desk: Desk) -> None:
    a, b, c = desk.submit(b"a", New(b"b", after=(-1,)), New(b"c", after=(-1, -2)))
    for seq in (a, b, c):
        [grant] = desk.lease()
        assert grant.seq == seq
        desk.complete(grant)
    assert desk.states(a, b, c) == ["COMPLETED"] * 3


def test_one_that_is_named_twice_is_waited_for_once(desk: Desk) -> None:
    a = desk.one()
    seq = desk.one(after=(a, a))
    desk.complete(desk.leased(a))
    assert desk.leased(seq)


def test_what_has_completed_already_is_not_waited_for(desk: Desk) -> None:
    a = desk.one()
    desk.complete(desk.leased(a))
    assert desk.leased(desk.one(after=(a,)))


@pytest.mark.parametrize("how", ["failed", "dead"])
def test_a_dependent_of_one_that_did_not_complete_is_dead(desk: Desk, how: str) -> None:
    a = desk.one()
    seq = desk.one(after=(a,))
    if how == "failed":
        desk.fail(desk.leased(a), End.REFUSED)
    else:
        desk.cancel(a)
    assert desk.states(seq) == ["DEAD"]
    assert desk.status(seq).reason == DEPENDENCY_FAILED


def test_a_task_after_one_that_has_failed_is_dead_at_once(desk: Desk) -> None:
    a = desk.one()
    desk.cancel(a)
    seq = desk.one(after=(a,))
    assert desk.said(seq) == ["TaskCreated", "TaskDead"]


def test_in_a_batch_those_after_one_that_is_dead_at_once_are_dead_too(desk: Desk) -> None:
    a = desk.one()
    desk.cancel(a)
    seqs = desk.submit(New(b"b", after=(a,)), New(b"c", after=(-1,)), New(b"d", after=(-2,)))
    assert desk.states(*seqs) == ["DEAD"] * 3


def test_a_task_that_waits_for_a_living_and_a_dead_one_is_dead(desk: Desk) -> None:
    alive, gone = desk.submit(b"a", b"b")
    desk.cancel(gone)
    seq = desk.one(after=(alive, gone))
    assert desk.states(seq) == ["DEAD"]
    desk.complete(desk.leased(alive))
    assert desk.states(seq) == ["DEAD"]


def test_one_failure_of_several_ends_the_dependent_once(desk: Desk) -> None:
    a, b = desk.submit(b"a", b"b")
    seq = desk.one(after=(a, b))
    desk.cancel(a, b)
    assert desk.said(seq).count("TaskDead") == 1


def test_a_retry_of_another_is_waited_for(desk: Desk) -> None:
    a = desk.one()
    seq = desk.one(after=(a,))
    desk.fail(desk.leased(a))
    assert desk.states(a, seq) == ["WAITING", "WAITING"]
    desk.until(desk.status(a).not_before_ns)
    desk.complete(desk.leased(a))
    assert desk.leased(seq)


def test_a_dependent_that_was_cancelled_is_not_woken(desk: Desk) -> None:
    a = desk.one()
    seq = desk.one(after=(a,))
    desk.cancel(seq)
    desk.complete(desk.leased(a))
    assert desk.lease() == []
    assert desk.said(seq) == ["TaskCreated", "TaskDead"]


def test_a_dependent_with_a_delay_waits_for_both(desk: Desk) -> None:
    a = desk.one()
    seq = desk.one(after=(a,), delay_ns=10 * S)
    desk.complete(desk.leased(a))
    assert desk.counts() == Counts(delayed=1, completed=1)
    desk.later(10 * S)
    assert desk.leased(seq)


def test_many_dependents_are_told_by_bounded_decisions(desk: Desk) -> None:
    a = desk.one()
    count = DEPENDENTS_MAX * 5 // 2
    desk.submit(*[New(b"x", after=(a,))] * count)
    desk.complete(desk.leased(a))
    assert desk.counts().blocked == count - DEPENDENTS_MAX
    decisions = 1
    while desk.counts().blocked:
        before = desk.counts().blocked
        desk.maintain()
        assert before - desk.counts().blocked <= DEPENDENTS_MAX
        decisions += 1
    assert decisions == 3
    assert desk.counts() == Counts(ready=count, completed=1)


def test_dependents_are_told_though_the_other_is_forgotten_meanwhile(desk: Desk) -> None:
    a = desk.one(retain_ns=0)
    count = DEPENDENTS_MAX * 5 // 2
    desk.submit(*[New(b"x", after=(a,))] * count)
    desk.complete(desk.leased(a))
    desk.later(S)
    while desk.maintain():
        pass
    assert not desk.kept(a)
    assert desk.counts() == Counts(ready=count)


def test_a_chain_of_five_thousand_is_ended_by_bounded_decisions(desk: Desk) -> None:
    count = 5000
    desk.submit(b"x", *[New(b"x", after=(-n,)) for n in range(1, count)])
    desk.cancel(1)
    decisions = 1
    while desk.counts().dead < count:
        before = desk.counts().dead
        desk.maintain()
        assert 0 < desk.counts().dead - before <= DEPENDENTS_MAX
        decisions += 1
    assert decisions >= count // DEPENDENTS_MAX
    assert desk.counts() == Counts(dead=count)
