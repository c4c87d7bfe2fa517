"""The histogram of durations that the metrics of a process read."""

from __future__ import annotations

from holdfast.clock import S
from holdfast.store.latency_histogram import EXPONENTS, LatencyHistogram

MODULES = ("holdfast.store.latency_histogram",)


def test_durations_are_counted_below_the_bounds_that_exceed_them() -> None:
    histogram = LatencyHistogram()
    durations = [0, 1, (1 << 16) - 1, 1 << 16, 5 * S, 3600 * S]
    for duration_ns in durations:
        histogram.add(duration_ns)
    buckets = histogram.cumulative()
    assert [bound_ns for bound_ns, _ in buckets] == [*(1 << one for one in EXPONENTS), None]
    for bound_ns, count in buckets[:-1]:
        assert bound_ns is not None
        assert count == sum(duration_ns < bound_ns for duration_ns in durations)
    assert buckets[-1] == (None, len(durations))
    assert histogram.total_ns == sum(durations)
