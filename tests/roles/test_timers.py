"""Timers: never early, never lost, once; whatever happens to workers, worlds and clocks."""

from __future__ import annotations

import contextlib
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import product
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import MS, S
from holdfast.config import INBOX_DEPTH_MAX, TTL_NS_MAX
from holdfast.durable import due, queue
from holdfast.durable.bounds import TIME_NS_MAX
from holdfast.durable.item import decode, keys_of, pack_int
from holdfast.errors import CommitUnknown, Invalid
from holdfast.messages import Intent, TimerSet
from holdfast.roles.timer_worker import BATCH_MAX
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.local import LocalStore
from holdfast.world import timers
from holdfast.world.context import Frame
from tests.roles.rig import Rig
from tests.roles.shop import Juggled, Meant, Planned, Repeated, Slept, Unset, Woken, app
from tests.world.rig import CRASH_BEFORE, FAULTS, Crash
from tests.world.test_ingress import fill

# What it does to the rows below the store can be done to rows in memory only.
on_rows_at_hand = pytest.mark.parametrize("rig", ["memory"], indirect=True)


MODULES = (
    "holdfast.roles.timer_worker",
    "holdfast.roles.firing",
    "holdfast.world.timers",
)

TIMERS, CALENDAR = timers.delays("shop"), timers.calendar("shop")


@pytest.fixture
def cx() -> hf.Context:
    """What a reducer is given."""
    frame = Frame("shop", "w", "ada", 1, 1_700_000_000 * S, bytes(16), 1)
    return hf.Context(frame, app)


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


def test_overdue_timers_fire_in_the_order_of_their_times(rig: Rig) -> None:
    """Not in the order they were set, nor by their clocks, and not more than a batch at once."""
    worlds = [rig.buyer(f"w{n}") for n in range(10)]
    rig.clock.step_wall(5 * 3600 * S)
    times = list(range(1, 2 * BATCH_MAX + 51))
    Random(7).shuffle(times)
    for place, n in enumerate(times):
        name = str(n)
        event = Slept(n, name=name) if place % 2 else Planned(wall_s(rig) + n, name=name)
        worlds[place % 10].send(event)
    rig.think()
    rig.clock.advance(10_000 * S)
    worker = rig.timer_worker()
    fired: list[int] = []
    while worker.tick():
        rig.think()
        now = sorted(int(name) for one in worlds for name in one.state().woken)
        fired, before = now, fired
        assert now == sorted(times)[: len(now)], "the longest overdue first"
        assert len(now) - len(before) <= BATCH_MAX
    assert fired == sorted(times)
    for one in worlds:
        assert one.state().woken == sorted(one.state().woken, key=int)


def test_ten_thousand_overdue_timers_fire_once_in_their_order(rig: Rig) -> None:
    ada = rig.buyer("ada")
    times = list(range(10_000))
    Random(7).shuffle(times)
    for at in range(0, len(times), 1000):
        some = [(ada, Slept(1 + n / 1000, name=str(n))) for n in times[at : at + 1000]]
        rig.runtime.send_many(some)
        rig.think()
    rig.clock.advance(86_400 * S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == [str(n) for n in range(10_000)]
    assert rig.timers() == queue.Counts(done=10_000)


@on_rows_at_hand
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


@pytest.mark.parametrize("ago_s", [0, 0.5, 1000, 86_400 * 365 * 10])
def test_a_time_in_the_past_is_due_at_once(rig: Rig, ago_s: float) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) - ago_s), Slept(0))
    rig.work(rig.timer_worker())
    assert ada.state().woken == ["", ""]


def test_a_calendar_time_is_meant_to_the_microsecond(rig: Rig) -> None:
    """A float of seconds would be a hundred nanoseconds early or late."""
    wall_ns = rig.clock.wall_ns()
    for micros in range(1, 200, 7):
        when = datetime.fromtimestamp(wall_ns // S, UTC) + timedelta(hours=1, microseconds=micros)
        rig.buyer("ada", Meant(when.isoformat(), key="k"))
        due_ns = rig.store.read(queue.next_due_ns, CALENDAR)
        assert due_ns == (wall_ns // S + 3600) * S + micros * 1000


def test_a_time_that_is_too_far_to_be_told_waits_and_blocks_nobody(rig: Rig) -> None:
    last_s = TIME_NS_MAX // S
    rig.clock.advance(1000 * S)
    ada = rig.buyer("ada", Planned(float(last_s - 1)), Slept(5, name="soon"))
    rig.work(rig.timer_worker(), seconds=10)
    assert ada.state().woken == ["soon"]
    assert rig.calendar().delayed == 1


def test_a_delay_or_key_out_of_bounds_fails_its_event_only(rig: Rig) -> None:
    wrong = [Slept(1, key="k" * 500), Slept(1, key=""), Unset("x" * 500), Unset("")]
    ada = rig.buyer("ada", *wrong, Slept(1))
    assert [entry.outcome for entry in ada.journal()] == ["failed"] * 4 + ["ok"]


LONGEST_S = TTL_NS_MAX // S
INF = float("inf")
NO_DELAY: list[Any] = [
    -1, -1e-9, LONGEST_S + 1, 1 << 63, (1 << 63) // S, 1e300, INF, -INF, float("nan"), True, False,
    "1", b"1", None, [], 1j, Decimal(1), timedelta(seconds=1),
]  # fmt: skip


@pytest.mark.parametrize("seconds", NO_DELAY, ids=repr)
def test_what_is_no_delay_is_refused_and_changes_nothing(cx: hf.Context, seconds: Any) -> None:
    with pytest.raises(Invalid) as refused:
        cx.after(seconds, Woken())
    assert refused.value.fields["what"] == "after"
    assert cx.intents == []


NO_TIME: list[Any] = [
    datetime(2030, 1, 1), datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC),
    datetime(2262, 4, 12, tzinfo=UTC),
    datetime.max.replace(tzinfo=ZoneInfo("America/New_York")),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))),
    date(2030, 1, 1), time(12, tzinfo=UTC), 1 << 63, 1.0, "2030-01-01T00:00+00:00", None, True,
]  # fmt: skip


@pytest.mark.parametrize("when", NO_TIME, ids=repr)
def test_what_is_no_time_is_refused_and_changes_nothing(cx: hf.Context, when: Any) -> None:
    with pytest.raises(Invalid):
        cx.at(when, Woken())
    assert cx.intents == []


@pytest.mark.parametrize("seconds", [0, 0.0, -0.0, 1e-9, 0.1, 1, LONGEST_S])
def test_a_delay_is_kept_to_the_nanosecond(cx: hf.Context, seconds: float) -> None:
    timer = codec.unpack_as(TimerSet, cx.after(seconds, Woken()).params)
    assert timer.delay_ns == round(seconds * S)


def test_a_timer_that_is_refused_leaves_the_one_in_its_slot(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "old"), Slept(float("inf"), "k", "new"))
    assert [entry.outcome for entry in ada.journal()] == ["ok", "failed"]
    rig.work(rig.timer_worker(), seconds=20)
    assert ada.state().woken == ["old"]


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


def test_a_timer_is_cancelled_twice_and_after_it_has_fired_without_harm(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10, "k"), Unset("k"), Unset("k"), Slept(10, "fired"))
    rig.work(rig.timer_worker(), seconds=20)
    ada.send(Unset("fired"))
    ada.send(Unset("fired"))
    rig.think()
    rig.work(rig.timer_worker(), seconds=20)
    assert ada.state().woken == [""]
    assert [entry.outcome for entry in ada.journal()] == ["ok"] * 7


def test_set_and_cancelled_by_one_event_it_does_not_fire_and_the_other_way_round_it_does(
    rig: Rig,
) -> None:
    ada = rig.buyer("ada", Juggled(["set a", "unset a", "unset b", "set b", "set c", "set c"]))
    rig.work(rig.timer_worker(), seconds=20)
    assert ada.state().woken == ["b", "c"]
    assert rig.timers() == queue.Counts(done=4)


KINDS = {
    "delay": lambda rig, name: Slept(10, "k", name),
    "time": lambda rig, name: Planned(wall_s(rig) + 10, "k", name),
}


@pytest.mark.parametrize(("first", "second"), list(product(KINDS, KINDS)))
def test_whatever_waits_in_a_slot_is_replaced_by_whatever_is_set_there(
    rig: Rig, first: str, second: str
) -> None:
    ada = rig.buyer("ada", KINDS[first](rig, "old"), KINDS[second](rig, "new"))
    waiting = rig.timers().delayed + rig.calendar().delayed
    rig.work(rig.timer_worker(), seconds=20)
    assert (waiting, ada.state().woken) == (1, ["new"])


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
    assert rig.store.read(timers.slots_of, "shop", rig.id(ada), 10) == []
    ada.send(Slept(10, "k", "second"))
    rig.work(worker, seconds=11)
    assert ada.state().woken == ["first", "second"]


def test_slots_of_different_worlds_have_nothing_to_do_with_each_other(rig: Rig) -> None:
    ada, bob = rig.buyer("ada", Slept(10, "k")), rig.buyer("bob", Slept(10, "k"), Unset("k"))
    rig.work(rig.timer_worker(), seconds=20)
    assert (ada.state().woken, bob.state().woken) == ([""], [])


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("event", [Slept(10), Repeated("* * * * *", "all")])
def test_however_the_commit_of_a_timer_worker_goes_wrong_its_timers_fire_once(
    rig: Rig, fault: str, event: hf.Event
) -> None:
    ada, bob = rig.buyer("ada", event), rig.buyer("bob", event)
    rig.clock.advance(61 * S)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash, CommitUnknown):
        worker.tick()
    rig.backend.arm({})
    rig.work(rig.timer_worker() if "crash" in fault else worker)
    assert (len(ada.state().woken), len(bob.state().woken)) == (1, 1)


def test_a_timer_fires_however_many_workers_die_with_its_commit_under_way(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10))
    rig.clock.advance(11 * S)
    for _ in range(20):
        rig.backend.arm({1: CRASH_BEFORE})
        with pytest.raises(Crash):
            rig.timer_worker().tick()
    rig.backend.arm({})
    rig.work(rig.timer_worker())
    assert ada.state().woken == [""]


def test_a_timer_that_a_worker_of_another_kind_died_with_fires_when_the_claim_is_over(
    rig: Rig,
) -> None:
    ada = rig.buyer("ada", Slept(10))
    rig.clock.advance(11 * S)
    for n in range(5):
        certain = queue.Budget(expiries_max=1 << 31)
        assert rig.store.transact(queue.claim, TIMERS, f"worker {n}", 10, 3 * S, certain)
        rig.work(rig.timer_worker(), seconds=2)
        assert ada.state().woken == []
        rig.clock.advance(2 * S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == [""]
    assert rig.timers() == queue.Counts(done=1)


def test_two_timer_workers_fire_each_timer_once(rig: Rig) -> None:
    ada = rig.buyer("ada", *[Slept(1, name=str(n)) for n in range(40)])
    one, two = rig.timer_worker(), rig.timer_worker()
    rig.clock.advance(2 * S)
    for _ in range(10):
        one.tick()
        two.tick()
    rig.think()
    assert ada.state().woken == [str(n) for n in range(40)]


def test_a_timer_that_cannot_be_read_is_a_dead_letter_and_the_others_fire(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(10, name="a"), Slept(30, name="c"))
    at_ns = rig.store.now_ns() + 20 * S
    rig.store.transact(lambda txn: due.hang(txn, TIMERS, b"nonsense", at_ns, at_ns))
    rig.clock.advance(40 * S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == ["a", "c"]
    [letter] = rig.store.read(queue.dead, TIMERS)
    assert (letter.payload, letter.failures) == (b"nonsense", 1)
    assert rig.timers() == queue.Counts(done=2, dead=1)


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


def test_timers_of_a_full_world_fire_in_order_and_once_when_there_is_room(rig: Rig) -> None:
    # Not by whole seconds: they fall due at different moments of those in which it is tried again.
    full = rig.buyer("full", *[Slept(30 - 1.3 * n, name=str(n)) for n in range(10)])
    for n in range(10, 20):
        full.send(Planned(wall_s(rig) + 40 - 1.3 * n, name=str(n)))
    rig.think()
    full.pause()
    depth = rig.depth(full)
    fill(rig, full, INBOX_DEPTH_MAX)
    worker = rig.timer_worker()
    rig.work(worker, seconds=40)
    assert rig.timers().delayed + rig.calendar().delayed == 20
    fill(rig, full, depth)
    for _ in range(12):
        rig.clock.advance(S // 4)
        worker.tick()
    full.resume()
    rig.expire(11)
    rig.work(worker, seconds=20)
    woken = [int(name) for name in full.state().woken]
    assert [n for n in woken if n < 10] == list(range(9, -1, -1))
    assert [n for n in woken if n >= 10] == list(range(19, 9, -1))
    assert len(woken) == 20


def test_a_timer_of_a_full_world_can_be_cancelled_while_it_waits_for_room(rig: Rig) -> None:
    full = rig.buyer("full", Slept(10, "k"))
    full.send(Unset("k"))
    fill(rig, full, INBOX_DEPTH_MAX)
    rig.clock.advance(20 * S)
    worker = rig.timer_worker()
    worker.tick()
    assert rig.timers().delayed == 1
    fill(rig, full, 1)
    rig.expire(11)
    rig.work(worker, seconds=20)
    assert full.state().woken == []
    assert rig.timers().delayed == 0


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


@pytest.mark.parametrize("ahead_h", [-2, 2])
@pytest.mark.parametrize("before", [False, True], ids=["set", "stepped"])
def test_a_calendar_time_goes_by_the_wall_clock_wherever_that_was_set_to(
    rig: Rig, ahead_h: int, before: bool
) -> None:
    """The step comes before the timer is set, or after; due is what the wall clock says then."""
    rig.buyer("ada")
    step_ns = ahead_h * 3600 * S
    if before:
        rig.clock.step_wall(step_ns)
    ada = rig.buyer("ada", Planned(wall_s(rig) + 3 * 3600))
    if not before:
        rig.clock.step_wall(step_ns)
    left_s = 3 * 3600 if before else (3 - ahead_h) * 3600
    worker = rig.timer_worker()
    rig.clock.advance((left_s - 10) * S)
    rig.work(worker, seconds=9)
    assert ada.state().woken == []
    rig.work(worker, seconds=2)
    assert ada.state().woken == [""]


def test_a_wall_clock_set_forward_fires_what_it_jumped_over_at_once(rig: Rig) -> None:
    hour = wall_s(rig) + 3600
    ada = rig.buyer("ada", Planned(hour, name="b"), Planned(hour - 60, name="a"), Slept(3600))
    rig.clock.step_wall(2 * 3600 * S)
    rig.work(rig.timer_worker())
    assert ada.state().woken == ["a", "b"]


def test_a_wall_clock_that_goes_to_and_fro_fires_each_time_once(rig: Rig) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    ada = rig.buyer("ada", Planned(wall_s(rig) + 3600, name="once"), Repeated("0 * * * *"))
    worker = rig.timer_worker()
    for hours in (2, -2, 2, -2):
        rig.clock.step_wall(hours * 3600 * S)
        rig.work(worker, seconds=5)
    assert sorted(ada.state().woken) == ["0 * * * *", "once"]


def test_a_sleeping_worker_looks_at_the_wall_clock_within_a_second(rig: Rig) -> None:
    rig.buyer("ada", Planned(wall_s(rig) + 86_400), Slept(86_400))
    worker = rig.timer_worker()
    assert not worker.tick()
    assert 0 < worker.next_s() <= 1


def test_a_worker_sleeps_until_the_next_timer_of_either_clock_to_the_microsecond(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(0.7501))
    worker = rig.timer_worker()
    assert worker.next_s() == pytest.approx(0.7501, abs=1e-6)
    ada.send(Planned(wall_s(rig) + 0.2503))
    rig.think()
    assert worker.next_s() == pytest.approx(0.2503, abs=1e-6)
    rig.clock.advance(S)
    assert worker.next_s() == 0


def test_a_calendar_time_that_waits_can_still_be_cancelled(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60, key="k"))
    rig.clock.step_wall(-3600 * S)
    rig.clock.advance(61 * S)
    worker = rig.timer_worker()
    rig.work(worker)
    ada.send(Unset("k"))
    rig.think()
    assert rig.calendar() == queue.Counts(done=1)
    rig.clock.advance(3600 * S)
    rig.work(worker)
    assert ada.state().woken == []


def test_what_was_hung_by_store_time_before_a_step_back_waits_for_the_wall_clock(rig: Rig) -> None:
    """A calendar time of an older release lies in the queue of delays."""
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60, key="k"))
    world_id = rig.id(ada)

    def move(txn: Txn) -> None:
        held = timers.slot(txn, "shop", world_id, "k")
        assert held is not None
        row = txn.get(keys_of(CALENDAR).items + pack_int(held.seq))
        assert row is not None
        queue.withdraw.fn(txn, CALENDAR, held.seq)
        intent = codec.unpack_as(Intent, decode(row).payload)
        timers.hang(txn, intent, "k", txn.now_ns + 60 * S)

    rig.store.transact(move)
    rig.clock.step_wall(-3600 * S)
    worker = rig.timer_worker()
    rig.work(worker, seconds=100)
    assert (ada.state().woken, rig.calendar().delayed) == ([], 1)
    rig.clock.advance(3600 * S)
    rig.work(worker)
    assert ada.state().woken == [""]


# -- forks ---------------------------------------------------------------------------------------


def test_a_calendar_time_that_a_fork_keeps_goes_by_the_wall_clock_too(rig: Rig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 3 * 3600, "k", "x"))
    child = ada.fork("child", timers="keep")
    rig.assign(child)
    rig.clock.step_wall(2 * 3600 * S)
    worker = rig.timer_worker()
    rig.clock.advance(3590 * S)
    rig.work(worker, seconds=9)
    assert (ada.state().woken, child.state().woken) == ([], [])
    rig.work(worker, seconds=2)
    assert (ada.state().woken, child.state().woken) == (["x"], ["x"])


@pytest.mark.parametrize("hours", [-5, 0, 5])
def test_a_delay_that_a_fork_keeps_of_a_cancelled_one_counts_from_when_it_was_set(
    rig: Rig, hours: int
) -> None:
    """By store time: however the wall clock was set before."""
    rig.clock.step_wall(hours * 3600 * S)
    ada = rig.buyer("ada", Slept(60, "k", "x"), Unset("k"))
    rig.clock.advance(40 * S)
    child = ada.fork("child", at=1, timers="keep")
    rig.assign(child)
    worker = rig.timer_worker()
    rig.work(worker, seconds=15)
    assert child.state().woken == []
    rig.work(worker, seconds=10)
    assert (ada.state().woken, child.state().woken) == ([], ["x"])


# -- many ----------------------------------------------------------------------------------------


def test_a_timer_is_found_among_many_that_are_pending(rig: Rig) -> None:
    rig.buyer("ada", *[Slept(1000 + n) for n in range(500)])
    bob = rig.buyer("bob", Slept(1))
    rig.work(rig.timer_worker(), seconds=2)
    assert bob.state().woken == [""]
    assert rig.timers().delayed == 500


def test_an_idle_worker_commits_nothing_however_many_are_pending(rig: Rig) -> None:
    rig.buyer("ada", *[Slept(1000 + n) for n in range(300)])
    worker = rig.timer_worker()
    rig.backend.arm({})
    for _ in range(100):
        assert not worker.tick()
        rig.clock.advance(S)
    assert rig.backend.commits == 0


def test_many_that_are_due_are_one_commit(rig: Rig) -> None:
    rig.buyer("ada", *[Slept(10) for _ in range(BATCH_MAX)])
    rig.clock.advance(20 * S)
    worker = rig.timer_worker()
    rig.backend.arm({})
    assert worker.tick()
    assert not worker.tick()
    assert rig.backend.commits == 1


def test_what_is_done_leaves_no_rows_behind(rig: Rig) -> None:
    """Of timers and slots, that is: what a queue keeps is the same for ten and for a hundred."""
    ada = rig.buyer("ada", *[Slept(1, f"k{n}") for n in range(10)])
    rig.work(rig.timer_worker(), seconds=2)
    few = timer_rows(rig)
    for n in range(100):
        ada.send(Slept(1, f"k{n}"))
    rig.work(rig.timer_worker(), seconds=2)
    assert len(ada.state().woken) == 110
    assert timer_rows(rig) == few


def timer_rows(rig: Rig) -> int:
    prefixes = [schema.prefix(schema.Space.QUEUE, name) for name in (TIMERS, CALENDAR)]
    prefixes.append(schema.prefix(schema.Space.WORLD, "shop", "t"))
    return sum(key.startswith(tuple(prefixes)) for key in rig.rows())
