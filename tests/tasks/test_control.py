"""Cancelling, redriving, forgetting, and what tasks say of themselves."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid, NotFound
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import Answer, End, Hold, New, Report
from holdfast.tasks.rows import Counts
from tests.tasks.rig import KEYS, LEASE_NS, Desk

DAY = 24 * 3600 * S


def in_place(desk: Desk, place: str) -> int:
    """A task that waits in this place."""
    if place == "ready":
        return desk.one()
    if place == "delayed":
        return desk.one(delay_ns=S)
    if place == "retrying":
        seq = desk.one(backoff_ns=S)
        desk.fail(desk.leased(seq))
        return seq
    if place == "blocked":
        return desk.one(after=(desk.one(),))
    if place == "parked":
        desk.limit(per_key=1)
        _, seq = desk.submit(*[New(b"x", limit="a")] * 2)
        desk.lease()
        return seq
    assert place == "suspect"
    seq = desk.one()
    desk.leased(seq)
    desk.later(LEASE_NS)
    desk.maintain()
    return seq


PLACES = ("ready", "delayed", "retrying", "blocked", "parked", "suspect")


@pytest.mark.parametrize("place", PLACES)
def test_a_task_is_cancelled_wherever_it_waits(desk: Desk, place: str) -> None:
    seq = in_place(desk, place)
    assert desk.cancel(seq, reason="not wanted") == [True]
    assert desk.states(seq) == ["DEAD"]
    assert desk.status(seq).reason == "not wanted"
    assert desk.said(seq)[-1] == "TaskDead"


@pytest.mark.parametrize("place", PLACES)
def test_a_cancelled_task_is_never_granted(desk: Desk, place: str) -> None:
    seq = in_place(desk, place)
    desk.cancel(seq)
    desk.later(DAY)
    assert seq not in [grant.seq for grant in desk.lease() + desk.lease(alone=True)]


def test_a_task_that_runs_is_cancelled_and_its_worker_is_told(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert desk.cancel(seq) == [True]
    assert desk.extend(Hold(seq, grant.lease)) == [0]
    assert desk.complete(grant) is Answer.CANCELLED
    assert desk.states(seq) == ["DEAD"]


def test_cancelling_counts_revocations_of_what_runs(desk: Desk) -> None:
    before = desk.ask().revocations
    seq = desk.one()
    desk.leased(seq)
    desk.cancel(seq)
    assert desk.ask().revocations == before + 1


def test_what_has_ended_is_not_cancelled(desk: Desk) -> None:
    seq = desk.one()
    desk.complete(desk.leased(seq))
    assert desk.cancel(seq) == [False]
    assert desk.states(seq) == ["COMPLETED"]


def test_the_same_task_twice_is_cancelled_once(desk: Desk) -> None:
    seq = desk.one()
    assert desk.cancel(seq, seq) == [True, False]


def test_cancelling_an_unknown_task_changes_nothing(desk: Desk) -> None:
    seq = desk.one()
    with pytest.raises(NotFound):
        desk.cancel(seq, 99)
    assert desk.states(seq) == ["WAITING"]


def test_a_lease_that_is_cancelled_does_not_expire_as_well(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    desk.cancel(seq)
    desk.later(LEASE_NS)
    desk.maintain()
    assert desk.said(seq) == ["TaskCreated", "LeaseGranted", "TaskDead"]


# -- redriving -----------------------------------------------------------------------------------


def dead(desk: Desk, **options: object) -> int:
    seq = desk.one(**options)
    desk.cancel(seq)
    return seq


def test_a_redriven_task_is_a_new_one_with_all_its_attempts(desk: Desk) -> None:
    old = desk.one(b"args", attempts=1, priority=3)
    desk.fail(desk.leased(old))
    [new] = desk.redrive(old)
    assert new != old
    grant = desk.leased(new)
    assert (grant.args, grant.attempt) == (b"args", 1)
    assert desk.status(old).redriven_by == new
    assert desk.states(old) == ["FAILED"]


def test_redriving_twice_answers_with_the_first_new_task(desk: Desk) -> None:
    old = dead(desk)
    assert desk.redrive(old) == desk.redrive(old)
    assert desk.counts() == Counts(ready=1, dead=1)


def test_a_redriven_task_can_be_redriven(desk: Desk) -> None:
    old = dead(desk)
    [new] = desk.redrive(old)
    desk.cancel(new)
    [newer] = desk.redrive(new)
    assert len({old, new, newer}) == 3


def test_the_same_task_twice_in_a_batch_is_redriven_once(desk: Desk) -> None:
    old = dead(desk)
    first, second = desk.redrive(old, old)
    assert first == second


def test_a_redriven_task_keeps_its_key(desk: Desk) -> None:
    old = dead(desk, key="k")
    [new] = desk.redrive(old)
    assert desk.one(key="k") == new


def test_large_arguments_are_shared_with_the_redriven_task(desk: Desk) -> None:
    large = b"x" * 100_000
    seq = desk.submit(New(large), retain_ns=S)[0]
    desk.cancel(seq)
    [new] = desk.redrive(seq)
    desk.later(S)
    desk.maintain()
    assert not desk.kept(seq)
    assert desk.leased(new).args == large


@pytest.mark.parametrize("state", ["WAITING", "LEASED", "COMPLETED"])
def test_only_what_failed_or_died_is_redriven(desk: Desk, state: str) -> None:
    seq = desk.one()
    if state != "WAITING":
        grant = desk.leased(seq)
        if state == "COMPLETED":
            desk.complete(grant)
    with pytest.raises(Invalid) as refused:
        desk.redrive(seq)
    assert refused.value.state == state
    assert len(desk.rows()) == 1


def test_redriving_an_unknown_task_changes_nothing(desk: Desk) -> None:
    old = dead(desk)
    with pytest.raises(NotFound):
        desk.redrive(old, 99)
    assert desk.status(old).redriven_by == 0


# -- retention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["completed", "failed", "dead"])
def test_a_task_is_kept_for_its_time_once_it_has_ended(desk: Desk, end: str) -> None:
    seq = desk.one(retain_ns=3 * S)
    grant = desk.leased(seq)
    if end == "completed":
        desk.complete(grant)
    elif end == "failed":
        desk.fail(grant, End.REFUSED)
    else:
        desk.cancel(seq)
    until = desk.status(seq).ended_ns + 3 * S
    desk.until(until - 1)
    desk.maintain()
    assert desk.kept(seq)
    desk.until(until)
    assert desk.maintain() > 0
    assert not desk.kept(seq)
    assert desk.counts() == Counts()


def test_what_has_not_ended_is_never_forgotten(desk: Desk) -> None:
    seq = desk.one(retain_ns=0)
    desk.later(1000 * DAY)
    desk.maintain()
    assert desk.kept(seq)


def test_forgetting_takes_bounded_steps(desk: Desk) -> None:
    seqs = desk.submit(*[b"x"] * 100, retain_ns=S)
    desk.settle(*(Report(grant.seq, grant.lease) for grant in desk.lease()))
    desk.later(S)
    for left in (70, 40, 10, 0):
        desk.maintain(30)
        assert desk.counts().completed == left
    assert not any(desk.kept(seq) for seq in seqs)


def test_a_step_forgets_as_many_however_they_have_ended(desk: Desk) -> None:
    """Tasks that ended in commits of their own: a step is bounded by tasks, not by commits."""
    desk.submit(*[b"x"] * 100, retain_ns=S)
    for grant in desk.lease():
        desk.complete(grant)
    desk.later(S)
    for done, left in ((60, 40), (40, 0)):
        assert desk.maintain(60) == done
        assert desk.counts().completed == left


def test_reports_of_a_forgotten_task_are_rejected(desk: Desk) -> None:
    seq = desk.one(retain_ns=0)
    grant = desk.leased(seq)
    desk.complete(grant)
    desk.later(S)
    desk.maintain()
    assert desk.complete(grant) is Answer.REJECTED


# -- progress ------------------------------------------------------------------------------------


def test_progress_is_kept_beside_the_log(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    height = len(desk.entries())
    desk.do(tasks.report_progress, [(seq, grant.lease, b"half")])
    said = desk.store.read(lambda txn: txn.scan(KEYS.progress, KEYS.progress + b"\xff"))
    assert [row for _, row in said] == [b"half"]
    assert len(desk.entries()) == height


def test_progress_under_a_lost_lease_is_ignored(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.later(LEASE_NS)
    desk.do(tasks.report_progress, [(seq, grant.lease, b"half"), (99, 1, b"what")])
    assert desk.store.read(lambda txn: txn.scan(KEYS.progress, KEYS.progress + b"\xff")) == []
