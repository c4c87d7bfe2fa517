"""The loop in real threads: it wakes, rests, stops, escalates, and shares a gate.

Nothing here sleeps to wait: handlers set events, and the tests wait for those.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.errors import Busy, Invalid, StoreClosed
from holdfast.runner import (
    Gate,
    GateClosed,
    LogEvent,
    LogKind,
    NotRunning,
    Policy,
    Runner,
    State,
    Tick,
    Work,
)
from holdfast.runner.bell import Bell
from holdfast.runner.loop import PAUSE_FIRST_MS
from holdfast.store.api import Store
from tests.postgres import fresh_url
from tests.runner.rig import FINE, QUEUE, TIMERS, Crash, Rig, Scripted

MODULES = ("holdfast.runner.loop", "holdfast.runner.bell", "holdfast.runner.gate")

LONG_S = 30.0
# Long enough that a test that passes did not do so by polling.
NEVER_MS = 60_000


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    urls = {"memory": lambda: "memory:", "lmdb": lambda: f"lmdb:{tmp_path}"}
    with stores.open(urls.get(request.param, fresh_url)()) as opened:
        yield opened


def put(store: Store, payload: bytes, *, to: str = QUEUE, after_ns: int = 0) -> None:
    due_ns = store.now_ns() + after_ns if after_ns else 0
    store.transact(queue.put, to, payload, not_before_ns=due_ns)


class Handled:
    """A handler whose calls can be waited for."""

    def __init__(self) -> None:
        self._called = threading.Condition()
        self.payloads: list[bytes] = []

    def __call__(self, work: Work) -> None:
        with self._called:
            self.payloads.append(work.payload)
            self._called.notify_all()

    def wait_for(self, count: int) -> list[bytes]:
        with self._called:
            assert self._called.wait_for(lambda: len(self.payloads) >= count, LONG_S)
            return list(self.payloads)


def looping(store: Store, handler: object, **options: object) -> Runner:
    policy = Policy(idle_sleep_max_ms=NEVER_MS)
    return Runner(
        store, QUEUE, handler, **{"worker": "w", "timers": TIMERS, "policy": policy, **options}
    )  # type: ignore[arg-type]


def test_an_idle_loop_wakes_at_once_for_queue_and_timers_alike(store: Store) -> None:
    handled = Handled()
    with looping(store, handled):
        for n, name in enumerate([QUEUE, TIMERS, QUEUE, TIMERS]):
            put(store, b"%d" % n, to=name)
            assert handled.wait_for(n + 1)[n] == b"%d" % n


def test_an_idle_loop_notices_a_timer_that_is_set_meanwhile_and_fires_it_when_due(
    store: Store,
) -> None:
    handled = Handled()
    with looping(store, handled):
        put(store, b"first")
        handled.wait_for(1)
        due_ns = store.now_ns() + S // 10
        put(store, b"later", to=TIMERS, after_ns=S // 10)
        assert handled.wait_for(2) == [b"first", b"later"]
        assert store.now_ns() >= due_ns


def test_an_idle_loop_stops_at_once(store: Store) -> None:
    handled = Handled()
    runner = looping(store, handled)
    runner.start()
    put(store, b"a")
    handled.wait_for(1)
    assert runner.shutdown(LONG_S)
    assert runner.state is State.STOPPED


def test_a_stopped_runner_can_be_started_again(store: Store) -> None:
    handled = Handled()
    runner = looping(store, handled)
    for n in (1, 2, 3):
        with runner:
            put(store, b"x")
            handled.wait_for(n)
        assert runner.state is State.STOPPED


def test_what_is_finished_when_a_stop_is_asked_for_is_settled(store: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(work: Work) -> None:
        entered.set()
        assert leave.wait(LONG_S)

    runner = looping(store, slow)
    runner.start()
    put(store, b"a")
    assert entered.wait(LONG_S)
    runner.request_stop()
    assert not runner.join(0)
    assert runner.state is State.STOPPING
    leave.set()
    assert runner.join(LONG_S)
    assert store.read(queue.counts, QUEUE) == queue.Counts(done=1)


def test_starting_twice_is_refused(store: Store) -> None:
    with looping(store, Handled()) as runner:
        with pytest.raises(Invalid):
            runner.start()
        with pytest.raises(Invalid):
            runner.run()


def test_running_before_booting_is_refused(rig: Rig) -> None:
    with pytest.raises(NotRunning):
        rig.stopped_runner().run()


def test_an_escalated_error_ends_the_loop_and_reaches_whoever_joins(store: Store) -> None:
    events: list[LogEvent] = []
    error = ValueError("mine")
    policy = Policy(on_fatal="raise", idle_sleep_max_ms=NEVER_MS)
    runner = looping(store, Scripted(error), policy=policy, log=events.append)
    runner.start()
    put(store, b"a")
    with pytest.raises(ValueError, match="mine") as raised:
        runner.join(LONG_S)
    assert raised.value is error
    assert runner.state is State.STOPPED
    assert store.read(queue.counts, QUEUE).dead == 1
    [last] = [event for event in events if event.kind is LogKind.LOOP_ERROR]
    assert (last, last.seq, last.status) == (events[-1], 0, "handler_error")


def test_a_policy_of_stop_ends_the_loop_without_an_error(store: Store) -> None:
    policy = Policy(on_fatal="stop", idle_sleep_max_ms=NEVER_MS)
    runner = looping(store, Scripted(ValueError()), policy=policy)
    runner.start()
    put(store, b"a")
    assert runner.join(LONG_S)
    assert runner.state is State.STOPPED


def test_a_crash_in_the_loop_settles_nothing_and_reaches_whoever_joins(store: Store) -> None:
    runner = looping(store, Scripted(Crash()))
    runner.start()
    put(store, b"a")
    with pytest.raises(Crash):
        runner.join(LONG_S)
    assert store.read(queue.counts, QUEUE).claimed == 1


def test_a_handler_may_ask_to_stop_and_even_to_shut_down(store: Store) -> None:
    runner = looping(store, lambda work: runner.shutdown())
    runner.start()
    put(store, b"a")
    assert runner.join(LONG_S)
    assert store.read(queue.counts, QUEUE).done == 1


def test_a_store_that_closes_under_a_loop_ends_it_with_the_error(tmp_path: Path) -> None:
    store = stores.open("memory:")
    runner = looping(store, Handled())
    runner.start()
    store.close()
    with pytest.raises(StoreClosed):
        runner.join(LONG_S)
    assert runner.state is State.STOPPED


# -- the bell ------------------------------------------------------------------------------------


class Overheard:
    """A store that remembers from which commit on it was listened to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.since: list[int] = []

    def wait(self, topic: str, since: int, timeout: float) -> int:
        self.since.append(since)
        return self._store.wait(topic, since, timeout)


def test_a_bell_rings_for_what_was_put_before_and_then_listens_only_for_what_is_newer(
    store: Store,
) -> None:
    put(store, b"a")
    overheard = Overheard(store)
    bell = Bell(overheard, [queue.topic(QUEUE)], name="test")  # type: ignore[arg-type]
    for payload in (b"b", b"c"):
        bell.wait(LONG_S)
        put(store, payload)
    bell.wait(LONG_S)
    bell.close()
    first, second, third = overheard.since[:3]
    assert 0 == first < second <= third


def test_a_bell_that_rang_while_nobody_slept_rings_for_the_next_to_sleep(store: Store) -> None:
    bell = Bell(store, [], name="test")
    bell.ring()
    bell.wait(LONG_S)
    bell.close()


# -- resting, by the simulated clock -------------------------------------------------------------


def test_the_loop_rests_with_the_injected_sleep_until_the_next_item_is_due(rig: Rig) -> None:
    rig.put_timer(b"t", after_ms=400)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        rig.clock.sleep(seconds)
        if rig.handled:
            runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=150)
    runner.run()
    assert slept == [0.15, 0.15, 0.1, 0.15]
    assert rig.payloads == [b"t"]


def test_what_falls_due_between_a_tick_and_the_look_at_the_clock_is_met_without_a_pause(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put_timer(b"t", after_ms=400)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=1000)
    tick = runner.tick

    def tick_and_lose_time() -> Tick:
        told = tick()
        rig.clock.advance(401 * MS)
        return told

    monkeypatch.setattr(runner, "tick", tick_and_lose_time)
    runner.run()
    assert rig.payloads == [b"t"]
    assert slept == [1.0], "not before it was handled"


def test_a_store_that_refuses_is_asked_again_after_longer_and_longer_pauses(rig: Rig) -> None:
    rig.put(b"a")
    rig.fault(*[Busy()] * 6)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if rig.handled:
            runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=100)
    runner.run()
    first = PAUSE_FIRST_MS / 1000
    assert slept == [first, 2 * first, 4 * first, 8 * first, 0.1, 0.1, 0.1]


def test_the_pauses_are_short_again_after_a_success(rig: Rig) -> None:
    rig.put(b"a")
    rig.fault(Busy(), Busy())
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            rig.put(b"b")
            rig.fault(Busy())
        if len(rig.handled) == 2:
            runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=100)
    runner.run()
    assert slept[:2] == [0.01, 0.02]
    assert slept[3] == 0.01


def test_stopping_with_work_that_the_store_does_not_take_gives_up_in_the_end(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(sleep=rig.clock.sleep, requeue_max_attempts=4)
    rig.fault(FINE, *[Busy()] * 10)
    assert runner.tick() == Tick(claimed=1, busy=1)
    assert runner.in_hand
    assert runner.shutdown()
    assert runner.state is State.STOPPED
    assert runner.counters.snapshot().lost == 1


def test_stopping_settles_what_ticks_have_left_in_hand(rig: Rig) -> None:
    rig.put(b"a")
    runner = rig.runner(sleep=rig.clock.sleep)
    rig.fault(FINE, Busy())
    runner.tick()
    assert runner.shutdown()
    assert rig.counts().done == 1


# -- the gate ------------------------------------------------------------------------------------


def test_runners_behind_one_gate_tick_one_at_a_time(store: Store) -> None:
    gate = Gate()
    inside = threading.Semaphore(1)
    done = Handled()

    def alone(work: Work) -> None:
        assert inside.acquire(blocking=False)
        done(work)
        inside.release()

    policy = Policy(max_batch=1, idle_sleep_max_ms=NEVER_MS)
    runners = [
        Runner(store, QUEUE, alone, worker=f"w{n}", gate=gate, policy=policy) for n in range(3)
    ]
    for runner in runners:
        runner.start()
    for n in range(60):
        put(store, b"%d" % n)
    assert len(done.wait_for(60)) == 60
    for runner in runners:
        assert runner.shutdown(LONG_S)
    assert store.read(queue.counts, QUEUE).done == 60


def test_a_gate_that_is_shut_refuses_ticks_and_looks(rig: Rig) -> None:
    gate = Gate()
    runner = rig.runner(gate=gate)
    gate.shutdown()
    with pytest.raises(GateClosed):
        runner.tick()
    with pytest.raises(GateClosed):
        runner.idle_sleep_ms()


def test_shutting_a_gate_ends_the_loops_behind_it(store: Store) -> None:
    gate = Gate()
    runner = looping(store, Handled(), gate=gate)
    runner.start()
    gate.shutdown()
    put(store, b"wake up")
    with pytest.raises(GateClosed):
        runner.join(LONG_S)


def test_shutting_a_gate_waits_for_the_one_inside(rig: Rig) -> None:
    gate = Gate()
    shut = threading.Thread(target=gate.shutdown)
    with gate:
        shut.start()
        shut.join(0.01)
        assert shut.is_alive()
    shut.join(LONG_S)
    assert not shut.is_alive()


def test_a_handler_may_shut_the_gate_it_is_behind(rig: Rig) -> None:
    rig.put(b"a")
    gate = Gate()
    runner = rig.runner(lambda work: gate.shutdown(), gate=gate)
    assert runner.tick().done == 1
    with pytest.raises(GateClosed):
        runner.tick()


def test_entering_a_gate_twice_is_refused_instead_of_hanging() -> None:
    gate = Gate()
    with gate, pytest.raises(Invalid), gate:
        pass
