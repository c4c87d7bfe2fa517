"""Wakeups of an idle runner loop: a notification of its queue, another thread or the sleep timeout wakes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast import failpoints
from holdfast.durable import queue
from holdfast.runner import Runner, RunnerPolicy, TickStats, WorkItem, wakeup
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.store.in_process import InProcessStore
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

QUEUE = "lane"
IDLE_MS = 600_000
WAIT_S = 30.0


class TickCountingRunner(Runner):
    ticks = 0

    def tick(self) -> TickStats:
        self.ticks += 1
        return super().tick()


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory:") as made:
        yield made


@pytest.fixture
def done() -> threading.Event:
    return threading.Event()


@pytest.fixture
def runner(store: Store, done: threading.Event) -> Iterator[TickCountingRunner]:
    """A running runner with an idle sleep of ten minutes."""

    def handle(work: WorkItem) -> None:
        done.set()

    policy = RunnerPolicy(idle_sleep_max_ms=IDLE_MS)
    made = TickCountingRunner(store, QUEUE, handle, worker="one", policy=policy, bootstrap=True)
    made.start()
    yield made
    made.shutdown(WAIT_S)


def put(store: Store, name: str = QUEUE) -> None:
    store.transact(queue.put, name, b"")


def until_asleep(store: Store) -> None:
    assert isinstance(store, InProcessStore)
    until(lambda: queue.topic(QUEUE) in store.sleepers, "the loop sleeps")


def test_notification_of_another_queue_does_not_wake_the_runner_loop(
    store: Store, runner: TickCountingRunner
) -> None:
    until_asleep(store)
    before = runner.ticks
    with store.subscribe(queue.topic("other")) as subscription:
        for _ in range(20):
            put(store, "other")
            assert subscription.wait(WAIT_S)
    # One tick may have been in progress.
    assert runner.ticks <= before + 1


def test_new_item_wakes_a_sleeping_runner_loop(
    store: Store, runner: TickCountingRunner, done: threading.Event
) -> None:
    for _ in range(2):
        until_asleep(store)
        put(store)
        assert done.wait(WAIT_S)
        done.clear()


def test_wake_of_the_runner_ends_its_sleep(store: Store, runner: TickCountingRunner) -> None:
    for _ in range(20):
        until_asleep(store)
        before = runner.ticks
        runner._loop.wake()
        until(lambda before=before: runner.ticks > before, "the next tick")


def test_item_put_during_a_tick_wakes_the_runner_loop(
    store: Store, runner: TickCountingRunner, done: threading.Event
) -> None:
    for _ in range(200):
        put(store)
        assert done.wait(WAIT_S)
        done.clear()


@pytest.mark.parametrize("error", [OSError("no more files"), RuntimeError("no more threads")])
def test_error_of_a_wait_does_not_end_the_runner_loop(
    store: Store,
    runner: TickCountingRunner,
    done: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr(wakeup, "ERROR_PAUSE_S", 0.01)
    until_asleep(store)
    with failpoints.on("runner.wait", raises=error):
        runner._loop.wake()
        before = runner.ticks
        until(lambda: runner.ticks > before + 1, "a tick after the error")
    put(store)
    assert done.wait(WAIT_S)


def test_stop_wakes_a_sleeping_runner_loop(runner: TickCountingRunner) -> None:
    until(lambda: runner.ticks > 0, "its first tick")
    assert runner.shutdown(WAIT_S)
