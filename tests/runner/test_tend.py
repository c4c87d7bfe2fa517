"""Claims of handlers under way are looked after: extended, ended when out of time, let go when lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.errors import Busy, HoldfastError, StoreCorrupt
from holdfast.runner import LogEvent, LogKind, Policy, Runner, State, Tick, Work
from holdfast.runner.tending import ATTEND_NS, UNBEGUN_NS
from tests.runner.rig import DROPPED, KEPT, QUEUE, Rig

MODULES = ("holdfast.runner.runner", "holdfast.runner.work", "holdfast.runner.settle")

LONG_S = 30.0
TTL_MS = 9_000
LIMIT_NS = 3600 * S


class Calls:
    """Handlers with a bound on their time, that stay inside until they are let go."""

    def __init__(self, rig: Rig, limit_ns: int = LIMIT_NS) -> None:
        self.limit_ns = limit_ns
        self.works: dict[bytes, Work] = {}
        self.cancelled: list[bytes] = []
        self.ended: list[bytes] = []
        self._rig = rig
        self._gates: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def gate(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._gates.setdefault(payload, threading.Event())

    def __call__(self, work: Work) -> None:
        self._begin(work)
        if not work.payload.startswith(b"quick"):
            assert self.gate(work.payload).wait(LONG_S)
        self.ended.append(work.payload)

    async def run(self, work: Work) -> None:
        self._begin(work)
        try:
            while not self.gate(work.payload).is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(work.payload)
            raise
        self.ended.append(work.payload)

    def _begin(self, work: Work) -> None:
        # Time passes while it is done: that is its pace.
        self._rig.clock.advance(1_000)
        work.limit_ns = self.limit_ns
        self.works[work.payload] = work

    def let_go(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.gate(payload).set()

    def wait_inside(self, *payloads: bytes) -> None:
        until(lambda: self.works.keys() >= set(payloads))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def tended(rig: Rig, handler: Any, **options: Any) -> Runner:
    return rig.runner(
        handler,
        **{"tend": True, "lease_ttl_ms": TTL_MS, "concurrency": 4, "timers": None, **options},
    )


def ticks(rig: Rig, runner: Runner, seconds: float) -> Tick:
    """Let time pass, a tick at a time; the sum of it."""
    total = Tick()
    for _ in range(int(seconds * 4)):
        rig.clock.advance(S // 4)
        add(total, runner.tick())
    return total


def add(total: Tick, tick: Tick) -> None:
    for name in Tick.__slots__:
        setattr(total, name, getattr(total, name) + getattr(tick, name))


def settled(runner: Runner, count: int) -> Tick:
    total = Tick()
    until(lambda: add(total, runner.tick()) or total.done + total.requeued + total.dead >= count)
    return total


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    until(lambda: not asyncio.all_tasks(made))
    made.call_soon_threadsafe(made.stop)
    thread.join(LONG_S)
    made.close()


# -- extending -------------------------------------------------------------------------------------


def test_claims_are_held_for_as_long_as_calls_are_within_their_time(rig: Rig) -> None:
    rig.put(b"a", b"b")
    calls = Calls(rig)
    runner = tended(rig, calls)
    runner.tick()
    calls.wait_inside(b"a", b"b")
    assert ticks(rig, runner, 5 * TTL_MS / 1000) == Tick()
    assert tended(rig, calls, worker="other").tick() == Tick(), "nothing has run out"
    calls.let_go(b"a", b"b")
    assert settled(runner, 2).done == 2
    assert rig.counts() == queue.Counts(done=2)


def test_all_claims_are_extended_in_one_commit_and_seldom(rig: Rig) -> None:
    payloads = [b"%d" % n for n in range(20)]
    rig.put(*payloads)
    calls = Calls(rig)
    runner = tended(rig, calls, concurrency=20)
    runner.tick()
    calls.wait_inside(*payloads)
    runner.tick()
    before = rig.backend.commits
    ticks(rig, runner, 10 * TTL_MS / 1000)
    assert 20 <= rig.backend.commits - before <= 32
    calls.let_go(*payloads)
    assert settled(runner, 20).done == 20


def test_an_idle_crew_extends_nothing(rig: Rig) -> None:
    rig.put(b"quick")
    calls = Calls(rig)
    runner = tended(rig, calls)
    runner.tick()
    settled(runner, 1)
    before = rig.backend.commits
    ticks(rig, runner, 5 * TTL_MS / 1000)
    assert rig.backend.commits == before


def test_the_claim_of_a_handler_that_sets_no_bound_runs_out(rig: Rig) -> None:
    rig.put(b"a")
    calls = Calls(rig, limit_ns=0)
    runner = tended(rig, calls, concurrency=1)
    runner.tick()
    calls.wait_inside(b"a")
    ticks(rig, runner, 2 * TTL_MS / 1000)
    other = tended(rig, rig.keep, worker="other")
    assert other.tick().claimed == 1
    assert settled(other, 1).done == 1
    calls.let_go(b"a")
    until(lambda: not runner.in_hand or runner.tick().lost)
    assert rig.counts() == queue.Counts(done=1)


@pytest.mark.parametrize("fault", [Busy(), DROPPED, KEPT], ids=["busy", "dropped", "kept"])
def test_a_store_that_refuses_an_extension_is_asked_again_and_the_runner_goes_on(
    rig: Rig, fault: str | HoldfastError
) -> None:
    rig.put(b"a")
    calls = Calls(rig)
    runner = tended(rig, calls)
    runner.tick()
    calls.wait_inside(b"a")
    runner.tick()
    rig.clock.advance(TTL_MS * MS // 2)
    rig.fault(fault)
    assert runner.tick().busy == 1
    rig.clock.advance(ATTEND_NS)
    assert runner.tick() == Tick()
    rig.clock.advance(TTL_MS * MS * 3 // 4)
    assert runner.tick() == Tick(), "it was extended right after"
    assert runner.state is State.RUNNING
    calls.let_go(b"a")
    assert settled(runner, 1).done == 1


def test_an_error_that_does_not_pass_ends_the_tick(rig: Rig) -> None:
    rig.put(b"a")
    calls = Calls(rig)
    runner = tended(rig, calls)
    runner.tick()
    calls.wait_inside(b"a")
    rig.clock.advance(TTL_MS * MS // 2)
    rig.fault(StoreCorrupt(why="test"))
    with pytest.raises(StoreCorrupt):
        runner.tick()
    calls.let_go(b"a")


# -- out of time -----------------------------------------------------------------------------------


def test_a_call_beyond_its_time_ends_as_a_timeout_at_once(rig: Rig) -> None:
    rig.put(b"a")
    calls = Calls(rig, limit_ns=2 * S)
    runner = tended(rig, calls, retry_budget_max=1)
    runner.tick()
    calls.wait_inside(b"a")
    rig.clock.advance(2 * S - 10 * MS)
    assert runner.tick() == Tick()
    rig.clock.advance(ATTEND_NS)
    assert runner.tick().dead == 1
    [letter] = rig.dead()
    assert letter.code == "timeout"
    assert calls.works[b"a"].dropped
    calls.let_go(b"a")


def test_a_call_that_is_out_of_time_leaves_its_place_to_the_next(rig: Rig) -> None:
    rig.put(b"hangs", b"b")
    calls = Calls(rig, limit_ns=2 * S)
    runner = tended(rig, calls, concurrency=1)
    runner.tick()
    calls.wait_inside(b"hangs")
    assert b"b" not in calls.works
    rig.clock.advance(2 * S)
    assert runner.tick().requeued == 1
    runner.tick()
    calls.wait_inside(b"b")
    assert not calls.ended
    calls.let_go(b"b", b"hangs")


def test_the_late_result_of_a_call_that_was_out_of_time_is_ignored(rig: Rig) -> None:
    rig.put(b"a")
    calls = Calls(rig, limit_ns=2 * S)
    runner = tended(rig, calls, retry_budget_max=1)
    runner.tick()
    calls.wait_inside(b"a")
    rig.clock.advance(2 * S)
    assert runner.tick().dead == 1
    calls.let_go(b"a")
    until(lambda: calls.ended)
    assert runner.tick() == Tick()
    assert rig.counts() == queue.Counts(dead=1)
    assert runner.shutdown()


def test_what_joins_a_failure_is_committed_with_the_timeout(rig: Rig) -> None:
    rig.put(b"a")
    calls = Calls(rig, limit_ns=2 * S)

    def handler(work: Work) -> None:
        work.join_failing(queue.put, "after", b"first said")
        work.join_failing(queue.put, "after", b"last said")
        work.join(queue.put, "after", b"if done")
        calls(work)

    runner = tended(rig, handler)
    runner.tick()
    calls.wait_inside(b"a")
    rig.clock.advance(2 * S)
    assert runner.tick().requeued == 1
    after = rig.store.read(queue.peek, "after", 10)
    assert [payload for _, payload in after] == [b"last said"]
    calls.let_go(b"a")


def test_progress_gives_a_call_its_whole_time_again(rig: Rig) -> None:
    rig.put(b"a")
    calls = Calls(rig, limit_ns=2 * S)
    runner = tended(rig, calls)
    runner.tick()
    calls.wait_inside(b"a")
    for _ in range(5):
        rig.clock.advance(3 * S // 2)
        calls.works[b"a"].progress()
        assert runner.tick() == Tick()
    rig.clock.advance(2 * S)
    assert runner.tick().requeued == 1
    calls.let_go(b"a")


def test_a_coroutine_beyond_its_time_is_cancelled(
    rig: Rig, loop: asyncio.AbstractEventLoop
) -> None:
    rig.put(b"a")
    calls = Calls(rig, limit_ns=2 * S)
    runner = tended(rig, calls.run, loop=lambda: loop, retry_budget_max=1)
    runner.tick()
    calls.wait_inside(b"a")
    rig.clock.advance(2 * S)
    assert runner.tick().dead == 1
    until(lambda: calls.cancelled == [b"a"])
    assert rig.dead()[0].code == "timeout"


# -- what was not begun ----------------------------------------------------------------------------


def ahead(rig: Rig, calls: Calls, **options: Any) -> Runner:
    """A runner of one hand that is at `slow`, with three items ahead of it."""
    rig.put(b"quick")
    runner = tended(rig, calls, concurrency=1, **options)
    runner.tick()
    settled(runner, 1)
    rig.put(b"slow", b"quick 1", b"quick 2", b"quick 3")
    assert runner.tick().claimed == 4
    calls.wait_inside(b"slow")
    return runner


def test_what_no_hand_has_begun_is_handed_back_unharmed_at_a_stop(rig: Rig) -> None:
    calls = Calls(rig)
    runner = ahead(rig, calls)
    runner.request_stop()
    assert runner.tick().released == 3
    assert rig.counts() == queue.Counts(ready=3, claimed=1, done=1)
    calls.let_go(b"slow")
    assert runner.shutdown()
    assert rig.counts() == queue.Counts(ready=3, done=2)
    assert calls.ended == [b"quick", b"slow"]
    assert tended(rig, rig.keep).tick().claimed == 3


def test_what_has_not_finished_a_while_after_a_stop_is_given_back_unharmed(rig: Rig) -> None:
    rig.put(b"a", b"b")
    calls = Calls(rig)
    runner = tended(rig, calls, stop_grace_ms=5_000)
    runner.tick()
    calls.wait_inside(b"a", b"b")
    runner.request_stop()
    assert ticks(rig, runner, 4) == Tick()
    calls.let_go(b"b")
    assert settled(runner, 1).done == 1
    assert ticks(rig, runner, 2).released == 1
    assert not runner.in_hand
    assert (calls.works[b"a"].dropped, calls.works[b"a"].lost) == (True, True)
    assert runner.shutdown()
    assert rig.counts() == queue.Counts(ready=1, done=1)
    calls.let_go(b"a")
    other = tended(rig, rig.keep, worker="other")
    other.tick()
    assert settled(other, 1).done == 1
    assert [work.attempt for work in rig.handled] == [1]


def test_what_waits_for_a_hand_is_held_meanwhile(rig: Rig) -> None:
    calls = Calls(rig)
    runner = ahead(rig, calls)
    runner.tick()
    rig.clock.advance(UNBEGUN_NS - 100 * MS)
    assert runner.tick() == Tick()
    assert rig.counts().claimed == 4
    calls.let_go(b"slow")
    assert settled(runner, 4).done == 4


def test_what_waits_too_long_for_a_hand_is_given_back_for_another_to_do(rig: Rig) -> None:
    calls = Calls(rig)
    runner = ahead(rig, calls)
    rig.clock.advance(UNBEGUN_NS + ATTEND_NS)
    assert runner.tick() == Tick(released=3)
    assert runner.tick() == Tick(), "it does not take them ahead again"
    other = tended(rig, rig.keep, worker="other")
    assert other.tick().claimed == 3
    assert settled(other, 3).done == 3
    assert {work.claim.expiries for work in rig.handled} == {0}
    calls.let_go(b"slow")


# -- what is not allowed yet -----------------------------------------------------------------------


class Tap:
    """A throttle that lets as many begin as the test has allowed."""

    def __init__(self) -> None:
        self.tokens = 0

    def stock(self, wanted: int) -> int:
        return wanted

    def take(self, wanted: int) -> int:
        taken = min(wanted, self.tokens)
        self.tokens -= taken
        return taken

    def wait_ns(self) -> int:
        return S


def test_what_may_not_begin_yet_is_held_and_begun_in_its_order(rig: Rig) -> None:
    rig.put(b"quick a", b"quick b", b"quick c")
    calls, tap = Calls(rig), Tap()
    runner = tended(rig, calls, throttle=tap, concurrency=4)
    assert runner.tick().claimed == 3
    assert ticks(rig, runner, 3 * TTL_MS / 1000) == Tick(), "its claim is extended meanwhile"
    assert calls.ended == []
    for begun in ([b"quick a"], [b"quick a", b"quick b"], [b"quick a", b"quick b", b"quick c"]):
        tap.tokens = 1
        settled(runner, 1)
        assert calls.ended == begun
    assert rig.counts() == queue.Counts(done=3)


def test_what_is_withdrawn_before_it_may_begin_is_never_begun(rig: Rig) -> None:
    seq, _ = rig.put(b"quick a", b"quick b")
    calls, tap = Calls(rig), Tap()
    runner = tended(rig, calls, throttle=tap)
    runner.tick()
    rig.store.transact(queue.withdraw, QUEUE, seq, True)
    assert runner.tick().lost == 1
    tap.tokens = 2
    settled(runner, 1)
    assert calls.ended == [b"quick b"]


def test_what_may_not_begin_yet_is_handed_back_at_a_stop(rig: Rig) -> None:
    rig.put(b"quick a", b"quick b")
    calls = Calls(rig)
    runner = tended(rig, calls, throttle=Tap())
    runner.tick()
    runner.request_stop()
    assert runner.tick().released == 2
    assert runner.shutdown()
    assert rig.counts() == queue.Counts(ready=2)
    assert calls.ended == []


# -- what was lost ---------------------------------------------------------------------------------


def test_a_claim_that_is_withdrawn_ends_its_call_at_the_next_look(rig: Rig) -> None:
    seq, _ = rig.put(b"a", b"b")
    calls = Calls(rig)
    told: list[LogEvent] = []
    runner = tended(rig, calls, log=told.append)
    runner.tick()
    calls.wait_inside(b"a", b"b")
    rig.store.transact(queue.withdraw, QUEUE, seq, True)
    assert runner.tick() == Tick(lost=1), "without any time passing"
    assert (calls.works[b"a"].dropped, calls.works[b"a"].lost) == (True, True)
    assert not calls.works[b"b"].dropped
    assert [event.kind for event in told] == [LogKind.LOST]
    calls.let_go(b"a", b"b")
    assert settled(runner, 1).done == 1
    assert rig.counts() == queue.Counts(done=2)


def test_a_coroutine_whose_claim_is_withdrawn_is_cancelled(
    rig: Rig, loop: asyncio.AbstractEventLoop
) -> None:
    seq, _ = rig.put(b"a", b"b")
    calls = Calls(rig)
    runner = tended(rig, calls.run, loop=lambda: loop)
    runner.tick()
    calls.wait_inside(b"a", b"b")
    rig.store.transact(queue.withdraw, QUEUE, seq, True)
    assert runner.tick().lost == 1
    until(lambda: calls.cancelled == [b"a"])
    calls.let_go(b"b")
    assert settled(runner, 1).done == 1


def test_what_was_withdrawn_before_a_hand_took_it_is_not_begun(rig: Rig) -> None:
    calls = Calls(rig)
    runner = ahead(rig, calls)
    [_, second, *_] = [work.seq for work in runner._tending.crew.held]  # type: ignore[union-attr]
    rig.store.transact(queue.withdraw, QUEUE, second, True)
    assert runner.tick().lost == 1
    calls.let_go(b"slow")
    settled(runner, 3)
    assert b"quick 1" not in calls.ended


def test_a_runner_that_was_paused_until_its_claims_ran_out_settles_nothing(rig: Rig) -> None:
    rig.put(b"a", b"b")
    calls = Calls(rig)
    paused = tended(rig, calls, worker="paused")
    paused.tick()
    calls.wait_inside(b"a", b"b")
    rig.clock.advance((TTL_MS + 1_000) * MS)
    other = tended(rig, rig.keep, worker="other")
    assert other.tick().claimed == 2
    calls.let_go(b"a")
    until(lambda: calls.ended)
    lost = Tick()
    until(lambda: add(lost, paused.tick()) or lost.lost == 2)
    assert (lost.done, lost.requeued, lost.claimed) == (0, 0, 0)
    assert calls.works[b"b"].lost
    assert settled(other, 2).done == 2
    assert rig.counts() == queue.Counts(done=2)
    assert [work.claim.tried[0].end for work in rig.handled] == ["expired", "expired"]
    calls.let_go(b"b")


# -- with its own loop -----------------------------------------------------------------------------


def test_a_looping_runner_holds_a_claim_that_is_much_shorter_than_its_call() -> None:
    with stores.open("memory:") as store:
        store.transact(queue.put, QUEUE, b"a")
        entered, leave = threading.Event(), threading.Event()
        runs: list[Work] = []

        def handler(work: Work) -> None:
            work.limit_ns = 60 * S
            runs.append(work)
            entered.set()
            assert leave.wait(LONG_S)

        # Long enough for a busy machine to extend it in time.
        policy = Policy(tend=True, lease_ttl_ms=1_000)
        with Runner(store, QUEUE, handler, worker="w", policy=policy):
            assert entered.wait(LONG_S)
            first_ns = runs[0].claim.expires_ns

            def extended() -> bool:
                [held] = store.read(queue.claims_of, QUEUE, runs[0].claim.owner, 10)
                return held.expires_ns > first_ns + 2 * S

            until(extended)
            leave.set()
            until(lambda: store.read(queue.counts, QUEUE).done == 1)
        assert len(runs) == 1


def test_a_looping_runner_hears_of_a_withdrawal_long_before_the_claim_would_run_out() -> None:
    with stores.open("memory:") as store:
        seq = store.transact(queue.put, QUEUE, b"a")
        entered, leave = threading.Event(), threading.Event()
        works: list[Work] = []

        def handler(work: Work) -> None:
            work.limit_ns = 3600 * S
            works.append(work)
            entered.set()
            while not work.dropped and not leave.is_set():
                time.sleep(0.001)

        policy = Policy(tend=True, lease_ttl_ms=3_600_000)
        with Runner(store, QUEUE, handler, worker="w", policy=policy):
            assert entered.wait(LONG_S)
            store.transact(queue.withdraw, QUEUE, seq, True)
            until(lambda: works[0].lost)
            leave.set()
        assert store.read(queue.counts, QUEUE) == queue.Counts(done=1)
