"""Purge of worlds: it leaves a tombstone with id, hash and date. The leader erases the rows of a
deleted world after the retention period."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.config import BLOB_GRACE_NS, DELETED_RETENTION_NS
from holdfast.durable import queue
from holdfast.errors import Fenced, Invalid, NotFound
from holdfast.messages import event_ingress
from holdfast.ops import audit
from holdfast.ops.erasure import world_purge
from holdfast.ops.verify import find_differences
from holdfast.store import blobs, schema, tuples
from holdfast.workers.orchestrator import Orchestrator
from holdfast.world import catalog, history, intents, purge, redrive
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.ingress import deliver_by_id
from holdfast.world.purge import WorldInUse
from tests.world import bank
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash, WorldRig, make_backend

MODULES = ("holdfast.world.purge", "holdfast.ops.erasure", "holdfast.workers.history_upkeep")

EVERY_5 = SnapshotPolicy(entries=5, keep=2)
SECRET = "hunter2-" * 800
KEPT_S = DELETED_RETENTION_NS / S
STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgresql),
]


def rig_on(kind: str = "memory") -> WorldRig:
    app = hf.App(
        "bank",
        worlds=[bank.BankAccount, bank.Audit],
        events=[bank.UnhandledEvent, bank.Seen],
        keep={bank.BankAccount: hf.Keep(entries=5)},
    )
    return WorldRig(app, make_backend(kind))


def make_busy_world(rig: WorldRig, name: str = "ada", *, effects: bool = True) -> WorldHandle[Any]:
    """Make a world with blobs, snapshots, keys, failed events, timers, effects and unread mail."""
    ada = rig.world(name=name)
    for n in range(12):
        ada.send(bank.Noted(f"{n} {name} {SECRET}", []), key=f"{name}-{n}")
    ada.send(bank.Failing(f"{name} {SECRET}"))
    ada.send(bank.Waited(3600, key="t0"))
    if effects:
        ada.send(bank.PaymentOrdered("EUR", times=3))
    rig.run(rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5)))
    if effects:
        # One effect becomes a dead letter. The world has not read its receipt.
        name_of = intents.effect_queue("bank", "fx.quote")
        [claim] = rig.store.transact(queue.claim, name_of, "pool", 1, S)
        rig.store.transact(queue.dead_letter, claim.token, "refused", "no")
    ada.send(bank.Noted(f"unread {SECRET}", []), key=f"{name}-unread")
    return ada


def expire_leases_and_collect_blobs(rig: WorldRig) -> None:
    """Advance the clock until leases expire, and garbage-collect unreferenced blobs."""
    rig.advance_clock(2 * 3600)
    rig.store.transact(blobs.collect, BLOB_GRACE_NS, 1000)


def rows_mentioning(rig: WorldRig, world_id: str) -> list[tuple[Any, ...]]:
    """Return the keys of all rows that contain the id or the text of a world. Two spaces are
    ignored: the lease log, which is truncated by time, and runnable marks, by which the former
    worker releases the world."""
    mark = world_id.encode()
    ignored_prefixes = tuple(map(schema.key_prefix, (schema.Space.LEASE_LOG, schema.Space.READY)))
    return [
        tuples.unpack(key) if not key.startswith(schema.MARKER_KEY) else (key,)
        for key, row in rig.rows().items()
        if (mark in key or mark in row or b"hunter2" in row)
        and not key.startswith(ignored_prefixes)
    ]


@pytest.mark.parametrize("on", STORES)
def test_purged_world_leaves_only_its_tombstone(on: str) -> None:
    rig = rig_on(on)
    ada = make_busy_world(rig)
    world_id, head = rig.id(ada), rig.head(ada)
    bob = rig.world(name="bob")
    bob.send(bank.DepositMade(7), key="k")
    expire_leases_and_collect_blobs(rig)
    erased = world_purge(rig.store, "bank", world_id, force=True)
    assert erased.tombstone.hash == head.hash
    assert erased.tombstone.purged_ns <= rig.store.now_ns()
    assert erased.forks == []
    kept = rows_mentioning(rig, world_id)
    assert kept == [(int(schema.Space.WORLD), "bank", "z", world_id)]
    assert rig.read(find_differences) == []
    with pytest.raises(NotFound):
        rig.read(catalog.get_record, "bank", world_id)
    # Other worlds are unchanged.
    rig.run(rig.worker("A", "2"))
    assert bob.state().balance == 7


def test_world_purge_is_idempotent() -> None:
    rig = rig_on()
    world_id = rig.id(make_busy_world(rig))
    expire_leases_and_collect_blobs(rig)
    first = world_purge(rig.store, "bank", world_id, force=True)
    assert world_purge(rig.store, "bank", world_id) == first


def test_name_of_a_purged_world_can_be_reused() -> None:
    rig = rig_on()
    ada = make_busy_world(rig)
    expire_leases_and_collect_blobs(rig)
    world_purge(rig.store, "bank", rig.id(ada), force=True)
    ada.send(bank.DepositMade(1))
    rig.assign(ada)
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 1


def test_purge_of_a_leased_world_needs_force() -> None:
    rig = rig_on()
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.run(rig.worker())
    world_id = rig.id(ada)
    before = rig.rows()
    with pytest.raises(WorldInUse) as raised:
        world_purge(rig.store, "bank", world_id)
    assert raised.value.fields["worker"] == "A"
    assert rig.rows() == before
    held = worker.host_of(world_id).lease
    world_purge(rig.store, "bank", world_id, force=True)
    # The purge fences the lease first: later commits of the host are refused.
    with pytest.raises(Fenced):
        rig.store.transact(lambda txn: txn.require_live(held))
    assert rows_mentioning(rig, world_id) == [(int(schema.Space.WORLD), "bank", "z", world_id)]


def test_purge_of_a_world_with_pending_effects_needs_force() -> None:
    rig = rig_on()
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR", times=2))
    rig.run(rig.worker())
    expire_leases_and_collect_blobs(rig)
    world_id = rig.id(ada)
    before = rig.rows()
    with pytest.raises(WorldInUse) as raised:
        world_purge(rig.store, "bank", world_id)
    assert raised.value.fields["open_effects"] == 2
    assert rig.rows() == before
    world_purge(rig.store, "bank", world_id, force=True)
    counts = rig.read(queue.counts, intents.effect_queue("bank", "fx.quote"))
    assert (counts.ready, counts.claimed, counts.dead) == (0, 0, 0)


def test_purge_drops_a_claimed_effect_and_fences_its_ack() -> None:
    rig = rig_on()
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR"))
    rig.run(rig.worker())
    name = intents.effect_queue("bank", "fx.quote")
    [claim] = rig.store.transact(queue.claim, name, "pool", 1, 60 * S)
    expire_leases_and_collect_blobs(rig)
    world_purge(rig.store, "bank", rig.id(ada), force=True)
    with pytest.raises(Fenced):
        rig.store.transact(queue.ack, [claim.token])


def test_purge_removes_dead_letters_and_redriven_events_of_its_world_only() -> None:
    rig = rig_on()
    ada, bob = make_busy_world(rig), make_busy_world(rig, "bob")
    ada.send(bank.Failing("once more"))
    rig.advance_clock()
    rig.run(rig.worker("A", "2"))
    letters = [one.seq for one in rig.failed_events()]
    assert len(letters) == 3
    rig.store.transact(queue.redrive, redrive.failed_events_queue("bank"), letters[:1])
    expire_leases_and_collect_blobs(rig)
    world_purge(rig.store, "bank", rig.id(ada), force=True)
    [left] = rig.failed_events()
    assert b"bob" in left.payload or left.blob
    assert not rig.read(redrive.has_redriven, "bank")
    assert rig.read(find_differences) == []
    assert bob.record().status is catalog.WorldStatus.ACTIVE


def test_purge_keeps_blobs_shared_with_forks() -> None:
    rig = rig_on()
    ada = rig.world()
    for _ in range(10):
        ada.send(bank.Noted(SECRET, []))
    rig.run(rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5)))
    child = ada.fork("child")
    grandchild = child.fork("grandchild")
    notes = child.state().notes
    expire_leases_and_collect_blobs(rig)
    world_id = rig.id(ada)
    erased = world_purge(rig.store, "bank", world_id)
    assert sorted(erased.forks) == sorted([rig.id(child), rig.id(grandchild)])
    assert child.state().notes == notes
    # The parent is erased. The child keeps its id in the lineage.
    assert [one.parent_world_id for one in child.lineage()] == [world_id]
    assert len(grandchild.lineage()) == 2


@pytest.mark.spec(
    "DESIGN",
    "15. HTTP, console, telemetry",
    "a purge that has begun has its audit entry, also if it is interrupted",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", [1, 2])
def test_begun_purge_is_audited(at: int, fault: str) -> None:
    rig = rig_on()
    world_id = rig.id(make_busy_world(rig))
    rig.backend.arm({at: fault})
    with pytest.raises(Crash):
        world_purge(
            rig.store, "bank", world_id, force=True,
            record=lambda txn: audit.record(txn, "bank", "ada", "worlds.purge", "world/by-id/w"),
        )  # fmt: skip
    rig.backend.arm({})
    begun = rig.read(catalog.get_record, "bank", world_id).purged
    assert begun == (at > 1 or fault == CRASH_AFTER)
    assert len(rig.read(audit.list_entries, "bank")) == begun


@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", range(1, 12))
def test_leader_finishes_an_interrupted_purge(at: int, fault: str) -> None:
    rig = rig_on()
    ada = make_busy_world(rig)
    world_id = rig.id(ada)
    expire_leases_and_collect_blobs(rig)
    rig.backend.arm({at: fault})
    with contextlib.suppress(Crash):
        world_purge(rig.store, "bank", world_id, force=True)
    rig.backend.arm({})
    if rig.read(catalog.find_id, "bank", "BankAccount", "ada") == world_id:
        # The crash came before the first commit.
        assert rig.read(catalog.get_record, "bank", world_id).status is catalog.WorldStatus.ACTIVE
        return
    run_leader(rig)
    assert rows_mentioning(rig, world_id) == [(int(schema.Space.WORLD), "bank", "z", world_id)]


def run_leader(rig: WorldRig, ticks_max: int = 500) -> None:
    leader = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    rig.advance_clock(2)
    for _ in range(ticks_max):
        if not leader.tick():
            leader.shut_down()
            return
    raise AssertionError("there is always more to erase")


@pytest.mark.parametrize("on", STORES)
def test_rows_of_a_deleted_world_are_erased_after_a_week(on: str) -> None:
    rig = rig_on(on)
    ada = make_busy_world(rig)
    world_id = rig.id(ada)
    ada.delete()
    run_leader(rig)
    assert rig.read(catalog.get_record, "bank", world_id).status is catalog.WorldStatus.DELETED
    rig.advance_clock(KEPT_S - 60)
    run_leader(rig)
    assert rig.read(catalog.get_record, "bank", world_id).status is catalog.WorldStatus.DELETED
    rig.advance_clock(120)
    run_leader(rig)
    assert rows_mentioning(rig, world_id) == []
    assert rig.read(catalog.count_by_status, "bank")["deleted"] == 0
    assert rig.read(history.find_plan, "bank", world_id) is None
    assert rig.read(find_differences) == []


def test_deleted_world_without_deletion_time_is_erased_too() -> None:
    rig = rig_on()
    ada = make_busy_world(rig)
    world_id = rig.id(ada)
    ada.delete()

    def as_before(txn: Any) -> None:
        """Restore the record format of a release that did not store the deletion time."""
        record = catalog.get_record(txn, "bank", world_id)
        txn.delete(schema.key_prefix(schema.Space.WORLD, "bank", "x", record.deleted_ns, world_id))
        catalog.save_record(txn, replace(record, deleted_ns=0))

    rig.store.transact(as_before)
    run_leader(rig)
    rig.advance_clock(KEPT_S + 60)
    run_leader(rig)
    assert rows_mentioning(rig, world_id) == []


def test_worker_skips_the_runnable_mark_of_a_purged_world() -> None:
    rig = rig_on()
    ada, bob = rig.world(), rig.world(name="bob")
    ada.send(bank.DepositMade(1))
    bob.send(bank.DepositMade(2))
    world_id = rig.id(ada)
    worker = rig.worker()
    ours = worker._runnable()
    assert set(ours) == {world_id, rig.id(bob)}
    world_purge(rig.store, "bank", world_id)
    worker._acquire_leases(list(ours))
    rig.run(worker)
    assert bob.state().balance == 2


def test_delivery_by_id_to_a_purged_world_is_not_found() -> None:
    rig = rig_on()
    ada = rig.world()
    world_id = rig.id(ada)
    world_purge(rig.store, "bank", world_id)
    with pytest.raises(NotFound):
        rig.store.transact(
            deliver_by_id,
            "bank",
            world_id,
            None,
            event_ingress(*rig.app.encode_event(bank.DepositMade(1))),
        )
    assert rows_mentioning(rig, world_id) == [(int(schema.Space.WORLD), "bank", "z", world_id)]


def test_erase_refuses_a_world_that_is_not_deleted() -> None:
    rig = rig_on()
    ada = rig.world()
    with pytest.raises(Invalid):
        rig.store.transact(purge.erase, "bank", rig.id(ada), 10)
    assert rig.read(catalog.find_id, "bank", "BankAccount", "ada") is not None
