"""The worker registry: advisory, and empty under a new leader."""

import pytest

from holdfast.authority import workers
from holdfast.authority.workers import WorkerRecord
from holdfast.clock import S, SimClock
from holdfast.errors import Invalid, NotFound
from holdfast.store.api import Store
from tests.authority.rig import U, acquire, force_release, release

MODULES = ("holdfast.authority.workers",)
TTL = 5 * S


def heartbeat(
    store: Store, worker: str = "w1", incarnation: str = "1", worlds: int = 0
) -> WorkerRecord:
    said: WorkerRecord = store.transact(
        workers.heartbeat, U, worker, incarnation, ("world",), worlds
    )
    return said


def live(store: Store, epoch: int) -> list[str]:
    found = store.read(workers.live, U, store.now_ns(), TTL, epoch)
    return [record.worker for record in found]


def known(store: Store) -> list[str]:
    return [record.worker for record in store.read(workers.known, U)]


def test_a_heartbeat_is_stamped_where_it_is_applied(sim_store: Store) -> None:
    epoch = acquire(sim_store).epoch
    said = heartbeat(sim_store, worlds=3)
    assert said == WorkerRecord("w1", "1", ("world",), said.heartbeat_ns, epoch, False, 3)
    assert 0 <= said.heartbeat_ns - sim_store.now_ns() < 1000
    assert sim_store.read(workers.find, U, "w1") == said


def test_a_worker_is_dead_at_the_very_end_of_its_time(sim_store: Store) -> None:
    said = heartbeat(sim_store)
    assert said.live(said.heartbeat_ns + TTL - 1, TTL, 0)
    assert not said.live(said.heartbeat_ns + TTL, TTL, 0)


def test_silence_makes_a_worker_dead_and_a_word_alive_again(
    sim_store: Store, clock: SimClock
) -> None:
    epoch = acquire(sim_store).epoch
    heartbeat(sim_store)
    clock.advance(2 * TTL)
    assert live(sim_store, epoch) == []
    heartbeat(sim_store)
    assert live(sim_store, epoch) == ["w1"]


@pytest.mark.parametrize("forced", [False, True])
def test_a_new_leader_trusts_nobody_who_has_not_spoken_since(
    sim_store: Store, forced: bool
) -> None:
    held = acquire(sim_store, "a")
    heartbeat(sim_store)
    assert live(sim_store, held.epoch) == ["w1"]
    force_release(sim_store) if forced else release(sim_store, held)
    heartbeat(sim_store, "w2")
    epoch = acquire(sim_store, "b").epoch
    assert live(sim_store, epoch) == []
    heartbeat(sim_store, "w2")
    assert live(sim_store, epoch) == ["w2"]
    assert known(sim_store) == ["w1", "w2"]


def test_workers_of_another_universe_are_not_seen(sim_store: Store) -> None:
    sim_store.transact(workers.heartbeat, "shop", "w1", "1", ())
    assert known(sim_store) == []


# -- draining ------------------------------------------------------------------------------------


def test_draining_stands_through_heartbeats_and_restarts_until_it_is_taken_back(
    sim_store: Store,
) -> None:
    heartbeat(sim_store)
    assert sim_store.transact(workers.drain, U, "w1", True).draining
    assert heartbeat(sim_store).draining
    assert heartbeat(sim_store, incarnation="2").draining
    assert not sim_store.transact(workers.drain, U, "w1", False).draining
    assert not heartbeat(sim_store).draining


def test_a_draining_worker_is_live_and_takes_nothing_new(sim_store: Store) -> None:
    said = heartbeat(sim_store)
    assert said.takes("world")
    assert not said.takes("adapter")
    drained = sim_store.transact(workers.drain, U, "w1", True)
    assert live(sim_store, 0) == ["w1"]
    assert not drained.takes("world")


def test_draining_somebody_unknown_is_not_found(sim_store: Store) -> None:
    with pytest.raises(NotFound):
        sim_store.transact(workers.drain, U, "nobody", True)
    assert known(sim_store) == []


# -- leaving -------------------------------------------------------------------------------------


def test_a_forgotten_worker_is_gone_and_so_is_its_drain(sim_store: Store) -> None:
    heartbeat(sim_store)
    sim_store.transact(workers.drain, U, "w1", True)
    assert sim_store.transact(workers.forget, U, "w1")
    assert known(sim_store) == []
    assert not sim_store.transact(workers.forget, U, "w1")
    assert not heartbeat(sim_store).draining


def test_a_leaver_does_not_forget_its_successor(sim_store: Store) -> None:
    heartbeat(sim_store, incarnation="2")
    assert not sim_store.transact(workers.forget, U, "w1", "1")
    assert known(sim_store) == ["w1"]
    assert sim_store.transact(workers.forget, U, "w1", "2")


def test_a_sweep_forgets_the_long_silent_up_to_its_limit(sim_store: Store, clock: SimClock) -> None:
    for name in ("w1", "w2", "w3"):
        heartbeat(sim_store, name)
    clock.advance(TTL)
    heartbeat(sim_store, "w2")
    before_ns = sim_store.now_ns() - 1
    assert sim_store.transact(workers.sweep, U, before_ns, 1) == 1
    assert sim_store.transact(workers.sweep, U, before_ns, 10) == 1
    assert known(sim_store) == ["w2"]


def test_who_is_known_is_read_in_pages(sim_store: Store) -> None:
    for name in ("w1", "w2", "w3"):
        heartbeat(sim_store, name)
    page = sim_store.read(workers.known, U, "w1", 1)
    assert [record.worker for record in page] == ["w2"]


# -- waking --------------------------------------------------------------------------------------


def test_the_leader_is_woken_by_changes_alone(sim_store: Store) -> None:
    def rung(since: int) -> int:
        return sim_store.wait(workers.topic(U), since, 0)

    heartbeat(sim_store)
    came = rung(0)
    assert came
    heartbeat(sim_store, worlds=7)
    assert rung(came) == came
    acquire(sim_store)
    heartbeat(sim_store)
    spoke_to_new_leader = rung(came)
    assert spoke_to_new_leader > came
    sim_store.transact(workers.drain, U, "w1", True)
    drained = rung(spoke_to_new_leader)
    assert drained > spoke_to_new_leader
    sim_store.transact(workers.drain, U, "w1", True)
    assert rung(drained) == drained
    sim_store.transact(workers.forget, U, "w1")
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
def test_a_bad_heartbeat_is_invalid_and_nothing_changes(
    sim_store: Store, worker: str, incarnation: str, roles: tuple[str, ...], worlds: int
) -> None:
    with pytest.raises(Invalid):
        sim_store.transact(workers.heartbeat, U, worker, incarnation, roles, worlds)
    assert known(sim_store) == []
