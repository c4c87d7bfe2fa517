"""Timers: never early, never lost, once; whatever happens to workers, worlds and clocks."""

from __future__ import annotations

from itertools import product

import pytest

import holdfast as hf
from holdfast.clock import MS, S
from holdfast.config import INBOX_DEPTH_MAX
from holdfast.durable import queue
from holdfast.durable.bounds import TIME_NS_MAX
from holdfast.store.local import LocalStore
from holdfast.world import publish
from tests.roles.rig import Rig
from tests.roles.shop import Planned, Slept, Unset
from tests.world.rig import FAULTS, Crash
from tests.world.test_ingress import fill

MODULES = ("holdfast.roles.timer_worker", "holdfast.roles.receipts", "holdfast.world.publish")

TIMERS = publish.timers("shop")


def wall_s(rig: Rig) -> float:
    return rig.clock.wall_ns() / S


# -- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.001, 1, 60, 86_400])
def test_a_timer_fires_when_it_is_due_and_not_before(rig: Rig, seconds: float) -> None:
    ada = rig.buyer("ada", Slept(seconds))
    worker = rig.timer_worker()
    set_ns = rig.clock.boot_ns()
    rig.clock.advance(int(seconds * S) - (rig.clock.boot_ns() - set_ns) - MS // 2)
    rig.work(worker)
    assert ada.state().woken == []
    rig.clock.advance(MS)
    rig.work(worker)
    assert ada.state().woken == [""]
    rig.work(worker, seconds=10)
    assert ada.state().woken == [""]


def test_timers_fire_in_the_order_of_their_times(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(30, name="c"), Slept(10, name="a"), Slept(20, name="b"))
    rig.work(rig.timer_worker(), seconds=60)
    assert ada.state().woken == ["a", "b", "c"]


def test_overdue_timers_fire_after_any_downtime(rig: Rig) -> None:
    ada = rig.buyer("ada", *[Slept(n, name=str(n)) for n in range(1, 20)])
    rig.clock.advance(365 * 86_400 * S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == [str(n) for n in range(1, 20)]


def test_overdue_timers_fire_after_the_machine_was_started_anew(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.clock.advance(3600 * S)
    rig.clock.reboot()
    rig.store = LocalStore("memory:", rig.backend, rig.clock)
    rig.host = rig.worker(incarnation="2", idle_s=1e6)
    rig.work(rig.timer_worker())
    rig.expire(20)
    rig.work(rig.timer_worker())
    assert rig.store.read(lambda txn: ada._state(txn, None)).woken == [""]


def test_a_time_in_the_past_is_due_at_once(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) - 1000), Slept(0))
    rig.work(rig.timer_worker())
    assert ada.state().woken == ["", ""]


def test_a_time_that_is_too_far_to_be_told_waits_and_blocks_nobody(rig: Rig) -> None:
    last_s = TIME_NS_MAX // S
    rig.clock.advance(1000 * S)
    ada = rig.buyer("ada", Planned(float(last_s - 1)), Slept(5, name="soon"))
    rig.work(rig.timer_worker(), seconds=10)
    assert ada.state().woken == ["soon"]
    assert rig.timers().delayed == 1


def test_a_delay_or_key_out_of_bounds_fails_its_event_only(rig: Rig) -> None:
    wrong = [Slept(-1), Slept(1e12), Slept(float("nan")), Slept(1, key="k" * 500), Slept(1, key="")]
    ada = rig.buyer("ada", *wrong, Unset("x" * 500), Slept(1))
    assert [entry.outcome for entry in ada.journal()] == ["failed"] * 6 + ["ok"]


# -- slots ---------------------------------------------------------------------------------------


def test_a_timer_set_again_replaces_the_pending_one(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "old"), Slept(20, "k", "new"))
    worker = rig.timer_worker()
    rig.work(worker, seconds=15)
    assert ada.state().woken == []
    rig.work(worker, seconds=60)
    assert ada.state().woken == ["new"]


def test_a_cancelled_timer_does_not_fire(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10, "k"), Unset("k"), Unset("never set"))
    rig.work(rig.timer_worker(), seconds=60)
    assert ada.state().woken == []
    assert rig.timers() == queue.Counts(done=1)


@pytest.mark.parametrize("event", [Unset("k"), Slept(20, "k", "new")])
def test_a_timer_in_a_workers_hands_is_cancelled_or_replaced_all_the_same(
    rig: Rig, event: hf.Event
) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "old"))
    rig.clock.advance(11 * S)
    assert rig.store.transact(queue.claim, TIMERS, "a worker that is slow", 10, S)
    ada.send(event)
    rig.think()
    rig.work(rig.timer_worker(), seconds=60)
    assert ada.state().woken == (["new"] if isinstance(event, Slept) else [])


def test_a_slot_is_free_again_once_its_timer_has_fired(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "first"))
    worker = rig.timer_worker()
    rig.work(worker, seconds=11)
    assert rig.store.read(publish.slots_of, "shop", rig.id(ada), 10) == []
    ada.send(Slept(10, "k", "second"))
    rig.work(worker, seconds=11)
    assert ada.state().woken == ["first", "second"]


def test_slots_of_different_worlds_have_nothing_to_do_with_each_other(rig: Rig) -> None:
    ada, bob = rig.buyer("ada", Slept(10, "k")), rig.buyer("bob", Slept(10, "k"), Unset("k"))
    rig.work(rig.timer_worker(), seconds=20)
    assert (ada.state().woken, bob.state().woken) == ([""], [])


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "commit"), list(product(FAULTS, (1, 2))))
def test_whichever_commit_of_a_timer_worker_goes_wrong_its_timer_fires_once(
    rig: Rig, fault: str, commit: int
) -> None:
    ada = rig.buyer("ada", Slept(10), Slept(10))
    rig.clock.advance(11 * S)
    worker = rig.timer_worker()
    rig.backend.arm({commit: fault})
    try:
        worker.runners[0].tick()
    except Crash:
        worker = rig.timer_worker("next")
    rig.backend.arm({})
    rig.work(worker, seconds=100)
    assert ada.state().woken == ["", ""]
    assert rig.timers() == queue.Counts(done=2)


def test_a_timer_fires_however_many_workers_died_with_it_in_hand(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10))
    rig.clock.advance(11 * S)
    for n in range(20):
        dying = rig.timer_worker(f"worker-{n}")
        rig.backend.arm({2: "crash before"})
        with pytest.raises(Crash):
            dying.runners[0].tick()
        rig.clock.advance(31 * S)
    rig.backend.arm({})
    rig.work(rig.timer_worker())
    assert ada.state().woken == [""]


def test_two_timer_workers_fire_each_timer_once(rig: Rig) -> None:
    ada = rig.buyer("ada", *[Slept(1, name=str(n)) for n in range(40)])
    one, two = rig.timer_worker("one"), rig.timer_worker("two")
    rig.clock.advance(2 * S)
    for _ in range(10):
        one.runners[0].tick()
        two.runners[0].tick()
    rig.think()
    assert sorted(ada.state().woken, key=int) == [str(n) for n in range(40)]


def test_a_timer_survives_the_migration_of_its_world(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.expire(30)
    rig.assign(ada, "B")
    rig.run(rig.host)
    rig.host = rig.worker("B", idle_s=1e6)
    rig.work(rig.timer_worker(), seconds=40)
    assert ada.state().woken == [""]


def test_the_timer_of_a_deleted_world_goes_without_harm(rig: Rig) -> None:
    ada, bob = rig.buyer("ada", Slept(10)), rig.buyer("bob", Slept(10))
    ada.delete()
    rig.work(rig.timer_worker(), seconds=20)
    assert bob.state().woken == [""]
    assert rig.timers() == queue.Counts(done=2)


def test_a_timer_of_a_full_world_waits_and_the_others_fire(rig: Rig) -> None:
    full, bob = rig.buyer("full", Slept(10, "k")), rig.buyer("bob", Slept(10))
    full.pause()
    depth = rig.depth(full)
    fill(rig, full, INBOX_DEPTH_MAX)
    worker = rig.timer_worker()
    rig.work(worker, seconds=20)
    assert bob.state().woken == [""]
    assert rig.timers().delayed == 1
    fill(rig, full, depth)
    full.resume()
    rig.expire(11)
    rig.work(worker, seconds=20)
    assert full.state().woken == [""]


# -- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-5000, -5, 5, 5000])
def test_a_wall_clock_that_steps_moves_no_delay(rig: Rig, hours: int) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.clock.step_wall(hours * 3600 * S)
    worker = rig.timer_worker()
    rig.work(worker, seconds=58)
    assert ada.state().woken == []
    rig.work(worker, seconds=4)
    assert ada.state().woken == [""]


def test_a_calendar_time_fires_when_the_calendar_says_so(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60))
    worker = rig.timer_worker()
    rig.work(worker, seconds=58)
    assert ada.state().woken == []
    rig.work(worker, seconds=4)
    assert ada.state().woken == [""]


def test_a_calendar_time_waits_for_a_wall_clock_that_was_set_back(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60, key="k"))
    rig.clock.step_wall(-3600 * S)
    worker = rig.timer_worker()
    rig.clock.advance(3599 * S)
    rig.work(worker, seconds=50)
    assert ada.state().woken == []
    rig.work(worker, seconds=20)
    assert ada.state().woken == [""]


def test_a_calendar_time_that_waits_can_still_be_cancelled(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60, key="k"))
    rig.clock.step_wall(-3600 * S)
    rig.clock.advance(61 * S)
    worker = rig.timer_worker()
    rig.work(worker)
    ada.send(Unset("k"))
    rig.think()
    assert rig.timers().delayed == 0
    rig.clock.advance(3600 * S)
    rig.work(worker)
    assert ada.state().woken == []


def test_a_timer_is_found_among_many_that_are_pending(rig: Rig) -> None:
    rig.buyer("ada", *[Slept(1000 + n) for n in range(500)])
    bob = rig.buyer("bob", Slept(1))
    rig.work(rig.timer_worker(), seconds=2)
    assert bob.state().woken == [""]
    assert rig.timers().delayed == 500
