"""The answer of `GET /metrics`: the samples of a store and of this process, in a text format of Prometheus.

The samples are read when they are asked for, so that nothing that runs pays for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from holdfast.clock import SYSTEM, Clock
from holdfast.ops.metrics.families import BY_NAME, MetricFamily, MetricSample, MetricType
from holdfast.ops.metrics.process_samples import (
    NO_RESPONSES,
    MeteredProcess,
    process_histograms,
    read_process_samples,
)
from holdfast.ops.metrics.runner_metrics import RunnerReading, latency_histogram
from holdfast.ops.metrics.runner_metrics import read_samples as read_runner_samples
from holdfast.ops.metrics.store_samples import read_samples as read_store_samples
from holdfast.ops.store_size import store_size, store_space
from holdfast.store.api import Store

ReadRunners = Callable[[], Sequence[RunnerReading]]


class MetricsPage:
    """The metrics of one store and of the runners of this process."""

    def __init__(
        self,
        store: Store,
        *,
        worker: str = "",
        runners: ReadRunners = tuple,
        roles: Sequence[object] = (),
        responses: Mapping[int, int] = NO_RESPONSES,
        clock: Clock = SYSTEM,
    ) -> None:
        """`worker` is the label of the metrics of this process. Without it they are left out. `responses` has the number of
        HTTP responses by the first digit of their status."""
        self._registry = CollectorRegistry()
        process = MeteredProcess(worker, roles, responses)
        self._registry.register(_HoldfastCollector(store, process, runners, clock))
        # Memory, processor time, open files and garbage collection of this process.
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return the content type and the body, in the best format that the Accept header names."""
        encoder, content_type = choose_encoder(accept)
        return content_type, encoder(self._registry)


class _HoldfastCollector(Collector):
    def __init__(
        self,
        store: Store,
        process: MeteredProcess,
        runners: ReadRunners,
        clock: Clock,
    ) -> None:
        self._store = store
        self._process = process
        self._runners = runners
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Empty: a registration reads no store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        readings, process = self._runners(), self._process
        samples = [
            *_size_samples(self._store),
            *self._store.read(read_store_samples, self._clock.wall_ns()),
            *read_runner_samples(process.worker, readings),
        ]
        if process.worker:
            samples += read_process_samples(process, self._store)
        # A stable sort keeps the order within a family.
        samples.sort(key=lambda sample: sample.family)
        for name, found in groupby(samples, key=lambda sample: sample.family):
            yield _metric(BY_NAME[name], found)
        yield from latency_histogram(process.worker, readings)
        if process.worker:
            yield from process_histograms(process.worker, self._store, process.roles)


def _size_samples(store: Store) -> Iterator[MetricSample]:
    size = store_size(store)
    yield MetricSample("holdfast_commits_total", (), size.commit_no)
    yield MetricSample("holdfast_store_bytes", (), size.bytes)
    yield MetricSample("holdfast_store_disk_bytes", (), size.disk_bytes)
    if (space := store_space(store)) is not None:
        yield MetricSample("holdfast_store_limit_bytes", (), space.limit_bytes)
        yield MetricSample("holdfast_store_disk_free_bytes", (), space.disk_free_bytes)


def _metric(family: MetricFamily, samples: Iterable[MetricSample]) -> Metric:
    kind = CounterMetricFamily if family.type is MetricType.COUNTER else GaugeMetricFamily
    metric = kind(family.name.removesuffix("_total"), family.help, labels=family.labels)
    for sample in samples:
        metric.add_metric(sample.labels, sample.value)
    return metric
