"""Timers that repeat: hung again at each firing, with a policy for what was missed."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.durable import queue
from tests.roles.rig import Rig
from tests.roles.shop import Repeated, Unset, Woken
from tests.world.rig import FAULTS, Crash

MODULES = ("holdfast.world.every", "holdfast.world.context", "holdfast.roles.receipts")

HOURLY = "0 * * * *"


def woken(rig: Rig, name: str = "ada") -> int:
    return len(rig.runtime.world(type(rig.buyer(name).state()), name).state().woken)


def hours(rig: Rig, n: float) -> None:
    rig.clock.advance(int(n * 3600 * S))


def test_it_fires_at_each_time_of_its_rule(rig: Rig) -> None:
    rig.buyer("ada", Repeated(HOURLY))
    worker = rig.timer_worker()
    for n in range(1, 6):
        rig.clock.advance((3600 * S - rig.clock.wall_ns() % (3600 * S)) - S)
        rig.work(worker)
        assert woken(rig) == n - 1
        rig.clock.advance(2 * S)
        rig.work(worker)
        assert woken(rig) == n
    assert rig.timers().delayed == 1


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 5)])
def test_what_was_missed_is_skipped_or_told_once_or_told_in_full(
    rig: Rig, missed: str, count: int
) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    rig.buyer("ada", Repeated(HOURLY, missed))
    hours(rig, 5)
    worker = rig.timer_worker()
    rig.work(worker)
    assert woken(rig) == count
    hours(rig, 1 - 1 / 6 + 0.01)
    rig.work(worker)
    assert woken(rig) == count + 1, "and it goes on in time"


def test_it_goes_on_until_its_key_is_cancelled(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY))
    worker = rig.timer_worker()
    hours(rig, 1)
    rig.work(worker)
    ada.send(Unset("job"))
    rig.think()
    hours(rig, 10)
    rig.work(worker)
    assert woken(rig) == 1
    assert rig.timers().delayed == rig.timers().ready == 0


def test_set_again_under_its_key_it_follows_the_new_rule(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY), Repeated("0 0 * * *"))
    hours(rig, 48)
    rig.work(rig.timer_worker())
    assert set(ada.state().woken) == {"0 0 * * *"}


def test_it_ends_with_its_world(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY))
    ada.delete()
    hours(rig, 2)
    rig.work(rig.timer_worker())
    assert rig.timers() == queue.Counts(done=1)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("commit", [1, 2])
def test_whatever_goes_wrong_each_time_is_told_once(rig: Rig, fault: str, commit: int) -> None:
    rig.buyer("ada", Repeated(HOURLY, "all"))
    hours(rig, 1)
    worker = rig.timer_worker()
    rig.backend.arm({commit: fault})
    try:
        worker.runners[0].tick()
    except Crash:
        worker = rig.timer_worker("next")
    rig.backend.arm({})
    rig.work(worker, seconds=50)
    assert woken(rig) == 1
    assert rig.timers().delayed == 1


def test_a_replay_wants_the_same(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY))
    hours(rig, 3)
    rig.work(rig.timer_worker())
    rig.host = rig.worker(incarnation="2", idle_s=1e6)
    rig.expire(20)
    ada.send(Woken("later"))
    rig.think()
    assert ada.state().woken[-1] == "later"
    assert rig.blocker(ada) == ""


@pytest.mark.parametrize(
    "wrong", [Repeated("nonsense"), Repeated(HOURLY, "maybe"), Repeated(HOURLY, zone="Mars/Base")]
)
def test_a_wrong_rule_fails_its_event_only(rig: Rig, wrong: Repeated) -> None:
    ada = rig.buyer("ada", wrong, Woken("on"))
    assert [entry.outcome for entry in ada.journal()] == ["failed", "ok"]
