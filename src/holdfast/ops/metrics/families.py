"""The metric families as data: name, type, labels and help text. `docs/metrics.md` has the same table.

- A family of scope STORE describes the store. Every server of the store exports the same value: use one server, or
  `max by (…)`.
- A family of scope PROCESS counts in one process. Its samples have the label `worker`: sum over the workers.
- Names follow the conventions of Prometheus: base units, `_total` for counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class MetricScope(Enum):
    STORE = "store"
    PROCESS = "process"


class MetricType(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricFamily:
    name: str
    type: MetricType
    labels: tuple[str, ...]
    help: str
    scope: MetricScope = MetricScope.STORE


class MetricSample(NamedTuple):
    """One value of a family. The label values are in the order of the family's labels."""

    family: str
    labels: tuple[str, ...]
    value: float


def _gauge(name: str, labels: str, help: str) -> MetricFamily:
    return MetricFamily(name, MetricType.GAUGE, tuple(labels.split()), help)


def _counter(name: str, labels: str, help: str) -> MetricFamily:
    return MetricFamily(name, MetricType.COUNTER, tuple(labels.split()), help)


STORE_FAMILIES = (
    _counter("holdfast_commits_total", "", "Commits of the store."),
    _gauge("holdfast_store_generation", "", "Generation of the store: 1, and one more after each restore."),
    _gauge("holdfast_store_bytes", "", "Size of the store."),
    _gauge("holdfast_store_disk_bytes", "", "Space of the store on the disk."),
    _gauge("holdfast_store_limit_bytes", "", "Size that an embedded store may reach."),
    _gauge("holdfast_store_disk_free_bytes", "", "Free space of the disk of an embedded store."),
    _gauge("holdfast_store_kind_bytes", "kind", "Bytes of keys and values by kind of data, as of the last census."),
    _gauge("holdfast_store_kind_rows", "kind", "Rows by kind of data, as of the last census."),
    _gauge("holdfast_store_census_age_seconds", "", "Age of the last census. No sample before the first one."),
    _gauge("holdfast_universes", "", "Universes of the store."),
    _gauge("holdfast_ready", "universe", "1 if the universe is ready, else 0."),
    _gauge("holdfast_readiness_blockers", "universe code", "Readiness blockers by reason."),
    _gauge("holdfast_leader_epoch", "universe", "Epoch of the leader lease."),
    _gauge("holdfast_leader_lease_seconds", "universe", "Time until the leader lease ends; 0 without a leader."),
    _gauge("holdfast_workers", "universe state", "Registered workers: live, draining or silent."),
    _gauge("holdfast_worlds", "universe status", "Worlds by status."),
    _gauge("holdfast_inbox_worlds", "universe", "Worlds with unread events, up to 1,000."),
    _gauge("holdfast_inbox_events", "universe", "Unread events of these worlds."),
    _gauge("holdfast_inbox_oldest_seconds", "universe", "Age of the oldest unread event of these worlds."),
    _gauge("holdfast_failed_events", "universe", "Events whose reducer raised, as dead letters."),
    _gauge("holdfast_effects", "universe kind state", "Effects without a receipt, and dead letters."),
    _counter("holdfast_effects_done_total", "universe kind", "Effects with a receipt."),
    _gauge("holdfast_timers", "universe clock state", "Pending timers of worlds by clock, and dead letters."),
    _gauge("holdfast_timer_lateness_seconds", "universe", "How long the first due timer has waited."),
    _gauge("holdfast_mail_waiting", "universe to", "Messages that wait for a universe in another store."),
    _gauge("holdfast_tasks", "universe queue state", "Tasks by state, ended ones while they are retained."),
    _gauge("holdfast_task_limit", "universe queue", "Largest number of leased tasks of a queue; 0: no limit."),
    _gauge("holdfast_flows", "universe flow state", "Flows by state, ended ones while they are retained."),
    _gauge("holdfast_schedules", "universe state", "Schedules: active, paused or stopped by an error."),
    _gauge("holdfast_schedule_queued", "universe", "Occurrences that wait for the end of the last one."),
    _gauge("holdfast_schedule_lateness_seconds", "universe", "How long the first due occurrence has waited."),
    _gauge("holdfast_budget_spent", "universe unit", "Spent by effects. Unit `money`: the currency."),
    _gauge("holdfast_budget_reserved", "universe unit", "Reserved by calls under way."),
    _gauge("holdfast_budget_limit", "universe unit", "Limit of the universe. No sample without a limit."),
    _gauge("holdfast_dispatches", "universe state", "Dispatch requests by state."),
    _gauge("holdfast_replay_pending", "universe", "Events that the leader was not yet notified of."),
    _gauge("holdfast_stage_rows", "stage state", "Rows of the latest run of a stage."),
    _gauge("holdfast_stage_calls", "stage", "Calls of the latest run of a stage."),
    _gauge("holdfast_stage_cost", "stage", "Reported cost of the latest run of a stage."),
    _gauge("holdfast_metrics_truncated", "family", "1 if a family leaves out values of a label."),
)  # fmt: skip

_PER_RUNNER = ("worker", "queue")
PROCESS_FAMILIES = tuple(
    MetricFamily(name, type, labels, help, MetricScope.PROCESS)
    for name, type, labels, help in (
        ("holdfast_runner_attempts_total", MetricType.COUNTER, (*_PER_RUNNER, "outcome"), "Attempts of runners: effects, mail and timers."),
        ("holdfast_runner_retries_total", MetricType.COUNTER, _PER_RUNNER, "Items that were put back for another attempt."),
        ("holdfast_runner_dead_letters_total", MetricType.COUNTER, _PER_RUNNER, "Items that became dead letters."),
        ("holdfast_runner_claims_lost_total", MetricType.COUNTER, _PER_RUNNER, "Items that were lost to another worker during an attempt."),
        ("holdfast_runner_sink_errors_total", MetricType.COUNTER, _PER_RUNNER, "Errors that a metrics sink of the app raised."),
        ("holdfast_runner_attempt_seconds", MetricType.HISTOGRAM, _PER_RUNNER, "Duration of attempts."),
        ("holdfast_task_attempts_total", MetricType.COUNTER, ("worker", "outcome"), "Ended attempts of tasks; activations of flows are tasks."),
        ("holdfast_task_attempt_seconds", MetricType.HISTOGRAM, ("worker",), "Duration of attempts of tasks."),
        ("holdfast_task_reports_total", MetricType.COUNTER, ("worker", "answer"), "Reports of attempts by the answer of the store."),
        ("holdfast_leases_held", MetricType.GAUGE, ("worker", "kind"), "Held leases: tasks, worlds, effects, and authority of the leader."),
        ("holdfast_leases_renewed_total", MetricType.COUNTER, ("worker", "kind"), "Extended leases of tasks and worlds."),
        ("holdfast_leases_lost_total", MetricType.COUNTER, ("worker", "kind"), "Leases of tasks and worlds that were lost or revoked."),
        ("holdfast_http_responses_total", MetricType.COUNTER, ("worker", "status"), "Responses of the HTTP server by the class of their status, such as 2xx."),
        ("holdfast_commit_seconds", MetricType.HISTOGRAM, ("worker",), "Duration of commits of this process."),
        ("holdfast_postgres_round_trips_total", MetricType.COUNTER, ("worker",), "Round trips of commits to PostgreSQL."),
        ("holdfast_postgres_statements_total", MetricType.COUNTER, ("worker",), "Statements of commits on PostgreSQL."),
        ("holdfast_postgres_retries_total", MetricType.COUNTER, ("worker",), "Commits that were repeated because PostgreSQL did not answer."),
    )
)  # fmt: skip

FAMILIES = STORE_FAMILIES + PROCESS_FAMILIES
BY_NAME = {family.name: family for family in FAMILIES}
