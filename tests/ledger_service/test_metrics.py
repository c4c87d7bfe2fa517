"""Run metrics: set-up and call times, throughput, and failures by class."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.clock import S
from holdfast.ledger import summary
from holdfast.ledger.runs import RunProgress
from holdfast.ledger.service.metrics import RunMetrics
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from tests.ledger_service.service_rig import exchange_request, next_report
from tests.ledger_service.test_service_requests import ROWS, ServiceRequestsRig, requests_rig

__all__ = ["requests_rig"]


def make_progress(metrics: RunMetrics, now_ns: int, done: int, in_flight: int) -> RunProgress:
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


def test_setup_ns_ends_at_the_first_call() -> None:
    metrics = RunMetrics(0)
    assert make_progress(metrics, 40 * S, 0, 0).setup_ns == 40 * S
    metrics.update_counts(50 * S, 0, 10)
    metrics.update_counts(52 * S, 100, 0)
    progress = make_progress(metrics, 60 * S, 100, 0)
    assert (progress.time_ns, progress.setup_ns, progress.calls_ns, progress.calls_rows) == (
        60 * S,
        50 * S,
        2 * S,
        100,
    )
    assert summary.mean_rate(progress) == 50
    assert summary.times_text(progress) == "1 min 00 s: 50 s until the first call, 2 s of calls"


def test_time_ns_excludes_the_gap_between_two_drivers() -> None:
    first = RunMetrics(0)
    first.update_counts(S, 0, 10)
    first.update_counts(3 * S, 40, 0)
    progress = make_progress(first, 4 * S, 40, 0)
    day = 86_400 * S
    second = RunMetrics(day, progress)
    second.update_counts(day, 40, 0)
    second.update_counts(day + S, 40, 10)
    second.update_counts(day + 4 * S, 100, 0)
    progress = make_progress(second, day + 4 * S, 100, 0)
    assert (progress.time_ns, progress.setup_ns, progress.calls_ns) == (8 * S, 2 * S, 5 * S)
    assert progress.calls_rows == 100
    assert progress.series[-1][0] == 8000


def test_restarted_service_continues_the_run_times() -> None:
    first = RunMetrics(0)
    first.add_calls(5, 0.5, [5])
    first.update_counts(S, 0, 10)
    progress = make_progress(first, 3 * S, 40, 10)
    second = RunMetrics(5 * S, progress, same_driver=True)
    second.update_counts(6 * S, 100, 0)
    progress = make_progress(second, 7 * S, 100, 0)
    assert (progress.time_ns, progress.setup_ns, progress.calls_ns) == (7 * S, S, 5 * S)
    assert (progress.calls, progress.calls_rows) == (5, 100)


def test_throughput_is_computed_per_interval() -> None:
    # 50 s of set-up, then 3,000 rows in 0.6 s.
    series = [(t, 0, 0, 0, 0, 0.0) for t in range(0, 50_000, 1000)]
    series += [(50_000 + 60 * at, 297 * at, 3 * at, 0, 16, 0.0) for at in range(11)]
    series += [(60_000, 2970, 30, 0, 0, 0.0)]
    steps = summary.throughput(series)
    assert [rate for _, _, rate in steps] == pytest.approx([5000] * len(steps))
    assert sum((end - begin) * rate for begin, end, rate in steps) == pytest.approx(3000)
    assert (steps[0][0], steps[-1][1]) == (50.0, 50.6)
    # The smoothed rate of the live display excludes the set-up, too.
    assert summary.recent_rate(series[:-1]) == pytest.approx(5000)


@pytest.mark.parametrize("rows", [[], [0], [5, 5], [0, 7]])
def test_throughput_of_short_series(rows: list[int]) -> None:
    series = [(1000 * at, done, 0, 0, 0, 0.0) for at, done in enumerate(rows)]
    assert [rate for _, _, rate in summary.throughput(series)] == ([7.0] if rows == [0, 7] else [])


def test_failed_by_class_counts_final_failures_and_survives_a_restart(
    requests_rig: ServiceRequestsRig,
) -> None:
    grant = requests_rig.claim("child/1")
    fail = int(RowState.TERMINAL_FAIL)
    resultless = [
        ledger_protocol.ResultlessRowReport(0, fail, 4, "ValueError: row 0"),
        ledger_protocol.ResultlessRowReport(1, fail, 1, "TimeoutError: after 1 s"),
        ledger_protocol.ResultlessRowReport(2, fail, 4, "ValueError: row 2"),
    ]
    grant_report, data = next_report(grant, done=[(3, 5)], others=resultless)
    exchange = replace(exchange_request(None, grant_report), calls=5)
    requests_rig.requests.handle_exchange("child/1", exchange, memoryview(data))
    # The reply was lost and the exchange is repeated: its calls count once.
    requests_rig.requests.handle_exchange("child/1", exchange, memoryview(data))
    progress = requests_rig.requests.progress()
    assert progress.calls == 6  # one from the claim
    # The time-out is retried: it counts as an attempt, not as a failed row.
    assert progress.failed_by_class == [0, 0, 0, 0, 2, 0, 0, 0]
    assert sum(progress.failed_by_class) == progress.ended[2] == 2
    assert [(group.text, group.count, group.rows) for group in progress.errors] == [
        ("ValueError: row <n>", 2, 2),
        ("TimeoutError: after <n> s", 1, 0),
    ]
    # A process died before it published: the counts come from the ledger.
    assert requests_rig.restart().progress().failed_by_class == [0, 0, 0, 0, 2, 0, 0, 0]
    assert sum(requests_rig.requests.progress().counts) == ROWS
