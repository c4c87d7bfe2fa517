"""Tasks are forgotten as fast as they end, and the log has its checkpoints, by whichever role is there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import holdfast as hf
from bench import retention
from bench.retention import Amount, LmdbSite, Minute, PgSite, Site
from holdfast.clock import MS, S, SimClock
from holdfast.config import BLOB_GRACE_NS, BLOB_THRESHOLD_BYTES
from holdfast.roles import task_upkeep
from holdfast.roles.orchestrator import Orchestrator
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.store.schema import Space
from holdfast.tasks import checkpoint, coordinator
from holdfast.tasks.coordinator import End, New, Report
from holdfast.tasks.rows import Counts, Spec, counts_of, keys_of
from tests.postgres import drop_databases, fresh_url
from tests.process.watch import until
from tests.roles.task_rig import shift

MODULES = ("holdfast.roles.task_upkeep",)

TASKS = 1_200
# A simulated run that is short: the load is a hundredth of the one of `python -m bench retention`.
SCALE = 100
LOG_BYTES = checkpoint.LOG_BYTES_MIN // SCALE // 4
SMALL = Amount(rate=1_000 // SCALE, minutes=3, retain_s=5, batch=5, first=1)
# Tasks of the second that was under way may be there, too. A slow machine forgets more of them: store time
# advances while the role catches up.
KEPT_MAX = int(SMALL.rate * (SMALL.retain_s + 1))
ROWS_MAX = 20 * KEPT_MAX


@hf.task
def nothing() -> None: ...


def ended(store: Store, universe: str, count: int, retain_ns: int, error: str = "") -> None:
    """So many tasks that have ended, each in a commit of its own: one row of the retention names one."""
    spec = Spec("other", queue="elsewhere", retain_ns=retain_ns)
    store.transact(coordinator.submit, universe, spec, [New(b"")] * count)
    grants = []
    while len(grants) < count:
        grants += store.transact(coordinator.lease, universe, "w", ["elsewhere"], 1_000).grants
    end = End.REFUSED if error else End.OK
    for grant in grants:
        report = Report(grant.seq, grant.lease, end, b"", "bad", error)
        store.transact(coordinator.settle, universe, "w", store.generation, [report])


def counts(store: Store, universe: str) -> Counts:
    found: Counts = store.read(counts_of, keys_of(universe), "elsewhere")
    return found


def test_a_worker_forgets_tasks_as_fast_as_they_end() -> None:
    with shift(nothing) as rig:
        worker = rig.worker()
        ended(rig.store, "jobs", TASKS, retain_ns=S)
        rig.pass_time(3, worker)
        rig.until(lambda: counts(rig.store, "jobs") == Counts(), "all are forgotten", worker)
        # No more than a few looks were needed: what is overdue is forgotten to its end.
        assert rig.clock.boot_ns() < SimClock().boot_ns() + 10 * S


def test_a_worker_that_waits_for_tasks_forgets_the_others_in_time() -> None:
    """It sleeps no longer than until the first retention is over."""
    with shift(nothing) as rig:
        worker = rig.worker()
        rig.pass_time(1, worker)
        ended(rig.store, "jobs", 5, retain_ns=4 * S)
        rig.pass_time(16, worker)
        rig.until(lambda: counts(rig.store, "jobs") == Counts(), "all are forgotten", worker)


def test_an_orchestrator_alone_forgets_tasks_and_makes_the_checkpoint() -> None:
    """Where task workers are scaled to none, the leader of the universe does it."""
    clock = SimClock()
    store = LocalStore("memory:", MemoryBackend(), clock)
    leader = Orchestrator(store, universe="u", worker="O", incarnation="1", clock=clock)
    ended(store, "u", TASKS, retain_ns=0, error="e" * 4_000)

    def tidy() -> bool:
        clock.advance(S)
        leader.tick()
        made: bool = store.read(checkpoint.current, "u").latest.number > 0
        return made and counts(store, "u") == Counts()

    until(tidy, "all are forgotten, and the log has a checkpoint")
    leader.finish()


def test_a_round_leaves_the_rest_of_a_long_backlog_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the log has its checkpoint, and a role that stops ends soon."""
    monkeypatch.setattr(task_upkeep, "ROUND", 2 * task_upkeep.BATCH)
    clock = SimClock()
    store = LocalStore("memory:", MemoryBackend(), clock)
    ended(store, "u", 3 * task_upkeep.BATCH, retain_ns=0)
    clock.advance(S)
    assert task_upkeep.tend(store, "u")
    assert counts(store, "u").completed == task_upkeep.BATCH
    task_upkeep.tend(store, "u", lambda: False)
    assert counts(store, "u").completed == task_upkeep.BATCH, "one that stops begins nothing"
    while task_upkeep.tend(store, "u"):
        pass
    assert counts(store, "u") == Counts()


def test_blobs_of_forgotten_tasks_go_with_a_worker_alone() -> None:
    """Large arguments and results are blobs: they go a minute after the last row that names them."""
    with shift(nothing) as rig:
        worker = rig.worker()
        large = New(b"\x92\x90\x80" + bytes(BLOB_THRESHOLD_BYTES))
        spec = Spec("other", queue="elsewhere", retain_ns=0)
        [seq] = rig.store.transact(coordinator.submit, "jobs", spec, [large])
        rig.store.transact(coordinator.cancel, "jobs", [seq])
        rig.pass_time(3, worker)
        rig.until(lambda: counts(rig.store, "jobs") == Counts(), "it is forgotten", worker)
        assert rig.store.read(blobs.next_idle_ns) is not None
        rig.pass_time(BLOB_GRACE_NS / S, worker)
        rig.until(
            lambda: rig.store.read(blobs.next_idle_ns) is None,
            "the blob is gone",
            worker,
            tick_ns=MS,
        )


# -- a long time ---------------------------------------------------------------------------------


class Rows:
    """The rows of tasks and of their log at the end of each simulated minute."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.found: list[int] = []

    def tell(self, _: Minute) -> None:
        self.found.append(self._site.store.read(self._count))

    def _count(self, txn: Txn) -> int:
        spaces = [schema.prefix(space) for space in (Space.TASK, Space.JOURNAL, Space.BLOB)]
        return sum(len(txn.scan(space, tuples.after(space))) for space in spaces)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MIN", LOG_BYTES)


def assert_flat(site: Site, by: str) -> None:
    rows = Rows(site)
    minutes = retention.run(site, by, SMALL, rows.tell)
    assert max(one.kept for one in minutes) <= KEPT_MAX
    # A task has two rows, and the log its share. If nothing went there would be many times as many.
    assert max(rows.found) <= ROWS_MAX < 2 * SMALL.rate * 60 * SMALL.minutes, rows.found


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize("by", retention.BY)
def test_rows_do_not_grow_with_time(tmp_path: Path, by: str) -> None:
    with contextlib.closing(LmdbSite(tmp_path)) as site:
        assert_flat(site, by)


@pytest.mark.postgresql
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("scaled")
def test_rows_do_not_grow_with_time_on_postgresql() -> None:
    with contextlib.closing(PgSite(fresh_url())) as site:
        assert_flat(site, "worker")
    drop_databases()
