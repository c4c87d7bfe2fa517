"""Wakeups of an idle runner loop: a notification or the sleep timeout wakes it, a listener timeout does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.durable import queue
from holdfast.runner import Runner, RunnerPolicy, TickStats, WorkItem
from holdfast.runner.wakeup import LISTEN_TIMEOUT_S
from holdfast.store import open as open_store
from holdfast.store.api import Store
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


def put(store: Store) -> None:
    store.transact(queue.put, QUEUE, b"")


def count_listener_timeouts(store: Store, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Return a semaphore that is released at every listener timeout without a new commit."""
    timeouts, real_wait = threading.Semaphore(0), store.wait

    def wait(topic: object, since: int, timeout: float) -> int:
        commit_no = real_wait(topic, since, timeout)  # type: ignore[arg-type]
        if commit_no == since:
            timeouts.release()
        return commit_no

    monkeypatch.setattr(store, "wait", wait)
    return timeouts


def test_listener_timeout_does_not_wake_the_runner_loop(
    store: Store, runner: TickCountingRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = count_listener_timeouts(store, monkeypatch)
    assert timeouts.acquire(timeout=WAIT_S)
    before = runner.ticks
    for _ in range(3):
        assert timeouts.acquire(timeout=WAIT_S + LISTEN_TIMEOUT_S)
    # One tick may have been in progress.
    assert runner.ticks <= before + 1


def test_new_item_wakes_a_sleeping_runner_loop(
    store: Store, runner: TickCountingRunner, done: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = count_listener_timeouts(store, monkeypatch)
    for _ in range(2):
        assert timeouts.acquire(timeout=WAIT_S)
        put(store)
        assert done.wait(WAIT_S)
        done.clear()


def test_item_put_during_a_tick_wakes_the_runner_loop(
    store: Store, runner: TickCountingRunner, done: threading.Event
) -> None:
    for _ in range(200):
        put(store)
        assert done.wait(WAIT_S)
        done.clear()


def test_stop_wakes_a_sleeping_runner_loop(runner: TickCountingRunner) -> None:
    until(lambda: runner.ticks > 0, "its first tick")
    assert runner.shutdown(WAIT_S)
