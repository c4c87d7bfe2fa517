"""Fork: the parent's state at a height, an empty inbox, none of the parent's pending intents."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable import inbox, journal, queue, snapshot
from holdfast.errors import Invalid, NotFound, ReplayDiverged
from holdfast.world import catalog
from holdfast.world.fork import create_fork, plan_fork
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.intents import effect_queue
from holdfast.world.timers import delay_queue
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.world.fork",)


@pytest.fixture
def rig(any_rig: WorldRig) -> WorldRig:
    return any_rig


AccountHandle = hf.WorldHandle[bank.BankAccount]


@pytest.fixture
def ada(rig: WorldRig) -> AccountHandle:
    """A world with 25 deposits of 1, 2, 3, ... and snapshots at 10 and 20."""
    handle = rig.world()
    rig.runtime.send_many([(handle, bank.DepositMade(n)) for n in range(1, 26)])
    rig.run(
        rig.worker(
            snapshots=SnapshotPolicy(10, keep=10), budgets=Budgets(max_inbox_batch=5), idle_s=1e6
        )
    )
    return handle


def balance_at(height: int) -> int:
    return height * (height + 1) // 2


# -- the child -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 9, 10, 11, 20, 24, 25])
def test_child_starts_with_the_parent_state_at_any_height(
    rig: WorldRig, ada: AccountHandle, at: int
) -> None:
    child = ada.fork("child", at=at)
    assert child.state() == ada.state(at=at) == bank.BankAccount(balance=balance_at(at))
    assert child.height() == at
    assert rig.baseline(child) == at


def test_fork_without_a_height_takes_the_latest_state(rig: WorldRig, ada: AccountHandle) -> None:
    assert ada.fork("child").state().balance == balance_at(25)


def test_fork_starts_with_an_empty_inbox(rig: WorldRig, ada: AccountHandle) -> None:
    ada.send(bank.DepositMade(100))
    child = ada.fork("child")
    subject = rig.subject(child)
    assert rig.store.read(inbox.cursor, subject) == rig.store.read(inbox.depth, subject) == 0
    assert child.journal() == []


def test_fork_does_not_change_its_parent(rig: WorldRig, ada: AccountHandle) -> None:
    child = ada.fork("child", at=10)
    rig.assign(child)
    before = {key: row for key, row in rig.rows().items() if rig.id(ada).encode() in key}
    child.send(bank.DepositMade(1000))
    rig.run(rig.worker("A", "2", idle_s=1e6))
    assert child.state().balance == balance_at(10) + 1000
    assert child.height() == 11
    assert ada.state().balance == balance_at(25)
    after = {key: row for key, row in rig.rows().items() if rig.id(ada).encode() in key}
    assert after == before


def test_fork_does_not_follow_its_parent(rig: WorldRig, ada: AccountHandle) -> None:
    child = ada.fork("child", at=10)
    ada.send(bank.DepositMade(1))
    rig.advance_clock()
    rig.run(rig.worker("A", "2"))
    assert child.state().balance == balance_at(10)


def test_fork_does_not_inherit_dedupe_keys(rig: WorldRig, ada: AccountHandle) -> None:
    ada.send(bank.DepositMade(5), key="k")
    child = ada.fork("child")
    assert child.send(bank.DepositMade(6), key="k") == 1


def test_fork_hash_chain_continues_the_parent_entry(rig: WorldRig, ada: AccountHandle) -> None:
    child = ada.fork("child", at=7)
    rig.assign(child)
    child.send(bank.DepositMade(1))
    rig.run(rig.worker("A", "2"))
    rig.store.read(journal.verify, rig.subject(child))
    parent_hash = rig.store.read(journal.hash_at, rig.subject(ada), 7)
    assert rig.head(child).hash_below_floor == parent_hash
    assert child.journal()[0].height == 8


def test_fork_of_a_fork_records_its_lineage(rig: WorldRig, ada: AccountHandle) -> None:
    child = ada.fork("child", at=20)
    grandchild = child.fork("grandchild")
    [own, parents] = grandchild.lineage()
    assert (own.parent_world_id, own.forked_at_height) == (rig.id(child), 20)
    assert (parents.parent_world_id, parents.forked_at_height) == (rig.id(ada), 20)
    saved = rig.store.read(snapshot.baseline, rig.subject(ada))
    assert saved is not None
    assert own.parent_snapshot_hash == saved.hash
    assert ada.lineage() == []


def test_state_below_the_fork_height_is_not_found(rig: WorldRig, ada: AccountHandle) -> None:
    child = ada.fork("child", at=20)
    with pytest.raises(NotFound):
        child.state(at=19)
    assert child.state(at=20).balance == balance_at(20)


def test_fork_shares_a_large_state_and_survives_parent_pruning(rig: WorldRig) -> None:
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


# -- pending intents -----------------------------------------------------------------------------


def test_fork_does_not_inherit_pending_effects_and_timers(rig: WorldRig) -> None:
    ada = rig.world()
    for event in (bank.PaymentOrdered("EUR", key="k"), bank.Waited(60)):
        ada.send(event)
    worker = rig.run()
    child = ada.fork("child")
    rig.assign(child)
    rig.run(worker)
    assert len(rig.queued(effect_queue("bank", "fx.quote"))) == 1
    assert rig.store.read(queue.counts, delay_queue("bank")).delayed == 1
    # An intent of the child under the same key is a new one: dedupe records are not inherited.
    child.send(bank.PaymentOrdered("USD", key="k"))
    rig.run(worker)
    assert len(rig.queued(effect_queue("bank", "fx.quote"))) == 2
    assert child.state().receipts == []


@pytest.mark.parametrize("policy", [{"effects": "maybe"}, {"timers": "fail"}])
def test_unknown_fork_policy_is_refused(
    rig: WorldRig, ada: AccountHandle, policy: dict[str, str]
) -> None:
    before = rig.rows()
    with pytest.raises(Invalid):
        ada.fork("child", **policy)
    assert rig.rows() == before


# -- names ---------------------------------------------------------------------------------------


def test_fork_under_the_same_name_is_idempotent(rig: WorldRig, ada: AccountHandle) -> None:
    first = ada.fork("child", at=10)
    rows = rig.rows()
    assert rig.id(ada.fork("child", at=10)) == rig.id(first)
    assert rig.rows() == rows


def test_fork_of_the_latest_state_is_idempotent_after_the_parent_advances(
    rig: WorldRig, ada: AccountHandle
) -> None:
    first = rig.id(ada.fork("child"))
    ada.send(bank.DepositMade(1))
    rig.advance_clock()
    rig.run(rig.worker("A", "2"))
    assert ada.height() == 26
    assert rig.id(ada.fork("child")) == first


@pytest.mark.parametrize("taken", ["another height", "another parent", "no fork", "itself"])
def test_fork_name_of_another_world_is_refused(
    rig: WorldRig, ada: AccountHandle, taken: str
) -> None:
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


def test_deleted_fork_can_be_recreated(rig: WorldRig, ada: AccountHandle) -> None:
    first = rig.id(ada.fork("child", at=10))
    rig.runtime.world(bank.BankAccount, "child").delete()
    assert rig.id(ada.fork("child", at=20)) != first


# -- the parent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-1, 26, 1000])
def test_fork_at_a_missing_height_is_not_found(rig: WorldRig, ada: AccountHandle, at: int) -> None:
    before = rig.rows()
    with pytest.raises(NotFound):
        ada.fork("child", at=at)
    assert rig.rows() == before


def test_fork_at_a_truncated_height_is_not_found(rig: WorldRig, ada: AccountHandle) -> None:
    while rig.store.transact(journal.truncate, rig.subject(ada), 100):
        pass
    rig.store.transact(snapshot.prune, rig.subject(ada), 1)
    before = rig.rows()
    for at in (0, 5, 10, 19):
        with pytest.raises(NotFound):
            ada.fork("child", at=at)
    assert rig.rows() == before
    assert ada.fork("child", at=20).state().balance == balance_at(20)
    assert ada.fork("later", at=23).state().balance == balance_at(23)


def test_fork_of_a_deleted_parent_is_not_found(rig: WorldRig, ada: AccountHandle) -> None:
    parent = rig.world_spec(ada)
    ada.delete()
    before = rig.rows()
    with pytest.raises(NotFound):
        ada.fork("child")
    with pytest.raises(NotFound):
        rig.store.read(plan_fork, parent)
    assert rig.rows() == before


def test_create_fork_after_the_parent_was_deleted_is_not_found(
    rig: WorldRig, ada: AccountHandle
) -> None:
    plan = rig.store.read(plan_fork, rig.world_spec(ada), 10)
    ada.delete()
    with pytest.raises(NotFound):
        rig.store.transact(create_fork, plan, "child", "fresh")


def test_create_fork_succeeds_although_the_parent_advanced(
    rig: WorldRig, ada: AccountHandle
) -> None:
    plan = rig.store.read(plan_fork, rig.world_spec(ada), 24)
    ada.send(bank.DepositMade(1))
    rig.advance_clock()
    rig.run(rig.worker("A", "2"))
    rig.store.transact(create_fork, plan, "child", "fresh")
    assert rig.runtime.world(bank.BankAccount, "child").state().balance == balance_at(24)


def test_paused_world_can_be_forked_at_a_snapshot(rig: WorldRig, ada: AccountHandle) -> None:
    ada.pause()
    assert ada.fork("child", at=20).record().status is catalog.WorldStatus.ACTIVE


def test_diverging_code_creates_no_fork(rig: WorldRig, ada: AccountHandle) -> None:
    class ReplyingAccount(hf.World):
        balance: int = 0

        @hf.on(bank.DepositMade)
        def deposited(self, event: bank.DepositMade, cx: hf.Context) -> None:
            cx.reply(0)

    # The same stored type as `bank.BankAccount`, in other code.
    ReplyingAccount.__name__ = bank.BankAccount.__name__
    other = hf.App("bank", worlds=[ReplyingAccount]).open(rig.store, roles=(), clock=rig.clock)
    before = rig.rows()
    with pytest.raises(ReplayDiverged):
        other.world(ReplyingAccount, "ada").fork("child", at=5)
    assert rig.rows() == before


def test_fork_cost_does_not_depend_on_journal_length(rig: WorldRig, ada: AccountHandle) -> None:
    """A fork at a snapshot replays no entry. It writes the same number of rows for any journal
    length."""
    read: list[int] = []
    for handle in (ada, _long_world(rig)):
        height = rig.baseline(handle)
        before = rig.rows()
        handle.fork(f"child-of-{handle.name}", at=height)
        read.append(len(rig.rows().keys() - before.keys()))
    assert read[0] == read[1]


def _long_world(rig: WorldRig) -> AccountHandle:
    handle = rig.world(name="long")
    rig.runtime.send_many([(handle, bank.DepositMade(1)) for _ in range(1000)])
    rig.run(rig.worker("A", "2", idle_s=1e6))
    return handle
