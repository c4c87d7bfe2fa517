"""The ledger service assigns row intervals to executors that write output parts."""

from __future__ import annotations

from holdfast.spark.part_assignments import (
    STRAGGLER_NS,
    WAIT_MS_MAX,
    WAIT_MS_MIN,
    PartAssignments,
    RowInterval,
)
from holdfast.spark.sinks import OutputFull, WrittenPart

S = 1_000_000_000
FIRST, SECOND = RowInterval(0, 10), RowInterval(10, 20)


def two_offered_intervals() -> PartAssignments:
    parts = PartAssignments(b"writer")
    parts.offer(*FIRST)
    parts.offer(*SECOND)
    return parts


def written_part(interval: RowInterval) -> list[WrittenPart]:
    return [WrittenPart(interval.lo, interval.hi, [])]


def test_assign_hands_out_each_interval_once_in_order() -> None:
    parts = two_offered_intervals()
    assert parts.assign("a", 0) == FIRST
    assert parts.has_unassigned
    assert parts.assign("b", 0) == SECOND
    assert not parts.has_unassigned
    assert parts.assign("c", 0) is None


def test_interval_has_a_result_after_its_owner_reports_it() -> None:
    parts = two_offered_intervals()
    parts.assign("a", 0)
    assert not parts.has_result(0)
    assert parts.report("a", 0, written_part(FIRST), S)
    assert parts.has_result(0)
    ended = parts.take_result(0)
    assert ended.parts == written_part(FIRST)
    assert ended.error is None
    assert not parts.has_result(0)
    # The interval is not assigned again.
    assert parts.assign("a", S) == SECOND
    assert parts.written_count == 1


def test_report_from_an_executor_without_the_interval_is_ignored() -> None:
    parts = two_offered_intervals()
    parts.assign("a", 0)
    assert not parts.report("b", 0, written_part(FIRST), 0)
    assert not parts.report("a", 10, written_part(SECOND), 0)
    assert not parts.has_result(0)


def test_interval_of_a_closed_connection_is_reassigned() -> None:
    parts = two_offered_intervals()
    parts.assign("a", 0)
    parts.on_disconnect("a")
    assert parts.has_unassigned
    assert parts.assign("b", 0) == FIRST
    # The late report of the first executor is refused.
    assert not parts.report("a", 0, written_part(FIRST), 0)
    assert parts.report("b", 0, written_part(FIRST), 0)


def test_straggler_interval_is_assigned_twice_and_the_first_report_counts() -> None:
    parts = two_offered_intervals()
    parts.assign("a", 0)
    parts.assign("b", 0)
    parts.report("b", 10, written_part(SECOND), S)
    assert parts.assign("b", STRAGGLER_NS) is None
    assert parts.assign("b", STRAGGLER_NS + 1) == FIRST
    assert parts.assign("c", STRAGGLER_NS + 1) is None, "the second is not late"
    assert parts.report("b", 0, written_part(FIRST), STRAGGLER_NS + 2)
    assert not parts.report("a", 0, written_part(FIRST), STRAGGLER_NS + 3)
    assert parts.take_result(0).parts == written_part(FIRST)
    assert not parts.has_result(0)


def test_straggler_limit_follows_durations_of_other_intervals() -> None:
    parts = two_offered_intervals()
    parts.assign("a", 0)
    parts.assign("b", 0)
    parts.report("b", 10, written_part(SECOND), 4 * STRAGGLER_NS)
    assert parts.assign("b", 11 * STRAGGLER_NS) is None
    assert parts.assign("b", 12 * STRAGGLER_NS + 1) == FIRST


def test_executor_does_not_get_its_own_straggler_interval() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.assign("a", 0)
    assert parts.assign("a", 10 * STRAGGLER_NS) is None


def test_failure_is_the_result_when_no_other_executor_writes_the_interval() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.assign("a", 0)
    parts.assign("b", 2 * STRAGGLER_NS)
    full = OutputFull(path="out", why="no space")
    parts.report_failure("a", 0, full)
    assert not parts.has_result(0)
    parts.report_failure("b", 0, full)
    # Parts written before the failure are committed first.
    assert not parts.has_result(0, failed=False)
    assert parts.take_result(0).error is full
    # The committer took the failure, so the interval can be assigned again.
    assert parts.assign("a", 3 * STRAGGLER_NS) == FIRST


def test_failure_of_an_executor_that_lost_its_interval_is_ignored() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.assign("a", 0)
    parts.on_disconnect("a")
    parts.report_failure("a", 0, OutputFull(path="out"))
    assert not parts.has_result(0)
    assert parts.has_unassigned


def test_wait_ms_grows_with_the_number_of_waiting_executors() -> None:
    parts = PartAssignments(b"")
    parts.assign("a", 0)
    assert parts.wait_ms() == WAIT_MS_MIN
    for n in range(100):
        parts.assign(f"w{n}", 0)
    assert WAIT_MS_MIN < parts.wait_ms() < WAIT_MS_MAX
    for n in range(1000):
        parts.assign(f"w{n}", 0)
    assert parts.wait_ms() == WAIT_MS_MAX
    for n in range(1000):
        parts.on_disconnect(f"w{n}")
    assert parts.wait_ms() == WAIT_MS_MIN


def test_interval_of_two_hung_executors_is_assigned_to_a_third() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.assign("a", 0)
    assert parts.assign("b", STRAGGLER_NS + 1) == FIRST
    assert parts.assign("c", 2 * STRAGGLER_NS) is None
    assert parts.assign("c", 2 * STRAGGLER_NS + 2) == FIRST
    assert parts.report("c", 0, written_part(FIRST), 2 * STRAGGLER_NS + 3)
