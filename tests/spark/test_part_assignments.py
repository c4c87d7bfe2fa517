"""Which executor writes which rows: the bookkeeping of the ledger service, step by step."""

from __future__ import annotations

from holdfast.spark.part_assignments import (
    SLOW_NS,
    WAIT_MS_MAX,
    WAIT_MS_MIN,
    Interval,
    PartAssignments,
)
from holdfast.spark.sinks import OutputFull, WrittenPart

S = 1_000_000_000
FIRST, SECOND = Interval(0, 10), Interval(10, 20)


def offered() -> PartAssignments:
    parts = PartAssignments(b"writer")
    parts.offer(*FIRST)
    parts.offer(*SECOND)
    return parts


def part(one: Interval) -> list[WrittenPart]:
    return [WrittenPart(one.lo, one.hi, [])]


def test_intervals_are_given_in_order_and_once() -> None:
    parts = offered()
    assert parts.take("a", 0) == FIRST
    assert parts.waiting
    assert parts.take("b", 0) == SECOND
    assert not parts.waiting
    assert parts.take("c", 0) is None


def test_an_interval_is_over_when_its_owner_reports_it() -> None:
    parts = offered()
    parts.take("a", 0)
    assert not parts.is_over(0)
    assert parts.report("a", 0, part(FIRST), S)
    assert parts.is_over(0)
    ended = parts.take_ended(0)
    assert ended.parts == part(FIRST)
    assert ended.error is None
    assert not parts.is_over(0)
    # It is not given again.
    assert parts.take("a", S) == SECOND
    assert parts.count == 1


def test_a_report_of_an_executor_that_was_not_given_the_interval_does_not_count() -> None:
    parts = offered()
    parts.take("a", 0)
    assert not parts.report("b", 0, part(FIRST), 0)
    assert not parts.report("a", 10, part(SECOND), 0)
    assert not parts.is_over(0)


def test_the_interval_of_a_closed_connection_is_given_to_another() -> None:
    parts = offered()
    parts.take("a", 0)
    parts.gone("a")
    assert parts.waiting
    assert parts.take("b", 0) == FIRST
    # The late report of the first one finds that it was taken from it.
    assert not parts.report("a", 0, part(FIRST), 0)
    assert parts.report("b", 0, part(FIRST), 0)


def test_a_slow_interval_is_given_a_second_time_and_the_first_report_counts() -> None:
    parts = offered()
    parts.take("a", 0)
    parts.take("b", 0)
    parts.report("b", 10, part(SECOND), S)
    assert parts.take("b", SLOW_NS) is None
    assert parts.take("b", SLOW_NS + 1) == FIRST
    assert parts.take("c", SLOW_NS + 1) is None, "the second is not late"
    assert parts.report("b", 0, part(FIRST), SLOW_NS + 2)
    assert not parts.report("a", 0, part(FIRST), SLOW_NS + 3)
    assert parts.take_ended(0).parts == part(FIRST)
    assert not parts.is_over(0)


def test_slow_is_measured_by_what_other_intervals_took() -> None:
    parts = offered()
    parts.take("a", 0)
    parts.take("b", 0)
    parts.report("b", 10, part(SECOND), 4 * SLOW_NS)
    assert parts.take("b", 11 * SLOW_NS) is None
    assert parts.take("b", 12 * SLOW_NS + 1) == FIRST


def test_an_executor_is_not_given_its_own_slow_interval() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.take("a", 0)
    assert parts.take("a", 10 * SLOW_NS) is None


def test_an_error_counts_when_no_other_executor_is_at_work() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.take("a", 0)
    parts.take("b", 2 * SLOW_NS)
    full = OutputFull(path="out", why="no space")
    parts.fail("a", 0, full)
    assert not parts.is_over(0)
    parts.fail("b", 0, full)
    # What was written before it is committed first.
    assert not parts.is_over(0, failed=False)
    assert parts.take_ended(0).error is full
    # The commit decides: it may be given again.
    assert parts.take("a", 3 * SLOW_NS) == FIRST


def test_an_error_of_an_executor_that_lost_its_interval_does_not_count() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.take("a", 0)
    parts.gone("a")
    parts.fail("a", 0, OutputFull(path="out"))
    assert not parts.is_over(0)
    assert parts.waiting


def test_executors_that_wait_ask_less_often_the_more_they_are() -> None:
    parts = PartAssignments(b"")
    parts.take("a", 0)
    assert parts.wait_ms() == WAIT_MS_MIN
    for n in range(100):
        parts.take(f"w{n}", 0)
    assert WAIT_MS_MIN < parts.wait_ms() < WAIT_MS_MAX
    for n in range(1000):
        parts.take(f"w{n}", 0)
    assert parts.wait_ms() == WAIT_MS_MAX
    for n in range(1000):
        parts.gone(f"w{n}")
    assert parts.wait_ms() == WAIT_MS_MIN


def test_an_interval_that_two_hung_executors_have_is_given_to_a_third() -> None:
    parts = PartAssignments(b"")
    parts.offer(*FIRST)
    parts.take("a", 0)
    assert parts.take("b", SLOW_NS + 1) == FIRST
    assert parts.take("c", 2 * SLOW_NS) is None
    assert parts.take("c", 2 * SLOW_NS + 2) == FIRST
    assert parts.report("c", 0, part(FIRST), 2 * SLOW_NS + 3)
