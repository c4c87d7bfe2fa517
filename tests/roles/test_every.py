"""Timers that repeat: hung again at each firing, with a policy for what was missed."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest

from holdfast.clock import S
from holdfast.config import INBOX_DEPTH_MAX
from holdfast.durable import queue
from holdfast.errors import CommitUnknown
from holdfast.roles.firing import CATCH_UP_MAX
from holdfast.world import cron
from holdfast.world import entry as steps
from tests.roles.rig import Rig
from tests.roles.shop import Repeated, Slept, Unset, Woken
from tests.world.rig import FAULTS, Crash
from tests.world.test_ingress import fill

MODULES = ("holdfast.world.every", "holdfast.world.context", "holdfast.roles.firing")

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
    assert rig.calendar().delayed == 1


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


def test_all_that_was_missed_in_a_long_time_is_told_in_order_a_part_at_a_time(rig: Rig) -> None:
    rig.buyer("ada", Repeated("* * * * *", "all"))
    minutes = 2 * CATCH_UP_MAX + 50
    rig.clock.advance(60 * S - rig.clock.wall_ns() % (60 * S) + S)
    hours(rig, (minutes - 1) / 60)
    worker = rig.timer_worker()
    rig.backend.arm({})
    while worker.tick():
        pass
    assert rig.backend.commits == 3
    rig.think()
    assert woken(rig) == minutes


def test_each_time_that_is_told_has_a_name_of_its_own(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY, "all"))
    hours(rig, 5)
    rig.work(rig.timer_worker())
    told = [steps.decode(body).ingress.intent_hash for body in rig.bodies(ada)[1:]]
    assert len(set(told)) == len(told) == 5


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 3)])
def test_hours_that_a_wall_clock_jumps_over_were_missed(rig: Rig, missed: str, count: int) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    rig.buyer("ada", Repeated(HOURLY, missed))
    rig.clock.step_wall(3 * 3600 * S)
    rig.work(rig.timer_worker())
    assert woken(rig) == count


def test_hours_that_a_wall_clock_shows_again_are_not_told_again(rig: Rig) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    rig.buyer("ada", Repeated(HOURLY, "all"))
    worker = rig.timer_worker()
    hours(rig, 3)
    rig.work(worker)
    rig.clock.step_wall(-2 * 3600 * S)
    for _ in range(4):
        hours(rig, 0.5)
        rig.work(worker)
    assert woken(rig) == 3
    hours(rig, 1)
    rig.work(worker)
    assert woken(rig) == 4


SETTINGS = [
    ("Europe/Berlin", "30 2 * * *", "2026-03-28T12:00", "2026-03-30T12:00"),
    ("Europe/Berlin", "30 2 * * *", "2026-10-24T12:00", "2026-10-26T12:00"),
    ("America/New_York", "30 2 * * *", "2026-03-07T17:00", "2026-03-09T17:00"),
    ("America/New_York", "30 1 * * *", "2026-10-31T17:00", "2026-11-02T17:00"),
    ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03T03:00", "2026-10-05T03:00"),
    ("Australia/Lord_Howe", "45 1 * * *", "2026-04-04T03:00", "2026-04-06T03:00"),
    ("Asia/Kathmandu", "30 2 * * *", "2026-03-28T12:00", "2026-03-30T12:00"),
]


@pytest.mark.parametrize(("zone", "rule", "start", "end"), SETTINGS)
def test_on_a_day_on_which_the_clock_is_set_a_daily_time_is_told_once(
    rig: Rig, zone: str, rule: str, start: str, end: str
) -> None:
    """Two days, the second of which has 23, 23.5, 24, 24.5 or 25 hours: twice, and never early."""
    begin_ns, end_ns = (_ns(text) for text in (start, end))
    rig.clock.step_wall(begin_ns - rig.clock.wall_ns())
    rig.buyer("ada", Repeated(rule, "skip", zone))
    worker = rig.timer_worker()
    told: list[int] = []
    while rig.clock.wall_ns() < end_ns:
        rig.clock.advance(60 * 5 * S)
        rig.work(worker)
        told += [rig.clock.wall_ns()] * (woken(rig) - len(told))
    due_ns, expected = begin_ns, []
    while (due_ns := cron.parse(rule).next_ns(due_ns, zone)) < end_ns:
        expected.append(due_ns)
    assert len(told) == len(expected) == 2
    assert all(0 <= at - due < 300 * S for at, due in zip(told, expected, strict=True))


def test_a_leap_day_is_told_in_leap_years(rig: Rig) -> None:
    rig.clock.step_wall(_ns("2026-01-01T00:00") - rig.clock.wall_ns())
    rig.buyer("ada", Repeated("0 0 29 2 *", "all"))
    worker = rig.timer_worker()
    told = []
    for year in range(2026, 2034):
        before = woken(rig)
        rig.clock.step_wall(_ns(f"{year + 1}-01-01T00:00") - rig.clock.wall_ns())
        rig.work(worker)
        told += [year] * (woken(rig) - before)
    assert told == [2028, 2032]


def test_a_full_world_is_told_later_and_nothing_is_left_out(rig: Rig) -> None:
    full = rig.buyer("ada", Repeated(HOURLY, "all"))
    full.pause()
    depth = rig.depth(full)
    fill(rig, full, INBOX_DEPTH_MAX)
    worker = rig.timer_worker()
    hours(rig, 3)
    rig.work(worker)
    assert rig.calendar().delayed == 1
    fill(rig, full, depth)
    full.resume()
    hours(rig, 0.1)
    rig.work(worker)
    assert woken(rig) == 3


def test_a_delay_set_under_its_key_ends_it(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY), Slept(10, "job", "once"))
    hours(rig, 5)
    rig.work(rig.timer_worker())
    assert ada.state().woken == ["once"]
    assert rig.calendar() == queue.Counts(done=1)


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
    assert rig.calendar().delayed == rig.calendar().ready == 0


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
    assert rig.calendar() == queue.Counts(done=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_goes_wrong_each_time_is_told_once(rig: Rig, fault: str) -> None:
    rig.buyer("ada", Repeated(HOURLY, "all"))
    hours(rig, 3)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash, CommitUnknown):
        worker.tick()
    rig.backend.arm({})
    rig.work(rig.timer_worker() if "crash" in fault else worker, seconds=50)
    assert woken(rig) == 3
    assert rig.calendar().delayed == 1


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
    "wrong",
    [
        Repeated("nonsense"), Repeated(""), Repeated("* * 30 2 *"), Repeated("@daily"),
        Repeated(HOURLY, "maybe"), Repeated(HOURLY, ""), Repeated(HOURLY, key=""),
        Repeated(HOURLY, zone="Mars/Base"), Repeated(HOURLY, zone="../../etc/passwd"),
    ],
)  # fmt: skip
def test_a_wrong_rule_fails_its_event_only(rig: Rig, wrong: Repeated) -> None:
    ada = rig.buyer("ada", wrong, Woken("on"))
    assert [entry.outcome for entry in ada.journal()] == ["failed", "ok"]


def _ns(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * S
