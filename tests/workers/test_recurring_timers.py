"""Recurring timers: rescheduled at each firing, with a policy for missed occurrences."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest

from holdfast.clock import S
from holdfast.config import INBOX_DEPTH_MAX
from holdfast.durable import queue
from holdfast.errors import CommitUnknown
from holdfast.workers.timers.delivery import CATCH_UP_MAX
from holdfast.world import cron
from holdfast.world import journal_entry as steps
from tests.workers.rig import WorkerRig
from tests.workers.shop import Repeated, Slept, Unset, Woken
from tests.world.rig import FAULTS, Crash
from tests.world.test_ingress import fill_inbox

MODULES = (
    "holdfast.world.recurring_timers",
    "holdfast.world.context",
    "holdfast.workers.timers.delivery",
)

HOURLY = "0 * * * *"


def fired_count(rig: WorkerRig, name: str = "ada") -> int:
    return len(rig.runtime.world(type(rig.buyer(name).state()), name).state().woken)


def advance_hours(rig: WorkerRig, n: float) -> None:
    rig.clock.advance(int(n * 3600 * S))


def test_recurring_timer_fires_at_each_time_of_its_rule(rig: WorkerRig) -> None:
    rig.buyer("ada", Repeated(HOURLY))
    worker = rig.timer_worker()
    for n in range(1, 6):
        rig.clock.advance((3600 * S - rig.clock.wall_ns() % (3600 * S)) - S)
        rig.run_until_idle(worker)
        assert fired_count(rig) == n - 1
        rig.clock.advance(2 * S)
        rig.run_until_idle(worker)
        assert fired_count(rig) == n
    assert rig.calendar_counts().delayed == 1


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 5)])
def test_missed_policy_skips_or_fires_once_or_fires_all(
    rig: WorkerRig, missed: str, count: int
) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    rig.buyer("ada", Repeated(HOURLY, missed))
    advance_hours(rig, 5)
    worker = rig.timer_worker()
    rig.run_until_idle(worker)
    assert fired_count(rig) == count
    advance_hours(rig, 1 - 1 / 6 + 0.01)
    rig.run_until_idle(worker)
    assert fired_count(rig) == count + 1, "and it goes on in time"


def test_missed_all_catches_up_in_bounded_commits(rig: WorkerRig) -> None:
    rig.buyer("ada", Repeated("* * * * *", "all"))
    minutes = 2 * CATCH_UP_MAX + 50
    rig.clock.advance(60 * S - rig.clock.wall_ns() % (60 * S) + S)
    advance_hours(rig, (minutes - 1) / 60)
    worker = rig.timer_worker()
    rig.backend.arm({})
    while worker.tick():
        pass
    assert rig.backend.commits == 3
    rig.run_worlds()
    assert fired_count(rig) == minutes


def test_each_occurrence_has_its_own_intent_hash(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY, "all"))
    advance_hours(rig, 5)
    rig.run_until_idle(rig.timer_worker())
    hashes = [steps.decode(body).ingress.intent_hash for body in rig.entry_bodies(ada)[1:]]
    assert len(set(hashes)) == len(hashes) == 5


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("one", 1), ("all", 3)])
def test_forward_clock_step_counts_as_missed_occurrences(
    rig: WorkerRig, missed: str, count: int
) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    rig.buyer("ada", Repeated(HOURLY, missed))
    rig.clock.step_wall(3 * 3600 * S)
    rig.run_until_idle(rig.timer_worker())
    assert fired_count(rig) == count


def test_backward_clock_step_does_not_repeat_occurrences(rig: WorkerRig) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    rig.buyer("ada", Repeated(HOURLY, "all"))
    worker = rig.timer_worker()
    advance_hours(rig, 3)
    rig.run_until_idle(worker)
    rig.clock.step_wall(-2 * 3600 * S)
    for _ in range(4):
        advance_hours(rig, 0.5)
        rig.run_until_idle(worker)
    assert fired_count(rig) == 3
    advance_hours(rig, 1)
    rig.run_until_idle(worker)
    assert fired_count(rig) == 4


DST_CASES = [
    ("Europe/Berlin", "30 2 * * *", "2026-03-28T12:00", "2026-03-30T12:00"),
    ("Europe/Berlin", "30 2 * * *", "2026-10-24T12:00", "2026-10-26T12:00"),
    ("America/New_York", "30 2 * * *", "2026-03-07T17:00", "2026-03-09T17:00"),
    ("America/New_York", "30 1 * * *", "2026-10-31T17:00", "2026-11-02T17:00"),
    ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03T03:00", "2026-10-05T03:00"),
    ("Australia/Lord_Howe", "45 1 * * *", "2026-04-04T03:00", "2026-04-06T03:00"),
    ("Asia/Kathmandu", "30 2 * * *", "2026-03-28T12:00", "2026-03-30T12:00"),
]


@pytest.mark.parametrize(("zone", "rule", "start", "end"), DST_CASES)
def test_daily_timer_fires_once_on_a_dst_change_day(
    rig: WorkerRig, zone: str, rule: str, start: str, end: str
) -> None:
    """Two days, the second of 23, 23.5, 24, 24.5 or 25 hours: two firings, and none early."""
    begin_ns, end_ns = (_ns(text) for text in (start, end))
    rig.clock.step_wall(begin_ns - rig.clock.wall_ns())
    rig.buyer("ada", Repeated(rule, "skip", zone))
    worker = rig.timer_worker()
    fired_ns: list[int] = []
    while rig.clock.wall_ns() < end_ns:
        rig.clock.advance(60 * 5 * S)
        rig.run_until_idle(worker)
        fired_ns += [rig.clock.wall_ns()] * (fired_count(rig) - len(fired_ns))
    due_ns, expected = begin_ns, []
    while (due_ns := cron.parse(rule).next_ns(due_ns, zone)) < end_ns:
        expected.append(due_ns)
    assert len(fired_ns) == len(expected) == 2
    assert all(0 <= at - due < 300 * S for at, due in zip(fired_ns, expected, strict=True))


def test_leap_day_timer_fires_only_in_leap_years(rig: WorkerRig) -> None:
    rig.clock.step_wall(_ns("2026-01-01T00:00") - rig.clock.wall_ns())
    rig.buyer("ada", Repeated("0 0 29 2 *", "all"))
    worker = rig.timer_worker()
    fired_years = []
    for year in range(2026, 2034):
        before = fired_count(rig)
        rig.clock.step_wall(_ns(f"{year + 1}-01-01T00:00") - rig.clock.wall_ns())
        rig.run_until_idle(worker)
        fired_years += [year] * (fired_count(rig) - before)
    assert fired_years == [2028, 2032]


def test_recurring_timer_of_a_full_inbox_fires_later_and_completely(rig: WorkerRig) -> None:
    full = rig.buyer("ada", Repeated(HOURLY, "all"))
    full.pause()
    depth = rig.inbox_depth(full)
    fill_inbox(rig, full, INBOX_DEPTH_MAX)
    worker = rig.timer_worker()
    advance_hours(rig, 3)
    rig.run_until_idle(worker)
    assert rig.calendar_counts().delayed == 1
    fill_inbox(rig, full, depth)
    full.resume()
    advance_hours(rig, 0.1)
    rig.run_until_idle(worker)
    assert fired_count(rig) == 3


def test_delay_under_the_same_key_replaces_a_recurring_timer(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY), Slept(10, "job", "once"))
    advance_hours(rig, 5)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == ["once"]
    assert rig.calendar_counts() == queue.QueueCounts(done=1)


def test_recurring_timer_fires_until_cancel_timer(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY))
    worker = rig.timer_worker()
    advance_hours(rig, 1)
    rig.run_until_idle(worker)
    ada.send(Unset("job"))
    rig.run_worlds()
    advance_hours(rig, 10)
    rig.run_until_idle(worker)
    assert fired_count(rig) == 1
    assert rig.calendar_counts().delayed == rig.calendar_counts().ready == 0


def test_recurring_timer_set_again_follows_the_new_rule(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY), Repeated("0 0 * * *"))
    advance_hours(rig, 48)
    rig.run_until_idle(rig.timer_worker())
    assert set(ada.state().woken) == {"0 0 * * *"}


def test_recurring_timer_ends_when_its_world_is_deleted(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY))
    ada.delete()
    advance_hours(rig, 2)
    rig.run_until_idle(rig.timer_worker())
    assert rig.calendar_counts() == queue.QueueCounts(done=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_recurring_timer_fires_each_occurrence_once_despite_commit_faults(
    rig: WorkerRig, fault: str
) -> None:
    rig.buyer("ada", Repeated(HOURLY, "all"))
    advance_hours(rig, 3)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash, CommitUnknown):
        worker.tick()
    rig.backend.arm({})
    rig.run_until_idle(rig.timer_worker() if "crash" in fault else worker, seconds=50)
    assert fired_count(rig) == 3
    assert rig.calendar_counts().delayed == 1


def test_replay_with_a_recurring_timer_does_not_diverge(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated(HOURLY))
    advance_hours(rig, 3)
    rig.run_until_idle(rig.timer_worker())
    rig.world_worker = rig.worker(incarnation="2", idle_s=1e6)
    rig.advance_clock(20)
    ada.send(Woken("later"))
    rig.run_worlds()
    assert ada.state().woken[-1] == "later"
    assert rig.blocker_code(ada) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        Repeated("nonsense"), Repeated(""), Repeated("* * 30 2 *"), Repeated("@daily"),
        Repeated(HOURLY, "maybe"), Repeated(HOURLY, ""), Repeated(HOURLY, key=""),
        Repeated(HOURLY, zone="Mars/Base"), Repeated(HOURLY, zone="../../etc/passwd"),
    ],
)  # fmt: skip
def test_invalid_recurring_rule_fails_only_its_event(rig: WorkerRig, wrong: Repeated) -> None:
    ada = rig.buyer("ada", wrong, Woken("on"))
    assert [entry.outcome for entry in ada.journal()] == ["failed", "ok"]


def _ns(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * S
