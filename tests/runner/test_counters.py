from __future__ import annotations

import threading

import pytest

from holdfast.clock import MS
from holdfast.errors import Busy, Conflict, Invalid, Timeout
from holdfast.runner import Counters, Fault, Metrics, Work
from holdfast.runner.counters import LATENCY_BOUNDS_MS
from tests.runner.rig import Rig, Scripted

MODULES = ("holdfast.runner.counters",)


def test_every_class_of_outcome_has_its_counter(rig: Rig) -> None:
    rig.put(*[b"x"] * 5)
    errors = [None, Conflict(), Busy(), Timeout(), Invalid()]
    runner = rig.runner(Scripted(*errors))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert (metrics.attempts, metrics.successes) == (5, 1)
    assert (metrics.conflicts, metrics.busies, metrics.transients) == (1, 1, 1)
    assert (metrics.retryable, metrics.fatals) == (3, 1)
    assert (metrics.requeues, metrics.dead_letters, metrics.lost) == (3, 1, 0)


def test_latency_is_measured_with_the_injected_clock(rig: Rig) -> None:
    rig.put(b"3", b"5", b"1000")
    runner = rig.runner(lambda work: rig.clock.advance(int(work.payload) * MS))
    runner.tick()
    metrics = runner.counters.snapshot()
    assert metrics.latency_samples == 3
    assert metrics.latency_total_ms == 1008
    assert metrics.latency_max_ms == 1000


@pytest.mark.parametrize("bound_ms", LATENCY_BOUNDS_MS)
def test_a_bound_belongs_to_its_bucket_and_what_is_above_to_the_next(bound_ms: int) -> None:
    counters = Counters()
    at = LATENCY_BOUNDS_MS.index(bound_ms)
    counters.finished(Fault.SUCCESS, bound_ms * MS)
    counters.finished(Fault.SUCCESS, bound_ms * MS + 1)
    histogram = counters.snapshot().latency_histogram
    assert histogram[at : at + 2] == (1, 1)
    assert sum(histogram) == 2


def test_a_snapshot_is_a_copy() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.add("attempts")
    assert before == Metrics()
    assert counters.snapshot() == Metrics(attempts=1)


def test_reset_starts_from_nothing() -> None:
    counters = Counters()
    counters.finished(Fault.BUSY, 5 * MS)
    counters.reset()
    assert counters.snapshot() == Metrics()


def test_the_sink_gets_a_copy_after_each_update() -> None:
    seen: list[Metrics] = []
    counters = Counters(seen.append)
    counters.add("attempts")
    counters.finished(Fault.SUCCESS, MS)
    counters.reset()
    assert [metrics.attempts for metrics in seen] == [1, 1, 0]
    assert [metrics.successes for metrics in seen] == [0, 1, 0]


def test_a_sink_that_raises_is_counted_and_breaks_nothing(rig: Rig) -> None:
    rig.put(b"a", b"b")
    counters = Counters(lambda metrics: 1 / 0)
    runner = rig.runner(counters=counters)
    assert runner.tick().done == 2
    assert counters.snapshot().sink_errors == 4


def test_a_sink_may_call_back_and_is_not_called_for_what_it_does_itself(rig: Rig) -> None:
    rig.put(b"a")
    calls = []

    def sink(metrics: Metrics) -> None:
        calls.append(metrics)
        counters.snapshot()
        counters.add("transients")
        runner.set_policy(runner.policy)

    counters = Counters(sink)
    runner = rig.runner(counters=counters)
    assert runner.tick().done == 1
    assert len(calls) == counters.snapshot().transients == 2
    assert counters.snapshot().sink_errors == 0


def test_a_sink_that_ticks_is_refused_and_the_loop_goes_on(rig: Rig) -> None:
    rig.put(b"a", b"b")
    counters = Counters(lambda metrics: runner.tick())
    runner = rig.runner(counters=counters)
    assert runner.tick().done == 2
    assert counters.snapshot().sink_errors > 0


def test_a_crash_in_a_sink_is_a_crash() -> None:
    def sink(metrics: Metrics) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Counters(sink).add("attempts")


def test_updates_from_many_threads_are_all_counted() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(1000):
            counters.add("attempts")
            counters.finished(Fault.SUCCESS, MS)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics = counters.snapshot()
    assert (metrics.attempts, metrics.successes, metrics.latency_samples) == (4000, 4000, 4000)


def test_latency_includes_failed_attempts(rig: Rig) -> None:
    rig.put(b"a")

    def slow(work: Work) -> None:
        rig.clock.advance(7 * MS)
        raise ValueError

    runner = rig.runner(slow)
    runner.tick()
    assert runner.counters.snapshot().latency_max_ms == 7
