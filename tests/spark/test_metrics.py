"""The figures of a run: they agree with its ledger, and their times are of what they say."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.clock import S
from holdfast.ledger import summary
from holdfast.ledger.runs import Progress
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.states import State
from holdfast.spark import wire
from tests.spark.service_rig import report, step
from tests.spark.test_office import ROWS, Offices, offices

__all__ = ["offices"]


def figures(metrics: RunMetrics, now_ns: int, done: int, in_flight: int) -> Progress:
    counts = [100 - done - in_flight, 0, in_flight, done, 0, 0, 0, 0]
    return metrics.progress(
        now_ns,
        counts=counts,
        ended=[done, 0, 0, 0],
        reused=0,
        retries=0,
        reclaims=0,
        fenced=0,
        tasks=1,
        height=0,
    )


def test_time_before_the_first_call_is_no_time_of_calls() -> None:
    metrics = RunMetrics(0)
    assert figures(metrics, 40 * S, 0, 0).setup_ns == 40 * S
    metrics.stand(50 * S, 0, 10)
    metrics.stand(52 * S, 100, 0)
    told = figures(metrics, 60 * S, 100, 0)
    assert (told.time_ns, told.setup_ns, told.calls_ns, told.calls_rows) == (
        60 * S,
        50 * S,
        2 * S,
        100,
    )
    assert summary.mean_rate(told) == 50
    assert summary.times_text(told) == "1 min 00 s: 50 s until the first call, 2 s of calls"


def test_the_gap_between_two_drivers_is_no_time_of_the_run() -> None:
    first = RunMetrics(0)
    first.stand(S, 0, 10)
    first.stand(3 * S, 40, 0)
    told = figures(first, 4 * S, 40, 0)
    day = 86_400 * S
    second = RunMetrics(day, told)
    second.stand(day, 40, 0)
    second.stand(day + S, 40, 10)
    second.stand(day + 4 * S, 100, 0)
    told = figures(second, day + 4 * S, 100, 0)
    assert (told.time_ns, told.setup_ns, told.calls_ns) == (8 * S, 2 * S, 5 * S)
    assert told.calls_rows == 100
    assert told.series[-1][0] == 8000


def test_a_service_that_is_started_again_goes_on_with_the_time() -> None:
    first = RunMetrics(0)
    first.took(5, 0.5, [5])
    first.stand(S, 0, 10)
    told = figures(first, 3 * S, 40, 10)
    second = RunMetrics(5 * S, told, same_driver=True)
    second.stand(6 * S, 100, 0)
    told = figures(second, 7 * S, 100, 0)
    assert (told.time_ns, told.setup_ns, told.calls_ns) == (7 * S, S, 5 * S)
    assert (told.calls, told.calls_rows) == (5, 100)


def test_throughput_is_that_of_its_interval() -> None:
    # 50 s of set-up, then 3,000 rows in 0.6 s.
    series = [(t, 0, 0, 0, 0, 0.0) for t in range(0, 50_000, 1000)]
    series += [(50_000 + 60 * at, 297 * at, 3 * at, 0, 16, 0.0) for at in range(11)]
    series += [(60_000, 2970, 30, 0, 0, 0.0)]
    steps = summary.throughput(series)
    assert [rate for _, _, rate in steps] == pytest.approx([5000] * len(steps))
    assert sum((end - begin) * rate for begin, end, rate in steps) == pytest.approx(3000)
    assert (steps[0][0], steps[-1][1]) == (50.0, 50.6)
    # The live display does not remember the set-up either.
    assert summary.pace_of(series[:-1]) == pytest.approx(5000)


@pytest.mark.parametrize("rows", [[], [0], [5, 5], [0, 7]])
def test_throughput_of_little_is_little(rows: list[int]) -> None:
    series = [(1000 * at, done, 0, 0, 0, 0.0) for at, done in enumerate(rows)]
    assert [rate for _, _, rate in summary.throughput(series)] == ([7.0] if rows == [0, 7] else [])


def test_failures_are_counted_by_class_for_good_and_alike_after_a_restart(offices: Offices) -> None:
    grant = offices.claim("child/1")
    fail = int(State.TERMINAL_FAIL)
    others = [
        wire.Other(0, fail, 4, "ValueError: row 0"),
        wire.Other(1, fail, 1, "TimeoutError: after 1 s"),
        wire.Other(2, fail, 4, "ValueError: row 2"),
    ]
    move, data = report(grant, done=[(3, 5)], others=others)
    told = replace(step(None, move), calls=5)
    offices.office.step("child/1", told, memoryview(data))
    # The answer was lost, and the same step comes again: its calls were made once.
    offices.office.step("child/1", told, memoryview(data))
    progress = offices.office.progress()
    assert progress.calls == 6  # one of the claim
    # The time-out is retried: an attempt, and no row.
    assert progress.failed_by_class == [0, 0, 0, 0, 2, 0, 0, 0]
    assert sum(progress.failed_by_class) == progress.ended[2] == 2
    assert [(one.text, one.count, one.rows) for one in progress.errors] == [
        ("ValueError: row <n>", 2, 2),
        ("TimeoutError: after <n> s", 1, 0),
    ]
    # A process that died before it published: the ledger knows.
    assert offices.restart().progress().failed_by_class == [0, 0, 0, 0, 2, 0, 0, 0]
    assert sum(offices.office.progress().counts) == ROWS
