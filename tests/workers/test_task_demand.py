"""The lease demand of a task worker as tables: state of the worker in, lease request out."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.tasks.leases import LEASE_BATCH_MAX
from holdfast.tasks.operations import LeaseResult, TaskGrant
from holdfast.workers.tasks.demand import (
    NO_CAPACITY,
    QUEUES_PER_COMMIT,
    LeaseCapacity,
    LeaseDemand,
    LeasePlan,
)
from holdfast.workers.tasks.quarantine_window import FIRST_DRAIN_NS

MODULES = ("holdfast.workers.tasks.demand",)

NOW_NS = 100 * S
SLOTS = (3, 0, 2)
USUAL = LeaseCapacity(5, False, SLOTS)
ALONE = LeaseCapacity(1, True, SLOTS)
LARGE = (LEASE_BATCH_MAX, LEASE_BATCH_MAX, 0)


def grants(count: int, *, suspect: bool = False) -> list[TaskGrant]:
    return [
        TaskGrant(
            seq=seq,
            lease=1,
            attempt=1,
            name="t",
            args=b"",
            queue="q",
            lease_ns=S,
            window_ns=S,
            expires_ns=NOW_NS + S,
            suspect=suspect,
            created_ns=0,
            generation=0,
        )
        for seq in range(count)
    ]


def demand_with_quarantine(*queues: str) -> LeaseDemand:
    """Return a demand that knows of a waiting quarantined task."""
    demand = LeaseDemand(list(queues or ["q"]))
    demand.on_leased(LeaseResult([], suspects=True), USUAL)
    return demand


# -- capacity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quarantine_waits", "busy", "quarantined_runs", "slots", "expected"),
    [
        (False, False, False, SLOTS, USUAL),
        (False, True, False, SLOTS, USUAL),
        (False, True, False, (0, 0, 0), LeaseCapacity(0, False, (0, 0, 0))),
        (False, False, False, LARGE, LeaseCapacity(LEASE_BATCH_MAX, False, LARGE)),
        # A quarantined task runs alone.
        (False, True, True, SLOTS, NO_CAPACITY),
        (True, True, True, SLOTS, NO_CAPACITY),
        # An idle worker asks for the quarantined task, a busy one drains first.
        (True, False, False, SLOTS, ALONE),
        (True, True, False, SLOTS, NO_CAPACITY),
    ],
)
def test_capacity_of_a_worker(
    quarantine_waits: bool,
    busy: bool,
    quarantined_runs: bool,
    slots: tuple[int, ...],
    expected: LeaseCapacity,
) -> None:
    demand = demand_with_quarantine() if quarantine_waits else LeaseDemand(["q"])
    found = demand.capacity(slots, busy=busy, quarantined_runs=quarantined_runs, now_ns=NOW_NS)
    assert found == expected


def test_capacity_after_the_quarantine_window_is_the_usual_one() -> None:
    demand = demand_with_quarantine()
    found = [
        demand.capacity(SLOTS, busy=True, quarantined_runs=False, now_ns=NOW_NS + passed_ns)
        for passed_ns in (0, FIRST_DRAIN_NS - 1, FIRST_DRAIN_NS, 11 * FIRST_DRAIN_NS)
    ]
    assert found == [NO_CAPACITY, NO_CAPACITY, USUAL, NO_CAPACITY]


def test_quarantined_grant_resets_the_quarantine_window() -> None:
    demand = demand_with_quarantine()
    end_ns = NOW_NS
    for _ in range(2):  # the second window is twice as long
        demand.capacity(SLOTS, busy=True, quarantined_runs=False, now_ns=end_ns)
        end_ns = demand.next_check_ns(end_ns, busy=True) or 0
        demand.capacity(SLOTS, busy=True, quarantined_runs=False, now_ns=end_ns)
        end_ns = demand.next_check_ns(end_ns, busy=True) or 0
    demand.on_leased(LeaseResult(grants(1, suspect=True), suspects=True), ALONE)
    demand.capacity(SLOTS, busy=True, quarantined_runs=False, now_ns=end_ns)
    assert demand.next_check_ns(end_ns, busy=True) == end_ns + FIRST_DRAIN_NS


# -- plan ------------------------------------------------------------------------------------------

FULL = LeaseCapacity(LEASE_BATCH_MAX, False, LARGE)
EMPTY = LeaseCapacity(0, False, SLOTS)


@pytest.mark.parametrize(
    ("capacity", "queues", "look", "reports", "queued", "due_ns", "expected"),
    [
        (USUAL, ["q"], True, 0, 0, None, LeasePlan(USUAL, ["q"], False)),
        (USUAL, ["q"], True, 0, 0, NOW_NS, LeasePlan(USUAL, ["q"], True)),
        # Nothing to do: no queue has work, no free slot, or no reason to look.
        (USUAL, [], True, 0, 0, None, None),
        (USUAL, [], True, 0, 0, NOW_NS + 1, None),
        (EMPTY, ["q"], True, 0, 0, None, None),
        (USUAL, ["q"], False, 0, 0, None, None),
        # A due task or a report needs a commit in any case.
        (EMPTY, [], True, 0, 0, NOW_NS, LeasePlan(EMPTY, [], True)),
        (USUAL, [], True, 0, 0, NOW_NS, LeasePlan(EMPTY, [], True)),
        (EMPTY, [], False, 1, 0, None, LeasePlan(EMPTY, [], False)),
        (USUAL, ["q"], False, 1, 0, None, LeasePlan(USUAL, ["q"], False)),
        # Reports wait for queued attempts, unless a whole batch can be leased.
        (USUAL, ["q"], True, 1, 2, None, None),
        (USUAL, ["q"], True, 2, 2, None, LeasePlan(USUAL, ["q"], False)),
        (FULL, ["q"], True, 1, 2, None, LeasePlan(FULL, ["q"], False)),
    ],
)
def test_plan_of_the_next_commit(
    capacity: LeaseCapacity,
    queues: list[str],
    look: bool,
    reports: int,
    queued: int,
    due_ns: int | None,
    expected: LeasePlan | None,
) -> None:
    demand = LeaseDemand(["q"])
    demand.look_for_tasks, demand.due_ns = look, due_ns
    assert (
        demand.plan(capacity, queues, report_count=reports, queued_count=queued, now_ns=NOW_NS)
        == expected
    )


def test_reports_are_delayed_once() -> None:
    demand = LeaseDemand(["q"])
    for delayed, expected in ((True, None), (False, LeasePlan(USUAL, ["q"], False))):
        plan = demand.plan(USUAL, ["q"], report_count=1, queued_count=9, now_ns=NOW_NS)
        assert (plan, demand.reports_delayed) == (expected, delayed)


def test_queues_without_work_end_the_search() -> None:
    demand = LeaseDemand(["q"])
    demand.plan(USUAL, [], report_count=0, queued_count=0, now_ns=NOW_NS)
    assert not demand.look_for_tasks


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leased", "capacity", "look_again", "reads_due"),
    [
        (LeaseResult([]), USUAL, False, True),
        (LeaseResult(grants(2)), USUAL, False, True),
        # The grants filled the slots of a kind.
        (LeaseResult(grants(3)), USUAL, True, False),
        (LeaseResult(grants(1)), LeaseCapacity(1, False, SLOTS), True, False),
        (LeaseResult([], suspects=True), USUAL, True, False),
        (LeaseResult([], overdue=True), USUAL, True, False),
        # A commit that asked for no task leaves the search unchanged.
        (LeaseResult([]), EMPTY, True, True),
    ],
)
def test_search_after_a_lease_result(
    leased: LeaseResult, capacity: LeaseCapacity, look_again: bool, reads_due: bool
) -> None:
    demand = LeaseDemand(["q"])
    assert demand.on_leased(leased, capacity) is reads_due
    assert demand.look_for_tasks is look_again


def test_worker_does_not_park_while_a_quarantined_task_waits() -> None:
    assert LeaseDemand(["q"]).can_park
    assert not demand_with_quarantine().can_park
    # An overdue result grants nothing and has no information about quarantined tasks.
    demand = demand_with_quarantine()
    demand.on_leased(LeaseResult([], overdue=True), USUAL)
    assert not demand.can_park


def test_worker_with_more_queues_than_one_commit_asks_does_not_park() -> None:
    queues = [f"q{n}" for n in range(QUEUES_PER_COMMIT + 1)]
    assert LeaseDemand(queues[:-1]).can_park
    assert not LeaseDemand(queues).can_park


# -- queues ----------------------------------------------------------------------------------------


def test_queues_with_work_are_rotated() -> None:
    demand = LeaseDemand(["a", "b", "c"])
    assert demand.known_queues() is None
    assert demand.found_queues(["a", "b", "c"], None) == ["b", "c", "a"]
    demand.on_leased(LeaseResult(grants(5)), USUAL)  # more tasks are ready: no read is needed
    assert demand.known_queues() == ["c", "a", "b"]
    assert demand.known_queues() == ["a", "b", "c"]


def test_queues_beyond_one_commit_are_asked_next() -> None:
    queues = [f"q{n:02}" for n in range(QUEUES_PER_COMMIT + 3)]
    demand = LeaseDemand(queues)
    first = demand.found_queues(queues, NOW_NS)
    assert demand.due_ns == NOW_NS
    assert sorted(first) == queues[:QUEUES_PER_COMMIT]
    demand.on_leased(LeaseResult([]), USUAL)
    assert demand.look_for_tasks
    rest = demand.known_queues()
    assert rest is not None
    assert sorted(rest) == queues[QUEUES_PER_COMMIT:]
    assert demand.known_queues() is None


@pytest.mark.parametrize(("due_ns", "expected"), [(None, None), (NOW_NS + 5, NOW_NS + 5)])
def test_next_check_is_the_next_due_time(due_ns: int | None, expected: int | None) -> None:
    demand = LeaseDemand(["q"])
    demand.due_ns = due_ns
    assert demand.next_check_ns(NOW_NS, busy=False) == expected
