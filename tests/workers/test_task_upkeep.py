"""Task upkeep by any service: ended tasks are deleted as fast as they end, and the log has checkpoints."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import holdfast as hf
from bench import retention
from bench.retention import Amount, LmdbSite, Minute, PgSite, Site
from holdfast.clock import MS, S, SimClock
from holdfast.config import BLOB_GRACE_NS, BLOB_THRESHOLD_BYTES
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.schema import Space
from holdfast.tasks import checkpoint, operations
from holdfast.tasks.model import TaskCounts, TaskSpec, get_counts, keys_of
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from holdfast.workers.orchestrator import Orchestrator
from holdfast.workers.tasks import upkeep
from tests.postgres import drop_databases, fresh_url
from tests.process.watch import until
from tests.workers.task_rig import open_task_rig

MODULES = ("holdfast.workers.tasks.upkeep",)

TASKS = 1_200
# A short simulated run with a hundredth of the load of `python -m bench retention`.
SCALE = 100
LOG_BYTES = checkpoint.LOG_BYTES_MIN // SCALE // 4
SMALL = Amount(rate=1_000 // SCALE, minutes=3, retain_s=5, batch=5, first=1)
# Tasks of the current second may still exist. A slow machine deletes more of them, because store time
# advances while the service catches up.
KEPT_MAX = int(SMALL.rate * (SMALL.retain_s + 1))
ROWS_MAX = 20 * KEPT_MAX


@hf.task
def nothing() -> None: ...


def make_ended_tasks(
    store: Store, universe: str, count: int, retain_ns: int, error: str = ""
) -> None:
    """Make `count` ended tasks, each in a separate commit, so that a retention row names one task."""
    spec = TaskSpec("other", queue="elsewhere", retain_ns=retain_ns)
    store.transact(operations.submit, universe, spec, [TaskToSubmit(b"")] * count)
    grants = []
    while len(grants) < count:
        grants += store.transact(
            operations.lease, universe, GrantRequest("w", ["elsewhere"], 1_000)
        ).grants
    end = AttemptOutcome.REFUSED if error else AttemptOutcome.OK
    for grant in grants:
        report = TaskReport(grant.seq, grant.lease, end, b"", "bad", error)
        store.transact(operations.apply_reports, universe, "w", store.generation, [report])


def counts(store: Store, universe: str) -> TaskCounts:
    found: TaskCounts = store.read(get_counts, keys_of(universe), "elsewhere")
    return found


def test_worker_deletes_expired_tasks_as_fast_as_they_end() -> None:
    with open_task_rig(nothing) as rig:
        worker = rig.worker()
        make_ended_tasks(rig.store, "jobs", TASKS, retain_ns=S)
        rig.pass_time(3, worker)
        rig.step_until(
            lambda: counts(rig.store, "jobs") == TaskCounts(), "all are forgotten", worker
        )
        # A few rounds suffice: one round deletes all overdue tasks.
        assert rig.clock.boot_ns() < SimClock().boot_ns() + 10 * S


def test_idle_worker_deletes_expired_tasks_in_time() -> None:
    """It sleeps at most until the end of the first retention."""
    with open_task_rig(nothing) as rig:
        worker = rig.worker()
        rig.pass_time(1, worker)
        make_ended_tasks(rig.store, "jobs", 5, retain_ns=4 * S)
        rig.pass_time(16, worker)
        rig.step_until(
            lambda: counts(rig.store, "jobs") == TaskCounts(), "all are forgotten", worker
        )


def test_orchestrator_deletes_expired_tasks_and_makes_the_checkpoint() -> None:
    """Without task workers the leader of the universe runs the upkeep."""
    clock = SimClock()
    store = InProcessStore("memory:", MemoryBackend(), clock)
    leader = Orchestrator(store, universe="u", worker="O", incarnation="1", clock=clock)
    make_ended_tasks(store, "u", TASKS, retain_ns=0, error="e" * 4_000)

    def tidy() -> bool:
        clock.advance(S)
        leader.tick()
        made: bool = store.read(checkpoint.read_index, "u").latest.number > 0
        return made and counts(store, "u") == TaskCounts()

    until(tidy, "all are forgotten, and the log has a checkpoint")
    leader.shut_down()


def test_upkeep_round_is_bounded_and_the_next_round_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound lets the checkpoint run and a stopping service end soon."""
    monkeypatch.setattr(upkeep, "ROUND", 2 * upkeep.BATCH)
    clock = SimClock()
    store = InProcessStore("memory:", MemoryBackend(), clock)
    make_ended_tasks(store, "u", 3 * upkeep.BATCH, retain_ns=0)
    clock.advance(S)
    assert upkeep.run_round(store, "u")
    assert counts(store, "u").completed == upkeep.BATCH
    upkeep.run_round(store, "u", lambda: False)
    assert counts(store, "u").completed == upkeep.BATCH, "one that stops begins nothing"
    while upkeep.run_round(store, "u"):
        pass
    assert counts(store, "u") == TaskCounts()


def test_worker_deletes_blobs_of_deleted_tasks() -> None:
    """Large arguments and results are blobs. They are deleted a minute after the last row that names them."""
    with open_task_rig(nothing) as rig:
        worker = rig.worker()
        large = TaskToSubmit(b"\x92\x90\x80" + bytes(BLOB_THRESHOLD_BYTES))
        spec = TaskSpec("other", queue="elsewhere", retain_ns=0)
        [seq] = rig.store.transact(operations.submit, "jobs", spec, [large])
        rig.store.transact(operations.cancel, "jobs", [seq])
        rig.pass_time(3, worker)
        rig.step_until(lambda: counts(rig.store, "jobs") == TaskCounts(), "it is forgotten", worker)
        assert rig.store.read(blobs.oldest_idle_ns) is not None
        rig.pass_time(BLOB_GRACE_NS / S, worker)
        rig.step_until(
            lambda: rig.store.read(blobs.oldest_idle_ns) is None,
            "the blob is gone",
            worker,
            tick_ns=MS,
        )


# -- bounded rows over time ----------------------------------------------------------------------


class RowCounter:
    """Counts the rows of tasks, log and blobs at the end of each simulated minute."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.counts: list[int] = []

    def record(self, _: Minute) -> None:
        self.counts.append(self._site.store.read(self._count_rows))

    def _count_rows(self, txn: Txn) -> int:
        spaces = [schema.key_prefix(space) for space in (Space.TASK, Space.JOURNAL, Space.BLOB)]
        return sum(len(txn.scan(space, tuples.prefix_end(space))) for space in spaces)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MIN", LOG_BYTES)


def assert_flat(site: Site, by: str) -> None:
    rows = RowCounter(site)
    minutes = retention.run(site, by, SMALL, rows.record)
    assert max(one.kept for one in minutes) <= KEPT_MAX
    # A task has two rows plus its log records. Without deletion the count would be many times higher.
    assert max(rows.counts) <= ROWS_MAX < 2 * SMALL.rate * 60 * SMALL.minutes, rows.counts


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("by", retention.BY)
def test_task_rows_do_not_grow_with_time(tmp_path: Path, by: str) -> None:
    with contextlib.closing(LmdbSite(tmp_path)) as site:
        assert_flat(site, by)


@pytest.mark.postgresql
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("scaled")
def test_task_rows_do_not_grow_with_time_on_postgresql() -> None:
    with contextlib.closing(PgSite(fresh_url())) as site:
        assert_flat(site, "worker")
    drop_databases()
