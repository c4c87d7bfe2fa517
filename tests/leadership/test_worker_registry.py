"""The worker registry: advisory, and without live workers at the start of a new leader epoch."""

import pytest

from holdfast.clock import S, SimClock
from holdfast.errors import Invalid, NotFound
from holdfast.leadership import worker_registry
from holdfast.leadership.worker_registry import WorkerRecord
from holdfast.store.api import Store
from tests.leadership.rig import U, acquire, force_release, release

MODULES = ("holdfast.leadership.worker_registry",)
TTL = 5 * S


def heartbeat(
    store: Store, worker: str = "w1", incarnation: str = "1", worlds: int = 0
) -> WorkerRecord:
    record: WorkerRecord = store.transact(
        worker_registry.heartbeat, U, worker, incarnation, ("world",), worlds
    )
    return record


def list_live(store: Store, epoch: int) -> list[str]:
    found = store.read(worker_registry.list_live, U, store.now_ns(), TTL, epoch)
    return [record.worker for record in found]


def list_registered(store: Store) -> list[str]:
    return [record.worker for record in store.read(worker_registry.list_registered, U)]


def test_heartbeat_is_stamped_with_store_time_and_leader_epoch(sim_store: Store) -> None:
    epoch = acquire(sim_store).epoch
    record = heartbeat(sim_store, worlds=3)
    at_ns = record.heartbeat_ns
    assert record == WorkerRecord("w1", "1", ("world",), at_ns, epoch, False, 3, since_ns=at_ns)
    assert 0 <= record.heartbeat_ns - sim_store.now_ns() < 1000
    assert sim_store.read(worker_registry.find, U, "w1") == record


def test_worker_keeps_the_time_of_its_first_heartbeat_until_its_next_incarnation(
    sim_store: Store, clock: SimClock
) -> None:
    first = heartbeat(sim_store)
    clock.advance(TTL)
    assert heartbeat(sim_store).since_ns == first.since_ns
    restarted = heartbeat(sim_store, incarnation="2")
    assert restarted.since_ns == restarted.heartbeat_ns > first.since_ns


def test_worker_is_dead_exactly_at_its_ttl(sim_store: Store) -> None:
    record = heartbeat(sim_store)
    assert record.live(record.heartbeat_ns + TTL - 1, TTL, 0)
    assert not record.live(record.heartbeat_ns + TTL, TTL, 0)


def test_worker_without_heartbeat_is_dead_until_its_next_heartbeat(
    sim_store: Store, clock: SimClock
) -> None:
    epoch = acquire(sim_store).epoch
    heartbeat(sim_store)
    clock.advance(2 * TTL)
    assert list_live(sim_store, epoch) == []
    heartbeat(sim_store)
    assert list_live(sim_store, epoch) == ["w1"]


@pytest.mark.parametrize("forced", [False, True])
def test_new_leader_epoch_requires_a_new_heartbeat_from_each_worker(
    sim_store: Store, forced: bool
) -> None:
    held = acquire(sim_store, "a")
    heartbeat(sim_store)
    assert list_live(sim_store, held.epoch) == ["w1"]
    force_release(sim_store) if forced else release(sim_store, held)
    heartbeat(sim_store, "w2")
    epoch = acquire(sim_store, "b").epoch
    assert list_live(sim_store, epoch) == []
    heartbeat(sim_store, "w2")
    assert list_live(sim_store, epoch) == ["w2"]
    assert list_registered(sim_store) == ["w1", "w2"]


def test_workers_of_another_universe_are_not_listed(sim_store: Store) -> None:
    sim_store.transact(worker_registry.heartbeat, "shop", "w1", "1", ())
    assert list_registered(sim_store) == []


# -- draining ------------------------------------------------------------------------------------


def test_draining_survives_heartbeats_and_restarts_until_reset(
    sim_store: Store,
) -> None:
    heartbeat(sim_store)
    assert sim_store.transact(worker_registry.set_draining, U, "w1", True).draining
    assert heartbeat(sim_store).draining
    assert heartbeat(sim_store, incarnation="2").draining
    assert not sim_store.transact(worker_registry.set_draining, U, "w1", False).draining
    assert not heartbeat(sim_store).draining


def test_draining_worker_is_live_and_accepts_no_role(sim_store: Store) -> None:
    record = heartbeat(sim_store)
    assert record.accepts("world")
    assert not record.accepts("adapter")
    drained = sim_store.transact(worker_registry.set_draining, U, "w1", True)
    assert list_live(sim_store, 0) == ["w1"]
    assert not drained.accepts("world")


def test_draining_an_unknown_worker_is_not_found(sim_store: Store) -> None:
    with pytest.raises(NotFound):
        sim_store.transact(worker_registry.set_draining, U, "nobody", True)
    assert list_registered(sim_store) == []


# -- removal -------------------------------------------------------------------------------------


def test_remove_deletes_a_worker_and_its_draining_flag(sim_store: Store) -> None:
    heartbeat(sim_store)
    sim_store.transact(worker_registry.set_draining, U, "w1", True)
    assert sim_store.transact(worker_registry.remove, U, "w1")
    assert list_registered(sim_store) == []
    assert not sim_store.transact(worker_registry.remove, U, "w1")
    assert not heartbeat(sim_store).draining


def test_remove_by_an_old_incarnation_keeps_its_successor(sim_store: Store) -> None:
    heartbeat(sim_store, incarnation="2")
    assert not sim_store.transact(worker_registry.remove, U, "w1", "1")
    assert list_registered(sim_store) == ["w1"]
    assert sim_store.transact(worker_registry.remove, U, "w1", "2")


def test_sweep_removes_silent_workers_up_to_its_limit(sim_store: Store, clock: SimClock) -> None:
    for name in ("w1", "w2", "w3"):
        heartbeat(sim_store, name)
    clock.advance(TTL)
    heartbeat(sim_store, "w2")
    before_ns = sim_store.now_ns() - 1
    assert sim_store.transact(worker_registry.sweep, U, before_ns, 1) == 1
    assert sim_store.transact(worker_registry.sweep, U, before_ns, 10) == 1
    assert list_registered(sim_store) == ["w2"]


def test_registered_workers_are_read_in_pages(sim_store: Store) -> None:
    for name in ("w1", "w2", "w3"):
        heartbeat(sim_store, name)
    page = sim_store.read(worker_registry.list_registered, U, "w1", 1)
    assert [record.worker for record in page] == ["w2"]


# -- notifications -------------------------------------------------------------------------------


def test_worker_topic_is_notified_only_by_registry_changes(sim_store: Store) -> None:
    def rung(since: int) -> int:
        return sim_store.wait(worker_registry.topic(U), since, 0)

    heartbeat(sim_store)
    registered = rung(0)
    assert registered
    heartbeat(sim_store, worlds=7)
    assert rung(registered) == registered
    acquire(sim_store)
    heartbeat(sim_store)
    new_epoch = rung(registered)
    assert new_epoch > registered
    sim_store.transact(worker_registry.set_draining, U, "w1", True)
    drained = rung(new_epoch)
    assert drained > new_epoch
    sim_store.transact(worker_registry.set_draining, U, "w1", True)
    assert rung(drained) == drained
    sim_store.transact(worker_registry.remove, U, "w1")
    assert rung(drained) > drained


@pytest.mark.parametrize(
    ("worker", "incarnation", "roles", "worlds"),
    [
        ("", "1", (), 0),
        ("x" * 201, "1", (), 0),
        ("w", "", (), 0),
        ("w", "1", ("",), 0),
        ("w", "1", ("world",) * 33, 0),
        ("w", "1", (), -1),
    ],
)
def test_bad_heartbeat_is_invalid_and_registers_nothing(
    sim_store: Store, worker: str, incarnation: str, roles: tuple[str, ...], worlds: int
) -> None:
    with pytest.raises(Invalid):
        sim_store.transact(worker_registry.heartbeat, U, worker, incarnation, roles, worlds)
    assert list_registered(sim_store) == []
