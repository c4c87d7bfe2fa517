"""The facts of readiness, as a store tells them."""

from typing import Any

import pytest

from holdfast.authority import replay, workers
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason
from holdfast.authority.readiness import Reason
from holdfast.clock import SimClock
from holdfast.errors import StoreCorrupt, WriterLost
from holdfast.ledger import runs
from holdfast.ledger.runs import RunRecord
from holdfast.roles import readiness
from holdfast.roles.readiness import gather, look
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.world import catalog
from holdfast.world.catalog import Blocker, Event
from tests.authority.rig import TTL, U, acquire, mark_stale, restored

MODULES = ("holdfast.roles.readiness",)


def create(store: Store, *names: str) -> None:
    def make(txn: Txn) -> None:
        for name in names:
            catalog.create(txn, U, "Account", name, f"id-{name}")

    store.transact(make)


def park(store: Store, name: str) -> None:
    blocker = Blocker("replay_diverged", "another state", 4)
    store.transact(catalog.change, U, f"id-{name}", Event.PARK, blocker)


def reasons(store: Store) -> list[Reason]:
    return [blocker.reason for blocker in look(store, U).reasons]


def test_a_universe_that_nobody_leads_is_not_ready(sim_store: Store) -> None:
    assert reasons(sim_store) == [Reason.AUTHORITY_MISSING]


def test_readiness_follows_the_lease(sim_store: Store, clock: SimClock) -> None:
    acquire(sim_store)
    assert look(sim_store, U).ready
    clock.advance(TTL)
    assert reasons(sim_store) == [Reason.AUTHORITY_EXPIRED]
    mark_stale(sim_store)
    assert reasons(sim_store) == [Reason.AUTHORITY_STALE]
    acquire(sim_store, "b")
    assert look(sim_store, U).ready
    restored(sim_store)
    assert reasons(sim_store) == [Reason.AUTHORITY_RESTORED]


def test_live_workers_are_counted_under_the_current_authority(sim_store: Store) -> None:
    sim_store.transact(workers.heartbeat, U, "w1", "1", ("world",))
    acquire(sim_store)
    assert look(sim_store, U).workers_live == 0
    sim_store.transact(workers.heartbeat, U, "w2", "1", ("world",))
    assert look(sim_store, U).workers_live == 1


def test_parked_and_paused_worlds_are_listed_with_their_blockers(sim_store: Store) -> None:
    acquire(sim_store)
    create(sim_store, "ada", "bob", "eve")
    park(sim_store, "ada")
    sim_store.transact(catalog.change, U, "id-eve", Event.PAUSE)
    found = look(sim_store, U)
    assert found.ready
    assert found.subjects_blocked == 2
    assert found.worlds == {"active": 1, "paused": 1, "parked": 1, "deleted": 0}
    ada, eve = found.subjects
    assert (ada.subject, ada.name, ada.ready) == ("id-ada", "Account/ada", False)
    [parked] = ada.reasons
    assert (parked.reason, parked.code) == (Reason.WORLD_PARKED, "replay_diverged")
    assert (parked.text, parked.height) == ("another state", 4)
    assert parked.since_ns > 0
    assert [blocker.reason for blocker in eve.reasons] == [Reason.WORLD_PAUSED]


def test_a_resumed_or_deleted_world_is_not_listed(sim_store: Store) -> None:
    create(sim_store, "ada", "bob")
    park(sim_store, "ada")
    park(sim_store, "bob")
    sim_store.transact(catalog.change, U, "id-ada", Event.RESUME)
    sim_store.transact(catalog.change, U, "id-bob", Event.DELETE)
    assert look(sim_store, U).subjects == []


def test_the_list_is_bounded_and_says_by_how_much(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "SUBJECTS_MAX", 2)
    monkeypatch.setattr(readiness, "SCAN_PAGE", 1)
    create(sim_store, *"abcde")
    for name in "bcde":
        park(sim_store, name)
    found = look(sim_store, U)
    assert [subject.name for subject in found.subjects] == ["Account/b", "Account/c"]
    assert (found.subjects_blocked, found.subjects_omitted) == (4, 2)


def test_a_search_that_gives_up_says_what_it_did_not_find(
    sim_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "RECORDS_MAX", 2)
    monkeypatch.setattr(readiness, "SCAN_PAGE", 1)
    create(sim_store, *"abc")
    park(sim_store, "c")
    found = look(sim_store, U)
    assert (found.subjects, found.subjects_omitted) == ([], 1)


def test_where_all_is_well_no_world_is_read(sim_store: Store) -> None:
    create(sim_store, "ada")
    seen: list[bytes] = []

    def watched(txn: Any) -> None:
        scan = txn.scan

        def told(lo: bytes, *rest: Any) -> Any:
            seen.append(lo)
            return scan(lo, *rest)

        txn.scan = told
        gather(txn, U)

    sim_store.read(watched)
    # Routes of mail are few, and lie beside the worlds. So are the rows of stopped ones.
    worlds = schema.prefix(schema.Space.WORLD)
    beside = tuple(schema.prefix(schema.Space.WORLD, U, kind) for kind in ("route", "u"))
    assert not [lo for lo in seen if lo.startswith(worlds) and not lo.startswith(beside)]


@pytest.mark.parametrize("marker", [None, schema.marker(9, 9), b"garbage!"])
def test_a_wrong_schema_marker_is_a_blocker(sim_store: Store, marker: bytes | None) -> None:
    acquire(sim_store)
    sim_store.transact(
        lambda txn: (
            txn.delete(schema.MARKER_KEY) if marker is None else txn.put(schema.MARKER_KEY, marker)
        )
    )
    assert reasons(sim_store) == [Reason.SCHEMA_MISMATCH]


@pytest.mark.parametrize("error", [StoreCorrupt(why="a bad page"), WriterLost()])
def test_a_store_that_fails_is_an_answer(error: Exception) -> None:
    class Broken:
        def read(self, *args: object) -> object:
            raise error

    found = look(Broken(), U)  # type: ignore[arg-type]
    assert not found.ready
    assert [(b.reason, b.code) for b in found.reasons] == [(Reason.STORE_FAILED, error.code)]  # type: ignore[attr-defined]


def test_a_closed_store_is_an_answer(sim_store: Store) -> None:
    sim_store.close()
    assert [blocker.code for blocker in look(sim_store, U).reasons] == ["store_closed"]


# -- dispatches and runs ---------------------------------------------------------------------------


def test_the_backlog_of_dispatches_is_told_by_state(sim_store: Store) -> None:
    acquire(sim_store)
    log = DispatchLog(sim_store, U)
    for n in range(3):
        log.request(f"r{n}", "work")
    log.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    log.failed("r2", "no")
    found = look(sim_store, U)
    assert found.ready
    assert found.backlog == {
        "pending": 1,
        "notified": 1,
        "delivered": 0,
        "failed": 1,
        "deferred": 0,
    }


def test_a_deferred_dispatch_makes_a_universe_unready_until_it_is_tried(sim_store: Store) -> None:
    acquire(sim_store)
    log = DispatchLog(sim_store, U)
    log.request("r1", "leader")
    log.concluded("r1", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    assert reasons(sim_store) == [Reason.NOTIFICATION_DEFERRED]
    log.tried("r1")
    assert look(sim_store, U).ready


def test_events_that_the_leader_was_not_told_make_a_universe_unready(sim_store: Store) -> None:
    acquire(sim_store)
    sim_store.transact(replay.follow, U)
    DispatchLog(sim_store, U).request("r1", "work")
    assert reasons(sim_store) == [Reason.REPLAY_PENDING]
    assert look(sim_store, U).replay_pending == 1
    sim_store.transact(replay.defer_leader_notification, U, "leader_missing", "no pane")
    pending, deferred = look(sim_store, U).reasons
    assert (pending.reason, deferred.reason) == (
        Reason.REPLAY_PENDING,
        Reason.NOTIFICATION_DEFERRED,
    )
    assert (deferred.code, deferred.text, deferred.since_ns > 0) == (
        "leader_missing", "no pane", True,
    )  # fmt: skip
    sim_store.transact(replay.advance, U, 0, 1, ["r1/0"])
    sim_store.transact(replay.clear_deferred, U)
    assert look(sim_store, U).ready


def test_a_halted_run_is_a_subject_that_is_not_ready(sim_store: Store) -> None:
    acquire(sim_store)

    def halt(txn: Txn) -> None:
        for name in ("labels", "prices"):
            runs.create(txn, RunRecord(f"run-{name}", name))
            runs.point(txn, name, f"run-{name}")
        runs.move(txn, "run-labels", runs.Event.HALT, halted="seq 9: illegal")

    sim_store.transact(halt)
    found = look(sim_store, U)
    assert found.ready
    [run] = found.subjects
    assert (run.name, run.ready) == ("run/labels", False)
    assert [(one.reason, one.text) for one in run.reasons] == [
        (Reason.RUN_HALTED, "seq 9: illegal")
    ]


def test_a_run_that_was_started_anew_is_no_longer_halted(sim_store: Store) -> None:
    acquire(sim_store)

    def halt(txn: Txn) -> None:
        runs.create(txn, RunRecord("first", "labels"))
        runs.move(txn, "first", runs.Event.HALT, halted="x")
        runs.create(txn, RunRecord("second", "labels"))
        runs.point(txn, "labels", "second")

    sim_store.transact(halt)
    assert look(sim_store, U).subjects == []
