"""Adapters and timer workers as real processes: killed between call and receipt, gone for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.durable import queue
from holdfast.store.api import Store
from holdfast.world import publish
from tests.process.conftest import LIMITS
from tests.process.paying import (
    LOG,
    WIRES_AT_ONCE,
    Ordered,
    Ruined,
    Slept,
    Till,
    Wired,
    app,
)
from tests.process.watch import until
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.paying:app"]
# In the terms 200; fewer where time is short.
KILLS = int(os.environ.get("HOLDFAST_TEST_KILLS", "12"))
ADAPTERS = 4
WIRES = 40
# Seconds without progress after which a full pool counts as hung ...
STANDS_S = 0.3
# ... and a pool with free places: a kill charges a claim that the pool has not begun.
STANDS_IDLE_S = 5.0
# A dead adapter's calls are made again after this.
LEASE_S = "1"

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def worlds(store: Store) -> Iterator[Runtime]:
    """Worlds live here; adapters and timers elsewhere."""
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


def calls(tmp_path: Path) -> dict[int, list[tuple[str, int]]]:
    """By order: the idempotency key and the attempt of each call, as the outside saw them."""
    found: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for line in (tmp_path / "calls").read_text().splitlines():
        n, key, attempt = line.split()
        found[int(n)].append((key, int(attempt)))
    return found


def _calling(adapter: Proc) -> bool:
    """Whether it is in the middle of a call that does not end."""
    return any(line.startswith("called") for line in list(adapter.lines))


@pytest.mark.timeout(60 + 3 * KILLS)
def test_adapters_killed_between_call_and_receipt_leave_one_receipt_for_each_intent(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path
) -> None:
    till.send(Ordered(0))
    adapters = [up("adapter", "--kinds", "pay", ready=None) for _ in range(ADAPTERS)]
    until(lambda: till.state().paid, "the first receipt")
    sent = kills = 0
    while (paid := len(till.state().paid)) <= KILLS:
        # As many deadly orders wait as there are adapters, so that each is worth a kill of its own.
        while sent < KILLS and sent - (paid - 1) < ADAPTERS:
            sent += 1
            till.send(Ordered(sent, deadly=True))

        def goes_on(paid: int = paid) -> bool:
            for adapter in adapters:
                assert adapter.running, f"ended by itself: {adapter.errors[-20:]}"
            return any(map(_calling, adapters)) or len(till.state().paid) > paid

        until(goes_on, f"receipts: {sent} sent, {kills} killed, {paid} paid")
        for place, adapter in enumerate(adapters):
            if _calling(adapter):
                assert adapter.kill() == -signal.SIGKILL
                adapter.close()
                kills += 1
                adapters[place] = up("adapter", "--kinds", "pay", ready=None)

    state, seen = till.state(), calls(tmp_path)
    repeated = sum(len(made) - 1 for made in seen.values())
    print(
        f"{kills} adapters killed between call and receipt: {KILLS + 1} intents, "
        f"{len(state.paid)} receipts, {repeated} calls repeated, each with its first key"
    )
    assert kills == KILLS
    assert sorted(state.paid) == list(range(KILLS + 1)), "one receipt each, and no other"
    for n in range(1, KILLS + 1):
        assert len(seen[n]) >= 2, f"order {n} was cut short and called again"
        assert len({key for key, _ in seen[n]}) == 1, f"order {n} was called under one key"
    assert len({key for made in seen.values() for key, _ in made}) == KILLS + 1
    counts = store.read(queue.counts, publish.effects("pay", "pay"))
    assert counts == queue.Counts(done=KILLS + 1)


def test_a_pool_killed_with_many_coroutines_under_way_leaves_one_receipt_for_each(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path
) -> None:
    till.send(Wired(1, WIRES))
    adapter = up("adapter", "--kinds", "wire")
    kills = 0
    while (paid := len(till.state().paid)) < WIRES:
        news, since_s = (0, paid), time.monotonic()

        def stands(adapter: Proc = adapter) -> bool:
            """Whether all that is under way hangs: nothing was called or paid for a while."""
            nonlocal news, since_s
            assert adapter.running, f"ended by itself: {adapter.errors[-20:]}"
            hang = sum(line.startswith("called") for line in list(adapter.lines))
            now = (hang, len(till.state().paid))
            if now != news:
                news, since_s = now, time.monotonic()
            quiet_s = STANDS_S if hang >= WIRES_AT_ONCE else STANDS_IDLE_S
            return now[1] == WIRES or (hang > 0 and time.monotonic() - since_s > quiet_s)

        until(stands, f"receipts: {kills} killed, {paid} paid")
        if _calling(adapter):
            adapter.kill()
            kills += 1
            adapter = up("adapter", "--kinds", "wire", ready=None)
    seen = calls(tmp_path)
    print(f"{kills} pools killed with coroutines under way: {WIRES} intents, {WIRES} receipts")
    assert sorted(till.state().paid) == list(range(1, WIRES + 1)), "one receipt each, and no other"
    assert all(len(made) >= 2 for made in seen.values())
    assert all(len({key for key, _ in made}) == 1 for made in seen.values())
    assert store.read(queue.counts, publish.effects("pay", "wire")) == queue.Counts(done=WIRES)


@pytest.mark.parametrize("how", ["exit", "SIGKILL", "SIGSEGV"])
def test_an_effect_that_ends_its_process_ends_in_one_receipt_and_takes_no_other_with_it(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path, how: str
) -> None:
    for n in range(1, 11):
        till.send(Ruined(n, how if n == 5 else ""))
    adapter = up("adapter", "--kinds", "ruin", ready=None)
    exits: list[int] = []

    def all_ended() -> bool:
        nonlocal adapter
        if not adapter.running:
            exits.append(adapter.wait())
            adapter = up("adapter", "--kinds", "ruin", ready=None)
        return len(till.state().ruined) >= 10

    until(all_ended, "ten receipts", timeout_s=60)
    told = till.state().ruined
    assert sorted(told) == sorted(
        "5 timeout expiries_exhausted" if n == 5 else f"{n} ok" for n in range(1, 11)
    )
    died = 7 if how == "exit" else -signal.Signals[how]
    assert exits == [died] * 3, "as often as its claims may run out, and no more"
    assert len({key for key, _ in calls(tmp_path)[5]}) == 1
    [letter] = store.read(queue.dead, publish.effects("pay", "ruin"))
    assert (letter.code, letter.expiries) == ("expiries_exhausted", 3)


def test_an_adapter_that_stood_still_during_its_call_brings_no_second_receipt(
    up: Up, till: WorldHandle[Till], store: Store, tmp_path: Path
) -> None:
    stands = up("adapter", "--kinds", "pay")
    till.send(Ordered(1, deadly=True))
    until(lambda: _calling(stands), "the call")
    stands.stop()
    up("adapter", "--kinds", "pay")
    until(lambda: till.state().paid, "the receipt of the other")
    stands.cont()
    stands.send("go on")
    stands.terminate()
    assert stands.wait() == 0
    till.send(Ordered(2))
    until(lambda: 2 in till.state().paid, "the next receipt")
    assert (till.state().paid, till.state().attempts) == ([1, 2], [2, 1])
    [first, second] = calls(tmp_path)[1]
    assert (first[0], first[1] + 1) == second, "one key, and the next attempt"
    counts = store.read(queue.counts, publish.effects("pay", "pay"))
    assert counts == queue.Counts(done=2)


def test_timers_that_fell_due_while_nobody_was_there_fire_once(
    up: Up, till: WorldHandle[Till], store: Store
) -> None:
    first = up("timer")
    for n in range(20):
        till.send(Slept(n, 0.1 * n))
    until(lambda: len(till.state().woken) >= 3, "the first timers")
    first.kill()
    due_ns = store.now_ns() + 2_500_000_000
    until(lambda: store.now_ns() > due_ns, "that all are overdue")
    up("timer")
    until(lambda: len(till.state().woken) >= 20, "all timers")
    assert sorted(till.state().woken) == list(range(20))


def test_no_timer_of_a_killed_worker_is_early_or_lost(
    up: Up, till: WorldHandle[Till], store: Store
) -> None:
    worker = up("timer")
    began_s = time.monotonic()
    for n in range(30):
        till.send(Slept(n, 0.1 * n))
    for _ in range(3):
        worker.kill()
        worker = up("timer")
    until(lambda: len(till.state().woken) >= 30, "all timers", timeout_s=40)
    assert time.monotonic() - began_s >= 2.9
    assert sorted(till.state().woken) == list(range(30))


def test_an_adapter_for_a_kind_that_is_not_there_does_not_start(up: Up) -> None:
    wrong = up("adapter", "--kinds", "pay,no-such-kind", ready=None)
    assert wrong.wait() == 1
    assert "no-such-kind" in wrong.errors[-1]
