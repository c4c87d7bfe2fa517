"""The samples of one process: HTTP responses, tasks, leases, commits and the cost of PostgreSQL.

The roles, the store and the HTTP server count anyway, or count what costs less than a thousandth of the work that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import HistogramMetricFamily

from holdfast.clock import S
from holdfast.ops.metrics.families import BY_NAME, MetricSample
from holdfast.runner.lease_supervision import LeaseCounters
from holdfast.store.api import Store
from holdfast.store.latency_histogram import LatencyHistogram
from holdfast.store.urls import scheme_of
from holdfast.tasks.operations import AttemptOutcome, ReportAnswer
from holdfast.workers.held_leases import held_leases
from holdfast.workers.tasks.worker import TaskWorker
from holdfast.workers.world.worker import WorldWorker

TASK_SECONDS = "holdfast_task_attempt_seconds"
COMMIT_SECONDS = "holdfast_commit_seconds"


NO_RESPONSES: Mapping[int, int] = {}


class MeteredProcess(NamedTuple):
    """A process whose metrics have the label `worker`. `responses` has the number of its HTTP responses by the first digit
    of their status."""

    worker: str
    roles: Sequence[object] = ()
    responses: Mapping[int, int] = NO_RESPONSES


def read_process_samples(process: MeteredProcess, store: Store) -> Iterator[MetricSample]:
    worker, roles, responses = process
    for digit, count in sorted(responses.items()):
        yield MetricSample("holdfast_http_responses_total", (worker, f"{digit}xx"), count)
    for role in roles:
        if isinstance(role, TaskWorker):
            for outcome in AttemptOutcome:
                count = role.outcomes[outcome]
                yield MetricSample(
                    "holdfast_task_attempts_total", (worker, outcome.name.lower()), count
                )
            for answer in ReportAnswer:
                yield MetricSample(
                    "holdfast_task_reports_total",
                    (worker, answer.name.lower()),
                    role.counts[answer],
                )
    for kind, held in held_leases(roles).items():
        yield MetricSample("holdfast_leases_held", (worker, kind), held)
    for kind, counters in _lease_counters(roles):
        yield MetricSample("holdfast_leases_renewed_total", (worker, kind), counters.renewed)
        yield MetricSample("holdfast_leases_lost_total", (worker, kind), counters.lost)
    if scheme_of(store.url) == "postgresql":
        costs = store.counters  # type: ignore[attr-defined]
        for name in ("round_trips", "statements", "retries"):
            value = getattr(costs, name)
            yield MetricSample(f"holdfast_postgres_{name}_total", (worker,), value)


def _lease_counters(roles: Sequence[object]) -> Iterator[tuple[str, LeaseCounters]]:
    for role in roles:
        if isinstance(role, TaskWorker):
            yield "tasks", role.lease_counters
        elif isinstance(role, WorldWorker):
            yield "worlds", role.lease_counters


def process_histograms(
    worker: str, store: Store, roles: Sequence[object]
) -> Iterator[HistogramMetricFamily]:
    tasks = [role.latencies for role in roles if isinstance(role, TaskWorker)]
    commits = getattr(store, "commit_latencies", None)
    for name, found in (
        (TASK_SECONDS, tasks),
        (COMMIT_SECONDS, [commits] if isinstance(commits, LatencyHistogram) else []),
    ):
        if found:
            yield _histogram(name, worker, found)


def _histogram(
    name: str, worker: str, histograms: Iterable[LatencyHistogram]
) -> HistogramMetricFamily:
    family = BY_NAME[name]
    metric = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    for histogram in histograms:
        buckets = [
            ("+Inf" if bound_ns is None else str(bound_ns / S), count)
            for bound_ns, count in histogram.cumulative()
        ]
        metric.add_metric((worker,), buckets, histogram.total_ns / S)
    return metric
