"""`holdfast up` in real processes: it serves, drains, is killed, fails, hangs, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.cli import main
from holdfast.durable import lease as leases
from holdfast.roles.world_worker import WorkerPolicy
from holdfast.store.api import Store
from holdfast.world import catalog
from holdfast.world.catalog import Status, subject_of
from tests.process.conftest import LIMITS
from tests.process.counting import Added, Broken, Counter, Gripped, Hung, app
from tests.process.watch import until
from tests.processes import Proc, python_proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.counting:app"]
EXIT_STUCK = 75
# A failover is over long before this: with the lease that others have it would not have begun by then.
FAILOVER_S = 9.0

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def runtime(store: Store) -> Runtime:
    """A client: it sends and looks, and runs no role."""
    made: Runtime = app.open(store, roles=())
    return made


@pytest.fixture
def up(home: Path, store: Store) -> Iterator[Up]:
    """Start workers by name; all of them are gone when the test ends."""
    started: list[Proc] = []

    def up(worker: str, *options: object, ready: str | None = "ready") -> Proc:
        argv = [*UP, "--store", str(home), "--worker", worker, *map(str, options)]
        started.append(Proc.spawn(argv, ready=ready))
        return started[-1]

    yield up
    for proc in started:
        proc.close()


def holder(store: Store, world: WorldHandle[Any]) -> str:
    """Which worker has the world now; empty for none."""

    def look(txn: Any) -> str:
        world_id = catalog.find(txn, app.universe, "Counter", world.name)
        found = leases.current(txn, subject_of(app.universe, world_id or ""))
        live = found is not None and found.live(txn.now_ns, txn.generation)
        return found.worker if live and found is not None else ""

    return store.read(look)


# -- serving -------------------------------------------------------------------------------------


def test_it_says_that_it_is_ready_and_serves(up: Up, runtime: Runtime) -> None:
    worker = up("one")
    assert worker.lines == ["ready one"]
    assert runtime.world(Counter, "a").ask(Added(5)) == 5


def test_another_process_sends(up: Up, home: Path, runtime: Runtime) -> None:
    up("one")
    code = f"""
    from tests.process.counting import Added, Counter, app
    with app.open({str(home)!r}, roles=()) as rt:
        print("sent", rt.world(Counter, "a").send(Added(5)), flush=True)
    """
    with python_proc(code, ready="sent") as sender:
        assert sender.lines == ["sent 1"]
        assert sender.wait() == 0
    assert runtime.world(Counter, "a").ask(Added(2)) == 7


def test_roles_may_run_in_processes_of_their_own(up: Up, runtime: Runtime) -> None:
    up("leader", "--role", "orchestrator")
    hands = up("hands", "--role", "world")
    assert runtime.world(Counter, "a").ask(Added(5)) == 5
    assert holder(runtime.store, runtime.world(Counter, "a")) == "hands"
    assert hands.running


def test_the_ready_line_as_json(up: Up, store: Store) -> None:
    worker = up("one", "--json", "--role", "world", ready='{"ready"')
    assert '"one"' in worker.lines[0]
    assert '"roles": ["world"]' in worker.lines[0]


# -- going away ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_at_once(up: Up, runtime: Runtime, number: signal.Signals) -> None:
    """With leases of an hour, nobody could go on soon if they were not given back."""
    world = runtime.world(Counter, "a")
    workers = {name: up(name, "--lease-s", 3600) for name in ("one", "two")}
    assert world.ask(Added(5)) == 5
    first = workers[holder(runtime.store, world)]
    os.kill(first.pid, number)
    assert first.wait() == 0
    assert first.errors == []
    assert world.ask(Added(2)) == 7
    second = workers[holder(runtime.store, world)]
    assert second is not first


def test_a_worker_that_drained_comes_back_for_its_worlds(up: Up, runtime: Runtime) -> None:
    world = runtime.world(Counter, "a")
    for total, name in ((1, "one"), (2, "one"), (3, "another")):
        worker = up(name, "--lease-s", 3600)
        assert world.ask(Added(1)) == total
        worker.terminate()
        assert worker.wait() == 0


def test_another_worker_takes_over_within_the_lease(up: Up, runtime: Runtime) -> None:
    world = runtime.world(Counter, "a")
    workers = {name: up(name, "--lease-s", 2) for name in ("one", "two")}
    sent = [world.ask(Added(1)) for _ in range(20)]
    first = workers[holder(runtime.store, world)]
    first.kill()
    began = time.monotonic()
    unread = [world.send(Added(1)) for _ in range(20)]
    assert world.ask(Added(1)) == 41
    assert time.monotonic() - began < FAILOVER_S < WorkerPolicy().lease_ttl_s
    assert workers[holder(runtime.store, world)] is not first
    journal = world.journal()
    assert [entry.step.seq for entry in journal] == list(range(1, 42))
    assert len(sent) + len(unread) + 1 == len(journal)


def test_what_is_sent_while_nobody_runs_waits(up: Up, runtime: Runtime) -> None:
    worlds = [runtime.world(Counter, f"w{n}") for n in range(10)]
    up("one", "--lease-s", 1).kill()
    for n in range(100):
        worlds[n % 10].send(Added(n))
    up("two", "--lease-s", 1)
    totals = [world.ask(Added(0)) for world in worlds]
    assert sum(totals) == sum(range(100))
    for at, world in enumerate(worlds):
        assert world.state().seen == [*range(at, 100, 10), 0]


def test_a_worker_that_was_stopped_finds_its_worlds_taken_and_goes_on(
    up: Up, runtime: Runtime
) -> None:
    world = runtime.world(Counter, "a")
    workers = {name: up(name, "--lease-s", 1) for name in ("one", "two")}
    assert world.ask(Added(1)) == 1
    zombie = workers[holder(runtime.store, world)]
    zombie.stop()
    assert world.ask(Added(1)) == 2
    zombie.cont()
    for total in range(3, 23):
        assert world.ask(Added(1)) == total
    assert [entry.step.seq for entry in world.journal()] == list(range(1, 23))
    assert all(worker.running for worker in workers.values())


def test_a_worker_that_is_drained_gives_up_its_worlds_and_no_message(
    up: Up, home: Path, runtime: Runtime
) -> None:
    world = runtime.world(Counter, "a")
    for name in ("one", "two"):
        up(name, "--lease-s", 3600)
    assert world.ask(Added(1)) == 1
    first = holder(runtime.store, world)
    assert main(["workers", "drain", first, "--store", str(home)]) == 0
    for _ in range(100):
        world.send(Added(1))
    assert world.ask(Added(1)) == 102
    until(lambda: holder(runtime.store, world) not in ("", first), "the other worker")
    assert world.ask(Added(1)) == 103
    assert [entry.step.seq for entry in world.journal()] == list(range(1, 104))


# -- failing -------------------------------------------------------------------------------------


def test_a_role_that_fails_ends_the_process_with_one_line(up: Up, runtime: Runtime) -> None:
    worker = up("one")
    runtime.world(Counter, "a").send(Broken())
    assert worker.wait() == 1
    [line] = worker.errors
    assert line.startswith(
        "holdfast: role_failed: role='world' why='Beyond: no role survives this'"
    )


def test_an_app_that_is_not_there_is_wrong_usage(home: Path, store: Store) -> None:
    argv = [*UP[:-1], "tests.process.nothing:app", "--store", str(home)]
    with Proc.spawn(argv, ready=None) as proc:
        assert proc.wait() == 2
        [line] = proc.errors
        assert line.startswith("holdfast: no_app: ")


@pytest.mark.parametrize(
    "option", [("--lease-s", "0"), ("--stuck-s", "nan"), ("--stuck-max", "0"), ("--role", "king")]
)
def test_an_option_without_sense_is_refused(
    home: Path, store: Store, option: tuple[str, str]
) -> None:
    with Proc.spawn([*UP, "--store", str(home), *option], ready=None) as proc:
        assert proc.wait() in (1, 2)
        assert proc.lines == []


# -- hanging -------------------------------------------------------------------------------------


def test_a_reducer_that_hangs_ends_the_process_and_says_where(up: Up, runtime: Runtime) -> None:
    worker = up("one", "--stuck-s", 2)
    world = runtime.world(Counter, "a")
    assert world.ask(Added(1)) == 1
    world.send(Hung())
    assert worker.wait() == EXIT_STUCK
    [line] = worker.errors
    assert line.startswith("holdfast: stuck: role=world world=Counter/a seq=2 for_s=2 ")
    assert world.state().total == 1


@pytest.mark.slow
def test_a_reducer_that_grips_the_interpreter_is_ended_too(up: Up, runtime: Runtime) -> None:
    worker = up("one", "--stuck-s", 1)
    runtime.world(Counter, "a").send(Gripped())
    assert worker.wait() == 1
    assert any("Timeout" in line for line in worker.errors)


def test_an_idle_worker_is_not_stuck(up: Up, runtime: Runtime) -> None:
    worker = up("one", "--stuck-s", 1)
    world = runtime.world(Counter, "a")
    began = time.monotonic()
    until(lambda: time.monotonic() - began > 3.0, "seconds without work")
    assert world.ask(Added(1)) == 1
    assert worker.running


@pytest.mark.slow
def test_a_world_that_hangs_again_and_again_is_parked_and_the_others_go_on(
    up: Up, runtime: Runtime
) -> None:
    """A supervisor starts the worker again each time, as one does on exit code 75."""
    options = ("--lease-s", 0.5, "--stuck-s", 0.7, "--stuck-max", 3)
    culprit = runtime.world(Counter, "culprit")
    others = [runtime.world(Counter, f"w{n}") for n in range(5)]
    for world in others:
        world.send(Added(1))
    culprit.send(Added(1))
    culprit.send(Hung())
    for world in others:
        world.send(Added(1))
    exits: list[int] = []
    worker = up("one", *options, ready=None)

    def parked() -> bool:
        nonlocal worker
        if not worker.running:
            exits.append(worker.wait())
            worker = up("one", *options, ready=None)
        return culprit.record().status is Status.PARKED

    until(parked, "the culprit to be parked", timeout_s=60)
    assert set(exits) == {EXIT_STUCK}
    blocker = culprit.record().blocker
    assert blocker is not None
    assert blocker.code == "reducer_stuck"
    assert [world.ask(Added(1)) for world in others] == [3] * 5
    assert {world.record().status for world in others} == {Status.ACTIVE}
    assert culprit.state().total == 1
