"""Handlers in several threads: a tick gives and collects, and waits for nobody."""

from __future__ import annotations

import threading

import pytest

from holdfast import store as stores
from holdfast.durable import queue
from holdfast.errors import Busy
from holdfast.runner import LogKind, Policy, Runner, State, Step, StepKind, Tick, Work
from tests.runner.rig import QUEUE, Crash, Rig

MODULES = ("holdfast.runner.crew", "holdfast.runner.runner")

LONG_S = 30.0


class Held:
    """A handler that is held inside until it is let go, each call by its payload."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.inside = threading.Semaphore(0)
        self.error = error
        self._leave: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def __call__(self, work: Work) -> None:
        self.inside.release()
        assert self._event(work.payload).wait(LONG_S)
        if self.error is not None:
            raise self.error

    def let_go(self, *payloads: bytes) -> None:
        for payload in payloads:
            self._event(payload).set()

    def wait_inside(self, count: int) -> None:
        for _ in range(count):
            assert self.inside.acquire(timeout=LONG_S)

    def _event(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._leave.setdefault(payload, threading.Event())


def collected(runner: Runner, held: Held, *payloads: bytes) -> Tick:
    """Let go, and tick until as many have been settled."""
    held.let_go(*payloads)
    total = Tick()
    while total.done + total.requeued + total.dead + total.lost < len(payloads):
        tick = runner.tick()
        for name in Tick.__slots__:
            setattr(total, name, getattr(total, name) + getattr(tick, name))
    return total


def test_a_tick_gives_as_many_as_there_is_room_for_and_does_not_wait(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c", b"d")
    held = Held()
    runner = rig.runner(held, concurrency=3)
    assert runner.tick() == Tick(claimed=3)
    held.wait_inside(3)
    assert runner.tick() == Tick()
    assert runner.room == 0
    assert rig.counts() == queue.Counts(ready=1, claimed=3)
    held.let_go(b"a", b"b", b"c", b"d")
    runner.shutdown()


def test_a_slow_handler_does_not_hold_up_the_others(rig: Rig) -> None:
    rig.put(b"slow", b"b", b"c", b"d")
    held = Held()
    runner = rig.runner(held, concurrency=2)
    runner.tick()
    total = collected(runner, held, b"b", b"c", b"d")
    assert total.done == 3
    assert rig.counts() == queue.Counts(claimed=1, done=3)
    assert collected(runner, held, b"slow").done == 1


def test_outcomes_that_finished_together_share_a_commit(rig: Rig) -> None:
    rig.put(*[b"%d" % n for n in range(8)])
    all_in = threading.Barrier(9)
    ended = threading.Semaphore(0)

    def together(work: Work) -> None:
        all_in.wait(LONG_S)
        ended.release()

    runner = rig.runner(together, concurrency=8)
    runner.tick()
    all_in.wait(LONG_S)
    for _ in range(8):
        assert ended.acquire(timeout=LONG_S)
    assert runner.shutdown()
    assert rig.counts().done == 8


def test_failures_in_a_crew_are_requeued_and_buried_as_in_line(rig: Rig) -> None:
    rig.put(b"a")
    held = Held(Busy())
    runner = rig.runner(held, concurrency=2)
    runner.tick()
    assert collected(runner, held, b"a").requeued == 1
    rig.put(b"b")
    held.error = ValueError()
    assert runner.tick().claimed == 1
    assert collected(runner, held, b"b").dead == 1


def test_a_crash_in_a_crew_is_raised_by_the_tick_and_settles_nothing(rig: Rig) -> None:
    rig.put(b"a")
    held = Held(Crash())
    runner = rig.runner(held, concurrency=2)
    runner.tick()
    with pytest.raises(Crash):
        collected(runner, held, b"a")
    assert rig.counts() == queue.Counts(claimed=1)


def test_claims_in_the_hands_of_the_crew_are_not_adopted(rig: Rig) -> None:
    rig.put(b"a")
    held = Held()
    runner = rig.runner(held, concurrency=2)
    runner.tick()
    rig.put(b"b")
    rig.fault("kept")
    assert runner.tick() == Tick(busy=1)
    assert runner.tick() == Tick(claimed=1)
    held.wait_inside(2)
    assert collected(runner, held, b"a", b"b").done == 2


def test_shutting_down_waits_for_the_crew_and_settles_it(rig: Rig) -> None:
    rig.put(b"a", b"b", b"c")
    held = Held()
    runner = rig.runner(held, concurrency=2)
    runner.tick()
    held.wait_inside(2)
    runner.request_stop()
    held.let_go(b"a", b"b")
    assert runner.shutdown()
    assert runner.state is State.STOPPED
    assert rig.counts() == queue.Counts(ready=1, done=2)


def test_an_escalated_error_waits_for_the_handlers_that_are_still_at_work() -> None:
    with stores.open("memory:") as store:
        held = Held()
        told = {kind: threading.Semaphore(0) for kind in LogKind}

        def handler(work: Work) -> None:
            held(work)
            if work.payload.startswith(b"bad"):
                raise ValueError(work.payload)

        store.transact(queue.put_many, QUEUE, [b"bad-1", b"bad-2", b"good"], priority=0)
        runner = Runner(
            store,
            QUEUE,
            handler,
            worker="w",
            concurrency=3,
            policy=Policy(on_fatal="raise"),
            log=lambda event: told[event.kind].release(),
        )
        runner.start()
        held.wait_inside(3)
        held.let_go(b"bad-1")
        assert told[LogKind.LOOP_ERROR].acquire(timeout=LONG_S)
        held.let_go(b"bad-2")
        for _ in range(2):
            assert told[LogKind.DEAD_LETTER].acquire(timeout=LONG_S)
        held.let_go(b"good")
        with pytest.raises(ValueError, match="bad-1"):
            runner.join(LONG_S)
        assert store.read(queue.counts, QUEUE) == queue.Counts(done=1, dead=2)


def test_a_looping_crew_works_everything_off_once() -> None:
    with stores.open("memory:") as store:
        lock, all_done = threading.Lock(), threading.Event()
        seen: list[int] = []

        def handler(work: Work) -> None:
            with lock:
                seen.append(int(work.payload))
                if len(seen) == 500:
                    all_done.set()

        policy = Policy(idle_sleep_max_ms=60_000)
        with Runner(store, QUEUE, handler, worker="w", concurrency=8, policy=policy):
            for n in range(500):
                store.transact(queue.put, QUEUE, b"%d" % n, priority=0)
            assert all_done.wait(LONG_S)
        assert sorted(seen) == list(range(500))
        assert store.read(queue.counts, QUEUE) == queue.Counts(done=500)


def test_attempts_and_results_of_a_crew_can_be_paired(rig: Rig) -> None:
    rig.put(b"a", b"b")
    steps: list[Step] = []
    held = Held()
    runner = rig.runner(held, concurrency=2, replay=steps.append)
    runner.tick()
    collected(runner, held, b"b")
    collected(runner, held, b"a")
    assert [(step.kind, step.frame) for step in steps] == [
        (StepKind.INBOX_ATTEMPT, b"a"),
        (StepKind.INBOX_ATTEMPT, b"b"),
        (StepKind.INBOX_RESULT, b"b"),
        (StepKind.INBOX_RESULT, b"a"),
    ]
