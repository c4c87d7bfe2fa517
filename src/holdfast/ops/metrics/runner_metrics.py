"""The samples of the runners of one process: effects, mail and timers. A runner counts each attempt anyway."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from prometheus_client.metrics_core import HistogramMetricFamily

from holdfast.clock import S
from holdfast.ops.metrics.families import BY_NAME, MetricSample
from holdfast.runner.counters import LATENCY_BOUNDS_MS, Metrics
from holdfast.workers.runner_service import RunnerService

OUTCOMES = ("successes", "conflicts", "busies", "transients", "fatals")
# A process exports its first queues by name.
QUEUES_MAX = 40
ATTEMPT_SECONDS = "holdfast_runner_attempt_seconds"


class RunnerReading(NamedTuple):
    """The counters of the runner of one queue."""

    queue: str
    metrics: Metrics


def runner_readings(services: Iterable[object]) -> list[RunnerReading]:
    """Return the counters of the runners of these services: one reading for each queue."""
    by_queue: dict[str, list[Metrics]] = {}
    for service in services:
        if isinstance(service, RunnerService):
            for runner in list(service.runners):
                by_queue.setdefault(runner.queue, []).append(runner.counters.snapshot())
    first_by_name = sorted(by_queue.items())[:QUEUES_MAX]
    return [RunnerReading(queue, add_metrics(found)) for queue, found in first_by_name]


def add_metrics(found: Sequence[Metrics]) -> Metrics:
    if len(found) == 1:
        return found[0]
    summed = {
        field.name: sum(getattr(metrics, field.name) for metrics in found)
        for field in fields(Metrics)
        if field.name not in ("latency_histogram", "latency_max_ns")
    }
    histograms = zip(*(metrics.latency_histogram for metrics in found), strict=True)
    return Metrics(
        **summed,
        latency_max_ns=max(metrics.latency_max_ns for metrics in found),
        latency_histogram=tuple(map(sum, histograms)),
    )


def read_samples(worker: str, readings: Sequence[RunnerReading]) -> Iterator[MetricSample]:
    for queue, metrics in readings:
        for outcome in OUTCOMES:
            yield MetricSample(
                "holdfast_runner_attempts_total",
                (worker, queue, outcome),
                getattr(metrics, outcome),
            )
        for name, value in (
            ("holdfast_runner_retries_total", metrics.requeues),
            ("holdfast_runner_dead_letters_total", metrics.dead_letters),
            ("holdfast_runner_claims_lost_total", metrics.lost),
            ("holdfast_runner_sink_errors_total", metrics.sink_errors),
        ):
            yield MetricSample(name, (worker, queue), value)


def latency_histogram(
    worker: str, readings: Sequence[RunnerReading]
) -> Iterator[HistogramMetricFamily]:
    if not readings:
        return
    family = BY_NAME[ATTEMPT_SECONDS]
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    bounds = [*(str(bound / 1_000) for bound in LATENCY_BOUNDS_MS), "+Inf"]
    for queue, metrics in readings:
        counted, buckets = 0, []
        for bound, count in zip(bounds, metrics.latency_histogram, strict=True):
            counted += count
            buckets.append((bound, counted))
        metric.add_metric((worker, queue), buckets, metrics.latency_total_ns / S)
    yield metric
