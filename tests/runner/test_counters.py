from __future__ import annotations

import threading

import pytest

from holdfast.clock import MS
from holdfast.errors import Busy, Conflict, Invalid, Timeout
from holdfast.runner import ErrorKind, Metrics, RunnerCounters, WorkItem
from holdfast.runner.counters import LATENCY_BOUNDS_MS
from tests.runner.rig import RunnerRig, ScriptedHandler

MODULES = ("holdfast.runner.counters",)


def test_counters_count_each_error_kind_separately(rig: RunnerRig) -> None:
    rig.put(*[b"x"] * 5)
    errors = [None, Conflict(), Busy(), Timeout(), Invalid()]
    runner = rig.runner(ScriptedHandler(*errors))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert (metrics.attempts, metrics.successes) == (5, 1)
    assert (metrics.conflicts, metrics.busies, metrics.transients) == (1, 1, 1)
    assert (metrics.retryable, metrics.fatals) == (3, 1)
    assert (metrics.requeues, metrics.dead_letters, metrics.lost) == (3, 1, 0)


def test_counters_measure_latency_with_the_injected_clock(rig: RunnerRig) -> None:
    rig.put(b"3", b"5", b"1000")
    runner = rig.runner(lambda work: rig.clock.advance(int(work.payload) * MS))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert metrics.latency_samples == 3
    assert metrics.latency_total_ms == 1008
    assert metrics.latency_max_ms == 1000


@pytest.mark.parametrize("bound_ms", LATENCY_BOUNDS_MS)
def test_latency_bucket_includes_its_upper_bound(bound_ms: int) -> None:
    counters = RunnerCounters()
    at = LATENCY_BOUNDS_MS.index(bound_ms)
    counters.count_attempt(ErrorKind.SUCCESS, bound_ms * MS)
    counters.count_attempt(ErrorKind.SUCCESS, bound_ms * MS + 1)
    histogram = counters.snapshot().latency_histogram
    assert histogram[at : at + 2] == (1, 1)
    assert sum(histogram) == 2


def test_counters_snapshot_is_a_copy() -> None:
    counters = RunnerCounters()
    before = counters.snapshot()
    counters.add("attempts")
    assert before == Metrics()
    assert counters.snapshot() == Metrics(attempts=1)


def test_counters_reset_sets_all_metrics_to_zero() -> None:
    counters = RunnerCounters()
    counters.count_attempt(ErrorKind.BUSY, 5 * MS)
    counters.reset()
    assert counters.snapshot() == Metrics()


def test_metrics_sink_gets_a_copy_after_each_update() -> None:
    seen: list[Metrics] = []
    counters = RunnerCounters(seen.append)
    counters.add("attempts")
    counters.count_attempt(ErrorKind.SUCCESS, MS)
    counters.reset()
    assert [metrics.attempts for metrics in seen] == [1, 1, 0]
    assert [metrics.successes for metrics in seen] == [0, 1, 0]


def test_error_of_a_metrics_sink_is_counted_and_ignored(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    counters = RunnerCounters(lambda metrics: 1 / 0)
    runner = rig.runner(counters=counters)
    assert runner.tick().done == 2
    assert counters.snapshot().sink_errors == 4


def test_metrics_sink_may_update_counters_without_recursive_calls(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = []

    def sink(metrics: Metrics) -> None:
        calls.append(metrics)
        counters.snapshot()
        counters.add("transients")
        runner.set_policy(runner.policy)

    counters = RunnerCounters(sink)
    runner = rig.runner(counters=counters)
    assert runner.tick().done == 1
    assert len(calls) == counters.snapshot().transients == 2
    assert counters.snapshot().sink_errors == 0


def test_tick_from_a_metrics_sink_is_rejected_and_the_tick_continues(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    counters = RunnerCounters(lambda metrics: runner.tick())
    runner = rig.runner(counters=counters)
    assert runner.tick().done == 2
    assert counters.snapshot().sink_errors > 0


def test_base_exception_of_a_metrics_sink_propagates() -> None:
    def sink(metrics: Metrics) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunnerCounters(sink).add("attempts")


def test_counters_count_updates_of_concurrent_threads() -> None:
    counters = RunnerCounters()

    def work() -> None:
        for _ in range(1000):
            counters.add("attempts")
            counters.count_attempt(ErrorKind.SUCCESS, MS)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics = counters.snapshot()
    assert (metrics.attempts, metrics.successes, metrics.latency_samples) == (4000, 4000, 4000)


def test_latency_includes_failed_attempts(rig: RunnerRig) -> None:
    rig.put(b"a")

    def slow(work: WorkItem) -> None:
        rig.clock.advance(7 * MS)
        raise ValueError

    runner = rig.runner(slow)
    runner.tick()
    assert runner.counters.snapshot().latency_max_ms == 7
