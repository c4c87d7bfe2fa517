"""Adapters and dispatchers in real processes, killed after typing a text and before recording it."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.adapters.dispatch_protocol import set_leader_pane
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.dispatch import log as dispatch_log
from holdfast.dispatch import notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.request import DispatchBacklog, DispatchRecord, DispatchStatus
from holdfast.store.api import Store
from tests.process.conftest import LIMITS
from tests.process.dispatch_app import BARRIER, SOCKET, Foreman, Told, app
from tests.process.watch import KILLS, until
from tests.processes import Proc
from tests.tmux_panes import PaneAgent, TmuxServer, tmux

__all__ = ["tmux"]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.dispatch_app:app"]
U = "crew"
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


def is_at_barrier(proc: Proc) -> bool:
    return any(line.startswith("typed") for line in list(proc.lines))


def typed_numbers(agent: PaneAgent) -> list[int]:
    found = [re.match(r"do number (\d+) \[hf:", text) for text in agent.texts]
    return [int(one[1]) for one in found if one]


def notices(agent: PaneAgent) -> list[str]:
    return [text for text in agent.texts if "reason" in text]


def delivered(store: Store) -> list[DispatchRecord]:
    return store.read(dispatch_log.list_by_status, U, DispatchStatus.DELIVERED, None, 1000)


@pytest.mark.timeout(60 + 10 * KILLS)
def test_dispatch_types_each_text_once_when_adapters_are_killed_after_typing(
    tmux: TmuxServer, up: Up, foreman: WorldHandle[Foreman], store: Store
) -> None:
    agent = tmux.start_agent("worker", "framed")
    for n in range(KILLS):
        foreman.send(Told(n, "worker", "claude" if n % 2 else "codex"))
    adapter = up("adapter", barrier=True)
    kills = 0
    while len(foreman.state().ended) < KILLS:

        def has_progressed(adapter: Proc = adapter) -> bool:
            assert adapter.running, f"ended by itself: {adapter.errors[-20:]}"
            return is_at_barrier(adapter) or len(foreman.state().ended) >= KILLS

        until(has_progressed, f"the next text: {kills} killed, {foreman.state().ended}")
        if is_at_barrier(adapter):
            assert adapter.kill() == -signal.SIGKILL
            kills += 1
            adapter = up("adapter", barrier=True)
    assert kills == KILLS
    assert sorted(foreman.state().ended) == sorted(f"{n} delivered" for n in range(KILLS))
    until(lambda: len(typed_numbers(agent)) >= KILLS, "the last text")
    assert sorted(typed_numbers(agent)) == list(range(KILLS)), "each text once, and no other"
    assert store.read(dispatch_log.backlog, U) == DispatchBacklog(delivered=KILLS)
    assert {record.tries for record in delivered(store)} == {1}
    print(f"{kills} adapters killed between typing and its record: {KILLS} texts, each typed once")


@pytest.mark.timeout(150)
def test_each_dispatch_ends_once_when_adapters_are_killed_at_random(
    tmux: TmuxServer, up: Up, foreman: WorldHandle[Foreman], store: Store
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    kill_times = random.Random(seed)
    agent = tmux.start_agent("worker", "framed")
    adapter = up("adapter", barrier=False)
    count = 0
    for _ in range(KILLS):
        for _each in range(3):
            foreman.send(Told(count, "worker"))
            count += 1
        # Kill at a random time after its next receipt.
        ended_before = len(foreman.state().ended)
        until(
            lambda ended_before=ended_before: len(foreman.state().ended) > ended_before, "a receipt"
        )
        at_s = time.monotonic() + kill_times.random() * 0.3
        until(lambda at_s=at_s: time.monotonic() >= at_s, "the moment")
        adapter.kill()
        adapter = up("adapter", barrier=False)
    until(lambda: len(foreman.state().ended) >= count, f"all after {KILLS} kills", 60)
    ended = dict(one.split() for one in foreman.state().ended)
    assert len(foreman.state().ended) == len(ended) == count, "one end each"
    # A request whose claim expired with three killed adapters fails, like any effect.
    given_up = {int(n) for n, how in ended.items() if how == "expiries_exhausted"}
    done = {int(n) for n, how in ended.items() if how == "delivered"}
    assert done | given_up == set(range(count))
    assert store.read(dispatch_log.backlog, U) == DispatchBacklog(
        delivered=len(done), failed=len(given_up)
    )
    until(lambda: set(typed_numbers(agent)) >= done, "the last text")
    typed = typed_numbers(agent)
    assert len(typed) == len(set(typed)), f"none is typed twice: {agent.texts}"
    assert set(typed) - given_up == done, f"none is lost: {agent.texts}"


@pytest.mark.timeout(120)
def test_leader_is_notified_once_when_dispatchers_are_killed_after_notifying(
    tmux: TmuxServer, up: Up, store: Store
) -> None:
    agent = tmux.start_agent("lead", "framed")
    set_leader_pane(store, U, pane="lead", socket=tmux.socket)
    log = DispatchLog(store, U)
    dispatcher = up("dispatch", barrier=True)
    kills = 0
    for n in range(3):
        log.request(f"r{n}", "work")
        log.failed(f"r{n}", f"reason {n}")
        while store.read(notifications.count_pending, U):

            def has_progressed(dispatcher: Proc = dispatcher) -> bool:
                assert dispatcher.running, f"ended by itself: {dispatcher.errors[-20:]}"
                return is_at_barrier(dispatcher) or not store.read(notifications.count_pending, U)

            until(has_progressed, f"that {n} is told", timeout_s=30)
            if is_at_barrier(dispatcher):
                dispatcher.kill()
                kills += 1
                dispatcher = up("dispatch", barrier=True)
    assert kills >= 3
    until(lambda: len(notices(agent)) >= 3, "the last notice")
    texts = notices(agent)
    assert [re.findall(r"reason \d", text) for text in texts] == [[f"reason {n}"] for n in range(3)]


@pytest.mark.timeout(60)
def test_dispatch_to_a_late_leader_is_deferred_then_delivered(
    tmux: TmuxServer, up: Up, foreman: WorldHandle[Foreman], store: Store
) -> None:
    up("adapter", barrier=False)
    up("dispatch", barrier=False)
    foreman.send(Told(1, "leader"))
    until(lambda: store.read(dispatch_log.backlog, U).deferred, "that it waits")
    agent = tmux.start_agent("lead", "framed")
    set_leader_pane(store, U, pane="lead", socket=tmux.socket)
    until(lambda: foreman.state().ended, "the receipt")
    assert foreman.state().ended == ["1 delivered"]
    until(lambda: typed_numbers(agent) == [1], "the text")
