"""Claim supervision: the runner extends claims of running handlers, times handlers out and abandons lost claims."""

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
from holdfast.runner import (
    LogEvent,
    LogKind,
    Runner,
    RunnerPolicy,
    RunnerState,
    TickStats,
    WorkItem,
)
from holdfast.runner.claim_supervisor import SUPERVISE_INTERVAL_NS
from holdfast.runner.executor import UNSTARTED_MAX_NS
from tests.runner.rig import QUEUE, UNKNOWN_ABORTED, UNKNOWN_COMMITTED, RunnerRig

MODULES = ("holdfast.runner.runner", "holdfast.runner.work", "holdfast.runner.settlement")

LONG_S = 30.0
TTL_MS = 9_000
LIMIT_NS = 3600 * S


class BlockingCalls:
    """Handlers with a time limit. Each call blocks until the test releases its payload."""

    def __init__(self, rig: RunnerRig, limit_ns: int = LIMIT_NS) -> None:
        self.limit_ns = limit_ns
        self.started_work: dict[bytes, WorkItem] = {}
        self.cancelled: list[bytes] = []
        self.finished: list[bytes] = []
        self._rig = rig
        self._release_events: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def release_event(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._release_events.setdefault(payload, threading.Event())

    def __call__(self, work: WorkItem) -> None:
        self._record_start(work)
        if not work.payload.startswith(b"quick"):
            assert self.release_event(work.payload).wait(LONG_S)
        self.finished.append(work.payload)

    async def run(self, work: WorkItem) -> None:
        self._record_start(work)
        try:
            while not self.release_event(work.payload).is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(work.payload)
            raise
        self.finished.append(work.payload)

    def _record_start(self, work: WorkItem) -> None:
        # The executor measures this as the handler latency.
        self._rig.clock.advance(1_000)
        work.limit_ns = self.limit_ns
        self.started_work[work.payload] = work

    def release(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.release_event(payload).set()

    def wait_until_started(self, *payloads: bytes) -> None:
        wait_until(lambda: self.started_work.keys() >= set(payloads))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def supervised_runner(rig: RunnerRig, handler: Any, **options: Any) -> Runner:
    return rig.runner(
        handler,
        **{
            "extend_claims": True,
            "lease_ttl_ms": TTL_MS,
            "concurrency": 4,
            "timers": None,
            **options,
        },
    )


def tick_for(rig: RunnerRig, runner: Runner, seconds: float) -> TickStats:
    """Advance the clock in steps of 250 ms with a tick each. Return the summed statistics."""
    total = TickStats()
    for _ in range(int(seconds * 4)):
        rig.clock.advance(S // 4)
        add_stats(total, runner.tick())
    return total


def add_stats(total: TickStats, tick: TickStats) -> None:
    for name in TickStats.__slots__:
        setattr(total, name, getattr(total, name) + getattr(tick, name))


def tick_until_settled(runner: Runner, count: int) -> TickStats:
    total = TickStats()
    wait_until(
        lambda: add_stats(total, runner.tick()) or total.done + total.requeued + total.dead >= count
    )
    return total


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    wait_until(lambda: not asyncio.all_tasks(made))
    made.call_soon_threadsafe(made.stop)
    thread.join(LONG_S)
    made.close()


# -- claim extension -------------------------------------------------------------------------------


def test_claims_are_extended_while_handlers_are_within_their_time_limit(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls)
    runner.tick()
    calls.wait_until_started(b"a", b"b")
    assert tick_for(rig, runner, 5 * TTL_MS / 1000) == TickStats()
    assert supervised_runner(rig, calls, worker="other").tick() == TickStats(), (
        "nothing has run out"
    )
    calls.release(b"a", b"b")
    assert tick_until_settled(runner, 2).done == 2
    assert rig.counts() == queue.QueueCounts(done=2)


def test_claims_are_extended_together_in_one_commit_per_interval(rig: RunnerRig) -> None:
    payloads = [b"%d" % n for n in range(20)]
    rig.put(*payloads)
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls, concurrency=20)
    runner.tick()
    calls.wait_until_started(*payloads)
    runner.tick()
    before = rig.backend.commits
    tick_for(rig, runner, 10 * TTL_MS / 1000)
    assert 20 <= rig.backend.commits - before <= 32
    calls.release(*payloads)
    assert tick_until_settled(runner, 20).done == 20


def test_idle_runner_extends_no_claims(rig: RunnerRig) -> None:
    rig.put(b"quick")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls)
    runner.tick()
    tick_until_settled(runner, 1)
    before = rig.backend.commits
    tick_for(rig, runner, 5 * TTL_MS / 1000)
    assert rig.backend.commits == before


def test_claim_of_a_handler_without_a_time_limit_expires(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig, limit_ns=0)
    runner = supervised_runner(rig, calls, concurrency=1)
    runner.tick()
    calls.wait_until_started(b"a")
    tick_for(rig, runner, 2 * TTL_MS / 1000)
    other = supervised_runner(rig, rig.record_work, worker="other")
    assert other.tick().claimed == 1
    assert tick_until_settled(other, 1).done == 1
    calls.release(b"a")
    wait_until(lambda: not runner.has_unsettled or runner.tick().lost)
    assert rig.counts() == queue.QueueCounts(done=1)


@pytest.mark.parametrize(
    "fault", [Busy(), UNKNOWN_ABORTED, UNKNOWN_COMMITTED], ids=["busy", "dropped", "kept"]
)
def test_claim_extension_is_retried_after_a_retryable_store_error(
    rig: RunnerRig, fault: str | HoldfastError
) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls)
    runner.tick()
    calls.wait_until_started(b"a")
    runner.tick()
    rig.clock.advance(TTL_MS * MS // 2)
    rig.inject_faults(fault)
    assert runner.tick().busy == 1
    rig.clock.advance(SUPERVISE_INTERVAL_NS)
    assert runner.tick() == TickStats()
    rig.clock.advance(TTL_MS * MS * 3 // 4)
    assert runner.tick() == TickStats(), "it was extended right after"
    assert runner.state is RunnerState.RUNNING
    calls.release(b"a")
    assert tick_until_settled(runner, 1).done == 1


def test_tick_raises_a_permanent_store_error_of_a_claim_extension(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls)
    runner.tick()
    calls.wait_until_started(b"a")
    rig.clock.advance(TTL_MS * MS // 2)
    rig.inject_faults(StoreCorrupt(why="test"))
    with pytest.raises(StoreCorrupt):
        runner.tick()
    calls.release(b"a")


# -- handler timeout -------------------------------------------------------------------------------


def test_handler_beyond_its_time_limit_is_dead_lettered_as_timeout(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig, limit_ns=2 * S)
    runner = supervised_runner(rig, calls, retry_budget_max=1)
    runner.tick()
    calls.wait_until_started(b"a")
    rig.clock.advance(2 * S - 10 * MS)
    assert runner.tick() == TickStats()
    rig.clock.advance(SUPERVISE_INTERVAL_NS)
    assert runner.tick().dead == 1
    [letter] = rig.dead_letters()
    assert letter.code == "timeout"
    assert calls.started_work[b"a"].dropped
    calls.release(b"a")


def test_handler_timeout_frees_its_slot_for_the_next_item(rig: RunnerRig) -> None:
    rig.put(b"hangs", b"b")
    calls = BlockingCalls(rig, limit_ns=2 * S)
    runner = supervised_runner(rig, calls, concurrency=1)
    runner.tick()
    calls.wait_until_started(b"hangs")
    assert b"b" not in calls.started_work
    rig.clock.advance(2 * S)
    assert runner.tick().requeued == 1
    runner.tick()
    calls.wait_until_started(b"b")
    assert not calls.finished
    calls.release(b"b", b"hangs")


def test_late_result_after_a_handler_timeout_is_ignored(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig, limit_ns=2 * S)
    runner = supervised_runner(rig, calls, retry_budget_max=1)
    runner.tick()
    calls.wait_until_started(b"a")
    rig.clock.advance(2 * S)
    assert runner.tick().dead == 1
    calls.release(b"a")
    wait_until(lambda: calls.finished)
    assert runner.tick() == TickStats()
    assert rig.counts() == queue.QueueCounts(dead=1)
    assert runner.shutdown()


def test_failure_operations_are_committed_with_a_handler_timeout(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig, limit_ns=2 * S)

    def handler(work: WorkItem) -> None:
        work.on_failure(queue.put, "after", b"first said")
        work.on_failure(queue.put, "after", b"last said")
        work.on_ack(queue.put, "after", b"if done")
        calls(work)

    runner = supervised_runner(rig, handler)
    runner.tick()
    calls.wait_until_started(b"a")
    rig.clock.advance(2 * S)
    assert runner.tick().requeued == 1
    after = rig.store.read(queue.peek, "after", 10)
    assert [payload for _, payload in after] == [b"last said"]
    calls.release(b"a")


def test_progress_restarts_the_handler_timeout(rig: RunnerRig) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig, limit_ns=2 * S)
    runner = supervised_runner(rig, calls)
    runner.tick()
    calls.wait_until_started(b"a")
    for _ in range(5):
        rig.clock.advance(3 * S // 2)
        calls.started_work[b"a"].progress()
        assert runner.tick() == TickStats()
    rig.clock.advance(2 * S)
    assert runner.tick().requeued == 1
    calls.release(b"a")


def test_coroutine_handler_is_cancelled_at_its_timeout(
    rig: RunnerRig, loop: asyncio.AbstractEventLoop
) -> None:
    rig.put(b"a")
    calls = BlockingCalls(rig, limit_ns=2 * S)
    runner = supervised_runner(rig, calls.run, loop=lambda: loop, retry_budget_max=1)
    runner.tick()
    calls.wait_until_started(b"a")
    rig.clock.advance(2 * S)
    assert runner.tick().dead == 1
    wait_until(lambda: calls.cancelled == [b"a"])
    assert rig.dead_letters()[0].code == "timeout"


# -- unstarted items -------------------------------------------------------------------------------


def runner_with_prefetched(rig: RunnerRig, calls: BlockingCalls, **options: Any) -> Runner:
    """A runner with one executor worker, which runs `slow`, and three prefetched items."""
    rig.put(b"quick")
    runner = supervised_runner(rig, calls, concurrency=1, **options)
    runner.tick()
    tick_until_settled(runner, 1)
    rig.put(b"slow", b"quick 1", b"quick 2", b"quick 3")
    assert runner.tick().claimed == 4
    calls.wait_until_started(b"slow")
    return runner


def test_unstarted_items_are_released_unchanged_at_stop(rig: RunnerRig) -> None:
    calls = BlockingCalls(rig)
    runner = runner_with_prefetched(rig, calls)
    runner.request_stop()
    assert runner.tick().released == 3
    assert rig.counts() == queue.QueueCounts(ready=3, claimed=1, done=1)
    calls.release(b"slow")
    assert runner.shutdown()
    assert rig.counts() == queue.QueueCounts(ready=3, done=2)
    assert calls.finished == [b"quick", b"slow"]
    assert supervised_runner(rig, rig.record_work).tick().claimed == 3


def test_unfinished_items_are_released_unchanged_after_the_stop_grace(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls, stop_grace_ms=5_000)
    runner.tick()
    calls.wait_until_started(b"a", b"b")
    runner.request_stop()
    assert tick_for(rig, runner, 4) == TickStats()
    calls.release(b"b")
    assert tick_until_settled(runner, 1).done == 1
    assert tick_for(rig, runner, 2).released == 1
    assert not runner.has_unsettled
    assert (calls.started_work[b"a"].dropped, calls.started_work[b"a"].lost) == (True, True)
    assert runner.shutdown()
    assert rig.counts() == queue.QueueCounts(ready=1, done=1)
    calls.release(b"a")
    other = supervised_runner(rig, rig.record_work, worker="other")
    other.tick()
    assert tick_until_settled(other, 1).done == 1
    assert [work.attempt for work in rig.handled] == [1]


def test_claims_of_unstarted_items_are_kept_while_they_wait(rig: RunnerRig) -> None:
    calls = BlockingCalls(rig)
    runner = runner_with_prefetched(rig, calls)
    runner.tick()
    rig.clock.advance(UNSTARTED_MAX_NS - 100 * MS)
    assert runner.tick() == TickStats()
    assert rig.counts().claimed == 4
    calls.release(b"slow")
    assert tick_until_settled(runner, 4).done == 4


def test_unstarted_items_are_released_after_unstarted_max(rig: RunnerRig) -> None:
    calls = BlockingCalls(rig)
    runner = runner_with_prefetched(rig, calls)
    rig.clock.advance(UNSTARTED_MAX_NS + SUPERVISE_INTERVAL_NS)
    assert runner.tick() == TickStats(released=3)
    assert runner.tick() == TickStats(), "it does not take them ahead again"
    other = supervised_runner(rig, rig.record_work, worker="other")
    assert other.tick().claimed == 3
    assert tick_until_settled(other, 3).done == 3
    assert {work.claim.expiries for work in rig.handled} == {0}
    calls.release(b"slow")


# -- throttled items -------------------------------------------------------------------------------


class FakeThrottle:
    """A throttle that grants the tokens set by the test."""

    def __init__(self) -> None:
        self.tokens = 0

    def available(self, wanted: int) -> int:
        return wanted

    def acquire(self, wanted: int) -> int:
        granted = min(wanted, self.tokens)
        self.tokens -= granted
        return granted

    def wait_ns(self) -> int:
        return S


def test_throttled_items_keep_their_claims_and_start_in_order(rig: RunnerRig) -> None:
    rig.put(b"quick a", b"quick b", b"quick c")
    calls, throttle = BlockingCalls(rig), FakeThrottle()
    runner = supervised_runner(rig, calls, throttle=throttle, concurrency=4)
    assert runner.tick().claimed == 3
    assert tick_for(rig, runner, 3 * TTL_MS / 1000) == TickStats(), (
        "its claim is extended meanwhile"
    )
    assert calls.finished == []
    for expected in ([b"quick a"], [b"quick a", b"quick b"], [b"quick a", b"quick b", b"quick c"]):
        throttle.tokens = 1
        tick_until_settled(runner, 1)
        assert calls.finished == expected
    assert rig.counts() == queue.QueueCounts(done=3)


def test_throttled_item_that_is_cancelled_is_never_started(rig: RunnerRig) -> None:
    seq, _ = rig.put(b"quick a", b"quick b")
    calls, throttle = BlockingCalls(rig), FakeThrottle()
    runner = supervised_runner(rig, calls, throttle=throttle)
    runner.tick()
    rig.store.transact(queue.cancel, QUEUE, seq, True)
    assert runner.tick().lost == 1
    throttle.tokens = 2
    tick_until_settled(runner, 1)
    assert calls.finished == [b"quick b"]


def test_throttled_items_are_released_at_stop(rig: RunnerRig) -> None:
    rig.put(b"quick a", b"quick b")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls, throttle=FakeThrottle())
    runner.tick()
    runner.request_stop()
    assert runner.tick().released == 2
    assert runner.shutdown()
    assert rig.counts() == queue.QueueCounts(ready=2)
    assert calls.finished == []


# -- lost claims -----------------------------------------------------------------------------------


def test_cancelled_item_abandons_its_handler_at_the_next_tick(rig: RunnerRig) -> None:
    seq, _ = rig.put(b"a", b"b")
    calls = BlockingCalls(rig)
    logged_events: list[LogEvent] = []
    runner = supervised_runner(rig, calls, log=logged_events.append)
    runner.tick()
    calls.wait_until_started(b"a", b"b")
    rig.store.transact(queue.cancel, QUEUE, seq, True)
    assert runner.tick() == TickStats(lost=1), "without any time passing"
    assert (calls.started_work[b"a"].dropped, calls.started_work[b"a"].lost) == (True, True)
    assert not calls.started_work[b"b"].dropped
    assert [event.kind for event in logged_events] == [LogKind.LOST]
    calls.release(b"a", b"b")
    assert tick_until_settled(runner, 1).done == 1
    assert rig.counts() == queue.QueueCounts(done=2)


def test_coroutine_handler_of_a_cancelled_item_is_cancelled(
    rig: RunnerRig, loop: asyncio.AbstractEventLoop
) -> None:
    seq, _ = rig.put(b"a", b"b")
    calls = BlockingCalls(rig)
    runner = supervised_runner(rig, calls.run, loop=lambda: loop)
    runner.tick()
    calls.wait_until_started(b"a", b"b")
    rig.store.transact(queue.cancel, QUEUE, seq, True)
    assert runner.tick().lost == 1
    wait_until(lambda: calls.cancelled == [b"a"])
    calls.release(b"b")
    assert tick_until_settled(runner, 1).done == 1


def test_prefetched_item_that_is_cancelled_is_not_started(rig: RunnerRig) -> None:
    calls = BlockingCalls(rig)
    runner = runner_with_prefetched(rig, calls)
    [_, second, *_] = [work.seq for work in runner._supervisor.executor.in_progress]  # type: ignore[union-attr]
    rig.store.transact(queue.cancel, QUEUE, second, True)
    assert runner.tick().lost == 1
    calls.release(b"slow")
    tick_until_settled(runner, 3)
    assert b"quick 1" not in calls.finished


def test_paused_runner_settles_nothing_after_its_claims_expired(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    calls = BlockingCalls(rig)
    paused = supervised_runner(rig, calls, worker="paused")
    paused.tick()
    calls.wait_until_started(b"a", b"b")
    rig.clock.advance((TTL_MS + 1_000) * MS)
    other = supervised_runner(rig, rig.record_work, worker="other")
    assert other.tick().claimed == 2
    calls.release(b"a")
    wait_until(lambda: calls.finished)
    lost = TickStats()
    wait_until(lambda: add_stats(lost, paused.tick()) or lost.lost == 2)
    assert (lost.done, lost.requeued, lost.claimed) == (0, 0, 0)
    assert calls.started_work[b"b"].lost
    assert tick_until_settled(other, 2).done == 2
    assert rig.counts() == queue.QueueCounts(done=2)
    assert [work.claim.failed_attempts[0].end for work in rig.handled] == ["expired", "expired"]
    calls.release(b"b")


# -- runner loop -----------------------------------------------------------------------------------


def test_runner_loop_extends_a_claim_shorter_than_its_handler() -> None:
    with stores.open("memory:") as store:
        store.transact(queue.put, QUEUE, b"a")
        entered, leave = threading.Event(), threading.Event()
        runs: list[WorkItem] = []

        def handler(work: WorkItem) -> None:
            work.limit_ns = 60 * S
            runs.append(work)
            entered.set()
            assert leave.wait(LONG_S)

        # A busy machine still extends a claim of this length in time.
        policy = RunnerPolicy(extend_claims=True, lease_ttl_ms=1_000)
        with Runner(store, QUEUE, handler, worker="w", policy=policy):
            assert entered.wait(LONG_S)
            first_ns = runs[0].claim.expires_ns

            def is_extended() -> bool:
                [claim] = store.read(queue.claims_of, QUEUE, runs[0].claim.owner, 10)
                return claim.expires_ns > first_ns + 2 * S

            wait_until(is_extended)
            leave.set()
            wait_until(lambda: store.read(queue.counts, QUEUE).done == 1)
        assert len(runs) == 1


def test_runner_loop_abandons_a_cancelled_item_before_its_claim_expires() -> None:
    with stores.open("memory:") as store:
        seq = store.transact(queue.put, QUEUE, b"a")
        entered, leave = threading.Event(), threading.Event()
        works: list[WorkItem] = []

        def handler(work: WorkItem) -> None:
            work.limit_ns = 3600 * S
            works.append(work)
            entered.set()
            while not work.dropped and not leave.is_set():
                time.sleep(0.001)

        policy = RunnerPolicy(extend_claims=True, lease_ttl_ms=3_600_000)
        with Runner(store, QUEUE, handler, worker="w", policy=policy):
            assert entered.wait(LONG_S)
            store.transact(queue.cancel, QUEUE, seq, True)
            wait_until(lambda: works[0].lost)
            leave.set()
        assert store.read(queue.counts, QUEUE) == queue.QueueCounts(done=1)
