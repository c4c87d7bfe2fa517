"""Row ranges: a batch of tasks is one row while it waits and one row while it is leased.

The rig compares the rows with the log and recounts the counters after every step.
"""

from __future__ import annotations

import msgspec
import pytest

from holdfast.errors import Invalid
from holdfast.store.api import Txn
from holdfast.store.prefix_scan import iter_rows
from holdfast.tasks import grants as tasks_grants
from holdfast.tasks import leases as leases
from holdfast.tasks import operations as tasks
from holdfast.tasks import task_list
from holdfast.tasks.model import TaskCounts, TaskSpec
from holdfast.tasks.operations import (
    AttemptOutcome,
    HeldLease,
    ReportAnswer,
    TaskGrant,
    TaskReport,
    TaskToSubmit,
)
from holdfast.tasks.row_ranges import (
    OpenRangeLease,
    RangeLease,
    decode_range,
    encode_range,
    is_range_lease,
    next_lease_no,
)
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, TaskOperationsRig


def count_rows(rig: TaskOperationsRig, space: bytes) -> int:
    def count(txn: Txn) -> int:
        return len(list(iter_rows(txn, space)))

    found: int = rig.store.read(count)
    return found


def ready_ranges(rig: TaskOperationsRig) -> list[tuple[int, int]]:
    def look(txn: Txn) -> list[tuple[int, int]]:
        return [decode_range(row) for _, row in iter_rows(txn, KEYS.ready)]

    return rig.store.read(look)


def completed_reports(*grants: TaskGrant) -> list[TaskReport]:
    return [
        TaskReport(grant.seq, grant.lease, AttemptOutcome.OK, b"%d" % grant.seq) for grant in grants
    ]


def test_batch_of_submitted_tasks_is_one_range_row(rig: TaskOperationsRig) -> None:
    assert rig.submit(*[b"x"] * 50) == list(range(1, 51))
    assert ready_ranges(rig) == [(1, 50)]
    assert [grant.seq for grant in rig.lease(20)] == list(range(1, 21))
    assert ready_ranges(rig) == [(21, 50)]
    assert rig.counts() == TaskCounts(ready=30, leased=20)


def test_grants_of_a_range_have_their_own_arguments(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"%d" % n for n in range(300)])
    assert [grant.args for grant in rig.lease(280)] == [b"%d" % n for n in range(280)]
    assert [grant.args for grant in rig.lease(280)] == [b"%d" % n for n in range(280, 300)]


def test_range_leased_tasks_have_no_status_row_until_they_end(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 10)
    grants = rig.lease(10)
    assert {grant.lease for grant in grants} == {2}
    assert (
        count_rows(rig, KEYS.statuses),
        count_rows(rig, KEYS.range_leases),
        count_rows(rig, KEYS.range_lease_starts),
    ) == (0, 1, 1)
    assert rig.states(1, 10) == ["LEASED", "LEASED"]
    assert rig.report(*completed_reports(*grants)) == [ReportAnswer.COMMITTED] * 10
    assert (
        count_rows(rig, KEYS.range_leases),
        count_rows(rig, KEYS.range_lease_starts),
        count_rows(rig, KEYS.expiries),
    ) == (0, 0, 0)
    assert [rig.status(seq).result for seq in (1, 10)] == [b"1", b"10"]


@pytest.mark.parametrize("order", [[2, 0, 4, 1, 3], [4, 3, 2, 1, 0], [1, 3, 0, 4, 2]])
def test_range_leased_tasks_may_complete_in_any_order(
    rig: TaskOperationsRig, order: list[int]
) -> None:
    rig.submit(*[b"x"] * 5)
    grants = rig.lease(5)
    for at in order:
        assert rig.report(*completed_reports(grants[at])) == [ReportAnswer.COMMITTED]
    assert rig.counts() == TaskCounts(completed=5)
    assert count_rows(rig, KEYS.range_leases) == count_rows(rig, KEYS.expiries) == 0


def test_repeated_report_under_a_range_lease_gets_the_first_answer(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b", b"c")
    first, second, _ = rig.lease(3)
    assert rig.report(*completed_reports(first, first)) == [ReportAnswer.COMMITTED] * 2
    wrong = TaskReport(second.seq, second.lease + 2, AttemptOutcome.OK, b"")
    assert rig.report(*completed_reports(first), wrong) == [
        ReportAnswer.COMMITTED,
        ReportAnswer.REJECTED,
    ]
    assert rig.states(1, 2, 3) == ["COMPLETED", "LEASED", "LEASED"]


def test_report_under_the_lease_of_another_range_is_cancelled(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b")
    rig.submit(b"c", b"d")
    [a, _], [c, _] = rig.lease(2), rig.lease(2)
    assert a.lease != c.lease
    assert rig.report(TaskReport(a.seq, c.lease)) == [ReportAnswer.CANCELLED]
    assert rig.report(*completed_reports(a, c)) == [ReportAnswer.COMMITTED] * 2


def test_failed_task_is_split_from_its_range(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b", b"c")
    first, second, third = rig.lease(3)
    assert rig.fail(second, error="no luck") == ReportAnswer.COMMITTED
    assert rig.states(1, 2, 3) == ["LEASED", "WAITING", "LEASED"]
    assert rig.report(*completed_reports(first, third)) == [ReportAnswer.COMMITTED] * 2
    rig.advance(LEASE_NS)
    retried = rig.lease_one(2)
    assert (retried.attempt, is_range_lease(retried.lease)) == (2, False)


def test_cancel_splits_a_waiting_range(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 5)
    assert rig.cancel(3, 5) == [True, True]
    assert ready_ranges(rig) == [(1, 2), (4, 4)]
    assert [grant.seq for grant in rig.lease()] == [1, 2, 4]


def test_cancel_splits_a_leased_range(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 5)
    grants = rig.lease()
    assert rig.cancel(3) == [True]
    assert rig.report(*completed_reports(*grants)) == [
        ReportAnswer.COMMITTED, ReportAnswer.COMMITTED, ReportAnswer.CANCELLED, ReportAnswer.COMMITTED, ReportAnswer.COMMITTED,
    ]  # fmt: skip


def test_range_lease_expires_except_for_extended_tasks(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 4)
    grants = rig.lease()
    rig.advance(LEASE_NS // 2)
    assert all(rig.extend(*(HeldLease(grant.seq, grant.lease) for grant in grants[1:3])))
    rig.report(*completed_reports(grants[0]))
    rig.advance(LEASE_NS // 2)
    rig.maintain()
    assert rig.states(1, 2, 3, 4) == ["COMPLETED", "LEASED", "LEASED", "WAITING"]
    assert rig.report(*completed_reports(grants[3])) == [ReportAnswer.CANCELLED]
    assert rig.report(*completed_reports(grants[1])) == [ReportAnswer.COMMITTED]
    rig.advance(LEASE_NS // 2)
    rig.maintain()
    assert rig.states(3) == ["WAITING"]
    assert (
        count_rows(rig, KEYS.range_leases)
        == count_rows(rig, KEYS.range_lease_starts)
        == count_rows(rig, KEYS.expiries)
        == 0
    )


def test_report_after_range_lease_expiry_is_cancelled_before_maintain(
    rig: TaskOperationsRig,
) -> None:
    rig.submit(b"a", b"b")
    first, _ = rig.lease()
    rig.advance(LEASE_NS)
    assert rig.report(*completed_reports(first)) == [ReportAnswer.CANCELLED]
    assert rig.states(1, 2) == ["LEASED", "LEASED"]
    rig.maintain()
    assert rig.counts() == TaskCounts(suspect=2)


def test_dependency_is_split_from_its_range(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 4)
    leased = rig.lease(2)
    last = rig.submit_one(after=(2, 3))
    assert ready_ranges(rig) == [(3, 3), (4, 4)]
    assert rig.report(*completed_reports(*leased)) == [ReportAnswer.COMMITTED] * 2
    assert rig.report(*completed_reports(*rig.lease())) == [ReportAnswer.COMMITTED] * 2
    assert rig.states(last) == ["WAITING"]
    assert rig.complete(rig.lease_one(last)) == ReportAnswer.COMMITTED


def test_leased_dependency_of_a_range_still_expires(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b")
    first, second = rig.lease()
    rig.submit_one(after=(1,))
    rig.report(*completed_reports(second))
    rig.advance(LEASE_NS)
    rig.maintain()
    assert rig.states(1) == ["WAITING"]
    assert rig.report(*completed_reports(first)) == [ReportAnswer.CANCELLED]


def test_batch_is_split_into_ranges_of_equal_tasks(rig: TaskOperationsRig) -> None:
    rig.submit(
        TaskToSubmit(b"a"),
        TaskToSubmit(b"b"),
        TaskToSubmit(b"c", key="k"),
        TaskToSubmit(b"d", after=(-3,)),
        TaskToSubmit(b"e"),
        TaskToSubmit(b"f"),
    )
    assert ready_ranges(rig) == [(1, 2), (3, 3), (5, 6)]


def test_dependency_in_the_same_batch_is_split_from_its_range(rig: TaskOperationsRig) -> None:
    rig.submit(
        TaskToSubmit(b"a"), TaskToSubmit(b"b"), TaskToSubmit(b"c"), TaskToSubmit(b"d", after=(-2,))
    )
    assert ready_ranges(rig) == [(1, 1), (2, 2), (3, 3)]
    rig.report(*completed_reports(*rig.lease()))
    assert rig.complete(rig.lease_one(4)) == ReportAnswer.COMMITTED


def test_range_lease_may_cover_ranges_of_different_priority(rig: TaskOperationsRig) -> None:
    rig.submit(b"a", b"b", b"c")
    rig.submit(b"d", b"e", priority=5)
    grants = rig.lease(4)
    assert [grant.seq for grant in grants] == [4, 5, 1, 2]
    assert len({grant.lease for grant in grants}) == 1
    rig.report(*completed_reports(*grants[1:3]))
    rig.advance(LEASE_NS)
    rig.maintain()
    assert rig.states(1, 2, 4, 5) == ["COMPLETED", "WAITING", "WAITING", "COMPLETED"]


def test_ranges_and_single_tasks_get_separate_leases(rig: TaskOperationsRig) -> None:
    rig.submit(b"a")
    rig.submit(b"b", b"c")
    rig.submit(b"d")
    numbers = [grant.lease for grant in rig.lease()]
    assert [is_range_lease(number) for number in numbers] == [False, True, True, False]
    assert numbers[0] == numbers[3]
    assert [grant.lease for grant in rig.lease()] == []


def test_range_of_unknown_task_names_is_set_unroutable(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 5, name="other")
    rig.submit(b"y")
    assert [grant.seq for grant in rig.lease(2, names=["work"])] == [6]
    assert rig.counts().stray + rig.counts().ready == 5
    assert [grant.seq for grant in rig.lease(names=["other"])] == [1, 2, 3, 4, 5]


def test_range_lease_is_limited_by_lease_bytes_max(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (leases, tasks_grants):
        monkeypatch.setattr(module, "LEASE_BYTES_MAX", 2_500)
    rig.submit(*[bytes(1_000)] * 7)
    assert [grant.seq for grant in rig.lease()] == [1, 2, 3]
    assert [grant.seq for grant in rig.lease()] == [4, 5, 6]
    assert [grant.seq for grant in rig.lease()] == [7]


def test_queue_concurrency_limit_splits_a_range(rig: TaskOperationsRig) -> None:
    rig.set_limits(concurrency=3)
    rig.submit(*[b"x"] * 5)
    first, *others = rig.lease()
    assert [first.seq, *(grant.seq for grant in others)] == [1, 2, 3]
    rig.report(*completed_reports(first))
    assert [grant.seq for grant in rig.lease()] == [4]


def test_task_list_cursor_survives_changes_of_a_range(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 10)

    def page(where: str, cursor: str = "") -> tuple[list[int], str]:
        found = rig.store.read(task_list.list_tasks, UNIVERSE, where, "", "", cursor, 4)
        return [row.seq for row in found.rows], found.cursor

    seqs, cursor = page("ready")
    assert seqs == [1, 2, 3, 4]
    grants = rig.lease(2)
    seqs, cursor = page("ready", cursor)
    assert seqs == [5, 6, 7, 8]
    grants += rig.lease(7)
    assert page("ready", cursor)[0] == [10]
    seqs, cursor = page("leased")
    assert seqs == [1, 2, 3, 4]
    rig.report(*completed_reports(*grants[2:6]))
    assert page("leased", cursor)[0] == [7, 8, 9]


def test_lease_numbers_distinguish_range_leases() -> None:
    assert [next_lease_no(n, for_ranges=True) for n in (0, 1, 2, 3)] == [2, 2, 4, 4]
    assert [next_lease_no(n, for_ranges=False) for n in (0, 1, 2, 3)] == [1, 3, 3, 5]
    assert [is_range_lease(n) for n in (-2, 0, 1, 2, 1 << 64)] == [False, False, False, True, False]


def test_encode_range_round_trip() -> None:
    for first, last in ((1, 1), (1, 2), (255, 256), (65_535, 70_000), (1, 1 << 40)):
        assert decode_range(encode_range(first, last)) == (first, last)


def test_open_range_lease_removes_single_tasks() -> None:
    range_lease = OpenRangeLease(2, RangeLease("w", 10, 0, [(1, 3, b"a"), (7, 9, b"b")], [1, 7]))
    assert [range_lease.index_of(seq) for seq in (0, 1, 3, 4, 6, 7, 9, 10)] == [
        -1,
        0,
        0,
        -1,
        -1,
        1,
        1,
        -1,
    ]
    assert (range_lease.remove(8), range_lease.remove(8), range_lease.remove(5)) == (
        b"b",
        None,
        None,
    )
    assert range_lease.tasks() == [1, 2, 3, 7, 9]
    assert [range_lease.remove(seq) for seq in (9, 1, 3, 2, 7)] == [b"b", b"a", b"a", b"a", b"b"]
    assert range_lease.tasks() == []


def test_tasks_of_different_specs_are_different_ranges(rig: TaskOperationsRig) -> None:
    specs = [TaskSpec("work", lease_ns=LEASE_NS), TaskSpec("work", priority=1, lease_ns=LEASE_NS)]
    rig.transact(
        tasks.submit_all, specs, [0, 0, 1, 1, 0], [TaskToSubmit(b"%d" % n) for n in range(5)]
    )
    assert ready_ranges(rig) == [(3, 4), (1, 2), (5, 5)]
    assert [grant.args for grant in rig.lease()] == [b"2", b"3", b"0", b"1", b"4"]


def test_long_unroutable_range_is_skipped_in_bounded_steps(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SKIPPED_MAX", 30)
    rig.submit(*[b"x"] * 70, name="other")
    rig.submit(b"y", b"z")
    lease_calls = 0
    while not (grants := rig.lease(2, names=["work"])):
        lease_calls += 1
        assert rig.counts().stray == 30 * lease_calls
    assert ([grant.seq for grant in grants], lease_calls) == ([71, 72], 2)


def test_cursor_of_another_task_list_is_rejected(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 6)
    rig.lease(3)
    pages = {
        where: rig.store.read(task_list.list_tasks, UNIVERSE, where, "", "", "", 1)
        for where in ("ready", "leased")
    }
    for where, other in (("ready", "leased"), ("leased", "ready")):
        with pytest.raises(Invalid, match="another list"):
            rig.store.read(task_list.list_tasks, UNIVERSE, where, "", "", pages[other].cursor, 1)


def test_cancel_of_many_tasks_of_a_range_in_one_transaction(rig: TaskOperationsRig) -> None:
    """The cost of a scan does not grow with the earlier writes of its transaction."""
    rig.submit(*[b"x"] * 3_000)
    leased = rig.lease(1_000)
    assert rig.cancel(*range(1, 3_000, 2)) == [True] * 1_500
    assert rig.report(*completed_reports(*leased[1::2])) == [ReportAnswer.COMMITTED] * 500
    assert rig.counts() == TaskCounts(ready=1_000, completed=500, dead=1_500)


def test_former_release_cannot_decode_a_range_expiry_batch(rig: TaskOperationsRig) -> None:
    """The former release must not decode the row as an empty batch and delete it."""
    rig.submit(b"a", b"b")
    rig.lease()
    rig.submit_one(after=(1,))
    [(_, row)] = rig.store.read(lambda txn: list(iter_rows(txn, KEYS.expiries)))
    before = tuple[int, str, list[int]]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(row, type=before)


def test_single_task_leased_from_a_range_has_a_status_row(rig: TaskOperationsRig) -> None:
    """A range lease of one task would need more rows than a status row."""
    rig.submit(*[b"x"] * 3)
    [grant] = rig.lease(1)
    assert (
        is_range_lease(grant.lease),
        count_rows(rig, KEYS.statuses),
        count_rows(rig, KEYS.range_leases),
    ) == (False, 1, 0)
    assert ready_ranges(rig) == [(2, 3)]
    assert rig.report(*completed_reports(grant)) == [ReportAnswer.COMMITTED]
