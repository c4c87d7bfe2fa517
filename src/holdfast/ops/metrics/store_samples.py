"""The samples of a store, from its counters in one snapshot.

The number of reads is bounded: a label has at most `VALUES_MAX` values, the first by name, and the sum of the rest
is one sample with the value `(other)`. At most `READ_MAX` rows are read for each of them. A family that leaves out
values has a sample of `holdfast_metrics_truncated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from holdfast.clock import S
from holdfast.dispatch import log as dispatch_log
from holdfast.durable import inbox, queue
from holdfast.durable.item import keys_of as queue_keys_of
from holdfast.effects import budget
from holdfast.flows import flow_list
from holdfast.leadership import leader_lease, worker_registry
from holdfast.ledger import runs, summary
from holdfast.ops import catalog_queries, pending_work
from holdfast.ops.metrics.families import BY_NAME, STORE_FAMILIES, MetricSample
from holdfast.schedules import queries as schedule_queries
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.tasks import queries as task_queries
from holdfast.workers import space_census
from holdfast.workers.readiness import derive_readiness
from holdfast.workers.readiness_facts import gather_facts
from holdfast.world import catalog, timers
from holdfast.world.redrive import failed_events_queue

UNIVERSES_MAX = 20
VALUES_MAX = 40
READ_MAX = 1_000
OTHER = "(other)"
MICROS = 1_000_000

EFFECT_STATES = ("ready", "delayed", "claimed", "dead")
TIMER_STATES = ("pending", "due", "dead")
STAGE_STATES = ("succeeded", "skipped", "failed", "cancelled", "in_flight")
RUNNABLE_MAX = 1_000


def read_samples(txn: Txn, wall_ns: int) -> list[MetricSample]:
    """Return the samples of all universes of a store, without its size. `wall_ns` is the wall clock time."""
    names = catalog_queries.universes(txn)
    samples = _Samples(wall_ns)
    samples.add("holdfast_store_generation", (), txn.generation)
    for universe in names[:UNIVERSES_MAX]:
        for read in (_read_roles, _read_worlds, _read_effects, _read_timers, _read_tasks, _read_flows,
                     _read_schedules, _read_budgets, _read_dispatch):  # fmt: skip
            read(txn, universe, samples)
    _read_census(txn, samples)
    samples.add("holdfast_universes", (), len(names))
    if len(names) > UNIVERSES_MAX:
        for family in STORE_FAMILIES:
            if "universe" in family.labels:
                samples.truncated(family.name)
    _read_stages(txn, samples)
    return samples.items


class _Samples:
    def __init__(self, wall_ns: int) -> None:
        self.wall_ns = wall_ns
        self.items: list[MetricSample] = []
        self._truncated: set[str] = set()

    def add(self, family: str, labels: Sequence[str], value: float) -> None:
        assert len(labels) == len(BY_NAME[family].labels), family
        self.items.append(MetricSample(family, tuple(labels), value))

    def truncated(self, family: str) -> None:
        if family not in self._truncated:
            self._truncated.add(family)
            self.add("holdfast_metrics_truncated", (family,), 1)

    def add_by_state(
        self, family: str, universe: str, rows: Iterable[tuple[str, Any]], states: Sequence[str]
    ) -> None:
        """Add the counts of named rows by state: the first names, and the sum of the rest."""
        other: Counter[str] = Counter()
        named = islice(rows, READ_MAX)
        for number, (name, counts) in enumerate(named):
            for state in states:
                if number < VALUES_MAX and name != OTHER:
                    self.add(family, (universe, name, state), getattr(counts, state))
                else:
                    other[state] += getattr(counts, state)
        if other:
            self.truncated(family)
            for state in states:
                self.add(family, (universe, OTHER, state), other[state])


# --- one function for each noun ------------------------------------------------------------------


def _read_census(txn: Txn, samples: _Samples) -> None:
    census = space_census.last_census(txn)
    if census is None:
        return
    rows, size = Counter[str](), Counter[str]()
    for figure in census.figures:
        rows[figure.kind] += figure.rows
        size[figure.kind] += figure.bytes
    for kind in sorted(rows):
        samples.add("holdfast_store_kind_bytes", (kind,), size[kind])
        samples.add("holdfast_store_kind_rows", (kind,), rows[kind])
    age_ns = max(txn.now_ns - census.ended_ns, 0)
    samples.add("holdfast_store_census_age_seconds", (), age_ns / S)


def _read_roles(txn: Txn, universe: str, samples: _Samples) -> None:
    snapshot = derive_readiness(gather_facts(txn, universe), txn.now_ns)
    samples.add("holdfast_ready", (universe,), float(snapshot.ready))
    blockers = Counter(
        blocker.reason.value
        for blocker in (
            *snapshot.reasons,
            *(reason for subject in snapshot.subjects for reason in subject.reasons),
        )
    )
    for code, count in sorted(blockers.items()):
        samples.add("holdfast_readiness_blockers", (universe, code), count)
    samples.add("holdfast_leader_epoch", (universe,), snapshot.epoch)
    remaining_ns = max(snapshot.leased_until_ns - txn.now_ns, 0)
    samples.add("holdfast_leader_lease_seconds", (universe,), remaining_ns / S)
    samples.add("holdfast_replay_pending", (universe,), snapshot.replay_pending)
    for to, waiting in sorted(snapshot.mail.items())[:VALUES_MAX]:
        samples.add("holdfast_mail_waiting", (universe, to), waiting)
    epoch = leader_lease.epoch(txn, universe)
    states = Counter(
        _worker_state(record, txn.now_ns, epoch)
        for record in worker_registry.list_registered(txn, universe)
    )
    for state in ("live", "draining", "silent"):
        samples.add("holdfast_workers", (universe, state), states[state])


def _worker_state(record: worker_registry.WorkerRecord, now_ns: int, epoch: int) -> str:
    if not record.live(now_ns, worker_registry.TTL_NS, epoch):
        return "silent"
    return "draining" if record.draining else "live"


def _read_worlds(txn: Txn, universe: str, samples: _Samples) -> None:
    for status, count in catalog.count_by_status(txn, universe).items():
        samples.add("holdfast_worlds", (universe, status), count)
    worlds, events, now_ns = 0, 0, txn.now_ns
    oldest_ns = now_ns
    runnable = catalog.list_all_runnable(txn, universe, RUNNABLE_MAX + 1)
    for world_id in runnable[:RUNNABLE_MAX]:
        subject = catalog.subject_of(universe, world_id)
        depth = inbox.depth(txn, subject)
        worlds += depth > 0
        events += depth
        for entry in inbox.read(txn, subject, 1) if depth else ():
            oldest_ns = min(oldest_ns, entry.at_ns)
    if len(runnable) > RUNNABLE_MAX:
        samples.truncated("holdfast_inbox_worlds")
    samples.add("holdfast_inbox_worlds", (universe,), worlds)
    samples.add("holdfast_inbox_events", (universe,), events)
    samples.add("holdfast_inbox_oldest_seconds", (universe,), (now_ns - oldest_ns) / S)
    failed = queue.counts(txn, failed_events_queue(universe)).dead
    samples.add("holdfast_failed_events", (universe,), failed)


def _read_effects(txn: Txn, universe: str, samples: _Samples) -> None:
    rows = [(row.kind, row.counts) for row in pending_work.kinds(txn, universe)]
    samples.add_by_state("holdfast_effects", universe, rows, EFFECT_STATES)
    done = {kind: counts.done for kind, counts in rows[:VALUES_MAX] if kind != OTHER}
    for kind, count in done.items():
        samples.add("holdfast_effects_done_total", (universe, kind), count)


def _read_timers(txn: Txn, universe: str, samples: _Samples) -> None:
    late_ns = 0
    for clock, name, offset_ns in (
        ("store", timers.delay_queue(universe), 0),
        ("wall", timers.calendar_queue(universe), samples.wall_ns - txn.now_ns),
    ):
        counts = queue.counts(txn, name)
        values = (counts.delayed, counts.ready + counts.claimed, counts.dead)
        for state, value in zip(TIMER_STATES, values, strict=True):
            samples.add("holdfast_timers", (universe, clock, state), value)
        keys = queue_keys_of(name)
        for key, _ in txn.scan(keys.delayed, tuples.prefix_end(keys.delayed), 1):
            due_ns = tuples.unpack(key[len(keys.delayed) :])[0]
            assert isinstance(due_ns, int)
            late_ns = max(late_ns, txn.now_ns + offset_ns - due_ns)
    samples.add("holdfast_timer_lateness_seconds", (universe,), late_ns / S)


def _read_tasks(txn: Txn, universe: str, samples: _Samples) -> None:
    rows = task_queries.list_queues(txn, universe)
    states = rows[0].counts.__struct_fields__ if rows else ()
    samples.add_by_state("holdfast_tasks", universe, ((row.queue, row.counts) for row in rows), states)  # fmt: skip
    for row in rows[:VALUES_MAX]:
        if row.queue != OTHER:
            samples.add("holdfast_task_limit", (universe, row.queue), row.limits.concurrency)


def _read_flows(txn: Txn, universe: str, samples: _Samples) -> None:
    rows = flow_list.list_counts(txn, universe)
    states = rows[0].counts.__struct_fields__ if rows else ()
    samples.add_by_state("holdfast_flows", universe, rows, states)


def _read_schedules(txn: Txn, universe: str, samples: _Samples) -> None:
    rows = schedule_queries.list_schedules(txn, universe, READ_MAX + 1)
    if len(rows) > READ_MAX:
        samples.truncated("holdfast_schedules")
    by_state = Counter(row.state for row in rows)
    for state in ("active", "paused", "stopped"):
        samples.add("holdfast_schedules", (universe, state), by_state[state])
    samples.add("holdfast_schedule_queued", (universe,), sum(row.queued for row in rows))
    due = [row.next_ns for row in rows if row.state == "active" and row.next_ns is not None]
    late_ns = max(samples.wall_ns - min(due), 0) if due else 0
    samples.add("holdfast_schedule_lateness_seconds", (universe,), late_ns / S)


def _read_budgets(txn: Txn, universe: str, samples: _Samples) -> None:
    for unit in budget.UNITS:
        account = budget.account(txn, universe, budget.UNIVERSE_SCOPE, unit)
        divisor = MICROS if unit == budget.MONEY else 1
        samples.add("holdfast_budget_spent", (universe, unit), account.spent / divisor)
        samples.add("holdfast_budget_reserved", (universe, unit), account.reserved / divisor)
        if account.limit is not None:
            samples.add("holdfast_budget_limit", (universe, unit), account.limit / divisor)


def _read_dispatch(txn: Txn, universe: str, samples: _Samples) -> None:
    backlog = dispatch_log.backlog(txn, universe)
    for state in backlog.__struct_fields__:
        samples.add("holdfast_dispatches", (universe, state), getattr(backlog, state))


def _read_stages(txn: Txn, samples: _Samples) -> None:
    names = runs.list_names(txn, "", VALUES_MAX + 1)
    if len(names) > VALUES_MAX:
        samples.truncated("holdfast_stage_rows")
    for name, run_id in names[:VALUES_MAX]:
        progress = runs.get_progress(txn, run_id)
        if progress is None:
            continue
        tally = summary.tally_rows(progress)
        for state in STAGE_STATES:
            samples.add("holdfast_stage_rows", (name, state), getattr(tally, state))
        samples.add("holdfast_stage_calls", (name,), progress.calls)
        samples.add("holdfast_stage_cost", (name,), progress.cost)
