"""Hosting leases: acquisition, the assignment check, and detection of stuck reducers."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast import failpoints
from holdfast.clock import S
from holdfast.durable import inbox, journal, lease
from holdfast.errors import Fenced, IllegalTransition, NotFound
from holdfast.ops import world_operations
from holdfast.workers.orchestrator import Orchestrator
from holdfast.world import catalog, hosting_lease
from holdfast.world.catalog import WorldBlocker
from holdfast.world.hosting_lease import HostingGrant
from tests.world import bank
from tests.world.rig import CRASH_BEFORE, Crash, WorldRig

MODULES = (
    "holdfast.world.hosting_lease",
    "holdfast.workers.world.worker",
    "holdfast.workers.world.hosted_worlds",
)

TTL_NS = 10 * S


def acquire(
    rig: WorldRig, worker: str, *handles: hf.WorldHandle[bank.BankAccount]
) -> list[HostingGrant]:
    ids = [rig.id(handle) for handle in handles]
    return rig.store.transact(hosting_lease.acquire, rig.universe, ids, worker, "1", TTL_NS, 5)


def current_lease(rig: WorldRig, handle: hf.WorldHandle[bank.BankAccount]) -> lease.LeaseStatus:
    status = rig.store.read(lease.current_status, rig.subject(handle))
    assert status is not None
    return status


# -- acquire -------------------------------------------------------------------------------------


def test_worker_acquires_worlds_assigned_to_it(rig: WorldRig) -> None:
    [granted] = acquire(rig, "A", rig.world())
    assert granted.lease is not None
    assert (granted.lease.worker, granted.lease.epoch) == ("A", 1)


def test_worker_is_refused_a_world_assigned_to_another(rig: WorldRig) -> None:
    ada = rig.world()
    before = rig.rows()
    [refused] = acquire(rig, "B", ada)
    assert (refused.lease, refused.refusal) == (None, "assigned_to_another")
    assert rig.rows() == before


def test_unassigned_world_can_be_leased_by_any_worker(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    [granted] = acquire(rig, "B", ada)
    assert granted.lease is not None


def test_leased_world_is_refused_until_its_lease_expires(rig: WorldRig) -> None:
    ada = rig.world()
    acquire(rig, "A", ada)
    rig.assign(ada, "B")
    [refused] = acquire(rig, "B", ada)
    assert (refused.lease, refused.refusal) == (None, "held")
    assert refused.retry_at_ns == current_lease(rig, ada).expires_ns
    rig.advance_clock()
    [granted] = acquire(rig, "B", ada)
    assert granted.lease is not None
    assert granted.lease.epoch == 2


@pytest.mark.parametrize("how", ["pause", "park", "delete"])
def test_inactive_world_is_not_leased(rig: WorldRig, how: str) -> None:
    ada = rig.world()
    world_id = rig.id(ada)
    event = catalog.WorldEvent(how)
    rig.store.transact(catalog.change_status, rig.universe, world_id, event)
    [refused] = rig.store.transact(
        hosting_lease.acquire, rig.universe, [world_id], "A", "1", TTL_NS, 5
    )
    assert refused.lease is None
    assert refused.refusal == {"pause": "paused", "park": "parked", "delete": "deleted"}[how]


def test_acquire_answers_each_world_of_a_batch_separately(rig: WorldRig) -> None:
    handles = [rig.world(name=name) for name in "abc"]
    rig.assign(handles[1], "B")
    answers = acquire(rig, "A", *handles)
    assert [answer.lease is not None for answer in answers] == [True, False, True]


def test_acquire_of_an_unknown_world_does_not_block_the_batch(rig: WorldRig) -> None:
    ada = rig.id(rig.world())
    answers = rig.store.transact(
        hosting_lease.acquire, rig.universe, ["nobody", ada], "A", "1", TTL_NS, 5
    )
    assert [answer.refusal for answer in answers] == [hosting_lease.WORLD_NOT_FOUND, ""]
    with pytest.raises(NotFound):
        world_operations.acquire_lease(rig.store, rig.universe, "nobody", "A", "1")


# -- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["pause", "delete"])
def test_pause_or_delete_fences_the_host_at_once(rig: WorldRig, how: str) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.run()
    subject = rig.subject(ada)
    ada.send(bank.DepositMade(2))
    getattr(ada, how)()
    rig.run(worker)
    assert worker.hosted == []
    assert rig.store.read(journal.head, subject).height == 1


def test_paused_world_accepts_messages_and_handles_them_after_resume(rig: WorldRig) -> None:
    ada = rig.world()
    worker = rig.run()
    ada.pause()
    for _ in range(3):
        ada.send(bank.DepositMade(1))
        rig.run(worker)
    assert (ada.height(), rig.inbox_depth(ada)) == (0, 3)
    ada.resume()
    rig.run(worker)
    assert ada.state().balance == 3


def test_pause_and_resume_are_idempotent(rig: WorldRig) -> None:
    ada = rig.world()
    ada.pause()
    ada.pause()
    assert rig.record(ada).status.value == "paused"
    ada.resume()
    ada.resume()
    assert rig.record(ada).status.value == "active"
    assert rig.store.read(catalog.count_by_status, "bank")["active"] == 1


def test_parked_world_cannot_be_paused(rig: WorldRig) -> None:
    ada = rig.world()
    rig.store.transact(
        catalog.change_status, "bank", rig.id(ada), catalog.WorldEvent.PARK, WorldBlocker("x", "y")
    )
    before = rig.rows()
    with pytest.raises(IllegalTransition):
        ada.pause()
    assert rig.rows() == before


def test_only_the_lease_holder_parks_a_world(rig: WorldRig) -> None:
    ada = rig.world()
    [granted] = acquire(rig, "A", ada)
    rig.advance_clock()
    before = rig.rows()
    with pytest.raises(Fenced):
        rig.store.transact(
            hosting_lease.park, rig.universe, rig.id(ada), granted.lease, WorldBlocker("stale", "")
        )
    assert rig.rows() == before


def test_worker_continues_other_worlds_when_a_diverging_one_is_paused(rig: WorldRig) -> None:
    ada, bob = rig.world(), rig.world(name="bob")
    for handle in (ada, bob):
        handle.send(bank.DepositMade(1))
    worker = rig.run()
    rig.store.transact(inbox.put, rig.subject(ada), None, b"junk")
    ada.send(bank.DepositMade(1))
    bob.send(bank.DepositMade(1))
    ada.pause()
    rig.run(worker)
    assert bob.state().balance == 2
    assert rig.record(ada).status.value == "paused"


# -- assignment ----------------------------------------------------------------------------------


def test_reassigned_world_moves_to_its_new_worker_without_lease_timeout(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    a, b = rig.run(), rig.worker("B")
    rig.assign(ada, "B")
    ada.send(bank.DepositMade(2))
    rig.run(a)
    assert a.hosted == []
    rig.run(b)
    assert ada.state().balance == 3
    assert current_lease(rig, ada).worker == "B"


@pytest.mark.parametrize("new_worker", ["B", None])
@pytest.mark.parametrize("commits", [True, False])
def test_world_that_moves_while_its_worker_acts_on_it_is_released(
    rig: WorldRig, new_worker: str | None, commits: bool
) -> None:
    """The assignment changes between the read of the inbox and the next commit of the former worker."""
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.run(rig.worker(idle_s=1e6))

    def move(_: object) -> None:
        if new_worker is None:
            rig.store.transact(catalog.unassign, rig.universe, rig.id(ada))
        else:
            rig.assign(ada, new_worker)

    rig.store.transact(lambda txn: catalog.mark_runnable(txn, rig.universe, rig.id(ada)))
    if commits:
        ada.send(bank.DepositMade(2))
    with failpoints.on("world.submit_cycles" if commits else "world.inboxes_read", calls=move):
        worker.tick()
    rig.run(worker)
    assert worker.hosted == []
    assert current_lease(rig, ada).state is lease.LeaseState.FREE
    assert rig.runnable("A") == []


@pytest.mark.parametrize("hosted", [True, False])
def test_unassigned_world_is_not_leased_again_by_its_former_worker(
    rig: WorldRig, hosted: bool
) -> None:
    ada = rig.world()
    worker = rig.worker()
    if hosted:
        ada.send(bank.DepositMade(1))
        rig.run(worker)
    height = ada.height()
    ada.send(bank.DepositMade(2))
    rig.store.transact(catalog.unassign, rig.universe, rig.id(ada))
    rig.run(worker)
    assert (worker.hosted, ada.height()) == ([], height)
    assert rig.runnable("A") == []
    assert rig.runnable(catalog.UNASSIGNED) == [rig.id(ada)]


def test_idle_world_is_released(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.run(rig.worker(idle_s=5.0))
    assert worker.hosted == [rig.id(ada)]
    rig.clock.advance(6 * S)
    worker.tick()
    assert worker.hosted == []
    assert current_lease(rig, ada).state is lease.LeaseState.FREE


def test_worker_without_the_world_type_releases_the_world(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    ignorant = rig.worker(app=hf.App("bank", worlds=[bank.Audit]))
    rig.run(ignorant)
    assert ignorant.hosted == []
    assert current_lease(rig, ada).state is lease.LeaseState.FREE
    leader = Orchestrator(rig.store, universe="bank", worker="O", incarnation="1", clock=rig.clock)
    leader.tick()
    able = rig.worker("B")
    able.tick()
    leader.tick()
    rig.run(able)
    assert ada.state().balance == 1


def test_busy_worker_renews_its_lease_before_expiry(rig: WorldRig) -> None:
    ada = rig.world()
    worker = rig.worker(idle_s=1e6)
    for n in range(20):
        ada.send(bank.DepositMade(1))
        worker.tick()
        rig.clock.advance(2 * S)
        assert current_lease(rig, ada).expires_ns > rig.store.now_ns(), n
    assert current_lease(rig, ada).epoch == 1


def test_worker_with_an_expired_lease_drops_the_world_without_writing(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.worker(idle_s=1e6)
    rig.run(worker)
    rig.advance_clock()
    before = rig.head(ada)
    worker.tick()
    assert worker.hosted == []
    assert rig.head(ada) == before


# -- order and fairness --------------------------------------------------------------------------


def test_worlds_beyond_the_tick_limit_are_served_in_turn(rig: WorldRig) -> None:
    """The first worlds always have work and must not starve the last ones."""
    handles = [rig.world(name=f"w{n}") for n in range(10)]
    worker = rig.worker(worlds_per_tick=3)
    for _ in range(8):
        for handle in handles:
            handle.send(bank.DepositMade(1))
        worker.tick()
    assert min(handle.height() for handle in handles) >= 2


def test_worlds_leased_by_another_worker_do_not_block_free_ones(rig: WorldRig) -> None:
    held = [rig.world(name=f"held{n}") for n in range(5)]
    for handle in held:
        handle.send(bank.DepositMade(1))
    rig.run()
    for handle in held:
        rig.assign(handle, "B")
        handle.send(bank.DepositMade(1))
    free = [rig.world(name=f"free{n}") for n in range(5)]
    for handle in free:
        rig.assign(handle, "B")
        handle.send(bank.DepositMade(1))
    b = rig.worker("B", worlds_per_tick=2)
    for _ in range(10):
        b.tick()
    assert [handle.height() for handle in free] == [1] * 5


def test_paused_worlds_do_not_block_active_ones(rig: WorldRig) -> None:
    paused = [rig.world(name=f"paused{n}") for n in range(6)]
    for handle in paused:
        handle.pause()
        handle.send(bank.DepositMade(1))
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    worker = rig.worker(worlds_per_tick=2)
    for _ in range(5):
        worker.tick()
    assert ada.height() == 1
    assert rig.runnable() == []


def test_higher_priority_world_is_served_first(rig: WorldRig) -> None:
    low, high = rig.world(name="low"), rig.world(name="high")
    rig.assign(high, "A", priority=5)
    for handle in (low, high):
        handle.send(bank.DepositMade(1))
    rig.worker(worlds_per_tick=1).tick()
    assert (low.height(), high.height()) == (0, 1)


# -- stuck reducers ------------------------------------------------------------------------------


class Poison(hf.Event):
    pass


class Frail(hf.World):
    n: int = 0

    @hf.on(Poison)
    def poison(self, event: Poison, cx: hf.Context) -> None:
        raise Crash

    @hf.on(bank.DepositMade)
    def deposited(self, event: bank.DepositMade, cx: hf.Context) -> None:
        self.n += event.amount


FRAIL = hf.App("bank", worlds=[Frail])


def run_successive_workers(rig: WorldRig, count: int, start: int = 1, **policy: float) -> int:
    """Start workers one after the other, each after the leases of its predecessor expired. Return
    the number of workers that crashed."""
    died = 0
    for n in range(start, start + count):
        worker = rig.worker("A", str(n), **policy)
        try:
            rig.run(worker)
        except Crash:
            died += 1
        rig.advance_clock()
    return died


def test_reducer_that_kills_its_worker_repeatedly_parks_its_world() -> None:
    rig = WorldRig(FRAIL)
    world = rig.world(Frail, "w")
    world.send(bank.DepositMade(1))
    world.send(Poison())
    world.send(bank.DepositMade(1))
    died = run_successive_workers(rig, 10, stuck_max=3)
    record = rig.record(world)
    assert died <= hosting_lease.SUSPECT_AFTER_LOSSES + 3
    assert record.status.value == "parked"
    assert record.blocker is not None
    assert record.blocker.code == "reducer_stuck"
    # Earlier events are journaled. The blocker names the poison event, not its whole batch.
    assert (world.height(), world.state().n) == (1, 1)
    assert "seq 2" in record.blocker.text


def test_isolated_stuck_reducer_is_tried_stuck_max_times() -> None:
    for stuck_max in (1, 2, 3, 5):
        rig = WorldRig(FRAIL)
        world = rig.world(Frail, "w")
        world.send(Poison())
        assert run_successive_workers(rig, 10, stuck_max=stuck_max) == stuck_max
        assert rig.blocker_code(world) == "reducer_stuck"


def test_losses_at_different_seqs_do_not_count_as_stuck() -> None:
    rig = WorldRig()
    ada = rig.world()
    for n in range(10):
        ada.send(bank.DepositMade(1))
        worker = rig.worker("A", str(n), stuck_max=3)
        worker.tick()
        ada.send(bank.DepositMade(1))
        rig.advance_clock()
    assert rig.record(ada).status.value == "active"
    assert rig.record(ada).stuck_count <= 1


def test_worlds_beside_a_stuck_reducer_are_not_parked() -> None:
    rig = WorldRig(FRAIL)
    poisoned = rig.world(Frail, "poisoned")
    others = [rig.world(Frail, f"w{n}") for n in range(12)]
    poisoned.send(Poison())
    for other in others:
        other.send(bank.DepositMade(1))
    run_successive_workers(rig, 10, stuck_max=4)
    assert rig.blocker_code(poisoned) == "reducer_stuck"
    assert [rig.record(other).status.value for other in others] == ["active"] * 12
    assert [other.state().n for other in others] == [1] * 12


def test_released_lease_does_not_count_as_a_loss(rig: WorldRig) -> None:
    ada = rig.world()
    for n in range(5):
        ada.send(bank.DepositMade(1))
        worker = rig.run(rig.worker("A", str(n), stuck_max=2))
        worker.shut_down()
        ada.send(bank.DepositMade(1))
    assert rig.record(ada).stuck_count == 0


def test_resume_resets_the_stuck_count() -> None:
    rig = WorldRig(FRAIL)
    world = rig.world(Frail, "w")
    world.send(Poison())
    run_successive_workers(rig, 5, stuck_max=2)
    assert rig.blocker_code(world) == "reducer_stuck"
    world.resume()
    assert rig.record(world).stuck_count == 0
    assert run_successive_workers(rig, 5, start=10, stuck_max=2) == 2


def test_worker_that_dies_during_acquire_leaves_the_world_to_the_next(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.DepositMade(1))
    rig.backend.arm({2: CRASH_BEFORE})
    with pytest.raises(Crash):
        rig.worker().tick()
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 1
