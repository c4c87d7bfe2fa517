"""Placement by the orchestrator: deleted worlds are not assigned and delay no other world."""

from __future__ import annotations

import pytest

from holdfast.errors import NotFound
from holdfast.messages import IntentReceipt, ReceiptStatus, receipt_ingress
from holdfast.workers.orchestrator import Orchestrator
from holdfast.world import catalog
from holdfast.world.catalog import UNASSIGNED
from holdfast.world.ingress import put_ingress
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.workers.orchestrator", "holdfast.world.ingress")

TICKS = 5


@pytest.fixture
def rig() -> WorldRig:
    return WorldRig()


@pytest.fixture
def leader(rig: WorldRig) -> Orchestrator:
    """An orchestrator with the leader lease and a heartbeat of worker A."""
    found = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    found.tick()
    rig.worker("A").tick()
    return found


def delete_with_runnable_row(rig: WorldRig, name: str) -> str:
    """Delete a world and add a runnable row for it afterwards."""
    handle = rig.runtime.world(bank.BankAccount, name)
    world_id = handle.create()
    handle.delete()
    rig.store.transact(catalog.mark_runnable, "bank", world_id)
    assert world_id in rig.runnable(UNASSIGNED)
    return world_id


def test_orchestrator_assigns_a_runnable_world(rig: WorldRig, leader: Orchestrator) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    ada.send(bank.DepositMade(1))
    leader.tick()
    found = rig.store.read(catalog.find_assignment, "bank", rig.id(ada))
    assert found is not None
    assert found.desired_worker_id == "A"


def test_runnable_row_of_a_deleted_world_delays_no_other_world(
    rig: WorldRig, leader: Orchestrator
) -> None:
    delete_with_runnable_row(rig, "gone")
    ada = rig.runtime.world(bank.BankAccount, "ada")
    ada.send(bank.DepositMade(1))
    leader.tick()
    rig.run()
    assert ada.state().balance == 1


def test_orchestrator_clears_the_runnable_row_of_a_deleted_world(
    rig: WorldRig, leader: Orchestrator
) -> None:
    world_id = delete_with_runnable_row(rig, "gone")
    assert leader.tick() is False, "there is nothing more to do"
    assert rig.runnable(UNASSIGNED) == []
    assert rig.store.read(catalog.find_assignment, "bank", world_id) is None


def test_orchestrator_clears_the_runnable_row_of_an_unknown_world(
    rig: WorldRig, leader: Orchestrator
) -> None:
    rig.store.transact(catalog.mark_runnable, "bank", "never")
    leader.tick()
    assert rig.runnable(UNASSIGNED) == []


def test_orchestrator_does_not_assign_a_world_deleted_before_placement(
    rig: WorldRig, leader: Orchestrator
) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    ada.send(bank.DepositMade(1))
    world_id = rig.id(ada)
    ada.delete()
    for _ in range(TICKS):
        leader.tick()
    assert rig.runnable(UNASSIGNED) == []
    assert rig.store.read(catalog.find_assignment, "bank", world_id) is None


def test_delivery_to_a_deleted_world_is_not_found_and_changes_nothing(rig: WorldRig) -> None:
    ada = rig.world()
    world_id = rig.id(ada)
    ada.delete()
    rig.run()
    ingress = receipt_ingress(IntentReceipt(b"i" * 32, "pay", ReceiptStatus.OK))
    before = rig.rows()
    with pytest.raises(NotFound, match="deleted"):
        rig.store.transact(lambda txn: put_ingress(txn, "bank", world_id, None, ingress))
    assert rig.rows() == before
