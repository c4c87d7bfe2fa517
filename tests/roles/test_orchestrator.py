"""Placing worlds: what was deleted has no place, and holds up nobody."""

from __future__ import annotations

import pytest

from holdfast.errors import NotFound
from holdfast.messages import Receipt, Status, receipt_ingress
from holdfast.roles.orchestrator import Orchestrator
from holdfast.world import catalog
from holdfast.world.catalog import NOBODY
from holdfast.world.ingress import deliver_to
from tests.world import bank
from tests.world.rig import Rig

MODULES = ("holdfast.roles.orchestrator", "holdfast.world.ingress")

TICKS = 5


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def leader(rig: Rig) -> Orchestrator:
    """It leads, and worker A has spoken to it."""
    found = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    found.tick()
    rig.worker("A").tick()
    return found


def deleted(rig: Rig, name: str) -> str:
    """A world that is deleted, and for which somebody has left a hint since."""
    handle = rig.runtime.world(bank.Account, name)
    world_id = handle.create()
    handle.delete()
    rig.store.transact(catalog.hint, "bank", world_id)
    assert world_id in rig.hints(NOBODY)
    return world_id


def test_a_world_with_work_is_placed(rig: Rig, leader: Orchestrator) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    ada.send(bank.Deposited(1))
    leader.tick()
    found = rig.store.read(catalog.assignment, "bank", rig.id(ada))
    assert found is not None
    assert found.desired_worker_id == "A"


def test_a_hint_of_a_deleted_world_holds_up_no_other(rig: Rig, leader: Orchestrator) -> None:
    deleted(rig, "gone")
    ada = rig.runtime.world(bank.Account, "ada")
    ada.send(bank.Deposited(1))
    leader.tick()
    rig.run()
    assert ada.state().balance == 1


def test_a_hint_of_a_deleted_world_is_taken_away(rig: Rig, leader: Orchestrator) -> None:
    world_id = deleted(rig, "gone")
    assert leader.tick() is False, "there is nothing more to do"
    assert rig.hints(NOBODY) == []
    assert rig.store.read(catalog.assignment, "bank", world_id) is None


def test_a_hint_of_a_world_that_never_was_is_taken_away(rig: Rig, leader: Orchestrator) -> None:
    rig.store.transact(catalog.hint, "bank", "never")
    leader.tick()
    assert rig.hints(NOBODY) == []


def test_a_world_that_is_deleted_before_it_was_placed_is_not(
    rig: Rig, leader: Orchestrator
) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    ada.send(bank.Deposited(1))
    world_id = rig.id(ada)
    ada.delete()
    for _ in range(TICKS):
        leader.tick()
    assert rig.hints(NOBODY) == []
    assert rig.store.read(catalog.assignment, "bank", world_id) is None


def test_what_is_delivered_to_a_deleted_world_is_not_found_and_changes_nothing(rig: Rig) -> None:
    ada = rig.world()
    world_id = rig.id(ada)
    ada.delete()
    rig.run()
    told = receipt_ingress(Receipt(b"i" * 32, "pay", Status.OK))
    before = rig.rows()
    with pytest.raises(NotFound, match="deleted"):
        rig.store.transact(lambda txn: deliver_to(txn, "bank", world_id, None, told))
    assert rig.rows() == before
