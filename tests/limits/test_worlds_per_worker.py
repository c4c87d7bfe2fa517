"""The limit of worlds per worker: the orchestrator respects it, and prefers the worker with fewer worlds."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.leadership import placement
from holdfast.workers.limit_settings import change_limits
from holdfast.workers.orchestrator import Orchestrator
from holdfast.world import catalog
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = ("holdfast.workers.worker_room", "holdfast.leadership.placement")


@pytest.fixture
def rig() -> WorldRig:
    return WorldRig()


@pytest.fixture
def leader(rig: WorldRig) -> Orchestrator:
    return make_leader(rig)


def make_leader(rig: WorldRig) -> Orchestrator:
    """An orchestrator with the leader lease, and heartbeats of the workers A and B."""
    found = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    found.tick()
    for name in "AB":
        rig.worker(name).tick()
    return found


def send(rig: WorldRig, count: int) -> None:
    for n in range(count):
        rig.runtime.world(bank.BankAccount, f"w{n}").send(bank.DepositMade(1))


def loads(rig: WorldRig) -> Counter[str]:
    found = {worker: rig.read(catalog.list_assigned, "bank", worker) for worker in "ABC"}
    return Counter({worker: len(worlds) for worker, worlds in found.items() if worlds})


def limit(rig: WorldRig, worlds: int) -> None:
    rig.store.transact(change_limits, "bank", {"worlds_per_worker": worlds})


def test_no_worker_gets_more_worlds_than_the_limit(rig: WorldRig, leader: Orchestrator) -> None:
    limit(rig, 3)
    send(rig, 8)
    assert leader.tick() is False, "nothing more can be placed"
    assert loads(rig) == {"A": 3, "B": 3}
    assert len(rig.runnable(catalog.UNASSIGNED)) == 2
    rig.worker("C").tick()
    leader.tick()
    assert loads(rig) == {"A": 3, "B": 3, "C": 2}


def test_raised_limit_places_the_waiting_worlds(rig: WorldRig, leader: Orchestrator) -> None:
    limit(rig, 1)
    send(rig, 6)
    leader.tick()
    assert loads(rig).total() == 2
    limit(rig, 0)
    leader.tick()
    assert loads(rig).total() == 6


def test_worlds_of_a_dead_worker_wait_for_room(rig: WorldRig, leader: Orchestrator) -> None:
    limit(rig, 3)
    send(rig, 6)
    leader.tick()
    rig.advance_clock(4)
    rig.worker("A").tick()
    leader.tick()
    rig.advance_clock(4)
    rig.worker("A").tick()
    leader.tick()
    assert loads(rig) == {"A": 3, "B": 3}, "A has no room for the worlds of B"
    rig.worker("C").tick()
    leader.tick()
    assert loads(rig) == {"A": 3, "C": 3}


def test_placement_prefers_the_worker_with_fewer_worlds() -> None:
    names = [f"w{n}" for n in range(200)]
    loads = {"A": 50, "B": 0}
    for name in names[:40]:
        assert placement.choose_with_room(name, ["A", "B"], loads, 100) == "B"
        loads["B"] += 1
    assert placement.choose_with_room("w", ["A"], {"A": 1}, 1) is None
    assert placement.choose_with_room("w", [], {}, 1) is None
    equal = {placement.choose_with_room(name, ["A", "B", "C"], {}, 9) for name in names}
    assert equal == {"A", "B", "C"}
    for name in names:
        free = placement.choose_with_room(name, ["A", "B", "C"], {}, 9)
        assert free == placement.choose_worker(name, ["A", "B", "C"])
