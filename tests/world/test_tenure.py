"""Who hosts a world: the lease, the assignment's consent, and reducers that never return."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.durable import inbox, journal, lease
from holdfast.errors import Fenced, IllegalTransition, NotFound
from holdfast.ops import service
from holdfast.roles.orchestrator import Orchestrator
from holdfast.world import catalog, tenure
from holdfast.world.catalog import Blocker
from holdfast.world.tenure import Granted
from tests.world import bank
from tests.world.rig import CRASH_BEFORE, Crash, Rig

MODULES = ("holdfast.world.tenure", "holdfast.roles.world_worker")

TTL_NS = 10 * S


def acquire(rig: Rig, worker: str, *handles: hf.WorldHandle[bank.Account]) -> list[Granted]:
    ids = [rig.id(handle) for handle in handles]
    return rig.store.transact(tenure.acquire, rig.universe, ids, worker, "1", TTL_NS, 5)


def current(rig: Rig, handle: hf.WorldHandle[bank.Account]) -> lease.Status:
    found = rig.store.read(lease.current, rig.subject(handle))
    assert found is not None
    return found


# -- consent -------------------------------------------------------------------------------------


def test_a_worker_gets_the_worlds_that_are_assigned_to_it(rig: Rig) -> None:
    [granted] = acquire(rig, "A", rig.world())
    assert granted.lease is not None
    assert (granted.lease.worker, granted.lease.epoch) == ("A", 1)


def test_a_worker_that_the_assignment_excludes_is_refused_and_nothing_changes(rig: Rig) -> None:
    ada = rig.world()
    before = rig.rows()
    [refused] = acquire(rig, "B", ada)
    assert (refused.lease, refused.refusal) == (None, "assigned_to_another")
    assert rig.rows() == before


def test_a_world_that_nobody_was_assigned_to_is_free_for_all(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    [granted] = acquire(rig, "B", ada)
    assert granted.lease is not None


def test_a_world_that_another_holds_is_refused_until_it_runs_out(rig: Rig) -> None:
    ada = rig.world()
    acquire(rig, "A", ada)
    rig.assign(ada, "B")
    [refused] = acquire(rig, "B", ada)
    assert (refused.lease, refused.refusal) == (None, "held")
    assert refused.retry_at_ns == current(rig, ada).expires_ns
    rig.expire()
    [granted] = acquire(rig, "B", ada)
    assert granted.lease is not None
    assert granted.lease.epoch == 2


@pytest.mark.parametrize("how", ["pause", "park", "delete"])
def test_a_world_that_is_not_active_is_not_hosted(rig: Rig, how: str) -> None:
    ada = rig.world()
    world_id = rig.id(ada)
    event = catalog.Event(how)
    rig.store.transact(catalog.change, rig.universe, world_id, event)
    [refused] = rig.store.transact(tenure.acquire, rig.universe, [world_id], "A", "1", TTL_NS, 5)
    assert refused.lease is None
    assert refused.refusal == {"pause": "paused", "park": "parked", "delete": "deleted"}[how]


def test_each_world_of_a_batch_has_its_own_answer(rig: Rig) -> None:
    handles = [rig.world(name=name) for name in "abc"]
    rig.assign(handles[1], "B")
    answers = acquire(rig, "A", *handles)
    assert [answer.lease is not None for answer in answers] == [True, False, True]


def test_an_unknown_world_is_refused_and_keeps_no_other_from_being_granted(rig: Rig) -> None:
    ada = rig.id(rig.world())
    answers = rig.store.transact(tenure.acquire, rig.universe, ["nobody", ada], "A", "1", TTL_NS, 5)
    assert [answer.refusal for answer in answers] == [tenure.UNKNOWN, ""]
    with pytest.raises(NotFound):
        service.acquire_lease(rig.store, rig.universe, "nobody", "A", "1")


# -- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pause", "delete"])
def test_pausing_or_deleting_a_hosted_world_fences_its_host_at_once(rig: Rig, how: str) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    worker = rig.run()
    subject = rig.subject(ada)
    ada.send(bank.Deposited(2))
    getattr(ada, how)()
    rig.run(worker)
    assert worker.hosted == []
    assert rig.store.read(journal.head, subject).height == 1


def test_a_paused_world_takes_messages_and_handles_them_when_it_is_resumed(rig: Rig) -> None:
    ada = rig.world()
    worker = rig.run()
    ada.pause()
    for _ in range(3):
        ada.send(bank.Deposited(1))
        rig.run(worker)
    assert (ada.height(), rig.depth(ada)) == (0, 3)
    ada.resume()
    rig.run(worker)
    assert ada.state().balance == 3


def test_pausing_twice_and_resuming_twice_change_nothing_more(rig: Rig) -> None:
    ada = rig.world()
    ada.pause()
    ada.pause()
    assert rig.record(ada).status.value == "paused"
    ada.resume()
    ada.resume()
    assert rig.record(ada).status.value == "active"
    assert rig.store.read(catalog.counts, "bank")["active"] == 1


def test_a_parked_world_is_resumed_not_paused(rig: Rig) -> None:
    ada = rig.world()
    rig.store.transact(catalog.change, "bank", rig.id(ada), catalog.Event.PARK, Blocker("x", "y"))
    before = rig.rows()
    with pytest.raises(IllegalTransition):
        ada.pause()
    assert rig.rows() == before


def test_only_the_holder_of_a_world_parks_it(rig: Rig) -> None:
    ada = rig.world()
    [granted] = acquire(rig, "A", ada)
    rig.expire()
    before = rig.rows()
    with pytest.raises(Fenced):
        rig.store.transact(
            tenure.park, rig.universe, rig.id(ada), granted.lease, Blocker("stale", "")
        )
    assert rig.rows() == before


def test_a_worker_whose_world_is_paused_while_it_diverges_goes_on_with_the_others(rig: Rig) -> None:
    ada, bob = rig.world(), rig.world(name="bob")
    for handle in (ada, bob):
        handle.send(bank.Deposited(1))
    worker = rig.run()
    rig.store.transact(inbox.put, rig.subject(ada), None, b"junk")
    ada.send(bank.Deposited(1))
    bob.send(bank.Deposited(1))
    ada.pause()
    rig.run(worker)
    assert bob.state().balance == 2
    assert rig.record(ada).status.value == "paused"


# -- assignment ----------------------------------------------------------------------------------


def test_a_world_that_moves_is_let_go_at_once_and_taken_up_without_waiting(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    a, b = rig.run(), rig.worker("B")
    rig.assign(ada, "B")
    ada.send(bank.Deposited(2))
    rig.run(a)
    assert a.hosted == []
    rig.run(b)
    assert ada.state().balance == 3
    assert current(rig, ada).worker == "B"


@pytest.mark.parametrize("hosted", [True, False])
def test_a_world_that_is_unassigned_is_not_taken_up_again_by_its_former_worker(
    rig: Rig, hosted: bool
) -> None:
    ada = rig.world()
    worker = rig.worker()
    if hosted:
        ada.send(bank.Deposited(1))
        rig.run(worker)
    height = ada.height()
    ada.send(bank.Deposited(2))
    rig.store.transact(catalog.unassign, rig.universe, rig.id(ada))
    rig.run(worker)
    assert (worker.hosted, ada.height()) == ([], height)
    assert rig.hints("A") == []
    assert rig.hints(catalog.NOBODY) == [rig.id(ada)]


def test_an_idle_world_is_given_back(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    worker = rig.run(rig.worker(idle_s=5.0))
    assert worker.hosted == [rig.id(ada)]
    rig.clock.advance(6 * S)
    worker.tick()
    assert worker.hosted == []
    assert current(rig, ada).state is lease.State.FREE


def test_a_world_whose_code_the_worker_does_not_have_is_left_to_others(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    ignorant = rig.worker(app=hf.App("bank", worlds=[bank.Audit]))
    rig.run(ignorant)
    assert ignorant.hosted == []
    assert current(rig, ada).state is lease.State.FREE
    leader = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    leader.tick()
    able = rig.worker("B")
    able.tick()
    leader.tick()
    rig.run(able)
    assert ada.state().balance == 1


def test_a_busy_worker_renews_before_the_lease_runs_out(rig: Rig) -> None:
    ada = rig.world()
    worker = rig.worker(idle_s=1e6)
    for n in range(20):
        ada.send(bank.Deposited(1))
        worker.tick()
        rig.clock.advance(2 * S)
        assert current(rig, ada).expires_ns > rig.store.now_ns(), n
    assert current(rig, ada).epoch == 1


def test_a_worker_that_cannot_renew_drops_the_world_without_another_write(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    worker = rig.worker(idle_s=1e6)
    rig.run(worker)
    rig.expire()
    before = rig.head(ada)
    worker.tick()
    assert worker.hosted == []
    assert rig.head(ada) == before


# -- order and fairness --------------------------------------------------------------------------


def test_more_worlds_than_a_tick_takes_all_get_their_turn(rig: Rig) -> None:
    """Those in front always have work; those behind must not wait for them."""
    handles = [rig.world(name=f"w{n}") for n in range(10)]
    worker = rig.worker(worlds_per_tick=3)
    for _ in range(8):
        for handle in handles:
            handle.send(bank.Deposited(1))
        worker.tick()
    assert min(handle.height() for handle in handles) >= 2


def test_worlds_that_another_holds_do_not_stand_in_the_way(rig: Rig) -> None:
    held = [rig.world(name=f"held{n}") for n in range(5)]
    for handle in held:
        handle.send(bank.Deposited(1))
    rig.run()
    for handle in held:
        rig.assign(handle, "B")
        handle.send(bank.Deposited(1))
    free = [rig.world(name=f"free{n}") for n in range(5)]
    for handle in free:
        rig.assign(handle, "B")
        handle.send(bank.Deposited(1))
    b = rig.worker("B", worlds_per_tick=2)
    for _ in range(10):
        b.tick()
    assert [handle.height() for handle in free] == [1] * 5


def test_paused_worlds_do_not_stand_in_the_way(rig: Rig) -> None:
    paused = [rig.world(name=f"paused{n}") for n in range(6)]
    for handle in paused:
        handle.pause()
        handle.send(bank.Deposited(1))
    ada = rig.world()
    ada.send(bank.Deposited(1))
    worker = rig.worker(worlds_per_tick=2)
    for _ in range(5):
        worker.tick()
    assert ada.height() == 1
    assert rig.hints() == []


def test_a_higher_priority_is_served_first(rig: Rig) -> None:
    low, high = rig.world(name="low"), rig.world(name="high")
    rig.assign(high, "A", priority=5)
    for handle in (low, high):
        handle.send(bank.Deposited(1))
    rig.worker(worlds_per_tick=1).tick()
    assert (low.height(), high.height()) == (0, 1)


# -- reducers that never return ------------------------------------------------------------------


class Poison(hf.Event):
    pass


class Frail(hf.World):
    n: int = 0

    @hf.on(Poison)
    def poison(self, event: Poison, cx: hf.Context) -> None:
        raise Crash

    @hf.on(bank.Deposited)
    def deposited(self, event: bank.Deposited, cx: hf.Context) -> None:
        self.n += event.amount


FRAIL = hf.App("bank", worlds=[Frail])


def lives(rig: Rig, count: int, start: int = 1, **policy: float) -> int:
    """Workers that are started one after the other, each when the one before is dead and its leases
    have run out; how many died of it."""
    died = 0
    for n in range(start, start + count):
        worker = rig.worker("A", str(n), **policy)
        try:
            rig.run(worker)
        except Crash:
            died += 1
        rig.expire()
    return died


def test_a_reducer_that_kills_its_worker_again_and_again_parks_its_world() -> None:
    rig = Rig(FRAIL)
    world = rig.world(Frail, "w")
    world.send(bank.Deposited(1))
    world.send(Poison())
    world.send(bank.Deposited(1))
    died = lives(rig, 10, stuck_max=3)
    record = rig.record(world)
    assert died <= tenure.SUSPECT + 3
    assert record.status.value == "parked"
    assert record.blocker is not None
    assert record.blocker.code == "reducer_stuck"
    # What came before it is journaled, and it is named itself, not the batch that it was in.
    assert (world.height(), world.state().n) == (1, 1)
    assert "seq 2" in record.blocker.text


def test_a_stuck_reducer_is_tried_as_often_as_the_policy_says_when_it_is_alone() -> None:
    for stuck_max in (1, 2, 3, 5):
        rig = Rig(FRAIL)
        world = rig.world(Frail, "w")
        world.send(Poison())
        assert lives(rig, 10, stuck_max=stuck_max) == stuck_max
        assert rig.blocker(world) == "reducer_stuck"


def test_losses_at_different_seqs_are_no_sign_of_a_stuck_reducer() -> None:
    rig = Rig()
    ada = rig.world()
    for n in range(10):
        ada.send(bank.Deposited(1))
        worker = rig.worker("A", str(n), stuck_max=3)
        worker.tick()
        ada.send(bank.Deposited(1))
        rig.expire()
    assert rig.record(ada).status.value == "active"
    assert rig.record(ada).stuck_count <= 1


def test_the_neighbours_of_a_stuck_reducer_are_not_parked_with_it() -> None:
    rig = Rig(FRAIL)
    poisoned = rig.world(Frail, "poisoned")
    others = [rig.world(Frail, f"w{n}") for n in range(12)]
    poisoned.send(Poison())
    for other in others:
        other.send(bank.Deposited(1))
    lives(rig, 10, stuck_max=4)
    assert rig.blocker(poisoned) == "reducer_stuck"
    assert [rig.record(other).status.value for other in others] == ["active"] * 12
    assert [other.state().n for other in others] == [1] * 12


def test_a_released_or_idle_lease_is_not_held_against_a_world(rig: Rig) -> None:
    ada = rig.world()
    for n in range(5):
        ada.send(bank.Deposited(1))
        worker = rig.run(rig.worker("A", str(n), stuck_max=2))
        worker.finish()
        ada.send(bank.Deposited(1))
    assert rig.record(ada).stuck_count == 0


def test_a_resumed_world_starts_with_a_clean_slate() -> None:
    rig = Rig(FRAIL)
    world = rig.world(Frail, "w")
    world.send(Poison())
    lives(rig, 5, stuck_max=2)
    assert rig.blocker(world) == "reducer_stuck"
    world.resume()
    assert rig.record(world).stuck_count == 0
    assert lives(rig, 5, start=10, stuck_max=2) == 2


def test_a_worker_that_dies_while_acquiring_leaves_the_world_to_the_next(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Deposited(1))
    rig.backend.arm({2: CRASH_BEFORE})
    with pytest.raises(Crash):
        rig.worker().tick()
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 1
