"""Timers: never early, never lost, fired once, despite faults of workers, worlds and clocks."""

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
from holdfast.durable import delayed, queue
from holdfast.durable.item import decode_item, keys_of, pack_int
from holdfast.durable.validation import TIME_NS_MAX
from holdfast.errors import CommitUnknown, Invalid
from holdfast.messages import Intent, TimerSet
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.in_process import InProcessStore
from holdfast.workers.timers.worker import BATCH_MAX
from holdfast.world import timers
from holdfast.world.context import ReducerInputs
from tests.workers.rig import WorkerRig
from tests.workers.shop import Juggled, Meant, Planned, Repeated, Slept, Unset, Woken, app
from tests.world.rig import CRASH_BEFORE, FAULTS, Crash
from tests.world.test_ingress import fill_inbox

# These tests change rows below the store, which only the memory backend allows.
memory_store_only = pytest.mark.parametrize("rig", ["memory"], indirect=True)


MODULES = (
    "holdfast.workers.timers.worker",
    "holdfast.workers.timers.delivery",
    "holdfast.world.timers",
)

TIMERS, CALENDAR = timers.delay_queue("shop"), timers.calendar_queue("shop")


@pytest.fixture
def cx() -> hf.Context:
    """The context of a reducer."""
    frame = ReducerInputs("shop", "w", "ada", 1, 1_700_000_000 * S, bytes(16), 1)
    return hf.Context(frame, app)


def wall_s(rig: WorkerRig) -> float:
    return rig.clock.wall_ns() / S


# -- due times -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.001, 1, 60, 86_400])
def test_timer_fires_when_due_and_not_before(rig: WorkerRig, seconds: float) -> None:
    ada = rig.buyer("ada", Slept(seconds))
    worker = rig.timer_worker()
    set_ns = rig.clock.boot_ns()
    rig.clock.advance(int(seconds * S) - (rig.clock.boot_ns() - set_ns) - MS // 2)
    rig.run_until_idle(worker)
    assert ada.state().woken == []
    rig.clock.advance(MS)
    rig.run_until_idle(worker)
    assert ada.state().woken == [""]
    rig.run_until_idle(worker, seconds=10)
    assert ada.state().woken == [""]


def test_timers_fire_in_due_order(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(30, name="c"), Slept(10, name="a"), Slept(20, name="b"))
    rig.run_until_idle(rig.timer_worker(), seconds=60)
    assert ada.state().woken == ["a", "b", "c"]


def test_overdue_timers_fire_after_any_downtime(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", *[Slept(n, name=str(n)) for n in range(1, 20)])
    rig.clock.advance(365 * 86_400 * S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [str(n) for n in range(1, 20)]


def test_overdue_timers_fire_in_due_order_in_bounded_batches(rig: WorkerRig) -> None:
    """Neither the order of setting nor the kind of clock matters. A tick fires at most one batch."""
    worlds = [rig.buyer(f"w{n}") for n in range(10)]
    rig.clock.step_wall(5 * 3600 * S)
    times = list(range(1, 2 * BATCH_MAX + 51))
    Random(7).shuffle(times)
    for place, n in enumerate(times):
        name = str(n)
        event = Slept(n, name=name) if place % 2 else Planned(wall_s(rig) + n, name=name)
        worlds[place % 10].send(event)
    rig.run_worlds()
    rig.clock.advance(10_000 * S)
    worker = rig.timer_worker()
    fired: list[int] = []
    while worker.tick():
        rig.run_worlds()
        now = sorted(int(name) for one in worlds for name in one.state().woken)
        fired, before = now, fired
        assert now == sorted(times)[: len(now)], "the longest overdue first"
        assert len(now) - len(before) <= BATCH_MAX
    assert fired == sorted(times)
    for one in worlds:
        assert one.state().woken == sorted(one.state().woken, key=int)


def test_ten_thousand_overdue_timers_fire_once_in_due_order(rig: WorkerRig) -> None:
    ada = rig.buyer("ada")
    times = list(range(10_000))
    Random(7).shuffle(times)
    for at in range(0, len(times), 1000):
        some = [(ada, Slept(1 + n / 1000, name=str(n))) for n in times[at : at + 1000]]
        rig.runtime.send_many(some)
        rig.run_worlds()
    rig.clock.advance(86_400 * S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [str(n) for n in range(10_000)]
    assert rig.timer_counts() == queue.QueueCounts(done=10_000)


@memory_store_only
def test_overdue_timers_fire_after_a_reboot(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.clock.advance(3600 * S)
    rig.clock.reboot()
    rig.store = InProcessStore("memory:", rig.backend, rig.clock)
    rig.world_worker = rig.worker(incarnation="2", idle_s=1e6)
    rig.run_until_idle(rig.timer_worker())
    rig.advance_clock(20)
    rig.run_until_idle(rig.timer_worker())
    assert rig.store.read(lambda txn: ada._state(txn, None)).woken == [""]


@pytest.mark.parametrize("ago_s", [0, 0.5, 1000, 86_400 * 365 * 10])
def test_timer_with_a_past_time_fires_immediately(rig: WorkerRig, ago_s: float) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) - ago_s), Slept(0))
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == ["", ""]


def test_calendar_timer_keeps_microseconds(rig: WorkerRig) -> None:
    """A float of seconds would be wrong by about a hundred nanoseconds."""
    wall_ns = rig.clock.wall_ns()
    for micros in range(1, 200, 7):
        when = datetime.fromtimestamp(wall_ns // S, UTC) + timedelta(hours=1, microseconds=micros)
        rig.buyer("ada", Meant(when.isoformat(), key="k"))
        due_ns = rig.store.read(queue.next_due_ns, CALENDAR)
        assert due_ns == (wall_ns // S + 3600) * S + micros * 1000


def test_timer_at_the_maximum_time_delays_no_other_timer(rig: WorkerRig) -> None:
    last_s = TIME_NS_MAX // S
    rig.clock.advance(1000 * S)
    ada = rig.buyer("ada", Planned(float(last_s - 1)), Slept(5, name="soon"))
    rig.run_until_idle(rig.timer_worker(), seconds=10)
    assert ada.state().woken == ["soon"]
    assert rig.calendar_counts().delayed == 1


def test_timer_delay_or_key_out_of_bounds_fails_only_its_event(rig: WorkerRig) -> None:
    wrong = [Slept(1, key="k" * 500), Slept(1, key=""), Unset("x" * 500), Unset("")]
    ada = rig.buyer("ada", *wrong, Slept(1))
    assert [entry.outcome for entry in ada.journal()] == ["failed"] * 4 + ["ok"]


LONGEST_S = TTL_NS_MAX // S
INF = float("inf")
INVALID_DELAYS: list[Any] = [
    -1, -1e-9, LONGEST_S + 1, 1 << 63, (1 << 63) // S, 1e300, INF, -INF, float("nan"), True, False,
    "1", b"1", None, [], 1j, Decimal(1), timedelta(seconds=1),
]  # fmt: skip


@pytest.mark.parametrize("seconds", INVALID_DELAYS, ids=repr)
def test_after_with_an_invalid_delay_is_rejected(cx: hf.Context, seconds: Any) -> None:
    with pytest.raises(Invalid) as refused:
        cx.after(seconds, Woken())
    assert refused.value.fields["what"] == "after"
    assert cx.intents == []


INVALID_TIMES: list[Any] = [
    datetime(2030, 1, 1), datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC),
    datetime(2262, 4, 12, tzinfo=UTC),
    datetime.max.replace(tzinfo=ZoneInfo("America/New_York")),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))),
    date(2030, 1, 1), time(12, tzinfo=UTC), 1 << 63, 1.0, "2030-01-01T00:00+00:00", None, True,
]  # fmt: skip


@pytest.mark.parametrize("when", INVALID_TIMES, ids=repr)
def test_at_with_an_invalid_time_is_rejected(cx: hf.Context, when: Any) -> None:
    with pytest.raises(Invalid):
        cx.at(when, Woken())
    assert cx.intents == []


@pytest.mark.parametrize("seconds", [0, 0.0, -0.0, 1e-9, 0.1, 1, LONGEST_S])
def test_after_keeps_the_delay_to_the_nanosecond(cx: hf.Context, seconds: float) -> None:
    timer = codec.unpack_as(TimerSet, cx.after(seconds, Woken()).params)
    assert timer.delay_ns == round(seconds * S)


def test_rejected_timer_keeps_the_existing_timer_of_its_key(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "old"), Slept(float("inf"), "k", "new"))
    assert [entry.outcome for entry in ada.journal()] == ["ok", "failed"]
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert ada.state().woken == ["old"]


# -- slots ---------------------------------------------------------------------------------------


def test_timer_with_the_same_key_replaces_the_pending_timer(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "old"), Slept(20, "k", "new"))
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=15)
    assert ada.state().woken == []
    rig.run_until_idle(worker, seconds=60)
    assert ada.state().woken == ["new"]


def test_a_cancelled_timer_does_not_fire(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10, "k"), Unset("k"), Unset("never set"))
    rig.run_until_idle(rig.timer_worker(), seconds=60)
    assert ada.state().woken == []
    assert rig.timer_counts() == queue.QueueCounts(done=1)


def test_cancel_timer_twice_or_after_firing_has_no_effect(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10, "k"), Unset("k"), Unset("k"), Slept(10, "fired"))
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    ada.send(Unset("fired"))
    ada.send(Unset("fired"))
    rig.run_worlds()
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert ada.state().woken == [""]
    assert [entry.outcome for entry in ada.journal()] == ["ok"] * 7


def test_set_and_cancel_timer_in_one_event_apply_in_order(
    rig: WorkerRig,
) -> None:
    ada = rig.buyer("ada", Juggled(["set a", "unset a", "unset b", "set b", "set c", "set c"]))
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert ada.state().woken == ["b", "c"]
    assert rig.timer_counts() == queue.QueueCounts(done=4)


KINDS = {
    "delay": lambda rig, name: Slept(10, "k", name),
    "time": lambda rig, name: Planned(wall_s(rig) + 10, "k", name),
}


@pytest.mark.parametrize(("first", "second"), list(product(KINDS, KINDS)))
def test_timer_of_any_kind_replaces_a_timer_of_any_kind(
    rig: WorkerRig, first: str, second: str
) -> None:
    ada = rig.buyer("ada", KINDS[first](rig, "old"), KINDS[second](rig, "new"))
    waiting = rig.timer_counts().delayed + rig.calendar_counts().delayed
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert (waiting, ada.state().woken) == (1, ["new"])


@pytest.mark.parametrize("event", [Unset("k"), Slept(20, "k", "new")])
def test_claimed_timer_can_be_cancelled_or_replaced(rig: WorkerRig, event: hf.Event) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "old"))
    rig.clock.advance(11 * S)
    assert rig.store.transact(queue.claim, TIMERS, "a worker that is slow", 10, S)
    ada.send(event)
    rig.run_worlds()
    rig.run_until_idle(rig.timer_worker(), seconds=60)
    assert ada.state().woken == (["new"] if isinstance(event, Slept) else [])


def test_timer_slot_is_free_after_firing(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10, "k", "first"))
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=11)
    assert rig.store.read(timers.list_slots, "shop", rig.id(ada), 10) == []
    ada.send(Slept(10, "k", "second"))
    rig.run_until_idle(worker, seconds=11)
    assert ada.state().woken == ["first", "second"]


def test_timer_slots_are_separate_for_each_world(rig: WorkerRig) -> None:
    ada, bob = rig.buyer("ada", Slept(10, "k")), rig.buyer("bob", Slept(10, "k"), Unset("k"))
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert (ada.state().woken, bob.state().woken) == ([""], [])


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("event", [Slept(10), Repeated("* * * * *", "all")])
def test_timers_fire_once_despite_a_fault_in_the_worker_commit(
    rig: WorkerRig, fault: str, event: hf.Event
) -> None:
    ada, bob = rig.buyer("ada", event), rig.buyer("bob", event)
    rig.clock.advance(61 * S)
    worker = rig.timer_worker()
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash, CommitUnknown):
        worker.tick()
    rig.backend.arm({})
    rig.run_until_idle(rig.timer_worker() if "crash" in fault else worker)
    assert (len(ada.state().woken), len(bob.state().woken)) == (1, 1)


def test_timer_fires_after_many_worker_crashes(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10))
    rig.clock.advance(11 * S)
    for _ in range(20):
        rig.backend.arm({1: CRASH_BEFORE})
        with pytest.raises(Crash):
            rig.timer_worker().tick()
    rig.backend.arm({})
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [""]


def test_timer_claimed_by_a_crashed_worker_fires_after_the_claim_expires(
    rig: WorkerRig,
) -> None:
    ada = rig.buyer("ada", Slept(10))
    rig.clock.advance(11 * S)
    for n in range(5):
        never_dead = queue.RetryBudget(expiries_max=1 << 31)
        assert rig.store.transact(queue.claim, TIMERS, f"worker {n}", 10, 3 * S, never_dead)
        rig.run_until_idle(rig.timer_worker(), seconds=2)
        assert ada.state().woken == []
        rig.clock.advance(2 * S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == [""]
    assert rig.timer_counts() == queue.QueueCounts(done=1)


def test_two_timer_workers_fire_each_timer_once(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", *[Slept(1, name=str(n)) for n in range(40)])
    one, two = rig.timer_worker(), rig.timer_worker()
    rig.clock.advance(2 * S)
    for _ in range(10):
        one.tick()
        two.tick()
    rig.run_worlds()
    assert ada.state().woken == [str(n) for n in range(40)]


def test_unreadable_timer_becomes_a_dead_letter_and_other_timers_fire(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(10, name="a"), Slept(30, name="c"))
    at_ns = rig.store.now_ns() + 20 * S
    rig.store.transact(lambda txn: delayed.schedule(txn, TIMERS, b"nonsense", at_ns, at_ns))
    rig.clock.advance(40 * S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == ["a", "c"]
    [dead_letter] = rig.store.read(queue.list_dead, TIMERS)
    assert (dead_letter.payload, dead_letter.failures) == (b"nonsense", 1)
    assert rig.timer_counts() == queue.QueueCounts(done=2, dead=1)


def test_a_timer_survives_the_migration_of_its_world(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.advance_clock(30)
    rig.assign(ada, "B")
    rig.run(rig.world_worker)
    rig.world_worker = rig.worker("B", idle_s=1e6)
    rig.run_until_idle(rig.timer_worker(), seconds=40)
    assert ada.state().woken == [""]


def test_timer_of_a_deleted_world_is_dropped(rig: WorkerRig) -> None:
    ada, bob = rig.buyer("ada", Slept(10)), rig.buyer("bob", Slept(10))
    ada.delete()
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert bob.state().woken == [""]
    assert rig.timer_counts() == queue.QueueCounts(done=2)


def test_timer_of_a_full_inbox_waits_and_other_timers_fire(rig: WorkerRig) -> None:
    full, bob = rig.buyer("full", Slept(10, "k")), rig.buyer("bob", Slept(10))
    full.pause()
    depth = rig.inbox_depth(full)
    fill_inbox(rig, full, INBOX_DEPTH_MAX)
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=20)
    assert bob.state().woken == [""]
    assert rig.timer_counts().delayed == 1
    fill_inbox(rig, full, depth)
    full.resume()
    rig.advance_clock(11)
    rig.run_until_idle(worker, seconds=20)
    assert full.state().woken == [""]


def test_timers_of_a_full_inbox_fire_once_in_order_after_it_has_space(rig: WorkerRig) -> None:
    # Fractional delays: the timers fall due at different offsets from the retry times.
    full = rig.buyer("full", *[Slept(30 - 1.3 * n, name=str(n)) for n in range(10)])
    for n in range(10, 20):
        full.send(Planned(wall_s(rig) + 40 - 1.3 * n, name=str(n)))
    rig.run_worlds()
    full.pause()
    depth = rig.inbox_depth(full)
    fill_inbox(rig, full, INBOX_DEPTH_MAX)
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=40)
    assert rig.timer_counts().delayed + rig.calendar_counts().delayed == 20
    fill_inbox(rig, full, depth)
    for _ in range(12):
        rig.clock.advance(S // 4)
        worker.tick()
    full.resume()
    rig.advance_clock(11)
    rig.run_until_idle(worker, seconds=20)
    woken = [int(name) for name in full.state().woken]
    assert [n for n in woken if n < 10] == list(range(9, -1, -1))
    assert [n for n in woken if n >= 10] == list(range(19, 9, -1))
    assert len(woken) == 20


def test_timer_waiting_for_inbox_space_can_be_cancelled(rig: WorkerRig) -> None:
    full = rig.buyer("full", Slept(10, "k"))
    full.send(Unset("k"))
    fill_inbox(rig, full, INBOX_DEPTH_MAX)
    rig.clock.advance(20 * S)
    worker = rig.timer_worker()
    worker.tick()
    assert rig.timer_counts().delayed == 1
    fill_inbox(rig, full, 1)
    rig.advance_clock(11)
    rig.run_until_idle(worker, seconds=20)
    assert full.state().woken == []
    assert rig.timer_counts().delayed == 0


# -- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-5000, -5, 5, 5000])
def test_wall_clock_step_does_not_move_a_delay(rig: WorkerRig, hours: int) -> None:
    ada = rig.buyer("ada", Slept(60))
    rig.clock.step_wall(hours * 3600 * S)
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=58)
    assert ada.state().woken == []
    rig.run_until_idle(worker, seconds=4)
    assert ada.state().woken == [""]


def test_calendar_timer_fires_at_its_wall_clock_time(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60))
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=58)
    assert ada.state().woken == []
    rig.run_until_idle(worker, seconds=4)
    assert ada.state().woken == [""]


@pytest.mark.parametrize("ahead_h", [-2, 2])
@pytest.mark.parametrize("before", [False, True], ids=["set", "stepped"])
def test_calendar_timer_follows_wall_clock_steps(
    rig: WorkerRig, ahead_h: int, before: bool
) -> None:
    """The clock steps before or after the timer is set. The due time follows the stepped clock."""
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
    rig.run_until_idle(worker, seconds=9)
    assert ada.state().woken == []
    rig.run_until_idle(worker, seconds=2)
    assert ada.state().woken == [""]


def test_forward_clock_step_fires_skipped_calendar_timers_immediately(rig: WorkerRig) -> None:
    hour = wall_s(rig) + 3600
    ada = rig.buyer("ada", Planned(hour, name="b"), Planned(hour - 60, name="a"), Slept(3600))
    rig.clock.step_wall(2 * 3600 * S)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().woken == ["a", "b"]


def test_repeated_clock_steps_fire_each_calendar_timer_once(rig: WorkerRig) -> None:
    rig.clock.advance(3600 * S - rig.clock.wall_ns() % (3600 * S) + 600 * S)
    ada = rig.buyer("ada", Planned(wall_s(rig) + 3600, name="once"), Repeated("0 * * * *"))
    worker = rig.timer_worker()
    for hours in (2, -2, 2, -2):
        rig.clock.step_wall(hours * 3600 * S)
        rig.run_until_idle(worker, seconds=5)
    assert sorted(ada.state().woken) == ["0 * * * *", "once"]


def test_timer_worker_checks_the_wall_clock_every_second(rig: WorkerRig) -> None:
    rig.buyer("ada", Planned(wall_s(rig) + 86_400), Slept(86_400))
    worker = rig.timer_worker()
    assert not worker.tick()
    assert 0 < worker.sleep_s() <= 1


def test_timer_worker_sleeps_until_the_next_timer_of_either_clock(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(0.7501))
    worker = rig.timer_worker()
    assert worker.sleep_s() == pytest.approx(0.7501, abs=1e-6)
    ada.send(Planned(wall_s(rig) + 0.2503))
    rig.run_worlds()
    assert worker.sleep_s() == pytest.approx(0.2503, abs=1e-6)
    rig.clock.advance(S)
    assert worker.sleep_s() == 0


def test_waiting_calendar_timer_can_be_cancelled(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60, key="k"))
    rig.clock.step_wall(-3600 * S)
    rig.clock.advance(61 * S)
    worker = rig.timer_worker()
    rig.run_until_idle(worker)
    ada.send(Unset("k"))
    rig.run_worlds()
    assert rig.calendar_counts() == queue.QueueCounts(done=1)
    rig.clock.advance(3600 * S)
    rig.run_until_idle(worker)
    assert ada.state().woken == []


def test_calendar_timer_in_the_delay_queue_waits_for_the_wall_clock(rig: WorkerRig) -> None:
    """An older release stored calendar timers in the queue of delays."""
    ada = rig.buyer("ada", Planned(wall_s(rig) + 60, key="k"))
    world_id = rig.id(ada)

    def move(txn: Txn) -> None:
        slot = timers.find_slot(txn, "shop", world_id, "k")
        assert slot is not None
        row = txn.get(keys_of(CALENDAR).items + pack_int(slot.seq))
        assert row is not None
        queue.cancel.fn(txn, CALENDAR, slot.seq)
        intent = codec.unpack_as(Intent, decode_item(row).payload)
        timers.schedule(txn, intent, "k", txn.now_ns + 60 * S)

    rig.store.transact(move)
    rig.clock.step_wall(-3600 * S)
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=100)
    assert (ada.state().woken, rig.calendar_counts().delayed) == ([], 1)
    rig.clock.advance(3600 * S)
    rig.run_until_idle(worker)
    assert ada.state().woken == [""]


# -- forks ---------------------------------------------------------------------------------------


def test_calendar_timer_kept_by_a_fork_follows_the_wall_clock(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Planned(wall_s(rig) + 3 * 3600, "k", "x"))
    child = ada.fork("child", timers="keep")
    rig.assign(child)
    rig.clock.step_wall(2 * 3600 * S)
    worker = rig.timer_worker()
    rig.clock.advance(3590 * S)
    rig.run_until_idle(worker, seconds=9)
    assert (ada.state().woken, child.state().woken) == ([], [])
    rig.run_until_idle(worker, seconds=2)
    assert (ada.state().woken, child.state().woken) == (["x"], ["x"])


@pytest.mark.parametrize("hours", [-5, 0, 5])
def test_delay_kept_by_a_fork_counts_from_its_original_set_time(rig: WorkerRig, hours: int) -> None:
    """The delay follows store time and ignores earlier wall clock steps."""
    rig.clock.step_wall(hours * 3600 * S)
    ada = rig.buyer("ada", Slept(60, "k", "x"), Unset("k"))
    rig.clock.advance(40 * S)
    child = ada.fork("child", at=1, timers="keep")
    rig.assign(child)
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=15)
    assert child.state().woken == []
    rig.run_until_idle(worker, seconds=10)
    assert (ada.state().woken, child.state().woken) == ([], ["x"])


# -- many ----------------------------------------------------------------------------------------


def test_due_timer_is_found_among_many_pending_timers(rig: WorkerRig) -> None:
    rig.buyer("ada", *[Slept(1000 + n) for n in range(500)])
    bob = rig.buyer("bob", Slept(1))
    rig.run_until_idle(rig.timer_worker(), seconds=2)
    assert bob.state().woken == [""]
    assert rig.timer_counts().delayed == 500


def test_idle_timer_worker_commits_nothing(rig: WorkerRig) -> None:
    rig.buyer("ada", *[Slept(1000 + n) for n in range(300)])
    worker = rig.timer_worker()
    rig.backend.arm({})
    for _ in range(100):
        assert not worker.tick()
        rig.clock.advance(S)
    assert rig.backend.commits == 0


def test_many_due_timers_fire_in_one_commit(rig: WorkerRig) -> None:
    rig.buyer("ada", *[Slept(10) for _ in range(BATCH_MAX)])
    rig.clock.advance(20 * S)
    worker = rig.timer_worker()
    rig.backend.arm({})
    assert worker.tick()
    assert not worker.tick()
    assert rig.backend.commits == 1


def test_fired_timers_leave_no_rows(rig: WorkerRig) -> None:
    """No timer or slot row remains: the row count is the same after ten and after a hundred timers."""
    ada = rig.buyer("ada", *[Slept(1, f"k{n}") for n in range(10)])
    rig.run_until_idle(rig.timer_worker(), seconds=2)
    few = timer_rows(rig)
    for n in range(100):
        ada.send(Slept(1, f"k{n}"))
    rig.run_until_idle(rig.timer_worker(), seconds=2)
    assert len(ada.state().woken) == 110
    assert timer_rows(rig) == few


def timer_rows(rig: WorkerRig) -> int:
    prefixes = [schema.key_prefix(schema.Space.QUEUE, name) for name in (TIMERS, CALENDAR)]
    prefixes.append(schema.key_prefix(schema.Space.WORLD, "shop", "t"))
    return sum(key.startswith(tuple(prefixes)) for key in rig.rows())
