"""Task leases: grant order, task names and kinds, expiry, extension and concurrency limits."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.tasks import leases as leases
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import TaskCounts
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    HeldLease,
    LeaseResult,
    ReportAnswer,
    TaskReport,
    TaskToSubmit,
)
from tests.tasks.rig import LEASE_NS, UNIVERSE, TaskOperationsRig

# -- grant order ---------------------------------------------------------------------------------


def test_lease_grants_the_oldest_task_first(rig: TaskOperationsRig) -> None:
    seqs = rig.submit(b"a", b"b", b"c")
    assert [grant.seq for grant in rig.lease(2)] == seqs[:2]
    assert [grant.seq for grant in rig.lease(2)] == seqs[2:]


def test_lease_grants_by_priority_before_age(rig: TaskOperationsRig) -> None:
    low, high, higher = rig.submit_one(priority=-1), rig.submit_one(), rig.submit_one(priority=9)
    assert [grant.seq for grant in rig.lease()] == [higher, high, low]


def test_lease_serves_queues_in_the_requested_order(rig: TaskOperationsRig) -> None:
    a, b = rig.submit_one(queue="a"), rig.submit_one(queue="b")
    assert [grant.seq for grant in rig.lease(queues=["b", "a"])] == [b, a]


def test_lease_ignores_queues_not_requested(rig: TaskOperationsRig) -> None:
    rig.submit_one(queue="a")
    assert rig.lease(queues=["b", "a2"]) == []
    assert rig.counts("a") == TaskCounts(ready=1)


def test_leased_task_is_not_granted_to_another_worker(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    assert len(rig.lease(worker="v")) == 1
    assert rig.lease(worker="w") == []


def test_grant_contains_name_arguments_attempt_and_lease(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(b"args", name="resize", queue="q", window_ns=7 * S)
    [grant] = rig.lease(worker="v", queues=["q"])
    assert (grant.seq, grant.name, grant.args, grant.queue) == (seq, "resize", b"args", "q")
    assert (grant.attempt, grant.lease_ns, grant.window_ns) == (1, LEASE_NS, 7 * S)
    assert (grant.generation, grant.suspect) == (rig.store.generation, False)


def test_lease_with_limit_zero_grants_nothing(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    assert rig.lease(0) == []


@pytest.mark.parametrize("limit", [-1, 1_000_000])
def test_lease_with_a_limit_out_of_bounds_is_invalid(rig: TaskOperationsRig, limit: int) -> None:
    with pytest.raises(Invalid):
        rig.lease(limit)


@pytest.mark.parametrize("worker", ["", "w" * 1000])
def test_lease_with_a_bad_worker_name_is_invalid(rig: TaskOperationsRig, worker: str) -> None:
    with pytest.raises(Invalid):
        rig.lease(worker=worker)


def test_lease_grants_at_most_lease_batch_max_tasks(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 1200)
    assert len(rig.lease(5000)) == leases.LEASE_BATCH_MAX
    assert rig.counts().ready == 200


def test_lease_of_large_arguments_is_limited_by_lease_bytes_max(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x" * 1_000_000] * 8)
    granted = []
    while grants := rig.lease(100):
        assert sum(len(grant.args) for grant in grants[:-1]) < leases.LEASE_BYTES_MAX
        granted.append(len(grants))
    assert sum(granted) == 8
    assert len(granted) > 1


def test_tasks_with_different_lease_durations_get_separate_leases(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b")
    rig.submit_one(lease_ns=LEASE_NS * 2)
    short, also_short, long = rig.lease()
    assert short.lease == also_short.lease != long.lease


# -- names and kinds -----------------------------------------------------------------------------


def lease_seqs(rig: TaskOperationsRig, *names: str, limit: int = 100) -> list[int]:
    """Lease as a worker with these task names and return the granted seqs."""
    return [grant.seq for grant in rig.lease(limit, names=names)]


def test_lease_grants_only_the_task_names_of_the_worker(rig: TaskOperationsRig) -> None:
    old, new = rig.submit_one(name="old"), rig.submit_one(name="new")
    assert lease_seqs(rig, "new") == [new]
    assert rig.counts() == TaskCounts(stray=1, leased=1)
    assert lease_seqs(rig, "old", "new") == [old]


def test_lease_without_task_names_grants_all_names(rig: TaskOperationsRig) -> None:
    old = rig.submit_one(name="old")
    assert lease_seqs(rig, "new") == []
    assert lease_seqs(rig) == [old]


def test_unroutable_task_keeps_its_priority(rig: TaskOperationsRig) -> None:
    urgent = rig.submit_one(name="old", priority=5)
    assert lease_seqs(rig, "new") == []
    rig.submit_one(name="new")
    assert lease_seqs(rig, "new", "old", limit=1) == [urgent]


def test_unroutable_tasks_do_not_block_other_leases(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 50, name="old")
    new = rig.submit_one(name="new")
    assert lease_seqs(rig, "new", limit=1) == [new]


def test_unroutable_task_can_be_cancelled(rig: TaskOperationsRig) -> None:
    old = rig.submit_one(name="old")
    lease_seqs(rig, "new")
    assert rig.cancel(old) == [True]
    assert rig.counts() == TaskCounts(dead=1)


def test_unroutable_task_does_not_hold_its_limit_key(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    first = rig.submit_one(name="new", limit="a")
    rig.submit_one(name="old", limit="a")
    third = rig.submit_one(name="new", limit="a")
    [grant] = rig.lease(1)
    assert grant.seq == first
    assert rig.lease() == []
    rig.complete(grant)
    granted = [*lease_seqs(rig, "new"), *lease_seqs(rig, "new")]
    assert granted == [third]


def test_lease_grants_each_kind_up_to_its_free_slots(rig: TaskOperationsRig) -> None:
    for kind in (0, 1, 2):
        rig.submit(*[b"x"] * 3, kind=kind)
    leased: LeaseResult = rig.transact(
        tasks.lease, GrantRequest("w", ["default"], 10, free_slots=(1, 0, 2))
    )
    assert [grant.seq for grant in leased.grants] == [1, 7, 8]


def test_lease_with_free_slots_for_some_kinds_only_is_invalid(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.transact(tasks.lease, GrantRequest("w", ["default"], 10, free_slots=(1, 2)))


# -- expiry --------------------------------------------------------------------------------------


def test_expired_lease_makes_the_task_wait_again(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    assert rig.maintain() > 0
    assert rig.states(seq) == ["WAITING"]
    assert rig.status(seq).expiries == 1


def test_lease_is_valid_until_its_last_nanosecond(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns - 1)
    assert rig.complete(grant) is ReportAnswer.COMMITTED


def test_lease_is_expired_at_expires_ns(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns)
    assert rig.complete(grant) is ReportAnswer.CANCELLED


def test_quarantined_task_is_leased_only_with_alone(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    leased = rig.lease_result()
    assert (leased.grants, leased.suspects) == ([], True)
    assert rig.counts() == TaskCounts(suspect=1)
    grant = rig.lease_one(seq, alone=True)
    assert (grant.attempt, grant.suspect) == (2, True)


@pytest.mark.parametrize(("expiries_max", "suspect"), [(1, []), (2, [1]), (3, [2])])
def test_last_lease_before_expiries_max_is_quarantined(
    rig: TaskOperationsRig, expiries_max: int, suspect: list[int]
) -> None:
    seq = rig.submit_one(expiries_max=expiries_max)
    suspect_expiries = []
    for expiries in range(expiries_max):
        if rig.lease_one(seq, alone=True).suspect:
            suspect_expiries.append(expiries)
        rig.advance(LEASE_NS)
        rig.maintain()
    assert (suspect_expiries, rig.states(seq)) == (suspect, ["DEAD"])


def test_quarantined_task_is_leased_without_other_tasks(rig: TaskOperationsRig) -> None:
    bad = rig.submit_one()
    rig.lease_one(bad)
    rig.advance(LEASE_NS)
    rig.submit(b"a", b"b")
    assert [grant.seq for grant in rig.lease(100, alone=True)] == [bad]


def test_lease_with_alone_grants_ready_tasks_without_a_quarantined_one(
    rig: TaskOperationsRig,
) -> None:
    seqs = rig.submit(b"a", b"b")
    assert [grant.seq for grant in rig.lease(100, alone=True)] == seqs


def test_task_is_dead_after_expiries_max_expired_leases(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(expiries_max=3)
    for _ in range(3):
        rig.lease_one(seq, alone=True)
        rig.advance(LEASE_NS)
        rig.maintain()
    assert rig.states(seq) == ["DEAD"]
    assert rig.status(seq).reason == leases.EXPIRIES_EXHAUSTED
    assert rig.record_kinds(seq)[-2:] == ["LeaseExpired", "TaskDead"]


def test_leases_of_a_batch_expire_individually(rig: TaskOperationsRig) -> None:
    a, b = rig.submit(b"a", b"b")
    first, _ = rig.lease()
    rig.advance(LEASE_NS // 2)
    rig.extend(HeldLease(first.seq, first.lease))
    rig.advance(LEASE_NS // 2)
    rig.maintain()
    assert rig.states(a, b) == ["LEASED", "WAITING"]
    rig.advance(LEASE_NS // 2)
    rig.maintain()
    assert rig.states(a, b) == ["WAITING", "WAITING"]


def test_lease_expires_at_most_expired_max_leases_per_transaction(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(30):
        rig.submit(*[b"x"] * 20)
        rig.lease(20)
    rig.advance(LEASE_NS)
    monkeypatch.setattr(leases, "EXPIRED_MAX", 100)
    rig.lease(1)
    assert rig.counts().leased > 0
    while rig.maintain():
        pass
    assert rig.counts() == TaskCounts(suspect=600)


def test_next_due_ns_is_the_first_lease_expiry_or_delay(rig: TaskOperationsRig) -> None:
    def due() -> int | None:
        return rig.store.read(leases.next_due_ns, UNIVERSE)

    assert due() is None
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert due() == grant.expires_ns
    rig.submit_one(delay_ns=S)
    assert due() == rig.store.now_ns() + S


# -- extension -----------------------------------------------------------------------------------


def test_extend_sets_the_lease_expiry_from_now(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance(LEASE_NS // 2)
    [expires_ns] = rig.extend(HeldLease(seq, grant.lease))
    assert expires_ns == rig.store.now_ns() + LEASE_NS == rig.status(seq).expires_ns


@pytest.mark.parametrize("wrong", ["lease", "task", "generation"])
def test_extend_of_a_lease_not_held_returns_zero(rig: TaskOperationsRig, wrong: str) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    before = rig.status(seq)
    held_lease = HeldLease(seq + (wrong == "task"), grant.lease + (wrong == "lease"))
    generation = rig.store.generation + (wrong == "generation")
    assert rig.extend(held_lease, generation=generation) == [0]
    assert rig.status(seq) == before


def test_extend_of_an_expired_lease_returns_zero(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    rig.advance_to(grant.expires_ns)
    assert rig.extend(HeldLease(seq, grant.lease)) == [0]


def test_extend_answers_each_lease_of_a_batch(rig: TaskOperationsRig) -> None:
    a, b = rig.submit(b"a", b"b")
    first, second = rig.lease()
    rig.complete(first)
    rig.advance(S)
    ended_ns, extended_ns = rig.extend(HeldLease(a, first.lease), HeldLease(b, second.lease))
    assert (ended_ns, extended_ns) == (0, rig.status(b).expires_ns)


def test_extend_without_progress_is_bounded_by_the_execution_window(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(window_ns=LEASE_NS * 3 // 2)
    grant = rig.lease_one(seq)
    granted_ns = rig.status(seq).granted_ns
    rig.advance(LEASE_NS * 3 // 4)
    [expires_ns] = rig.extend(HeldLease(seq, grant.lease))
    assert expires_ns == granted_ns + LEASE_NS * 3 // 2
    rig.advance(LEASE_NS // 2)
    assert rig.extend(HeldLease(seq, grant.lease)) == [expires_ns]
    rig.advance(LEASE_NS)
    assert rig.extend(HeldLease(seq, grant.lease)) == [0]


def test_extend_with_progress_restarts_the_execution_window(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(window_ns=LEASE_NS)
    grant = rig.lease_one(seq)
    for _ in range(10):
        rig.advance(LEASE_NS * 3 // 4)
        [expires_ns] = rig.extend(HeldLease(seq, grant.lease, True))
        assert expires_ns == rig.store.now_ns() + LEASE_NS
    assert rig.complete(grant) is ReportAnswer.COMMITTED


def test_extend_never_shortens_a_lease(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(window_ns=S)
    grant = rig.lease_one(seq)
    assert rig.extend(HeldLease(seq, grant.lease, True)) == [grant.expires_ns]


# -- limits --------------------------------------------------------------------------------------


def test_queue_concurrency_limits_leases(rig: TaskOperationsRig) -> None:
    rig.set_limits(concurrency=2)
    rig.submit(*[b"x"] * 5)
    first, second = rig.lease()
    assert rig.lease() == []
    rig.complete(first)
    assert len(rig.lease()) == 1
    rig.report(TaskReport(second.seq, second.lease, AttemptOutcome.FAILED))
    assert len(rig.lease()) == 1


def test_report_and_lease_reuses_the_concurrency_slot_of_its_report(rig: TaskOperationsRig) -> None:
    rig.set_limits(concurrency=1)
    rig.submit(b"a", b"b")
    [grant] = rig.lease()
    report = TaskReport(grant.seq, grant.lease)
    result = rig.transact(
        tasks.report_and_lease, rig.store.generation, [report], GrantRequest("w", ["default"], 5)
    )
    assert result.answers == [ReportAnswer.COMMITTED]
    assert [grant.seq for grant in result.leased.grants] == [2]


def test_queue_without_a_limit_is_not_limited(rig: TaskOperationsRig) -> None:
    rig.set_limits(concurrency=1)
    rig.submit(*[b"x"] * 3, queue="other")
    assert len(rig.lease(queues=["other"])) == 3


def test_per_key_limits_leases_of_a_limit_key(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    rig.submit(*[TaskToSubmit(b"x", limit=limit) for limit in "aabb"], b"free")
    assert [grant.seq for grant in rig.lease()] == [1, 3, 5]
    assert rig.counts().parked == 2


def test_next_task_of_a_limit_key_is_leased_after_a_completion(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    first, second, third = rig.submit(*[TaskToSubmit(b"x", limit="a")] * 3)
    [grant] = rig.lease()
    assert grant.seq == first
    rig.complete(grant)
    assert rig.counts() == TaskCounts(ready=1, parked=1, completed=1)
    assert rig.lease_one(second)
    assert rig.lease() == []
    assert rig.state(third).name == "WAITING"


@pytest.mark.parametrize("how", ["fail", "expire", "cancel"])
def test_limit_key_is_freed_by_failure_expiry_and_cancel(rig: TaskOperationsRig, how: str) -> None:
    rig.set_limits(per_key=1)
    first, second = rig.submit(*[TaskToSubmit(b"x", limit="a")] * 2)
    [grant] = rig.lease()
    if how == "fail":
        rig.fail(grant)
    elif how == "expire":
        rig.advance(LEASE_NS)
    else:
        rig.cancel(first)
    assert [grant.seq for grant in rig.lease()] == [second]


def test_cancel_of_an_unthrottled_task_unthrottles_the_next(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    _, second, third = rig.submit(*[TaskToSubmit(b"x", limit="a")] * 3)
    [grant] = rig.lease()
    rig.complete(grant)
    rig.cancel(second)
    assert [grant.seq for grant in rig.lease()] == [third]


def test_higher_per_key_limit_unthrottles_tasks(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    rig.submit(*[TaskToSubmit(b"x", limit="a")] * 4)
    assert len(rig.lease()) == 1
    rig.set_limits(per_key=3)
    assert len(rig.lease()) == 2


def test_lower_per_key_limit_keeps_current_leases(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=3)
    rig.submit(*[TaskToSubmit(b"x", limit="a")] * 5)
    grants = rig.lease()
    rig.set_limits(per_key=1)
    assert len(grants) == 3
    for grant in grants:
        assert rig.lease() == []
        assert rig.complete(grant) is ReportAnswer.COMMITTED
    assert len(rig.lease()) == 1


def test_removed_limit_unthrottles_all_tasks(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    rig.submit(*[TaskToSubmit(b"x", limit="a")] * 4)
    rig.lease()
    rig.set_limits()
    assert len(rig.lease()) == 3


def test_lease_throttles_a_bounded_number_of_tasks_per_transaction(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    rig.submit(*[TaskToSubmit(b"x", limit="a")] * 3000)
    high = rig.submit_one(limit="b", priority=-1)
    assert [grant.seq for grant in rig.lease(10)] == [1]
    assert rig.counts().parked <= leases.SKIPPED_MAX + 10
    granted: list[int] = []
    for _ in range(5):
        granted += [grant.seq for grant in rig.lease(10)]
    assert granted == [high]


@pytest.mark.parametrize("limits", [{"concurrency": -1}, {"per_key": 1 << 40}])
def test_limit_out_of_bounds_is_invalid(rig: TaskOperationsRig, limits: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        rig.set_limits(**limits)
