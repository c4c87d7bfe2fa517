"""Timers in real processes: workers killed while firing, downtime, worlds that move to another worker.

A timer worker claims and fires a timer in one commit. It can only be killed between sending that commit and
receiving the reply, so the test stops the writer during that time and the outcome is in doubt. The test also
kills processes that hold a claim, as a worker of an older release would.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.store.api import Store
from holdfast.world import timers
from tests.process.conftest import LIMITS
from tests.process.timer_app import Sleeper, TimerRequested, app
from tests.process.watch import KILLS, until, writer_of, writers_of
from tests.processes import Proc, python_proc

MODULES = (
    "holdfast.workers.timers.worker",
    "holdfast.workers.timers.delivery",
    "holdfast.durable.delayed",
)

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.timer_app:app"]
# Kills of each kind of process. The acceptance test uses 200.
VICTIMS = 4
COUNT = 50
# The worlds of a killed worker are hosted elsewhere after this time.
LEASE_S = "2"
QUEUES = (timers.delay_queue("sleep"), timers.calendar_queue("sleep"))

# Claims one due timer, prints a line, and holds the claim until it is killed.
CLAIMER = """
import os, sys
from holdfast import store as stores
from holdfast.durable import queue

path, name, owner = sys.argv[1:]
with stores.open(path) as store:
    print("ready", flush=True)
    certain = queue.RetryBudget(failures_max=5, expiries_max=1 << 31)
    while not store.transact(queue.claim, name, owner, 1, 1_000_000_000, certain):
        store.wait(queue.topic(name), 0, 0.01)
    print("claimed", flush=True)
    os.read(0, 1)
"""

Start = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def worlds(store: Store) -> Iterator[Runtime]:
    """The runtime that hosts the worlds. Timer workers run in other processes."""
    runtime: Runtime = app.open(store, roles=("orchestrator", "world"))
    with runtime:
        yield runtime


@pytest.fixture
def sleeper(worlds: Runtime) -> WorldHandle[Sleeper]:
    return worlds.world(Sleeper, "sleeper")


@pytest.fixture
def up(home: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as running:

        def up(role: str) -> Proc:
            argv = [*UP, "--store", str(home), "--role", role, "--lease-s", LEASE_S]
            return running.enter_context(Proc.spawn(argv, ready=None))

        yield up


@pytest.fixture
def claimer(home: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as running:

        def claimer(name: str, owner: str) -> Proc:
            return running.enter_context(python_proc(CLAIMER, str(home), name, owner, ready=None))

        yield claimer


def pending_count(store: Store) -> int:
    """The number of waiting and claimed timers. The read needs no writer."""
    counts = [store.read(queue.counts, name) for name in QUEUES]
    return sum(one.ready + one.delayed + one.claimed for one in counts)


def claimed_count(store: Store) -> int:
    return sum(store.read(queue.counts, name).claimed for name in QUEUES)


def wait_store_time(store: Store, ns: int) -> None:
    end_ns = store.now_ns() + ns
    until(lambda: store.now_ns() > end_ns, "that time goes by")


def kill_all(victims: list[Proc]) -> None:
    for victim in victims:
        assert victim.kill() == -signal.SIGKILL
        victim.close()


@pytest.mark.slow
@pytest.mark.timeout(60 + 4 * KILLS)
def test_timers_fire_once_and_not_early_when_workers_are_killed_while_firing(
    up: Start,
    claimer: Start,
    worlds: Runtime,
    sleeper: WorldHandle[Sleeper],
    store: Store,
    home: Path,
) -> None:
    sent = in_flight = in_hand = 0

    def set_timers(count: int, seconds: float) -> None:
        nonlocal sent
        before = pending_count(store)
        # One call, so that no timer is due before the last is set.
        sleeps = [
            TimerRequested(n, seconds, calendar=bool(n % 2)) for n in range(sent, sent + count)
        ]
        worlds.send_many([(sleeper, one) for one in sleeps])
        sent += count
        until(lambda: pending_count(store) >= before + count, "timers that are set")

    while in_flight < KILLS or in_hand < KILLS:
        # Kill processes that hold a claim. No timer worker runs at this point.
        holders = [claimer(QUEUES[n % 2], f"{in_hand}.{n}") for n in range(VICTIMS)]
        for holder in holders:
            holder.expect("ready")
        set_timers(2 * VICTIMS, 0.02)
        for holder in holders:
            holder.expect("claimed")
        assert claimed_count(store) >= 1
        kill_all(holders)
        in_hand += VICTIMS

        # Kill workers with a commit in flight. The writer is stopped before the timers are due.
        workers = [up("timer") for _ in range(VICTIMS)]
        for worker in workers:
            worker.expect("ready")
        until(lambda: pending_count(store) == 0, "what the dead had claimed")
        set_timers(4, 0.5)
        writer = writer_of(home)
        writer.stop()
        wait_store_time(store, 550 * MS)
        if pending_count(store) == 4:
            in_flight += VICTIMS
        kill_all(workers)
        writer.cont()

    last = up("timer")
    # Earlier commits may have fired all timers. Wait for "ready", since only then SIGTERM is handled.
    last.expect("ready")
    until(lambda: len(sleeper.state().woken) >= sent, "all timers", timeout_s=60)
    until(lambda: pending_count(store) == 0, "that none is left")
    last.terminate()
    assert last.wait() == 0
    state = sleeper.state()
    print(
        f"{in_flight} killed with their commit under way, {in_hand} with a claim in hand: "
        f"{sent} timers, {len(state.woken)} woken, {len(state.early)} early"
    )
    assert sorted(state.woken) == list(range(sent)), "each once"
    assert state.early == []
    done = sum(store.read(queue.counts, name).done for name in QUEUES)
    assert done == sent


def test_timers_due_during_downtime_fire_once_and_in_order(
    home: Path,
) -> None:
    opened = stores.open(home, limits=LIMITS)
    with opened as store, app.open(store, roles=("orchestrator", "world")) as runtime:
        sleeper = runtime.world(Sleeper, "sleeper")
        # Timers set later are due earlier.
        sleeps = [
            TimerRequested(n, 0.5 + n / 50, calendar=bool(n % 2)) for n in reversed(range(COUNT))
        ]
        runtime.send_many([(sleeper, event) for event in sleeps])
        until(lambda: pending_count(store) == COUNT, "timers that are set")
        due_ns = store.now_ns() + 2 * S
    until(lambda: not writers_of(home), "that the writer has left")
    with stores.open(home, limits=LIMITS) as store:
        until(lambda: store.now_ns() > due_ns, "that all are overdue")
        with app.open(store, roles=("orchestrator", "world", "timer")) as runtime:
            sleeper = runtime.world(Sleeper, "sleeper")
            until(lambda: len(sleeper.state().woken) >= COUNT, "all timers")
            state = sleeper.state()
    assert sorted(state.woken) == list(range(COUNT))
    for by_clock in (0, 1):
        fired = [n for n in state.woken if n % 2 == by_clock]
        assert fired == sorted(fired), "in the order of their times"
    assert state.early == []


@pytest.mark.slow
def test_timers_reach_a_world_after_its_worker_was_killed(up: Start, store: Store) -> None:
    """Another worker hosts the world when the timers fire."""
    up("orchestrator")
    first = up("world")
    with app.open(store, roles=()) as runtime:
        sleeper = runtime.world(Sleeper, "sleeper")
        for n in range(20):
            sleeper.send(TimerRequested(n, 1 + n / 20, calendar=bool(n % 2)))
        until(lambda: pending_count(store) == 20, "timers that are set")
        first.kill()
        up("timer")
        up("world")
        until(lambda: len(sleeper.state().woken) >= 20, "all timers", timeout_s=60)
        state = sleeper.state()
    assert sorted(state.woken) == list(range(20))
    assert state.early == []
