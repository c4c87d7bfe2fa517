"""An idle loop looks at the store when something has rung, or its time is up; not because its bell looked up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.durable import queue
from holdfast.runner import Policy, Runner, Tick, Work
from holdfast.runner.bell import LISTEN_S
from holdfast.store import open as open_store
from holdfast.store.api import Store
from tests.process.watch import until

pytestmark = pytest.mark.timeout(60)

QUEUE = "lane"
IDLE_MS = 600_000
WAIT_S = 30.0


class Counted(Runner):
    ticks = 0

    def tick(self) -> Tick:
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
def runner(store: Store, done: threading.Event) -> Iterator[Counted]:
    """One that would sleep for ten minutes."""

    def handle(work: Work) -> None:
        done.set()

    policy = Policy(idle_sleep_max_ms=IDLE_MS)
    made = Counted(store, QUEUE, handle, worker="one", policy=policy, bootstrap=True)
    made.start()
    yield made
    made.shutdown(WAIT_S)


def put(store: Store) -> None:
    store.transact(queue.put, QUEUE, b"")


def look_ups(store: Store, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Let go each time the bell has looked up without news."""
    seen, whole = threading.Semaphore(0), store.wait

    def wait(topic: object, since: int, timeout: float) -> int:
        heard = whole(topic, since, timeout)  # type: ignore[arg-type]
        if heard == since:
            seen.release()
        return heard

    monkeypatch.setattr(store, "wait", wait)
    return seen


def test_a_bell_that_looks_up_wakes_no_loop(
    store: Store, runner: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = look_ups(store, monkeypatch)
    assert seen.acquire(timeout=WAIT_S)
    before = runner.ticks
    for _ in range(3):
        assert seen.acquire(timeout=WAIT_S + LISTEN_S)
    # One more may have been under way.
    assert runner.ticks <= before + 1


def test_an_item_wakes_it_however_long_it_sleeps(
    store: Store, runner: Counted, done: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = look_ups(store, monkeypatch)
    for _ in range(2):
        assert seen.acquire(timeout=WAIT_S)
        put(store)
        assert done.wait(WAIT_S)
        done.clear()


def test_an_item_that_comes_during_a_tick_is_not_slept_over(
    store: Store, runner: Counted, done: threading.Event
) -> None:
    for _ in range(200):
        put(store)
        assert done.wait(WAIT_S)
        done.clear()


def test_a_stop_ends_the_pause(runner: Counted) -> None:
    until(lambda: runner.ticks > 0, "its first tick")
    assert runner.shutdown(WAIT_S)
