"""The readiness facts as they are read from a store."""

from typing import Any

import pytest

from holdfast.clock import SimClock
from holdfast.dispatch import notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import DispatchOutcomeReason
from holdfast.errors import StoreCorrupt, WriterLost
from holdfast.leadership import worker_registry
from holdfast.ledger import runs
from holdfast.ledger.runs import RunRecord
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.workers import readiness_facts
from holdfast.workers.readiness import ReadinessReason
from holdfast.workers.readiness_facts import gather_facts, read_readiness
from holdfast.world import catalog
from holdfast.world.catalog import WorldBlocker, WorldEvent
from tests.leadership.rig import TTL, U, acquire, mark_stale, simulate_restore

MODULES = ("holdfast.workers.readiness_facts",)


def create(store: Store, *names: str) -> None:
    def make(txn: Txn) -> None:
        for name in names:
            catalog.create(txn, U, "Account", name, f"id-{name}")

    store.transact(make)


def park(store: Store, name: str) -> None:
    blocker = WorldBlocker("replay_diverged", "another state", 4)
    store.transact(catalog.change_status, U, f"id-{name}", WorldEvent.PARK, blocker)


def reasons(store: Store) -> list[ReadinessReason]:
    return [blocker.reason for blocker in read_readiness(store, U).reasons]


def test_universe_without_leader_is_not_ready(sim_store: Store) -> None:
    assert reasons(sim_store) == [ReadinessReason.AUTHORITY_MISSING]


def test_readiness_follows_the_leader_lease(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store)
    assert read_readiness(sim_store, U).ready
    clock.advance(TTL)
    assert reasons(sim_store) == [ReadinessReason.AUTHORITY_EXPIRED]
    mark_stale(sim_store)
    assert reasons(sim_store) == [ReadinessReason.AUTHORITY_STALE]
    acquire(sim_store, "b")
    assert read_readiness(sim_store, U).ready
    simulate_restore(sim_store)
    assert reasons(sim_store) == [ReadinessReason.AUTHORITY_RESTORED]


def test_live_workers_are_counted_for_the_current_leader_epoch(sim_store: Store) -> None:
    sim_store.transact(worker_registry.heartbeat, U, "w1", "1", ("world",))
    acquire(sim_store)
    assert read_readiness(sim_store, U).workers_live == 0
    sim_store.transact(worker_registry.heartbeat, U, "w2", "1", ("world",))
    assert read_readiness(sim_store, U).workers_live == 1


def test_parked_and_paused_worlds_are_listed_with_their_blockers(sim_store: Store) -> None:
    acquire(sim_store)
    create(sim_store, "ada", "bob", "eve")
    park(sim_store, "ada")
    sim_store.transact(catalog.change_status, U, "id-eve", WorldEvent.PAUSE)
    found = read_readiness(sim_store, U)
    assert found.ready
    assert found.subjects_blocked == 2
    assert found.worlds == {"active": 1, "paused": 1, "parked": 1, "deleted": 0}
    ada, eve = found.subjects
    assert (ada.subject, ada.name, ada.ready) == ("id-ada", "Account/ada", False)
    [parked] = ada.reasons
    assert (parked.reason, parked.code) == (ReadinessReason.WORLD_PARKED, "replay_diverged")
    assert (parked.text, parked.height) == ("another state", 4)
    assert parked.since_ns > 0
    assert [blocker.reason for blocker in eve.reasons] == [ReadinessReason.WORLD_PAUSED]


def test_resumed_or_deleted_world_is_not_listed_as_blocked(sim_store: Store) -> None:
    create(sim_store, "ada", "bob")
    park(sim_store, "ada")
    park(sim_store, "bob")
    sim_store.transact(catalog.change_status, U, "id-ada", WorldEvent.RESUME)
    sim_store.transact(catalog.change_status, U, "id-bob", WorldEvent.DELETE)
    assert read_readiness(sim_store, U).subjects == []


def test_subject_list_is_bounded_and_counts_omitted_subjects(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness_facts, "SUBJECTS_MAX", 2)
    monkeypatch.setattr(readiness_facts, "SCAN_PAGE", 1)
    create(sim_store, *"abcde")
    for name in "bcde":
        park(sim_store, name)
    found = read_readiness(sim_store, U)
    assert [subject.name for subject in found.subjects] == ["Account/b", "Account/c"]
    assert (found.subjects_blocked, found.subjects_omitted) == (4, 2)


def test_scan_that_reaches_its_limit_counts_omitted_subjects(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness_facts, "RECORDS_MAX", 2)
    monkeypatch.setattr(readiness_facts, "SCAN_PAGE", 1)
    create(sim_store, *"abc")
    park(sim_store, "c")
    found = read_readiness(sim_store, U)
    assert (found.subjects, found.subjects_omitted) == ([], 1)


def test_gather_reads_no_world_row_when_none_is_blocked(sim_store: Store) -> None:
    create(sim_store, "ada")
    scanned: list[bytes] = []

    def watched(txn: Any) -> None:
        scan = txn.scan

        def told(lo: bytes, *rest: Any) -> Any:
            scanned.append(lo)
            return scan(lo, *rest)

        txn.scan = told
        gather_facts(txn, U)

    sim_store.read(watched)
    # Mail routes and rows of stopped worlds are few. They share the key space of the worlds.
    worlds = schema.key_prefix(schema.Space.WORLD)
    beside = tuple(schema.key_prefix(schema.Space.WORLD, U, kind) for kind in ("route", "u"))
    assert not [lo for lo in scanned if lo.startswith(worlds) and not lo.startswith(beside)]


@pytest.mark.parametrize("marker", [None, schema.encode_marker(9, 9), b"garbage!"])
def test_wrong_schema_marker_is_a_blocker(sim_store: Store, marker: bytes | None) -> None:
    acquire(sim_store)
    sim_store.transact(
        lambda txn: (
            txn.delete(schema.MARKER_KEY) if marker is None else txn.put(schema.MARKER_KEY, marker)
        )
    )
    assert reasons(sim_store) == [ReadinessReason.SCHEMA_MISMATCH]


@pytest.mark.parametrize("error", [StoreCorrupt(why="a bad page"), WriterLost()])
def test_store_error_is_reported_as_a_blocker(error: Exception) -> None:
    class Broken:
        def read(self, *args: object) -> object:
            raise error

    found = read_readiness(Broken(), U)  # type: ignore[arg-type]
    assert not found.ready
    assert [(b.reason, b.code) for b in found.reasons] == [
        (ReadinessReason.STORE_FAILED, error.code)
    ]  # type: ignore[attr-defined]


def test_closed_store_is_reported_as_a_blocker(sim_store: Store) -> None:
    sim_store.close()
    assert [blocker.code for blocker in read_readiness(sim_store, U).reasons] == ["store_closed"]


# -- dispatches and runs ---------------------------------------------------------------------------


def test_readiness_reports_the_dispatch_backlog_by_state(sim_store: Store) -> None:
    acquire(sim_store)
    log = DispatchLog(sim_store, U)
    for n in range(3):
        log.request(f"r{n}", "work")
    log.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    log.failed("r2", "no")
    found = read_readiness(sim_store, U)
    assert found.ready
    assert found.backlog == {
        "pending": 1,
        "notified": 1,
        "delivered": 0,
        "failed": 1,
        "deferred": 0,
    }


def test_deferred_dispatch_makes_a_universe_unready_until_it_is_tried(sim_store: Store) -> None:
    acquire(sim_store)
    log = DispatchLog(sim_store, U)
    log.request("r1", "leader")
    log.concluded("r1", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    assert reasons(sim_store) == [ReadinessReason.NOTIFICATION_DEFERRED]
    log.tried("r1")
    assert read_readiness(sim_store, U).ready


def test_pending_leader_notifications_make_a_universe_unready(sim_store: Store) -> None:
    acquire(sim_store)
    sim_store.transact(notifications.subscribe, U)
    DispatchLog(sim_store, U).request("r1", "work")
    assert reasons(sim_store) == [ReadinessReason.REPLAY_PENDING]
    assert read_readiness(sim_store, U).replay_pending == 1
    sim_store.transact(notifications.defer_leader_notification, U, "leader_missing", "no pane")
    pending, deferred = read_readiness(sim_store, U).reasons
    assert (pending.reason, deferred.reason) == (
        ReadinessReason.REPLAY_PENDING,
        ReadinessReason.NOTIFICATION_DEFERRED,
    )
    assert (deferred.code, deferred.text, deferred.since_ns > 0) == (
        "leader_missing", "no pane", True,
    )  # fmt: skip
    sim_store.transact(notifications.advance, U, 0, 1, ["r1/0"])
    sim_store.transact(notifications.clear_deferred, U)
    assert read_readiness(sim_store, U).ready


def test_halted_run_is_an_unready_subject(sim_store: Store) -> None:
    acquire(sim_store)

    def halt(txn: Txn) -> None:
        for name in ("labels", "prices"):
            runs.create(txn, RunRecord(f"run-{name}", name))
            runs.set_latest(txn, name, f"run-{name}")
        runs.change_status(txn, "run-labels", runs.RunEvent.HALT, halted="seq 9: illegal")

    sim_store.transact(halt)
    found = read_readiness(sim_store, U)
    assert found.ready
    [run] = found.subjects
    assert (run.name, run.ready) == ("run/labels", False)
    assert [(one.reason, one.text) for one in run.reasons] == [
        (ReadinessReason.RUN_HALTED, "seq 9: illegal")
    ]


def test_restarted_run_is_not_listed_as_halted(sim_store: Store) -> None:
    acquire(sim_store)

    def halt(txn: Txn) -> None:
        runs.create(txn, RunRecord("first", "labels"))
        runs.change_status(txn, "first", runs.RunEvent.HALT, halted="x")
        runs.create(txn, RunRecord("second", "labels"))
        runs.set_latest(txn, "labels", "second")

    sim_store.transact(halt)
    assert read_readiness(sim_store, U).subjects == []
