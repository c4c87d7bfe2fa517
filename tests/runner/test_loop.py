"""The runner loop in real threads: wake-up, idle sleep, stop, fatal errors and a shared tick lock.

Tests do not sleep. They wait for events that handlers set.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import failpoints
from holdfast import store as stores
from holdfast.clock import MS, SYSTEM, S
from holdfast.durable import queue
from holdfast.errors import Busy, Invalid, StoreClosed
from holdfast.runner import (
    LogEvent,
    LogKind,
    NotRunning,
    Runner,
    RunnerPolicy,
    RunnerState,
    TickLock,
    TickLockClosed,
    TickStats,
    WorkItem,
)
from holdfast.runner.demand import BACKOFF_FIRST_MS
from holdfast.runner.wakeup import Wakeup
from holdfast.store.api import Store
from tests.postgres import fresh_url
from tests.runner.rig import COMMIT_OK, QUEUE, TIMERS, RunnerRig, ScriptedHandler, SimulatedCrash

MODULES = ("holdfast.runner.loop", "holdfast.runner.wakeup", "holdfast.runner.tick")

LONG_S = 30.0
# Longer than any test: a passing test did not rely on polling.
NEVER_MS = 60_000


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    urls = {"memory": lambda: "memory:", "lmdb": lambda: f"lmdb:{tmp_path}"}
    with stores.open(urls.get(request.param, fresh_url)()) as opened:
        yield opened


def put(store: Store, payload: bytes, *, to: str = QUEUE, after_ns: int = 0) -> None:
    due_ns = store.now_ns() + after_ns if after_ns else 0
    store.transact(queue.put, to, payload, not_before_ns=due_ns)


class RecordingHandler:
    """A handler that records payloads and lets tests wait for calls."""

    def __init__(self) -> None:
        self._called = threading.Condition()
        self.payloads: list[bytes] = []

    def __call__(self, work: WorkItem) -> None:
        with self._called:
            self.payloads.append(work.payload)
            self._called.notify_all()

    def wait_for(self, count: int) -> list[bytes]:
        with self._called:
            assert self._called.wait_for(lambda: len(self.payloads) >= count, LONG_S)
            return list(self.payloads)


def make_runner(store: Store, handler: object, **options: object) -> Runner:
    policy = RunnerPolicy(idle_sleep_max_ms=NEVER_MS)
    return Runner(
        store, QUEUE, handler, **{"worker": "w", "timers": TIMERS, "policy": policy, **options}
    )  # type: ignore[arg-type]


def test_idle_loop_wakes_for_queue_and_timer_items(store: Store) -> None:
    handled = RecordingHandler()
    with make_runner(store, handled):
        for n, name in enumerate([QUEUE, TIMERS, QUEUE, TIMERS]):
            put(store, b"%d" % n, to=name)
            assert handled.wait_for(n + 1)[n] == b"%d" % n


def test_idle_loop_fires_a_timer_set_meanwhile_when_due(
    store: Store,
) -> None:
    handled = RecordingHandler()
    with make_runner(store, handled):
        put(store, b"first")
        handled.wait_for(1)
        due_ns = store.now_ns() + S // 10
        put(store, b"later", to=TIMERS, after_ns=S // 10)
        assert handled.wait_for(2) == [b"first", b"later"]
        assert store.now_ns() >= due_ns


def test_shutdown_stops_an_idle_loop(store: Store) -> None:
    handled = RecordingHandler()
    runner = make_runner(store, handled)
    runner.start()
    put(store, b"a")
    handled.wait_for(1)
    assert runner.shutdown(LONG_S)
    assert runner.state is RunnerState.STOPPED


def test_stopped_runner_can_be_started_again(store: Store) -> None:
    handled = RecordingHandler()
    runner = make_runner(store, handled)
    for n in (1, 2, 3):
        with runner:
            put(store, b"x")
            handled.wait_for(n)
        assert runner.state is RunnerState.STOPPED


def test_item_in_progress_at_stop_request_is_settled(store: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(work: WorkItem) -> None:
        entered.set()
        assert leave.wait(LONG_S)

    runner = make_runner(store, slow)
    runner.start()
    put(store, b"a")
    assert entered.wait(LONG_S)
    runner.request_stop()
    assert not runner.join(0)
    assert runner.state is RunnerState.STOPPING
    leave.set()
    assert runner.join(LONG_S)
    assert store.read(queue.counts, QUEUE) == queue.QueueCounts(done=1)


def test_second_start_is_invalid(store: Store) -> None:
    with make_runner(store, RecordingHandler()) as runner:
        with pytest.raises(Invalid):
            runner.start()
        with pytest.raises(Invalid):
            runner.run()


def test_run_before_boot_raises_not_running(rig: RunnerRig) -> None:
    with pytest.raises(NotRunning):
        rig.stopped_runner().run()


def test_join_raises_a_fatal_handler_error_with_on_fatal_raise(store: Store) -> None:
    events: list[LogEvent] = []
    error = ValueError("mine")
    policy = RunnerPolicy(on_fatal="raise", idle_sleep_max_ms=NEVER_MS)
    runner = make_runner(store, ScriptedHandler(error), policy=policy, log=events.append)
    runner.start()
    put(store, b"a")
    with pytest.raises(ValueError, match="mine") as raised:
        runner.join(LONG_S)
    assert raised.value is error
    assert runner.state is RunnerState.STOPPED
    assert store.read(queue.counts, QUEUE).dead == 1
    [last] = [event for event in events if event.kind is LogKind.LOOP_ERROR]
    assert (last, last.seq, last.status) == (events[-1], 0, "handler_error")


def test_on_fatal_stop_ends_the_loop_without_an_error(store: Store) -> None:
    policy = RunnerPolicy(on_fatal="stop", idle_sleep_max_ms=NEVER_MS)
    runner = make_runner(store, ScriptedHandler(ValueError()), policy=policy)
    runner.start()
    put(store, b"a")
    assert runner.join(LONG_S)
    assert runner.state is RunnerState.STOPPED


def test_join_raises_a_crash_of_the_loop_and_nothing_is_settled(store: Store) -> None:
    runner = make_runner(store, ScriptedHandler(SimulatedCrash()))
    runner.start()
    put(store, b"a")
    with pytest.raises(SimulatedCrash):
        runner.join(LONG_S)
    assert store.read(queue.counts, QUEUE).claimed == 1


def test_handler_may_call_shutdown(store: Store) -> None:
    runner = make_runner(store, lambda work: runner.shutdown())
    runner.start()
    put(store, b"a")
    assert runner.join(LONG_S)
    assert store.read(queue.counts, QUEUE).done == 1


def test_join_raises_store_closed_when_the_store_closes_during_the_loop(tmp_path: Path) -> None:
    store = stores.open("memory:")
    runner = make_runner(store, RecordingHandler())
    runner.start()
    store.close()
    with pytest.raises(StoreClosed):
        runner.join(LONG_S)
    assert runner.state is RunnerState.STOPPED


# -- wakeup --------------------------------------------------------------------------------------


def test_wakeup_waits_from_the_last_seen_commit(store: Store) -> None:
    put(store, b"a")
    wakeup = Wakeup(store, [queue.topic(QUEUE)])
    seen = [wakeup.last_commit]
    for payload in (b"b", b"c"):
        wakeup.wait(LONG_S)
        seen.append(wakeup.last_commit)
        put(store, payload)
    wakeup.wait(LONG_S)
    seen.append(wakeup.last_commit)
    # Each wait reports new commits only: the sequence rises, and a further wait finds none.
    assert 0 == seen[0] < seen[1] < seen[2] < seen[3]
    wakeup.wait(0.05)
    assert wakeup.last_commit == seen[3]
    wakeup.close()


def test_wakeup_wait_with_a_commit_known_elsewhere_skips_older_notifications(store: Store) -> None:
    put(store, b"a")
    wakeup = Wakeup(store, [queue.topic(QUEUE)])
    since = store.wait(queue.topic(QUEUE), 0, LONG_S)
    began_ns = SYSTEM.mono_ns()
    wakeup.wait(0.1, since)
    assert SYSTEM.mono_ns() - began_ns >= 100 * MS
    wakeup.close()


def test_wakeup_of_a_closed_store_pauses_and_leaves_the_error_to_the_loop() -> None:
    closed = stores.open("memory:")
    wakeup = Wakeup(closed, [queue.topic(QUEUE)])
    closed.close()
    began_ns = SYSTEM.mono_ns()
    wakeup.wait(0.1)
    assert SYSTEM.mono_ns() - began_ns >= 100 * MS
    wakeup.close()


def test_wakeup_set_before_wait_ends_the_next_wait(store: Store) -> None:
    wakeup = Wakeup(store, [])
    wakeup.set()
    began_ns = SYSTEM.mono_ns()
    wakeup.wait(LONG_S)
    assert SYSTEM.mono_ns() - began_ns < LONG_S * 1000 * MS
    wakeup.close()


# -- idle sleep and backoff, with the simulated clock --------------------------------------------


def test_loop_sleeps_until_the_next_item_is_due(rig: RunnerRig) -> None:
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


def test_item_due_after_the_tick_is_handled_without_a_sleep(
    rig: RunnerRig,
) -> None:
    rig.put_timer(b"t", after_ms=400)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=1000)
    with failpoints.on("runner.ticked", calls=lambda _: rig.clock.advance(401 * MS)):
        runner.run()
    assert rig.payloads == [b"t"]
    assert slept == [1.0], "not before it was handled"


def test_loop_backoff_grows_while_the_store_is_busy(rig: RunnerRig) -> None:
    rig.put(b"a")
    rig.inject_faults(*[Busy()] * 6)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if rig.handled:
            runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=100)
    runner.run()
    first = BACKOFF_FIRST_MS / 1000
    assert slept == [first, 2 * first, 4 * first, 8 * first, 0.1, 0.1, 0.1]


def test_loop_backoff_resets_after_a_success(rig: RunnerRig) -> None:
    rig.put(b"a")
    rig.inject_faults(Busy(), Busy())
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            rig.put(b"b")
            rig.inject_faults(Busy())
        if len(rig.handled) == 2:
            runner.request_stop()

    runner = rig.runner(sleep=sleep, idle_sleep_max_ms=100)
    runner.run()
    assert slept[:2] == [0.01, 0.02]
    assert slept[3] == 0.01


def test_shutdown_abandons_settlement_after_requeue_max_attempts(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(sleep=rig.clock.sleep, requeue_max_attempts=4)
    rig.inject_faults(COMMIT_OK, *[Busy()] * 10)
    assert runner.tick() == TickStats(claimed=1, busy=1)
    assert runner.has_unsettled
    assert runner.shutdown()
    assert runner.state is RunnerState.STOPPED
    assert runner.counters.snapshot().lost == 1


def test_shutdown_settles_outcomes_left_by_ticks(rig: RunnerRig) -> None:
    rig.put(b"a")
    runner = rig.runner(sleep=rig.clock.sleep)
    rig.inject_faults(COMMIT_OK, Busy())
    runner.tick()
    assert runner.shutdown()
    assert rig.counts().done == 1


# -- tick lock -----------------------------------------------------------------------------------


def test_runners_with_a_shared_tick_lock_tick_one_at_a_time(store: Store) -> None:
    tick_lock = TickLock()
    inside = threading.Semaphore(1)
    recorder = RecordingHandler()

    def exclusive_handler(work: WorkItem) -> None:
        assert inside.acquire(blocking=False)
        recorder(work)
        inside.release()

    policy = RunnerPolicy(max_batch=1, idle_sleep_max_ms=NEVER_MS)
    runners = [
        Runner(store, QUEUE, exclusive_handler, worker=f"w{n}", tick_lock=tick_lock, policy=policy)
        for n in range(3)
    ]
    for runner in runners:
        runner.start()
    for n in range(60):
        put(store, b"%d" % n)
    assert len(recorder.wait_for(60)) == 60
    for runner in runners:
        assert runner.shutdown(LONG_S)
    assert store.read(queue.counts, QUEUE).done == 60


def test_closed_tick_lock_rejects_tick_and_idle_sleep(rig: RunnerRig) -> None:
    tick_lock = TickLock()
    runner = rig.runner(tick_lock=tick_lock)
    tick_lock.shutdown()
    with pytest.raises(TickLockClosed):
        runner.tick()
    with pytest.raises(TickLockClosed):
        runner.idle_sleep_ms()


def test_tick_lock_shutdown_ends_the_loops_that_use_it(store: Store) -> None:
    tick_lock = TickLock()
    runner = make_runner(store, RecordingHandler(), tick_lock=tick_lock)
    runner.start()
    tick_lock.shutdown()
    put(store, b"wake up")
    with pytest.raises(TickLockClosed):
        runner.join(LONG_S)


def test_tick_lock_shutdown_waits_for_the_current_holder(rig: RunnerRig) -> None:
    tick_lock = TickLock()
    closer = threading.Thread(target=tick_lock.shutdown)
    with tick_lock:
        closer.start()
        closer.join(0.01)
        assert closer.is_alive()
    closer.join(LONG_S)
    assert not closer.is_alive()


def test_handler_may_shut_down_the_tick_lock(rig: RunnerRig) -> None:
    rig.put(b"a")
    tick_lock = TickLock()
    runner = rig.runner(lambda work: tick_lock.shutdown(), tick_lock=tick_lock)
    assert runner.tick().done == 1
    with pytest.raises(TickLockClosed):
        runner.tick()


def test_reentering_the_tick_lock_is_invalid() -> None:
    tick_lock = TickLock()
    with tick_lock, pytest.raises(Invalid), tick_lock:
        pass
