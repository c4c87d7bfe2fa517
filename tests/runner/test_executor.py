"""Concurrent handlers in an executor: a tick submits items and collects outcomes without waiting."""

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
from holdfast.runner import (
    LogKind,
    RecordedStep,
    Runner,
    RunnerPolicy,
    RunnerState,
    StepKind,
    TickStats,
    WorkItem,
)
from holdfast.runner.executor import (
    ABANDONED_MAX,
    NOTIFY_BATCH,
    STALL_NS,
    AsyncExecutor,
    Executor,
    ThreadExecutor,
)
from holdfast.runner.work import WorkOutcome
from tests.runner.rig import QUEUE, RunnerRig, SimulatedCrash

MODULES = ("holdfast.runner.executor", "holdfast.runner.runner")

LONG_S = 30.0


class BlockingHandler:
    """A handler that blocks until the test releases its payload."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.started = threading.Semaphore(0)
        self.error = error
        self._release_events: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def __call__(self, work: WorkItem) -> None:
        self.started.release()
        assert self._release_event(work.payload).wait(LONG_S)
        if self.error is not None:
            raise self.error

    def release(self, *payloads: bytes) -> None:
        for payload in payloads:
            self._release_event(payload).set()

    def wait_until_started(self, count: int) -> None:
        for _ in range(count):
            assert self.started.acquire(timeout=LONG_S)

    def _release_event(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._release_events.setdefault(payload, threading.Event())


def release_and_tick(runner: Runner, handler: BlockingHandler, *payloads: bytes) -> TickStats:
    """Release these payloads and tick until they are settled. Return the summed statistics."""
    handler.release(*payloads)
    total = TickStats()
    while total.done + total.requeued + total.dead + total.lost < len(payloads):
        tick = runner.tick()
        for name in TickStats.__slots__:
            setattr(total, name, getattr(total, name) + getattr(tick, name))
    return total


def test_tick_submits_up_to_concurrency_and_does_not_wait(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c", b"d")
    handler = BlockingHandler()
    runner = rig.runner(handler, concurrency=3)
    assert runner.tick() == TickStats(claimed=3)
    handler.wait_until_started(3)
    assert runner.tick() == TickStats()
    assert runner.capacity == 0
    assert rig.counts() == queue.QueueCounts(ready=1, claimed=3)
    handler.release(b"a", b"b", b"c", b"d")
    runner.shutdown()


def test_slow_handler_does_not_block_other_handlers(rig: RunnerRig) -> None:
    rig.put(b"slow", b"b", b"c", b"d")
    handler = BlockingHandler()
    runner = rig.runner(handler, concurrency=2)
    runner.tick()
    total = release_and_tick(runner, handler, b"b", b"c", b"d")
    assert total.done == 3
    assert rig.counts() == queue.QueueCounts(claimed=1, done=3)
    assert release_and_tick(runner, handler, b"slow").done == 1


def test_outcomes_of_concurrent_handlers_are_all_settled(rig: RunnerRig) -> None:
    rig.put(*[b"%d" % n for n in range(8)])
    all_in = threading.Barrier(9)
    ended = threading.Semaphore(0)

    def together(work: WorkItem) -> None:
        all_in.wait(LONG_S)
        ended.release()

    runner = rig.runner(together, concurrency=8)
    runner.tick()
    all_in.wait(LONG_S)
    for _ in range(8):
        assert ended.acquire(timeout=LONG_S)
    assert runner.shutdown()
    assert rig.counts().done == 8


def test_executor_failures_are_requeued_or_dead_lettered(rig: RunnerRig) -> None:
    rig.put(b"a")
    handler = BlockingHandler(Busy())
    runner = rig.runner(handler, concurrency=2)
    runner.tick()
    assert release_and_tick(runner, handler, b"a").requeued == 1
    rig.put(b"b")
    handler.error = ValueError()
    assert runner.tick().claimed == 1
    assert release_and_tick(runner, handler, b"b").dead == 1


def test_crash_in_an_executor_thread_is_raised_by_the_tick(rig: RunnerRig) -> None:
    rig.put(b"a")
    handler = BlockingHandler(SimulatedCrash())
    runner = rig.runner(handler, concurrency=2)
    runner.tick()
    with pytest.raises(SimulatedCrash):
        release_and_tick(runner, handler, b"a")
    assert rig.counts() == queue.QueueCounts(claimed=1)


def test_claims_in_progress_in_the_executor_are_not_adopted(rig: RunnerRig) -> None:
    rig.put(b"a")
    handler = BlockingHandler()
    runner = rig.runner(handler, concurrency=2)
    runner.tick()
    rig.put(b"b")
    rig.inject_faults("kept")
    assert runner.tick() == TickStats(busy=1)
    assert runner.tick() == TickStats(claimed=1)
    handler.wait_until_started(2)
    assert release_and_tick(runner, handler, b"a", b"b").done == 2


def test_shutdown_waits_for_the_executor_and_settles_its_outcomes(rig: RunnerRig) -> None:
    rig.put(b"a", b"b", b"c")
    handler = BlockingHandler()
    runner = rig.runner(handler, concurrency=2)
    runner.tick()
    handler.wait_until_started(2)
    runner.request_stop()
    handler.release(b"a", b"b")
    assert runner.shutdown()
    assert runner.state is RunnerState.STOPPED
    assert rig.counts() == queue.QueueCounts(ready=1, done=2)


def test_join_raises_a_fatal_error_after_running_handlers_finish() -> None:
    with stores.open("memory:") as store:
        blocking_handler = BlockingHandler()
        logged = {kind: threading.Semaphore(0) for kind in LogKind}

        def handler(work: WorkItem) -> None:
            blocking_handler(work)
            if work.payload.startswith(b"bad"):
                raise ValueError(work.payload)

        store.transact(queue.put_many, QUEUE, [b"bad-1", b"bad-2", b"good"], priority=0)
        runner = Runner(
            store,
            QUEUE,
            handler,
            worker="w",
            concurrency=3,
            policy=RunnerPolicy(on_fatal="raise"),
            log=lambda event: logged[event.kind].release(),
        )
        runner.start()
        blocking_handler.wait_until_started(3)
        blocking_handler.release(b"bad-1")
        assert logged[LogKind.LOOP_ERROR].acquire(timeout=LONG_S)
        blocking_handler.release(b"bad-2")
        for _ in range(2):
            assert logged[LogKind.DEAD_LETTER].acquire(timeout=LONG_S)
        blocking_handler.release(b"good")
        with pytest.raises(ValueError, match="bad-1"):
            runner.join(LONG_S)
        assert store.read(queue.counts, QUEUE) == queue.QueueCounts(done=1, dead=2)


def test_runner_loop_with_an_executor_handles_every_item_once() -> None:
    with stores.open("memory:") as store:
        lock, all_done = threading.Lock(), threading.Event()
        seen: list[int] = []

        def handler(work: WorkItem) -> None:
            with lock:
                seen.append(int(work.payload))
                if len(seen) == 500:
                    all_done.set()

        policy = RunnerPolicy(idle_sleep_max_ms=60_000)
        with Runner(store, QUEUE, handler, worker="w", concurrency=8, policy=policy):
            for n in range(500):
                store.transact(queue.put, QUEUE, b"%d" % n, priority=0)
            assert all_done.wait(LONG_S)
        assert sorted(seen) == list(range(500))
        assert store.read(queue.counts, QUEUE) == queue.QueueCounts(done=500)


def test_replay_hook_gets_attempt_and_result_of_concurrent_handlers(rig: RunnerRig) -> None:
    rig.put(b"a", b"b")
    steps: list[RecordedStep] = []
    handler = BlockingHandler()
    runner = rig.runner(handler, concurrency=2, replay=steps.append)
    runner.tick()
    release_and_tick(runner, handler, b"b")
    release_and_tick(runner, handler, b"a")
    assert [(step.kind, step.frame) for step in steps] == [
        (StepKind.INBOX_ATTEMPT, b"a"),
        (StepKind.INBOX_ATTEMPT, b"b"),
        (StepKind.INBOX_RESULT, b"b"),
        (StepKind.INBOX_RESULT, b"a"),
    ]


# -- the executor without a runner -----------------------------------------------------------------

QUICK_NS = 10_000


class BlockingHandlers:
    """Thread and coroutine handlers that block until released. Records starts, overlaps and cancellations."""

    def __init__(self) -> None:
        self.started: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.running: set[bytes] = set()
        self.running_max = 0
        self.latency_ns = QUICK_NS
        self._release_events: dict[bytes, threading.Event] = {}
        self._lock = threading.Lock()

    def release_event(self, payload: bytes) -> threading.Event:
        with self._lock:
            return self._release_events.setdefault(payload, threading.Event())

    def release(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.release_event(payload).set()

    def run(self, work: WorkItem) -> WorkOutcome:
        self._enter(work)
        if not work.payload.startswith((b"quick", b"crash")):
            assert self.release_event(work.payload).wait(LONG_S)
        return self._leave(work)

    async def run_async(self, work: WorkItem) -> WorkOutcome:
        self._enter(work)
        if not work.payload.startswith((b"quick", b"crash")):
            gate = self.release_event(work.payload)
            while not gate.is_set():
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    self.cancelled.append(work.payload)
                    if not work.payload.startswith(b"stubborn"):
                        self._leave(work)
                        raise
        return self._leave(work)

    def _enter(self, work: WorkItem) -> None:
        with self._lock:
            self.started.append(work.payload)
            self.running.add(work.payload)
            self.running_max = max(self.running_max, len(self.running))

    def _leave(self, work: WorkItem) -> WorkOutcome:
        with self._lock:
            self.running.discard(work.payload)
        if work.payload.startswith(b"crash"):
            raise SimulatedCrash
        return WorkOutcome(work, None, self.latency_ns)


class ExecutorRig:
    """Rig for thread and asyncio executors with a simulated clock."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.handlers = BlockingHandlers()
        self.clock = SimClock()
        self.done_signals = threading.Semaphore(0)
        self.loop = asyncio.new_event_loop()
        self.seq = 0
        self.executors: list[Executor] = []
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def make_executor(
        self, size: int, *, ahead_max: int = 0, clock: Clock | None = None
    ) -> Executor:
        options: Any = {
            "on_begin": lambda work: None,
            "on_done": self.done_signals.release,
            "clock": clock or self.clock,
            "prefetch_max": ahead_max,
        }
        executor: Executor
        if self.kind == "threads":
            executor = ThreadExecutor(size, self.handlers.run, name=self.name, **options)
        else:
            executor = AsyncExecutor(size, self.handlers.run_async, self.loop, **options)
        self.executors.append(executor)
        return executor

    def make_work(self, *payloads: bytes) -> list[WorkItem]:
        work_items = []
        for payload in payloads:
            self.seq += 1
            claim = Claim(
                QUEUE,
                self.seq,
                1,
                "w",
                expires_ns=1 << 60,
                priority=0,
                failures=0,
                expiries=0,
                enqueued_ns=0,
                payload=payload,
            )
            work_items.append(WorkItem(claim, payload, "queue", lambda claim, ttl_ms: None))
            work_items[-1].taken_ns = self.clock.mono_ns()
        return work_items

    def make_warm_executor(self, size: int, ahead_max: int = 100) -> Executor:
        """An executor with a known handler latency and no awake worker."""
        executor = self.make_executor(size, ahead_max=ahead_max)
        executor.submit(self.make_work(b"quick"))
        assert len(collect_payloads(executor, 1)) == 1
        # An awake worker would take the next submitted item.
        wait_until(lambda: executor._awake == 0)
        return executor

    def close(self) -> None:
        for executor in self.executors:
            executor.take_unstarted()
            executor.close()
        wait_until(self._is_empty)
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _is_empty(self) -> bool:
        """Release running handlers. Return whether no handler and no asyncio task is left."""
        self.handlers.release(*list(self.handlers.running))
        return not self.handlers.running and not asyncio.all_tasks(self.loop)


@pytest.fixture(params=["threads", "tasks"])
def executor_rig(request: pytest.FixtureRequest) -> Iterator[ExecutorRig]:
    made = ExecutorRig(request.param, request.node.name)
    yield made
    made.close()


@pytest.fixture
def async_executor_rig(request: pytest.FixtureRequest) -> Iterator[ExecutorRig]:
    made = ExecutorRig("tasks", request.node.name)
    yield made
    made.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def collect_payloads(executor: Executor, count: int) -> list[bytes]:
    """Wait for `count` outcomes and return their payloads."""
    payloads: list[bytes] = []
    wait_until(
        lambda: (
            payloads.extend(o.work.payload for o in executor.drain_finished())
            or len(payloads) >= count
        )
    )
    return payloads


def test_executor_does_not_prefetch_before_latency_is_known(executor_rig: ExecutorRig) -> None:
    assert executor_rig.make_executor(3, ahead_max=100).capacity == 3


def test_executor_prefetch_depends_on_latency_and_prefetch_max(
    executor_rig: ExecutorRig,
) -> None:
    assert executor_rig.make_warm_executor(3, ahead_max=100).capacity == 103
    executor_rig.handlers.latency_ns = 30 * MS
    assert executor_rig.make_warm_executor(3, ahead_max=100).capacity == 3 + 2


def test_executor_runs_at_most_its_worker_count_concurrently(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_warm_executor(3)
    payloads = [b"%d" % n for n in range(executor.capacity)]
    executor.submit(executor_rig.make_work(*payloads))
    assert executor.capacity == 0

    def all_running() -> bool:
        # The runner loop does the same: it wakes one more worker of a stalled executor.
        executor_rig.clock.advance(STALL_NS)
        executor.wake_one_more()
        return len(executor_rig.handlers.running) == 3

    wait_until(all_running)
    executor_rig.handlers.release(*payloads)
    assert sorted(collect_payloads(executor, len(payloads))) == sorted(payloads)
    assert executor_rig.handlers.running_max == 3


def test_executor_wakes_an_idle_worker_for_a_single_item(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_warm_executor(3)
    executor.submit(executor_rig.make_work(b"slow"))
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    executor.submit(executor_rig.make_work(b"slower"))
    wait_until(lambda: executor_rig.handlers.running == {b"slow", b"slower"})
    executor.submit(executor_rig.make_work(b"quick"))
    assert collect_payloads(executor, 1) == [b"quick"]


def test_stalled_executor_queue_wakes_one_more_worker(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_warm_executor(2)
    quick = [b"quick %d" % n for n in range(10)]
    executor.submit(executor_rig.make_work(b"slow", *quick))
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    assert executor.is_stalled
    executor.wake_one_more()
    assert executor.is_stalled, "it has not stood long enough"
    executor_rig.clock.advance(STALL_NS)
    executor.wake_one_more()
    assert sorted(collect_payloads(executor, 10)) == sorted(quick)
    assert executor_rig.handlers.running == {b"slow"}


def test_executor_signals_a_finished_item_while_the_next_one_runs(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_executor(1)
    executor.submit(executor_rig.make_work(b"quick", b"slow"))
    assert executor_rig.done_signals.acquire(timeout=LONG_S)
    assert collect_payloads(executor, 1) == [b"quick"]
    assert executor.busy


def test_executor_signals_quick_outcomes_in_batches(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_warm_executor(1, ahead_max=500)
    while executor_rig.done_signals.acquire(blocking=False):
        pass
    executor.submit(executor_rig.make_work(*[b"quick %d" % n for n in range(NOTIFY_BATCH + 10)]))
    wait_until(lambda: len(executor_rig.handlers.started) == NOTIFY_BATCH + 11)
    collect_payloads(executor, NOTIFY_BATCH + 10)
    signal_count = 0
    while executor_rig.done_signals.acquire(blocking=False):
        signal_count += 1
    assert 1 <= signal_count <= 2


def test_executor_wakes_one_thread_for_many_quick_items(request: pytest.FixtureRequest) -> None:
    executor_rig = ExecutorRig("threads", request.node.name)
    executor = executor_rig.make_warm_executor(5, ahead_max=2_000)
    executor.submit(executor_rig.make_work(*[b"quick %d" % n for n in range(1_000)]))
    collect_payloads(executor, 1_000)
    names = [thread.name for thread in threading.enumerate()]
    assert len([name for name in names if name.startswith(executor_rig.name)]) == 1
    executor_rig.close()


def test_executor_measures_latency_if_the_outcome_has_none(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_executor(3, ahead_max=100)
    executor_rig.handlers.latency_ns = 0
    executor.submit(executor_rig.make_work(b"slow"))
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    executor_rig.clock.advance(30 * MS)
    executor_rig.handlers.release(b"slow")
    collect_payloads(executor, 1)
    assert executor.capacity == 3 + 2


def test_executor_returns_outcomes_after_it_raised_a_crash(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_executor(1)
    executor.submit(executor_rig.make_work(b"quick 1", b"crash", b"quick 2"))
    wait_until(
        lambda: len(executor_rig.handlers.started) == 3 and not executor_rig.handlers.running
    )
    with pytest.raises(SimulatedCrash):
        wait_until(executor.drain_finished)
    assert collect_payloads(executor, 2) == [b"quick 1", b"quick 2"]
    assert not executor.busy


def test_added_executor_capacity_starts_a_queued_item(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_warm_executor(1)
    executor.submit(executor_rig.make_work(b"slow", b"quick too"))
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    executor.add_capacity(1)
    assert collect_payloads(executor, 1) == [b"quick too"]
    executor.add_capacity(-1)


def test_run_in_caller_runs_queued_items_until_none_is_left(
    request: pytest.FixtureRequest,
) -> None:
    executor_rig = ExecutorRig("threads", request.node.name)
    executor = executor_rig.make_warm_executor(2)
    assert isinstance(executor, ThreadExecutor)
    [first] = executor_rig.make_work(b"quick 1")
    run_inline = executor.run_in_caller(first)
    assert run_inline is not None
    assert (executor.count, executor.free_workers) == (1, 1)
    # Quick items wake no second worker.
    executor.submit(executor_rig.make_work(b"quick 2", b"quick 3"))
    run_inline()
    assert sorted(collect_payloads(executor, 3)) == [b"quick 1", b"quick 2", b"quick 3"]
    wait_until(lambda: executor._awake == 0)
    executor_rig.close()


def test_run_in_caller_is_refused_without_a_free_worker(
    request: pytest.FixtureRequest,
) -> None:
    executor_rig = ExecutorRig("threads", request.node.name)
    executor = executor_rig.make_executor(1)
    assert isinstance(executor, ThreadExecutor)
    [blocked_item, other] = executor_rig.make_work(b"held", b"quick")
    executor.submit([blocked_item])
    assert executor.run_in_caller(other) is None
    assert not executor.has(other.token)
    executor.abandon(blocked_item)
    # The abandoned item has freed its slot.
    run_inline = executor.run_in_caller(other)
    assert run_inline is not None
    run_inline()
    assert collect_payloads(executor, 1) == [b"quick"]
    executor._abandoned_count += 2 * ABANDONED_MAX
    assert executor.run_in_caller(other) is None
    executor_rig.close()


def test_unstarted_items_taken_back_from_the_executor_are_not_run(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_warm_executor(1)
    executor.submit(executor_rig.make_work(b"slow", b"a", b"b"))
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    assert [work.payload for work in executor.take_unstarted()] == [b"a", b"b"]
    assert executor.count == 1
    executor_rig.handlers.release(b"slow")
    assert collect_payloads(executor, 1) == [b"slow"]
    executor.submit(executor_rig.make_work(b"quick again"))
    collect_payloads(executor, 1)
    assert executor_rig.handlers.started == [b"quick", b"slow", b"quick again"]


def test_overdue_items_are_taken_from_the_executor_and_prefetch_stops(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_warm_executor(1)
    executor.submit(executor_rig.make_work(b"slow", b"a", b"b"))
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    assert executor.take_overdue(S) == []
    executor_rig.clock.advance(S)
    assert [work.payload for work in executor.take_overdue(S)] == [b"a", b"b"]
    assert executor.capacity == 0


def test_no_item_is_overdue_while_executor_workers_are_free(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_warm_executor(1)
    executor_rig.clock.advance(S)
    assert executor.take_overdue(S) == []


def test_item_abandoned_before_its_start_is_never_run(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_warm_executor(1)
    slow, dropped, last = executor_rig.make_work(b"slow", b"a", b"quick last")
    executor.submit([slow, dropped, last])
    wait_until(lambda: executor_rig.handlers.running == {b"slow"})
    executor.abandon(dropped)
    executor_rig.handlers.release(b"slow")
    assert collect_payloads(executor, 2) == [b"slow", b"quick last"]
    assert b"a" not in executor_rig.handlers.started


def test_outcome_of_an_abandoned_handler_is_ignored(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_executor(2)
    dropped, kept = executor_rig.make_work(b"stubborn", b"kept")
    executor.submit([dropped, kept])
    wait_until(lambda: len(executor_rig.handlers.running) == 2)
    executor.abandon(dropped)
    assert dropped.dropped
    assert [work.payload for work in executor.in_progress] == [b"kept"]
    executor_rig.handlers.release(b"stubborn", b"kept")
    wait_until(lambda: not executor_rig.handlers.running)
    assert collect_payloads(executor, 1) == [b"kept"]
    assert executor.drain_finished() == []
    assert not executor.busy


def test_outcome_of_a_handler_abandoned_after_its_end_is_ignored(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_executor(1)
    [work] = executor_rig.make_work(b"quick")
    executor.submit([work])
    assert executor_rig.done_signals.acquire(timeout=LONG_S)
    executor.abandon(work)
    assert executor.drain_finished() == []
    executor.submit(executor_rig.make_work(b"quick again"))
    assert collect_payloads(executor, 1) == [b"quick again"]


def test_executor_replaces_a_worker_blocked_in_an_abandoned_handler(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_executor(1)
    [blocked] = executor_rig.make_work(b"stubborn")
    executor.submit([blocked])
    wait_until(lambda: executor_rig.handlers.running)
    executor.abandon(blocked)
    assert executor.capacity == 1
    executor.submit(executor_rig.make_work(b"quick"))
    assert collect_payloads(executor, 1) == [b"quick"]
    assert executor_rig.handlers.running == {b"stubborn"}


@pytest.mark.parametrize("ahead_max", [0, 500])
def test_executor_replaces_at_most_abandoned_max_blocked_workers(
    executor_rig: ExecutorRig, ahead_max: int
) -> None:
    executor = (
        executor_rig.make_warm_executor(2, ahead_max)
        if ahead_max
        else executor_rig.make_executor(2)
    )
    blocked = executor_rig.make_work(*[b"stubborn %d" % n for n in range(2 * (ABANDONED_MAX + 1))])
    for work in blocked:
        assert executor.capacity > 0
        executor.submit([work])
        wait_until(lambda work=work: work.payload in executor_rig.handlers.running)  # type: ignore[misc]
        executor.abandon(work)
    assert executor.capacity == 0
    executor.submit(executor_rig.make_work(b"quick late"))
    executor_rig.clock.advance(STALL_NS)
    executor.wake_one_more()
    assert not executor.is_stalled
    assert b"quick late" not in executor_rig.handlers.started
    executor_rig.handlers.release(blocked[0].payload)
    wait_until(lambda: executor.is_stalled)
    executor.wake_one_more()
    assert collect_payloads(executor, 1) == [b"quick late"]


def test_asyncio_task_of_an_abandoned_coroutine_is_cancelled(
    async_executor_rig: ExecutorRig,
) -> None:
    executor = async_executor_rig.make_executor(2)
    dropped, kept = async_executor_rig.make_work(b"dropped", b"kept")
    executor.submit([dropped, kept])
    wait_until(lambda: len(async_executor_rig.handlers.running) == 2)
    executor.abandon(dropped)
    wait_until(lambda: async_executor_rig.handlers.running == {b"kept"})
    assert async_executor_rig.handlers.cancelled == [b"dropped"]


def test_abandoned_coroutine_that_ignores_cancellation_frees_its_slot(
    async_executor_rig: ExecutorRig,
) -> None:
    executor = async_executor_rig.make_executor(1)
    [blocked] = async_executor_rig.make_work(b"stubborn")
    executor.submit([blocked])
    wait_until(lambda: async_executor_rig.handlers.running)
    executor.abandon(blocked)
    wait_until(lambda: async_executor_rig.handlers.cancelled)
    executor.submit(async_executor_rig.make_work(b"quick"))
    assert collect_payloads(executor, 1) == [b"quick"]
    async_executor_rig.handlers.release(b"stubborn")
    wait_until(lambda: not async_executor_rig.handlers.running)
    assert executor.drain_finished() == []
    assert executor.capacity == 1


def test_closed_executor_leaves_no_thread_after_its_handlers_end() -> None:
    executor_rig = ExecutorRig("threads", "close me")
    executor = executor_rig.make_executor(4)
    executor.submit(executor_rig.make_work(b"a", b"quick 1", b"quick 2", b"quick 3"))
    collect_payloads(executor, 3)
    assert any(thread.name.startswith("close me") for thread in threading.enumerate())
    executor.close()
    wait_until(
        lambda: [t.name.startswith("close me") for t in threading.enumerate()].count(True) == 1
    )
    executor_rig.handlers.release(b"a")
    wait_until(lambda: not any(t.name.startswith("close me") for t in threading.enumerate()))
    executor_rig.close()


def test_executor_worker_going_idle_misses_no_submitted_item(executor_rig: ExecutorRig) -> None:
    executor = executor_rig.make_executor(3, ahead_max=50, clock=SYSTEM)
    submitted = 0
    for round_ in range(1_500):
        count = round_ % 4 + 1
        executor.submit(executor_rig.make_work(*[b"quick"] * count))
        submitted += count
        # wake_one_more is never called, so a lost wake-up would block this loop.
        assert len(collect_payloads(executor, count)) == count
    assert len(executor_rig.handlers.started) == submitted
    assert executor_rig.handlers.running_max <= 3


def test_concurrent_submit_and_drain_of_the_executor_lose_nothing(
    executor_rig: ExecutorRig,
) -> None:
    executor = executor_rig.make_executor(4, ahead_max=50, clock=SYSTEM)
    total, found = 5_000, 0
    submitted = 0
    deadline = time.monotonic() + LONG_S
    while found < total:
        assert time.monotonic() < deadline
        count = min(executor.capacity, total - submitted, 7)
        if count > 0:
            executor.submit(executor_rig.make_work(*[b"quick"] * count))
            submitted += count
        found += len(executor.drain_finished())
    assert len(executor_rig.handlers.started) == total
    assert not executor.busy
