"""Adapters and timer workers in real processes: killed between call and receipt, stopped, restarted late."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.durable.dead_letters import DeadLetter
from holdfast.store.api import Store
from holdfast.world import intents
from tests.process.conftest import LIMITS
from tests.process.payment_app import (
    CRASH_EFFECTS,
    LOG,
    WIRES_AT_ONCE,
    PaymentRequested,
    Ruined,
    SleepRequested,
    Till,
    Wired,
    app,
)
from tests.process.watch import KILLS, assert_no_process_left, until
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.payment_app:app"]
ADAPTERS = 4
WIRES = WIRES_AT_ONCE * KILLS
# Seconds without progress after which a full pool counts as hung ...
STALLED_FULL_S = 0.3
# ... and a pool with free slots: a kill expires a claim that the pool has not started.
STALLED_IDLE_S = 5.0
# The calls of a dead adapter are repeated after this time.
LEASE_S = "1"
# The time between two timers.
TIMER_STEP_S = 0.05

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def worlds(store: Store) -> Iterator[Runtime]:
    """The runtime that hosts the worlds. Adapters and timer workers run in other processes."""
    runtime: Runtime = app.open(store, roles=("orchestrator", "world"))
    with runtime:
        yield runtime


@pytest.fixture
def till(worlds: Runtime) -> WorldHandle[Till]:
    return worlds.world(Till, "till")


@pytest.fixture
def up(home: Path, tmp_path: Path, store: Store) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(role: str, *options: str, ready: str | None = "ready") -> Proc:
            argv = [*UP, "--store", str(home), "--role", role, "--lease-s", LEASE_S, *options]
            proc = Proc.spawn(argv, ready=ready, env={LOG: str(tmp_path / "calls")})
            return running.enter_context(proc)

        yield up


def calls_by_order(log: Path) -> dict[int, list[tuple[str, int]]]:
    """For each order: the idempotency key and the attempt of each logged call."""
    found: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for line in log.read_text().splitlines():
        n, key, attempt = line.split()
        found[int(n)].append((key, int(attempt)))
    return found


def _is_in_a_call(adapter: Proc) -> bool:
    """Whether the adapter is in a call that hangs."""
    return any(line.startswith("called") for line in list(adapter.lines))


@pytest.mark.timeout(60 + 3 * KILLS)
def test_each_effect_has_one_receipt_when_adapters_are_killed_before_the_receipt(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path
) -> None:
    till.send(PaymentRequested(0))
    adapters = [up("adapter", "--kinds", "pay", ready=None) for _ in range(ADAPTERS)]
    until(lambda: till.state().paid, "the first receipt")
    sent = kills = 0
    while (paid := len(till.state().paid)) <= KILLS:
        # One waiting deadly order per adapter, so that each order costs a separate kill.
        while sent < KILLS and sent - (paid - 1) < ADAPTERS:
            sent += 1
            till.send(PaymentRequested(sent, deadly=True))

        def has_progressed(paid: int = paid) -> bool:
            for adapter in adapters:
                assert adapter.running, f"ended by itself: {adapter.errors[-20:]}"
            return any(map(_is_in_a_call, adapters)) or len(till.state().paid) > paid

        until(has_progressed, f"receipts: {sent} sent, {kills} killed, {paid} paid")
        for index, adapter in enumerate(adapters):
            if _is_in_a_call(adapter):
                assert adapter.kill() == -signal.SIGKILL
                adapter.close()
                kills += 1
                adapters[index] = up("adapter", "--kinds", "pay", ready=None)

    state, calls = till.state(), calls_by_order(tmp_path / "calls")
    repeated = sum(len(made) - 1 for made in calls.values())
    print(
        f"{kills} adapters killed between call and receipt: {KILLS + 1} intents, "
        f"{len(state.paid)} receipts, {repeated} calls repeated, each with its first key"
    )
    assert kills == KILLS
    assert sorted(state.paid) == list(range(KILLS + 1)), "one receipt each, and no other"
    for n in range(1, KILLS + 1):
        assert len(calls[n]) >= 2, f"order {n} was cut short and called again"
        assert len({key for key, _ in calls[n]}) == 1, f"order {n} was called under one key"
    assert len({key for made in calls.values() for key, _ in made}) == KILLS + 1
    counts = store.read(queue.counts, intents.effect_queue("pay", "pay"))
    assert counts == queue.QueueCounts(done=KILLS + 1)


def test_each_async_effect_has_one_receipt_when_its_pool_is_killed(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path
) -> None:
    till.send(Wired(1, WIRES))
    adapter = up("adapter", "--kinds", "wire")
    kills = 0
    while (paid := len(till.state().paid)) < WIRES:
        progress, since_s = (0, paid), time.monotonic()

        def is_stalled(adapter: Proc = adapter) -> bool:
            """Whether every running call hangs: no new call and no receipt for a while."""
            nonlocal progress, since_s
            assert adapter.running, f"ended by itself: {adapter.errors[-20:]}"
            hang = sum(line.startswith("called") for line in list(adapter.lines))
            now = (hang, len(till.state().paid))
            if now != progress:
                progress, since_s = now, time.monotonic()
            quiet_s = STALLED_FULL_S if hang >= WIRES_AT_ONCE else STALLED_IDLE_S
            return now[1] == WIRES or (hang > 0 and time.monotonic() - since_s > quiet_s)

        until(is_stalled, f"receipts: {kills} killed, {paid} paid")
        if _is_in_a_call(adapter):
            adapter.kill()
            kills += 1
            adapter = up("adapter", "--kinds", "wire", ready=None)
    calls = calls_by_order(tmp_path / "calls")
    print(f"{kills} pools killed with coroutines under way: {WIRES} intents, {WIRES} receipts")
    assert sorted(till.state().paid) == list(range(1, WIRES + 1)), "one receipt each, and no other"
    assert all(len(made) >= 2 for made in calls.values())
    assert all(len({key for key, _ in made}) == 1 for made in calls.values())
    assert store.read(queue.counts, intents.effect_queue("pay", "wire")) == queue.QueueCounts(
        done=WIRES
    )


class CrashResult(NamedTuple):
    """The end of ten orders, one of which crashes each adapter that calls it."""

    exits: list[int]
    receipts: list[str]
    deadly_keys: set[str]
    dead: list[DeadLetter]


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CrashResult]:
    """The results of all ways to crash, which run at the same time: most of it is waiting for leases."""
    folder = tmp_path_factory.mktemp("crashes")
    exits: dict[str, list[int]] = {how: [] for how in CRASH_EFFECTS}
    with (
        stores.open(folder / "store", limits=LIMITS) as store,
        app.open(store, roles=("orchestrator", "world")) as runtime,
        contextlib.ExitStack() as running,
    ):

        def start_adapter(how: str) -> Proc:
            options = ["--role", "adapter", "--lease-s", LEASE_S, "--kinds", f"ruin-{how}"]
            env = {LOG: str(folder / how)}
            argv = [*UP, "--store", str(folder / "store"), *options]
            return running.enter_context(Proc.spawn(argv, ready=None, env=env))

        tills = {how: runtime.world(Till, how) for how in CRASH_EFFECTS}
        for how, till in tills.items():
            for n in range(1, 11):
                till.send(Ruined(n, how, deadly=n == 5))
        adapters = {how: start_adapter(how) for how in CRASH_EFFECTS}

        def all_ended() -> bool:
            for how, adapter in adapters.items():
                if not adapter.running:
                    exits[how].append(adapter.wait())
                    adapters[how] = start_adapter(how)
            return all(len(till.state().ruined) >= 10 for till in tills.values())

        until(all_ended, "ten receipts each", timeout_s=60)
        results = {
            how: CrashResult(
                exits[how],
                till.state().ruined,
                {key for key, _ in calls_by_order(folder / how)[5]},
                store.read(queue.list_dead, intents.effect_queue("pay", f"ruin-{how}")),
            )
            for how, till in tills.items()
        }
    assert_no_process_left(folder / "store", LIMITS.idle_exit_s)
    return results


@pytest.mark.parametrize("how", CRASH_EFFECTS)
def test_effect_that_crashes_its_process_gets_one_expiries_exhausted_receipt(
    crashes: dict[str, CrashResult], how: str
) -> None:
    found = crashes[how]
    assert sorted(found.receipts) == sorted(
        "5 timeout expiries_exhausted" if n == 5 else f"{n} ok" for n in range(1, 11)
    )
    died = 7 if how == "exit" else -signal.Signals[how]
    assert found.exits == [died] * 3, "as often as its claims may run out, and no more"
    assert len(found.deadly_keys) == 1
    [letter] = found.dead
    assert (letter.code, letter.expiries) == ("expiries_exhausted", 3)


def test_adapter_stopped_during_its_call_delivers_no_second_receipt(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path
) -> None:
    stopped = up("adapter", "--kinds", "pay")
    till.send(PaymentRequested(1, deadly=True))
    until(lambda: _is_in_a_call(stopped), "the call")
    stopped.stop()
    up("adapter", "--kinds", "pay")
    until(lambda: till.state().paid, "the receipt of the other")
    stopped.cont()
    stopped.send("go on")
    stopped.terminate()
    assert stopped.wait() == 0
    till.send(PaymentRequested(2))
    until(lambda: 2 in till.state().paid, "the next receipt")
    assert (till.state().paid, till.state().attempts) == ([1, 2], [2, 1])
    [first, second] = calls_by_order(tmp_path / "calls")[1]
    assert (first[0], first[1] + 1) == second, "one key, and the next attempt"
    counts = store.read(queue.counts, intents.effect_queue("pay", "pay"))
    assert counts == queue.QueueCounts(done=2)


def test_timers_due_without_a_timer_worker_fire_once_later(
    up: Up, till: WorldHandle[Till], store: Store
) -> None:
    first = up("timer")
    for n in range(20):
        till.send(SleepRequested(n, TIMER_STEP_S * n))
    until(lambda: len(till.state().woken) >= 3, "the first timers")
    first.kill()
    due_ns = store.now_ns() + int(20 * TIMER_STEP_S * S)
    until(lambda: store.now_ns() > due_ns, "that all are overdue")
    up("timer")
    until(lambda: len(till.state().woken) >= 20, "all timers")
    assert sorted(till.state().woken) == list(range(20))


def test_timers_of_a_killed_worker_fire_once_and_not_early(
    up: Up, till: WorldHandle[Till], store: Store
) -> None:
    worker = up("timer")
    began_s = time.monotonic()
    for n in range(30):
        till.send(SleepRequested(n, TIMER_STEP_S * n))
    for _ in range(3):
        worker.kill()
        worker = up("timer")
    until(lambda: len(till.state().woken) >= 30, "all timers", timeout_s=40)
    assert time.monotonic() - began_s >= 29 * TIMER_STEP_S
    assert sorted(till.state().woken) == list(range(30))


def test_adapter_with_an_unknown_effect_kind_does_not_start(up: Up) -> None:
    wrong = up("adapter", "--kinds", "pay,no-such-kind", ready=None)
    assert wrong.wait() == 1
    assert "no-such-kind" in wrong.errors[-1]
