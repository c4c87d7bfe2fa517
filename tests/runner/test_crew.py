"""Handlers in several threads: a tick gives and collects, and waits for nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.clock import MS, SYSTEM, Clock, S, SimClock
from holdfast.durable import queue
from holdfast.durable.queue import Claim
from holdfast.errors import Busy
from holdfast.runner import LogKind, Policy, Runner, State, Step, StepKind, Tick, Work
from holdfast.runner.crew import HANDFUL, NUDGE_NS, WRITTEN_OFF_MAX, Crew, Tasks, Threads
from holdfast.runner.work import Outcome
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


# -- the crew by itself ----------------------------------------------------------------------------

QUICK_NS = 10_000


class Play:
    """Handlers that stay inside until they are let go, threads and tasks alike. It counts."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.inside: set[bytes] = set()
        self.most_inside = 0
        self.latency_ns = QUICK_NS
        self._gates: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def gate(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(payload, threading.Event())

    def let_go(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.gate(payload).set()

    def run(self, work: Work) -> Outcome:
        self._enter(work)
        if not work.payload.startswith((b"quick", b"crash")):
            assert self.gate(work.payload).wait(LONG_S)
        return self._leave(work)

    async def run_async(self, work: Work) -> Outcome:
        self._enter(work)
        if not work.payload.startswith((b"quick", b"crash")):
            gate = self.gate(work.payload)
            while not gate.is_set():
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    self.cancelled.append(work.payload)
                    if not work.payload.startswith(b"stubborn"):
                        self._leave(work)
                        raise
        return self._leave(work)

    def _enter(self, work: Work) -> None:
        with self._lock:
            self.begun.append(work.payload)
            self.inside.add(work.payload)
            self.most_inside = max(self.most_inside, len(self.inside))

    def _leave(self, work: Work) -> Outcome:
        with self._lock:
            self.inside.discard(work.payload)
        if work.payload.startswith(b"crash"):
            raise Crash
        return Outcome(work, None, self.latency_ns)


class Stage:
    """A crew of either kind, with time that stands still, and what it was given."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.play = Play()
        self.clock = SimClock()
        self.rung = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.seq = 0
        self.crews: list[Crew] = []
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def crew(self, size: int, *, ahead_max: int = 0, clock: Clock | None = None) -> Crew:
        options: Any = {
            "began": lambda work: None,
            "done": self.rung.release,
            "clock": clock or self.clock,
            "ahead_max": ahead_max,
        }
        made: Crew
        if self.kind == "threads":
            made = Threads(size, self.play.run, name=self.name, **options)
        else:
            made = Tasks(size, self.play.run_async, self.loop, **options)
        self.crews.append(made)
        return made

    def works(self, *payloads: bytes) -> list[Work]:
        made = []
        for payload in payloads:
            self.seq += 1
            claim = Claim(QUEUE, self.seq, 1, "w", 1 << 60, 0, 0, 0, 0, payload)
            made.append(Work(claim, payload, "queue", lambda claim, ttl_ms: None))
            made[-1].taken_ns = self.clock.mono_ns()
        return made

    def warmed_up(self, size: int, ahead_max: int = 100) -> Crew:
        """A crew that knows how quick its handlers are, with all hands at rest."""
        crew = self.crew(size, ahead_max=ahead_max)
        crew.give(self.works(b"quick"))
        assert len(collect(crew, 1)) == 1
        # One that is still awake would take its share of what is given next.
        until(lambda: crew._awake == 0)
        return crew

    def close(self) -> None:
        for crew in self.crews:
            crew.waiting()
            crew.close()
        until(self._empty)
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _empty(self) -> bool:
        """Whether everybody has left; whoever came in meanwhile is let go, too."""
        self.play.let_go(*list(self.play.inside))
        return not self.play.inside and not asyncio.all_tasks(self.loop)


@pytest.fixture(params=["threads", "tasks"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(request.param, request.node.name)
    yield made
    made.close()


@pytest.fixture
def loop_stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage("tasks", request.node.name)
    yield made
    made.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def collect(crew: Crew, count: int) -> list[bytes]:
    """The payloads of so many outcomes."""
    found: list[bytes] = []
    until(lambda: found.extend(o.work.payload for o in crew.collect()) or len(found) >= count)
    return found


def test_nothing_is_taken_ahead_before_the_pace_is_known(stage: Stage) -> None:
    assert stage.crew(3, ahead_max=100).room == 3


def test_more_is_taken_ahead_the_quicker_the_handlers_are_and_never_beyond_the_bound(
    stage: Stage,
) -> None:
    assert stage.warmed_up(3, ahead_max=100).room == 103
    stage.play.latency_ns = 30 * MS
    assert stage.warmed_up(3, ahead_max=100).room == 3 + 2


def test_no_more_handlers_run_at_once_than_there_are_hands_however_much_is_ahead(
    stage: Stage,
) -> None:
    crew = stage.warmed_up(3)
    payloads = [b"%d" % n for n in range(crew.room)]
    crew.give(stage.works(*payloads))
    assert crew.room == 0

    def nudged() -> bool:
        # As the loop does it: a hand that found itself in others' way is woken again later.
        stage.clock.advance(NUDGE_NS)
        crew.nudge()
        return len(stage.play.inside) == 3

    until(nudged)
    stage.play.let_go(*payloads)
    assert sorted(collect(crew, len(payloads))) == sorted(payloads)
    assert stage.play.most_inside == 3


def test_one_that_comes_alone_is_begun_at_once_although_the_hands_awake_are_busy(
    stage: Stage,
) -> None:
    crew = stage.warmed_up(3)
    crew.give(stage.works(b"slow"))
    until(lambda: stage.play.inside == {b"slow"})
    crew.give(stage.works(b"slower"))
    until(lambda: stage.play.inside == {b"slow", b"slower"})
    crew.give(stage.works(b"quick"))
    assert collect(crew, 1) == [b"quick"]


def test_a_slow_handler_among_quick_ones_does_not_hold_up_the_line(stage: Stage) -> None:
    crew = stage.warmed_up(2)
    quick = [b"quick %d" % n for n in range(10)]
    crew.give(stage.works(b"slow", *quick))
    until(lambda: stage.play.inside == {b"slow"})
    assert crew.standing
    crew.nudge()
    assert crew.standing, "it has not stood long enough"
    stage.clock.advance(NUDGE_NS)
    crew.nudge()
    assert sorted(collect(crew, 10)) == sorted(quick)
    assert stage.play.inside == {b"slow"}


def test_a_quick_outcome_is_announced_although_a_slow_one_is_next(stage: Stage) -> None:
    crew = stage.crew(1)
    crew.give(stage.works(b"quick", b"slow"))
    assert stage.rung.acquire(timeout=LONG_S)
    assert collect(crew, 1) == [b"quick"]
    assert crew.busy


def test_quick_outcomes_of_a_crew_that_is_looked_after_are_announced_by_the_handful(
    stage: Stage,
) -> None:
    crew = stage.warmed_up(1, ahead_max=500)
    while stage.rung.acquire(blocking=False):
        pass
    crew.give(stage.works(*[b"quick %d" % n for n in range(HANDFUL + 10)]))
    until(lambda: len(stage.play.begun) == HANDFUL + 11)
    collect(crew, HANDFUL + 10)
    rings = 0
    while stage.rung.acquire(blocking=False):
        rings += 1
    assert 1 <= rings <= 2


def test_one_hand_is_woken_for_much_that_is_quick(request: pytest.FixtureRequest) -> None:
    stage = Stage("threads", request.node.name)
    crew = stage.warmed_up(5, ahead_max=2_000)
    crew.give(stage.works(*[b"quick %d" % n for n in range(1_000)]))
    collect(crew, 1_000)
    names = [thread.name for thread in threading.enumerate()]
    assert len([name for name in names if name.startswith(stage.name)]) == 1
    stage.close()


def test_how_long_a_handler_took_is_measured_if_it_does_not_say(stage: Stage) -> None:
    crew = stage.crew(3, ahead_max=100)
    stage.play.latency_ns = 0
    crew.give(stage.works(b"slow"))
    until(lambda: stage.play.inside == {b"slow"})
    stage.clock.advance(30 * MS)
    stage.play.let_go(b"slow")
    collect(crew, 1)
    assert crew.room == 3 + 2


def test_what_ended_beside_a_crash_is_collected_after_it(stage: Stage) -> None:
    crew = stage.crew(1)
    crew.give(stage.works(b"quick 1", b"crash", b"quick 2"))
    until(lambda: len(stage.play.begun) == 3 and not stage.play.inside)
    with pytest.raises(Crash):
        until(crew.collect)
    assert collect(crew, 2) == [b"quick 1", b"quick 2"]
    assert not crew.busy


def test_a_hand_that_is_lent_takes_what_waits_at_once(stage: Stage) -> None:
    crew = stage.warmed_up(1)
    crew.give(stage.works(b"slow", b"quick too"))
    until(lambda: stage.play.inside == {b"slow"})
    crew.lend(1)
    assert collect(crew, 1) == [b"quick too"]
    crew.lend(-1)


def test_a_thread_that_lends_itself_goes_on_until_nothing_waits(
    request: pytest.FixtureRequest,
) -> None:
    stage = Stage("threads", request.node.name)
    crew = stage.warmed_up(2)
    assert isinstance(crew, Threads)
    [first] = stage.works(b"quick 1")
    own = crew.enlist(first)
    assert own is not None
    assert (crew.count, crew.free) == (1, 1)
    # Quick ones are left to the hand that is awake.
    crew.give(stage.works(b"quick 2", b"quick 3"))
    own()
    assert sorted(collect(crew, 3)) == [b"quick 1", b"quick 2", b"quick 3"]
    until(lambda: crew._awake == 0)
    stage.close()


def test_a_crew_whose_hands_are_all_at_something_or_lost_takes_no_other_thread(
    request: pytest.FixtureRequest,
) -> None:
    stage = Stage("threads", request.node.name)
    crew = stage.crew(1)
    assert isinstance(crew, Threads)
    [held, other] = stage.works(b"held", b"quick")
    crew.give([held])
    assert crew.enlist(other) is None
    assert not crew.has(other.token)
    crew.drop(held)
    # Its place is another's now.
    own = crew.enlist(other)
    assert own is not None
    own()
    assert collect(crew, 1) == [b"quick"]
    crew._written_off += 2 * WRITTEN_OFF_MAX
    assert crew.enlist(other) is None
    stage.close()


def test_what_no_hand_has_begun_can_be_taken_back_and_is_not_run(stage: Stage) -> None:
    crew = stage.warmed_up(1)
    crew.give(stage.works(b"slow", b"a", b"b"))
    until(lambda: stage.play.inside == {b"slow"})
    assert [work.payload for work in crew.waiting()] == [b"a", b"b"]
    assert crew.count == 1
    stage.play.let_go(b"slow")
    assert collect(crew, 1) == [b"slow"]
    crew.give(stage.works(b"quick again"))
    collect(crew, 1)
    assert stage.play.begun == [b"quick", b"slow", b"quick again"]


def test_what_has_waited_too_long_for_a_hand_is_given_up_and_no_more_is_taken_ahead(
    stage: Stage,
) -> None:
    crew = stage.warmed_up(1)
    crew.give(stage.works(b"slow", b"a", b"b"))
    until(lambda: stage.play.inside == {b"slow"})
    assert crew.overdue(S) == []
    stage.clock.advance(S)
    assert [work.payload for work in crew.overdue(S)] == [b"a", b"b"]
    assert crew.room == 0


def test_nothing_is_overdue_while_hands_are_free(stage: Stage) -> None:
    crew = stage.warmed_up(1)
    stage.clock.advance(S)
    assert crew.overdue(S) == []


def test_what_was_dropped_before_a_hand_took_it_is_never_run(stage: Stage) -> None:
    crew = stage.warmed_up(1)
    slow, dropped, last = stage.works(b"slow", b"a", b"quick last")
    crew.give([slow, dropped, last])
    until(lambda: stage.play.inside == {b"slow"})
    crew.drop(dropped)
    stage.play.let_go(b"slow")
    assert collect(crew, 2) == [b"slow", b"quick last"]
    assert b"a" not in stage.play.begun


def test_the_outcome_of_a_dropped_handler_is_ignored(stage: Stage) -> None:
    crew = stage.crew(2)
    dropped, kept = stage.works(b"stubborn", b"kept")
    crew.give([dropped, kept])
    until(lambda: len(stage.play.inside) == 2)
    crew.drop(dropped)
    assert dropped.dropped
    assert [work.payload for work in crew.held] == [b"kept"]
    stage.play.let_go(b"stubborn", b"kept")
    until(lambda: not stage.play.inside)
    assert collect(crew, 1) == [b"kept"]
    assert crew.collect() == []
    assert not crew.busy


def test_a_handler_that_was_dropped_when_it_had_just_finished_is_ignored_too(stage: Stage) -> None:
    crew = stage.crew(1)
    [work] = stage.works(b"quick")
    crew.give([work])
    assert stage.rung.acquire(timeout=LONG_S)
    crew.drop(work)
    assert crew.collect() == []
    crew.give(stage.works(b"quick again"))
    assert collect(crew, 1) == [b"quick again"]


def test_a_hand_that_does_not_come_back_is_replaced(stage: Stage) -> None:
    crew = stage.crew(1)
    [stuck] = stage.works(b"stubborn")
    crew.give([stuck])
    until(lambda: stage.play.inside)
    crew.drop(stuck)
    assert crew.room == 1
    crew.give(stage.works(b"quick"))
    assert collect(crew, 1) == [b"quick"]
    assert stage.play.inside == {b"stubborn"}


@pytest.mark.parametrize("ahead_max", [0, 500])
def test_hands_are_replaced_up_to_a_bound_and_again_when_some_have_come_back(
    stage: Stage, ahead_max: int
) -> None:
    crew = stage.warmed_up(2, ahead_max) if ahead_max else stage.crew(2)
    stuck = stage.works(*[b"stubborn %d" % n for n in range(2 * (WRITTEN_OFF_MAX + 1))])
    for work in stuck:
        assert crew.room > 0
        crew.give([work])
        until(lambda work=work: work.payload in stage.play.inside)  # type: ignore[misc]
        crew.drop(work)
    assert crew.room == 0
    crew.give(stage.works(b"quick late"))
    stage.clock.advance(NUDGE_NS)
    crew.nudge()
    assert not crew.standing
    assert b"quick late" not in stage.play.begun
    stage.play.let_go(stuck[0].payload)
    until(lambda: crew.standing)
    crew.nudge()
    assert collect(crew, 1) == [b"quick late"]


def test_the_task_of_a_dropped_coroutine_is_cancelled(loop_stage: Stage) -> None:
    crew = loop_stage.crew(2)
    dropped, kept = loop_stage.works(b"dropped", b"kept")
    crew.give([dropped, kept])
    until(lambda: len(loop_stage.play.inside) == 2)
    crew.drop(dropped)
    until(lambda: loop_stage.play.inside == {b"kept"})
    assert loop_stage.play.cancelled == [b"dropped"]


def test_a_coroutine_that_swallows_its_cancellation_takes_no_place(loop_stage: Stage) -> None:
    crew = loop_stage.crew(1)
    [stuck] = loop_stage.works(b"stubborn")
    crew.give([stuck])
    until(lambda: loop_stage.play.inside)
    crew.drop(stuck)
    until(lambda: loop_stage.play.cancelled)
    crew.give(loop_stage.works(b"quick"))
    assert collect(crew, 1) == [b"quick"]
    loop_stage.play.let_go(b"stubborn")
    until(lambda: not loop_stage.play.inside)
    assert crew.collect() == []
    assert crew.room == 1


def test_a_closed_crew_leaves_no_thread_behind_once_its_handlers_have_ended() -> None:
    stage = Stage("threads", "close me")
    crew = stage.crew(4)
    crew.give(stage.works(b"a", b"quick 1", b"quick 2", b"quick 3"))
    collect(crew, 3)
    assert any(thread.name.startswith("close me") for thread in threading.enumerate())
    crew.close()
    until(lambda: [t.name.startswith("close me") for t in threading.enumerate()].count(True) == 1)
    stage.play.let_go(b"a")
    until(lambda: not any(t.name.startswith("close me") for t in threading.enumerate()))
    stage.close()


def test_a_hand_that_goes_to_sleep_misses_nothing_that_is_given_meanwhile(stage: Stage) -> None:
    crew = stage.crew(3, ahead_max=50, clock=SYSTEM)
    given = 0
    for round_ in range(1_500):
        count = round_ % 4 + 1
        crew.give(stage.works(*[b"quick"] * count))
        given += count
        # Nobody nudges: a wake-up that is lost is lost for good.
        assert len(collect(crew, count)) == count
    assert len(stage.play.begun) == given
    assert stage.play.most_inside <= 3


def test_givers_and_hands_that_race_lose_nothing(stage: Stage) -> None:
    crew = stage.crew(4, ahead_max=50, clock=SYSTEM)
    total, found = 5_000, 0
    given = 0
    deadline = time.monotonic() + LONG_S
    while found < total:
        assert time.monotonic() < deadline
        count = min(crew.room, total - given, 7)
        if count > 0:
            crew.give(stage.works(*[b"quick"] * count))
            given += count
        found += len(crew.collect())
    assert len(stage.play.begun) == total
    assert not crew.busy
