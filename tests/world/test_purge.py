"""Erasing worlds: a purge leaves an id, a hash and a date; a deleted world's rows go after a while."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.app.handle import WorldHandle
from holdfast.clock import S
from holdfast.config import BLOB_GRACE_NS, DELETED_KEPT_NS
from holdfast.durable import queue
from holdfast.errors import Fenced, Invalid, NotFound
from holdfast.messages import event_ingress
from holdfast.ops.erasure import world_purge
from holdfast.ops.recount import recount
from holdfast.roles.orchestrator import Orchestrator
from holdfast.store import blobs, schema, tuples
from holdfast.world import catalog, history, publish, purge, redrive
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.ingress import enqueue
from holdfast.world.purge import InUse
from tests.world import bank
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash, Rig, rows_on

MODULES = ("holdfast.world.purge", "holdfast.ops.erasure", "holdfast.roles.upkeep")

EVERY_5 = SnapshotPolicy(entries=5, keep=2)
SECRET = "hunter2-" * 800
KEPT_S = DELETED_KEPT_NS / S
ON = [
    pytest.param("memory", id="memory"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgresql),
]


def rig_on(kind: str = "memory") -> Rig:
    app = hf.App(
        "bank",
        worlds=[bank.Account, bank.Audit],
        events=[bank.Unheard, bank.Seen],
        keep={bank.Account: hf.Keep(entries=5)},
    )
    return Rig(app, rows_on(kind))


def lived(rig: Rig, name: str = "ada", *, effects: bool = True) -> WorldHandle[Any]:
    """A world with a bit of everything: blobs, snapshots, keys, failures, timers, effects, unread mail."""
    ada = rig.world(name=name)
    for n in range(12):
        ada.send(bank.Noted(f"{n} {name} {SECRET}", []), key=f"{name}-{n}")
    ada.send(bank.Failing(f"{name} {SECRET}"))
    ada.send(bank.Waited(3600, key="t0"))
    if effects:
        ada.send(bank.Paid("EUR", times=3))
    rig.run(rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5)))
    if effects:
        # One of the effects is dead, and its receipt is unread.
        name_of = publish.effects("bank", "fx.quote")
        [claim] = rig.store.transact(queue.claim, name_of, "pool", 1, S)
        rig.store.transact(queue.bury, claim.token, "refused", "no")
    ada.send(bank.Noted(f"unread {SECRET}", []), key=f"{name}-unread")
    return ada


def released(rig: Rig) -> None:
    """Leases have run out, and what worlds had let go of before has been collected."""
    rig.expire(2 * 3600)
    rig.store.transact(blobs.collect, BLOB_GRACE_NS, 1000)


def rows_of(rig: Rig, world_id: str) -> list[tuple[Any, ...]]:
    """Every row that has the id of a world in it, or words of it; but the lease log, which is cut by
    time, and the hint by which its former worker lets go."""
    mark = world_id.encode()
    spared = tuple(map(schema.prefix, (schema.Space.LEASE_LOG, schema.Space.READY)))
    return [
        tuples.unpack(key) if not key.startswith(schema.MARKER_KEY) else (key,)
        for key, row in rig.rows().items()
        if (mark in key or mark in row or b"hunter2" in row) and not key.startswith(spared)
    ]


@pytest.mark.parametrize("on", ON)
def test_a_purged_world_leaves_an_id_a_hash_and_a_date(on: str) -> None:
    rig = rig_on(on)
    ada = lived(rig)
    world_id, head = rig.id(ada), rig.head(ada)
    bob = rig.world(name="bob")
    bob.send(bank.Deposited(7), key="k")
    released(rig)
    erased = world_purge(rig.store, "bank", world_id, force=True)
    assert erased.tombstone.hash == head.hash
    assert erased.tombstone.purged_ns <= rig.store.now_ns()
    assert erased.forks == []
    kept = rows_of(rig, world_id)
    assert kept == [(int(schema.Space.WORLD), "bank", "z", world_id)]
    assert rig.read(recount) == []
    with pytest.raises(NotFound):
        rig.read(catalog.record, "bank", world_id)
    # Others are as they were.
    rig.run(rig.worker("A", "2"))
    assert bob.state().balance == 7


def test_asked_again_it_answers_as_the_first_time() -> None:
    rig = rig_on()
    world_id = rig.id(lived(rig))
    released(rig)
    first = world_purge(rig.store, "bank", world_id, force=True)
    assert world_purge(rig.store, "bank", world_id) == first


def test_the_name_is_free_for_another_world() -> None:
    rig = rig_on()
    ada = lived(rig)
    released(rig)
    world_purge(rig.store, "bank", rig.id(ada), force=True)
    ada.send(bank.Deposited(1))
    rig.assign(ada)
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 1


def test_a_world_that_is_held_is_not_purged_unless_forced() -> None:
    rig = rig_on()
    ada = rig.world()
    ada.send(bank.Deposited(1))
    worker = rig.run(rig.worker())
    world_id = rig.id(ada)
    before = rig.rows()
    with pytest.raises(InUse) as raised:
        world_purge(rig.store, "bank", world_id)
    assert raised.value.fields["worker"] == "A"
    assert rig.rows() == before
    held = worker.host_of(world_id).lease
    world_purge(rig.store, "bank", world_id, force=True)
    # Fenced first: what its host still brings is refused.
    with pytest.raises(Fenced):
        rig.store.transact(lambda txn: txn.require_live(held))
    assert rows_of(rig, world_id) == [(int(schema.Space.WORLD), "bank", "z", world_id)]


def test_a_world_with_open_effects_is_not_purged_unless_forced() -> None:
    rig = rig_on()
    ada = rig.world()
    ada.send(bank.Paid("EUR", times=2))
    rig.run(rig.worker())
    released(rig)
    world_id = rig.id(ada)
    before = rig.rows()
    with pytest.raises(InUse) as raised:
        world_purge(rig.store, "bank", world_id)
    assert raised.value.fields["open_effects"] == 2
    assert rig.rows() == before
    world_purge(rig.store, "bank", world_id, force=True)
    counts = rig.read(queue.counts, publish.effects("bank", "fx.quote"))
    assert (counts.ready, counts.claimed, counts.dead) == (0, 0, 0)


def test_an_effect_that_is_being_done_is_dropped_and_its_answer_counts_for_nothing() -> None:
    rig = rig_on()
    ada = rig.world()
    ada.send(bank.Paid("EUR"))
    rig.run(rig.worker())
    name = publish.effects("bank", "fx.quote")
    [claim] = rig.store.transact(queue.claim, name, "pool", 1, 60 * S)
    released(rig)
    world_purge(rig.store, "bank", rig.id(ada), force=True)
    with pytest.raises(Fenced):
        rig.store.transact(queue.ack, [claim.token])


def test_dead_letters_and_events_to_be_delivered_again_go_with_it_and_others_stay() -> None:
    rig = rig_on()
    ada, bob = lived(rig), lived(rig, "bob")
    ada.send(bank.Failing("once more"))
    rig.expire()
    rig.run(rig.worker("A", "2"))
    letters = [one.seq for one in rig.dead()]
    assert len(letters) == 3
    rig.store.transact(queue.redrive, redrive.failures("bank"), letters[:1])
    released(rig)
    world_purge(rig.store, "bank", rig.id(ada), force=True)
    [left] = rig.dead()
    assert b"bob" in left.payload or left.blob
    assert not rig.read(redrive.waiting, "bank")
    assert rig.read(recount) == []
    assert bob.record().status is catalog.Status.ACTIVE


def test_content_that_another_world_has_too_stays_for_it() -> None:
    rig = rig_on()
    ada = rig.world()
    for _ in range(10):
        ada.send(bank.Noted(SECRET, []))
    rig.run(rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5)))
    child = ada.fork("child")
    grandchild = child.fork("grandchild")
    notes = child.state().notes
    released(rig)
    world_id = rig.id(ada)
    erased = world_purge(rig.store, "bank", world_id)
    assert sorted(erased.forks) == sorted([rig.id(child), rig.id(grandchild)])
    assert child.state().notes == notes
    # The parent is gone; the child knows its id.
    assert [one.parent_world_id for one in child.lineage()] == [world_id]
    assert len(grandchild.lineage()) == 2


@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_purge_that_is_interrupted_is_continued_by_whoever_leads(at: int, fault: str) -> None:
    rig = rig_on()
    ada = lived(rig)
    world_id = rig.id(ada)
    released(rig)
    rig.backend.arm({at: fault})
    with contextlib.suppress(Crash):
        world_purge(rig.store, "bank", world_id, force=True)
    rig.backend.arm({})
    if rig.read(catalog.find, "bank", "Account", "ada") == world_id:
        # Nothing of it was committed.
        assert rig.read(catalog.record, "bank", world_id).status is catalog.Status.ACTIVE
        return
    lead(rig)
    assert rows_of(rig, world_id) == [(int(schema.Space.WORLD), "bank", "z", world_id)]


def lead(rig: Rig, ticks_max: int = 500) -> None:
    leader = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    rig.expire(2)
    for _ in range(ticks_max):
        if not leader.tick():
            leader.finish()
            return
    raise AssertionError("there is always more to erase")


@pytest.mark.parametrize("on", ON)
def test_the_rows_of_a_deleted_world_go_a_week_later_and_leave_nothing(on: str) -> None:
    rig = rig_on(on)
    ada = lived(rig)
    world_id = rig.id(ada)
    ada.delete()
    lead(rig)
    assert rig.read(catalog.record, "bank", world_id).status is catalog.Status.DELETED
    rig.expire(KEPT_S - 60)
    lead(rig)
    assert rig.read(catalog.record, "bank", world_id).status is catalog.Status.DELETED
    rig.expire(120)
    lead(rig)
    assert rows_of(rig, world_id) == []
    assert rig.read(catalog.counts, "bank")["deleted"] == 0
    assert rig.read(history.planned, "bank", world_id) is None
    assert rig.read(recount) == []


def test_a_world_that_an_older_release_deleted_is_collected_too() -> None:
    rig = rig_on()
    ada = lived(rig)
    world_id = rig.id(ada)
    ada.delete()

    def as_before(txn: Any) -> None:
        """As a release left it that did not note when."""
        record = catalog.record(txn, "bank", world_id)
        txn.delete(schema.prefix(schema.Space.WORLD, "bank", "x", record.deleted_ns, world_id))
        catalog.save(txn, replace(record, deleted_ns=0))

    rig.store.transact(as_before)
    lead(rig)
    rig.expire(KEPT_S + 60)
    lead(rig)
    assert rows_of(rig, world_id) == []


def test_a_worker_that_has_read_the_hint_of_an_erased_world_goes_on_with_the_others() -> None:
    rig = rig_on()
    ada, bob = rig.world(), rig.world(name="bob")
    ada.send(bank.Deposited(1))
    bob.send(bank.Deposited(2))
    world_id = rig.id(ada)
    worker = rig.worker()
    ours = worker._runnable()
    assert set(ours) == {world_id, rig.id(bob)}
    world_purge(rig.store, "bank", world_id)
    worker._acquire(list(ours))
    rig.run(worker)
    assert bob.state().balance == 2


def test_mail_to_an_erased_world_by_its_id_is_not_delivered() -> None:
    rig = rig_on()
    ada = rig.world()
    world_id = rig.id(ada)
    world_purge(rig.store, "bank", world_id)
    with pytest.raises(NotFound):
        rig.store.transact(
            enqueue,
            "bank",
            world_id,
            None,
            event_ingress(*rig.app.encode_event(bank.Deposited(1))),
        )
    assert rows_of(rig, world_id) == [(int(schema.Space.WORLD), "bank", "z", world_id)]


def test_only_a_deleted_world_is_erased() -> None:
    rig = rig_on()
    ada = rig.world()
    with pytest.raises(Invalid):
        rig.store.transact(purge.erase, "bank", rig.id(ada), 10)
    assert rig.read(catalog.find, "bank", "Account", "ada") is not None
