"""Pauses of queues: a paused queue accepts tasks, grants none and loses none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import S
from holdfast.errors import Invalid, NothingToDo
from holdfast.tasks import operations as tasks
from holdfast.tasks import queries
from holdfast.tasks.model import PROCESS, QueueLimits, TaskSpec, get_limits
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    ReportAnswer,
    TaskReport,
    TaskToSubmit,
)
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, TaskOperationsRig
from tests.tasks.test_notifications import notifies_queue


def test_paused_queue_grants_nothing_and_accepts_tasks(rig: TaskOperationsRig) -> None:
    before = rig.submit(b"a", b"b")
    assert rig.set_paused(True)
    assert not rig.set_paused(True)
    after = rig.submit_one(kind=PROCESS)
    for alone in (False, True):
        leased = rig.lease_result(alone=alone)
        assert (leased.grants, leased.suspects) == ([], False)
    assert rig.set_paused(False)
    assert not rig.set_paused(False)
    assert [grant.seq for grant in rig.lease()] == [*before, after]


def test_other_queues_are_not_paused(rig: TaskOperationsRig) -> None:
    rig.set_paused(True, "paper")
    rig.submit_one(queue="paper")
    other = rig.submit_one()
    assert [grant.seq for grant in rig.lease(queues=["paper", "default"])] == [other]


def test_running_tasks_of_a_paused_queue_end_and_retry_after_it(rig: TaskOperationsRig) -> None:
    first, second, third = rig.submit(b"a", b"b", b"c")
    grants = rig.lease()
    rig.set_paused(True)
    report = TaskReport(grants[0].seq, grants[0].lease)
    request = GrantRequest("w", ["default"], 5)
    result = rig.transact(tasks.report_and_lease, rig.store.generation, [report], request)
    assert (result.answers, result.leased.grants) == ([ReportAnswer.COMMITTED], [])
    rig.fail(grants[1], AttemptOutcome.RELEASED)
    # The worker of the third task dies.
    rig.advance(LEASE_NS)
    assert rig.lease() == []
    assert rig.lease_result(alone=True).grants == []
    rig.set_paused(False)
    assert [grant.seq for grant in rig.lease(alone=True)] == [third]
    assert [grant.seq for grant in rig.lease()] == [second]
    assert rig.state(first).name == "COMPLETED"


def test_delayed_blocked_limited_and_unknown_tasks_wait_until_the_resume(
    rig: TaskOperationsRig,
) -> None:
    rig.set_limits(per_key=1)
    rig.set_paused(True)
    delayed = rig.submit_one(delay_ns=S)
    keyed = rig.submit(*[TaskToSubmit(b"x", limit="k")] * 2)
    named = rig.submit_one(name="other")
    blocked = rig.submit_one(after=(keyed[0],))
    rig.advance(S)
    assert rig.lease(names=("work",)) == []
    rig.set_paused(False)
    assert {grant.seq for grant in rig.lease()} == {delayed, keyed[0], named}
    grant = rig.status(keyed[0])
    rig.report(TaskReport(keyed[0], grant.lease))
    assert {grant.seq for grant in rig.lease()} == {keyed[1], blocked}


def test_parked_request_of_a_paused_queue_stays_parked(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    rig.set_paused(True)
    request = GrantRequest("w", ["default"], 1)
    with pytest.raises(NothingToDo):
        rig.transact(tasks.lease_or_park, request, 0)
    rig.set_paused(False)
    assert len(rig.transact(tasks.lease_or_park, request, 0).grants) == 1


def test_paused_queue_shows_no_work(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    rig.set_paused(True)
    assert rig.store.read(queries.queues_with_work, UNIVERSE, ["default"]) == []
    rig.set_paused(False)
    assert rig.store.read(queries.queues_with_work, UNIVERSE, ["default"]) == ["default"]


def test_resume_notifies_the_queue(rig: TaskOperationsRig) -> None:
    assert not notifies_queue(rig, lambda: rig.set_paused(True))
    assert notifies_queue(rig, lambda: rig.set_paused(False))


def test_new_limit_does_not_resume_a_queue(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    rig.set_paused(True)
    rig.set_limits(concurrency=3)
    rig.transact(tasks.set_limits, "default", QueueLimits(concurrency=2), True)
    assert rig.lease() == []
    rig.set_paused(False)
    assert rig.store.read(get_limits, KEYS, "default") == QueueLimits(2, 0, (2, 0))
    assert len(rig.lease()) == 1


def test_resumed_queue_leaves_no_row(rig: TaskOperationsRig) -> None:
    rig.set_paused(True, "paper")
    assert rig.store.read(queries.find_queue, UNIVERSE, "paper") is not None
    rig.set_paused(False, "paper")
    assert rig.store.read(queries.find_queue, UNIVERSE, "paper") is None


def test_queue_name_is_checked(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.set_paused(True, "")


def test_pause_survives_a_new_process(tmp_path: Path) -> None:
    spec, request = TaskSpec(name="work"), GrantRequest("w", ["default"], 9)
    counts = itertools.count()
    for paused in (True, False):
        with stores.open(tmp_path / "store") as store:
            store.transact(tasks.submit, UNIVERSE, spec, [TaskToSubmit(b"%d" % next(counts))])
            store.transact(tasks.set_queue_paused, UNIVERSE, "default", paused)
        with stores.open(tmp_path / "store") as store:
            grants = store.transact(tasks.lease, UNIVERSE, request).grants
            assert [grant.seq for grant in grants] == ([] if paused else [1, 2])
