"""Adapters and dispatchers as real processes, killed between typing and writing it down."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.adapters.dispatching import name_leader
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.authority import dispatch_log, replay
from holdfast.authority.dispatch import Backlog, DispatchRecord, DispatchStatus
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.store.api import Store
from tests.panes import Agent, TmuxServer, tmux
from tests.process.conftest import LIMITS
from tests.process.dispatching import BARRIER, SOCKET, Foreman, Told, app
from tests.process.watch import until
from tests.processes import Proc

__all__ = ["tmux"]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.dispatching:app"]
U = "crew"
KILLS = int(os.environ.get("HOLDFAST_TEST_DISPATCH_KILLS", "5"))
LEASE_S = "1"

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def foreman(store: Store) -> Iterator[WorldHandle[Foreman]]:
    runtime: Runtime = app.open(store, roles=("orchestrator", "world"))
    with runtime:
        yield runtime.world(Foreman, "ada")


@pytest.fixture
def up(home: Path, tmp_path: Path, store: Store, tmux: TmuxServer) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(role: str, *, barrier: bool) -> Proc:
            argv = [*UP, "--store", str(home), "--role", role, "--lease-s", LEASE_S]
            env = {SOCKET: tmux.socket, BARRIER: str(tmp_path / "stood") if barrier else ""}
            return running.enter_context(Proc.spawn(argv, ready=None, env=env))

        yield up


def stands(proc: Proc) -> bool:
    return any(line.startswith("typed") for line in list(proc.lines))


def numbers(agent: Agent) -> list[int]:
    found = [re.match(r"do number (\d+) \[hf:", text) for text in agent.texts]
    return [int(one[1]) for one in found if one]


def notices(agent: Agent) -> list[str]:
    return [text for text in agent.texts if "reason" in text]


def delivered(store: Store) -> list[DispatchRecord]:
    return store.read(dispatch_log.listed, U, DispatchStatus.DELIVERED, None, 1000)


@pytest.mark.timeout(60 + 10 * KILLS)
def test_adapters_killed_after_typing_leave_every_text_typed_once(
    tmux: TmuxServer, up: Up, foreman: WorldHandle[Foreman], store: Store
) -> None:
    agent = tmux.agent("worker", "framed")
    for n in range(KILLS):
        foreman.send(Told(n, "worker", "claude" if n % 2 else "codex"))
    adapter = up("adapter", barrier=True)
    kills = 0
    while len(foreman.state().ended) < KILLS:

        def goes_on(adapter: Proc = adapter) -> bool:
            assert adapter.running, f"ended by itself: {adapter.errors[-20:]}"
            return stands(adapter) or len(foreman.state().ended) >= KILLS

        until(goes_on, f"the next text: {kills} killed, {foreman.state().ended}")
        if stands(adapter):
            assert adapter.kill() == -signal.SIGKILL
            kills += 1
            adapter = up("adapter", barrier=True)
    assert kills == KILLS
    assert sorted(foreman.state().ended) == sorted(f"{n} delivered" for n in range(KILLS))
    until(lambda: len(numbers(agent)) >= KILLS, "the last text")
    assert sorted(numbers(agent)) == list(range(KILLS)), "each text once, and no other"
    assert store.read(dispatch_log.backlog, U) == Backlog(delivered=KILLS)
    assert {record.tries for record in delivered(store)} == {1}
    print(f"{kills} adapters killed between typing and its record: {KILLS} texts, each typed once")


@pytest.mark.timeout(150)
def test_adapters_killed_at_any_moment_leave_one_end_for_each_request(
    tmux: TmuxServer, up: Up, foreman: WorldHandle[Foreman], store: Store
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    agent = tmux.agent("worker", "framed")
    adapter = up("adapter", barrier=False)
    count = 0
    for _ in range(KILLS):
        for _each in range(3):
            foreman.send(Told(count, "worker"))
            count += 1
        # Somewhere in the middle of what this one does, after it has done something.
        told = len(foreman.state().ended)
        until(lambda told=told: len(foreman.state().ended) > told, "a receipt")
        at_s = time.monotonic() + moments.random() * 0.3
        until(lambda at_s=at_s: time.monotonic() >= at_s, "the moment")
        adapter.kill()
        adapter = up("adapter", barrier=False)
    until(lambda: len(foreman.state().ended) >= count, f"all after {KILLS} kills", 60)
    ended = dict(one.split() for one in foreman.state().ended)
    assert len(foreman.state().ended) == len(ended) == count, "one end each"
    # One that three adapters died with is given up, as any effect is.
    given_up = {int(n) for n, how in ended.items() if how == "expiries_exhausted"}
    done = {int(n) for n, how in ended.items() if how == "delivered"}
    assert done | given_up == set(range(count))
    assert store.read(dispatch_log.backlog, U) == Backlog(delivered=len(done), failed=len(given_up))
    until(lambda: set(numbers(agent)) >= done, "the last text")
    typed = numbers(agent)
    assert len(typed) == len(set(typed)), f"none is typed twice: {agent.texts}"
    assert set(typed) - given_up == done, f"none is lost: {agent.texts}"


@pytest.mark.timeout(120)
def test_dispatchers_killed_after_telling_the_leader_tell_it_nothing_twice(
    tmux: TmuxServer, up: Up, store: Store
) -> None:
    agent = tmux.agent("lead", "framed")
    name_leader(store, U, pane="lead", socket=tmux.socket)
    log = DispatchLog(store, U)
    dispatcher = up("dispatch", barrier=True)
    kills = 0
    for n in range(3):
        log.request(f"r{n}", "work")
        log.failed(f"r{n}", f"reason {n}")
        while store.read(replay.pending, U):

            def goes_on(dispatcher: Proc = dispatcher) -> bool:
                assert dispatcher.running, f"ended by itself: {dispatcher.errors[-20:]}"
                return stands(dispatcher) or not store.read(replay.pending, U)

            until(goes_on, f"that {n} is told", timeout_s=30)
            if stands(dispatcher):
                dispatcher.kill()
                kills += 1
                dispatcher = up("dispatch", barrier=True)
    assert kills >= 3
    until(lambda: len(notices(agent)) >= 3, "the last notice")
    told = notices(agent)
    assert [re.findall(r"reason \d", text) for text in told] == [[f"reason {n}"] for n in range(3)]


@pytest.mark.timeout(60)
def test_a_leader_that_comes_late_gets_what_waited_for_it(
    tmux: TmuxServer, up: Up, foreman: WorldHandle[Foreman], store: Store
) -> None:
    up("adapter", barrier=False)
    up("dispatch", barrier=False)
    foreman.send(Told(1, "leader"))
    until(lambda: store.read(dispatch_log.backlog, U).deferred, "that it waits")
    agent = tmux.agent("lead", "framed")
    name_leader(store, U, pane="lead", socket=tmux.socket)
    until(lambda: foreman.state().ended, "the receipt")
    assert foreman.state().ended == ["1 delivered"]
    until(lambda: numbers(agent) == [1], "the text")
