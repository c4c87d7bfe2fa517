"""Fork: the parent's state at a height, an empty inbox, none of the parent's wishes."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.errors import Invalid, NotFound, ReplayDiverged
from holdfast.world import catalog
from holdfast.world.fork import cut, plant
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.publish import effects
from holdfast.world.timers import delays
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.world.fork",)


@pytest.fixture
def rig(any_rig: Rig) -> Rig:
    return any_rig


Handle = hf.WorldHandle[bank.Account]


@pytest.fixture
def ada(rig: Rig) -> Handle:
    """25 deposits of 1, 2, 3, ...; snapshots at 10 and 20."""
    handle = rig.world()
    rig.runtime.send_many([(handle, bank.Deposited(n)) for n in range(1, 26)])
    rig.run(
        rig.worker(
            snapshots=SnapshotPolicy(10, keep=10), budgets=Budgets(max_inbox_batch=5), idle_s=1e6
        )
    )
    return handle


def total(height: int) -> int:
    return height * (height + 1) // 2


# -- what a child is -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 9, 10, 11, 20, 24, 25])
def test_a_child_starts_with_the_parents_state_at_any_height(
    rig: Rig, ada: Handle, at: int
) -> None:
    child = ada.fork("child", at=at)
    assert child.state() == ada.state(at=at) == bank.Account(balance=total(at))
    assert child.height() == at
    assert rig.baseline(child) == at


def test_without_a_height_the_latest_state_is_forked(rig: Rig, ada: Handle) -> None:
    assert ada.fork("child").state().balance == total(25)


def test_a_childs_inbox_is_empty_though_the_parents_is_not(rig: Rig, ada: Handle) -> None:
    ada.send(bank.Deposited(100))
    child = ada.fork("child")
    subject = rig.subject(child)
    assert rig.store.read(inbox.cursor, subject) == rig.store.read(inbox.depth, subject) == 0
    assert child.journal() == []


def test_a_child_goes_its_own_way_and_the_parent_does_not_notice(rig: Rig, ada: Handle) -> None:
    child = ada.fork("child", at=10)
    rig.assign(child)
    before = {key: row for key, row in rig.rows().items() if rig.id(ada).encode() in key}
    child.send(bank.Deposited(1000))
    rig.run(rig.worker("A", "2", idle_s=1e6))
    assert child.state().balance == total(10) + 1000
    assert child.height() == 11
    assert ada.state().balance == total(25)
    after = {key: row for key, row in rig.rows().items() if rig.id(ada).encode() in key}
    assert after == before


def test_the_parent_goes_on_and_the_child_does_not_notice(rig: Rig, ada: Handle) -> None:
    child = ada.fork("child", at=10)
    ada.send(bank.Deposited(1))
    rig.expire()
    rig.run(rig.worker("A", "2"))
    assert child.state().balance == total(10)


def test_keys_of_the_parent_are_new_to_the_child(rig: Rig, ada: Handle) -> None:
    ada.send(bank.Deposited(5), key="k")
    child = ada.fork("child")
    assert child.send(bank.Deposited(6), key="k") == 1


def test_the_hash_chain_of_a_child_stands_on_the_parents_entry(rig: Rig, ada: Handle) -> None:
    child = ada.fork("child", at=7)
    rig.assign(child)
    child.send(bank.Deposited(1))
    rig.run(rig.worker("A", "2"))
    rig.store.read(journal.verify, rig.subject(child))
    parent_hash = rig.store.read(journal.hash_at, rig.subject(ada), 7)
    assert rig.head(child).below == parent_hash
    assert child.journal()[0].height == 8


def test_a_fork_of_a_fork_knows_where_it_comes_from(rig: Rig, ada: Handle) -> None:
    child = ada.fork("child", at=20)
    grandchild = child.fork("grandchild")
    [own, parents] = grandchild.lineage()
    assert (own.parent_world_id, own.forked_at_height) == (rig.id(child), 20)
    assert (parents.parent_world_id, parents.forked_at_height) == (rig.id(ada), 20)
    saved = rig.store.read(snapshot.baseline, rig.subject(ada))
    assert saved is not None
    assert own.parent_snapshot_hash == saved.hash
    assert ada.lineage() == []


def test_a_state_below_the_fork_is_not_the_childs(rig: Rig, ada: Handle) -> None:
    child = ada.fork("child", at=20)
    with pytest.raises(NotFound):
        child.state(at=19)
    assert child.state(at=20).balance == total(20)


def test_a_large_state_is_shared_and_survives_the_parents_pruning(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("x" * (BLOB_THRESHOLD_BYTES + 1), []))
    worker = rig.run(rig.worker(snapshots=SnapshotPolicy(1, keep=1)))
    child = ada.fork("child")
    for _ in range(3):
        ada.send(bank.Noted("y", []))
        rig.run(worker)
    from holdfast.store import blobs

    rig.clock.advance(10**12)
    rig.store.transact(blobs.collect, 0, 100)
    assert len(child.state().notes[0]) == BLOB_THRESHOLD_BYTES + 1


# -- what it does not inherit --------------------------------------------------------------------


def test_pending_effects_and_timers_stay_with_the_parent(rig: Rig) -> None:
    ada = rig.world()
    for event in (bank.Paid("EUR", key="k"), bank.Waited(60)):
        ada.send(event)
    worker = rig.run()
    child = ada.fork("child")
    rig.assign(child)
    rig.run(worker)
    assert len(rig.queued(effects("bank", "fx.quote"))) == 1
    assert rig.store.read(queue.counts, delays("bank")).delayed == 1
    # Its own intent under the same key is another one: the cache of keys was not inherited.
    child.send(bank.Paid("USD", key="k"))
    rig.run(worker)
    assert len(rig.queued(effects("bank", "fx.quote"))) == 2
    assert child.state().receipts == []


@pytest.mark.parametrize("policy", [{"effects": "maybe"}, {"timers": "fail"}])
def test_a_policy_that_is_unknown_is_refused(rig: Rig, ada: Handle, policy: dict[str, str]) -> None:
    before = rig.rows()
    with pytest.raises(Invalid):
        ada.fork("child", **policy)
    assert rig.rows() == before


# -- by name -------------------------------------------------------------------------------------


def test_forking_again_under_the_same_name_gives_the_same_child(rig: Rig, ada: Handle) -> None:
    first = ada.fork("child", at=10)
    rows = rig.rows()
    assert rig.id(ada.fork("child", at=10)) == rig.id(first)
    assert rig.rows() == rows


def test_a_fork_of_the_latest_state_is_the_same_when_the_parent_has_gone_on(
    rig: Rig, ada: Handle
) -> None:
    first = rig.id(ada.fork("child"))
    ada.send(bank.Deposited(1))
    rig.expire()
    rig.run(rig.worker("A", "2"))
    assert ada.height() == 26
    assert rig.id(ada.fork("child")) == first


@pytest.mark.parametrize("taken", ["another height", "another parent", "no fork", "itself"])
def test_a_name_that_is_another_worlds_is_refused(rig: Rig, ada: Handle, taken: str) -> None:
    name = "child"
    if taken == "another height":
        ada.fork(name, at=10)
    elif taken == "another parent":
        rig.world(name="bob").fork(name)
    elif taken == "no fork":
        rig.world(name=name)
    else:
        name = "ada"
    before = rig.rows()
    with pytest.raises(Invalid):
        ada.fork(name, at=20)
    assert rig.rows() == before


def test_a_child_that_was_deleted_can_be_made_again(rig: Rig, ada: Handle) -> None:
    first = rig.id(ada.fork("child", at=10))
    rig.runtime.world(bank.Account, "child").delete()
    assert rig.id(ada.fork("child", at=20)) != first


# -- from what ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-1, 26, 1000])
def test_a_height_that_the_parent_does_not_have_is_not_found(
    rig: Rig, ada: Handle, at: int
) -> None:
    before = rig.rows()
    with pytest.raises(NotFound):
        ada.fork("child", at=at)
    assert rig.rows() == before


def test_a_height_that_was_cut_off_is_not_found_and_the_baseline_is(rig: Rig, ada: Handle) -> None:
    while rig.store.transact(journal.truncate, rig.subject(ada), 100):
        pass
    rig.store.transact(snapshot.prune, rig.subject(ada), 1)
    before = rig.rows()
    for at in (0, 5, 10, 19):
        with pytest.raises(NotFound):
            ada.fork("child", at=at)
    assert rig.rows() == before
    assert ada.fork("child", at=20).state().balance == total(20)
    assert ada.fork("later", at=23).state().balance == total(23)


def test_a_deleted_parent_is_not_found(rig: Rig, ada: Handle) -> None:
    parent = rig.kernel(ada)
    ada.delete()
    before = rig.rows()
    with pytest.raises(NotFound):
        ada.fork("child")
    with pytest.raises(NotFound):
        rig.store.read(cut, parent)
    assert rig.rows() == before


def test_a_parent_that_is_deleted_between_cutting_and_planting_is_not_found(
    rig: Rig, ada: Handle
) -> None:
    cutting = rig.store.read(cut, rig.kernel(ada), 10)
    ada.delete()
    with pytest.raises(NotFound):
        rig.store.transact(plant, cutting, "child", "fresh")


def test_a_cutting_of_a_parent_that_goes_on_all_the_time_is_planted_all_the_same(
    rig: Rig, ada: Handle
) -> None:
    cutting = rig.store.read(cut, rig.kernel(ada), 24)
    ada.send(bank.Deposited(1))
    rig.expire()
    rig.run(rig.worker("A", "2"))
    rig.store.transact(plant, cutting, "child", "fresh")
    assert rig.runtime.world(bank.Account, "child").state().balance == total(24)


def test_a_paused_or_parked_world_can_be_forked_at_a_snapshot(rig: Rig, ada: Handle) -> None:
    ada.pause()
    assert ada.fork("child", at=20).record().status is catalog.Status.ACTIVE


def test_code_that_does_not_repeat_the_journal_makes_no_child(rig: Rig, ada: Handle) -> None:
    class Account(hf.World):
        balance: int = 0

        @hf.on(bank.Deposited)
        def deposited(self, event: bank.Deposited, cx: hf.Context) -> None:
            cx.reply(0)

    other = hf.App("bank", worlds=[Account]).open(rig.store, roles=(), clock=rig.clock)
    before = rig.rows()
    with pytest.raises(ReplayDiverged):
        other.world(Account, "ada").fork("child", at=5)
    assert rig.rows() == before


def test_a_fork_is_as_cheap_from_a_long_journal_as_from_a_short_one(rig: Rig, ada: Handle) -> None:
    """At a snapshot nothing is replayed: it reads as many rows whatever lies below."""
    read: list[int] = []
    for handle in (ada, _long(rig)):
        height = rig.baseline(handle)
        before = rig.rows()
        handle.fork(f"child-of-{handle.name}", at=height)
        read.append(len(rig.rows().keys() - before.keys()))
    assert read[0] == read[1]


def _long(rig: Rig) -> Handle:
    handle = rig.world(name="long")
    rig.runtime.send_many([(handle, bank.Deposited(1)) for _ in range(1000)])
    rig.run(rig.worker("A", "2", idle_s=1e6))
    return handle
