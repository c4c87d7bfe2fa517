"""`holdfast up` in real processes: serving, draining, kills, failed roles and stuck reducers."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.cli import main
from holdfast.durable import lease as leases
from holdfast.store.api import Store
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.world import catalog
from holdfast.world.catalog import WorldStatus, subject_of
from tests.process.conftest import LIMITS
from tests.process.counter_app import Added, Broken, Counter, Gripped, Hung, app
from tests.process.watch import until
from tests.processes import Proc, python_proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.counter_app:app"]
EXIT_STUCK = 75
# `holdfast up` with a shorter last resort: by default it comes five seconds after the watchdog.
UP_WITH_SHORT_HARD_TIMEOUT = """
import sys
from holdfast.cli import main, up
up.HARD_TIMEOUT_EXTRA_S = 2.0
sys.exit(main(["up", "tests.process.counter_app:app", *sys.argv[1:]]))
"""
# A failover with the short lease of the test ends before this. With the default lease it would not have started.
FAILOVER_S = 9.0

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def runtime(store: Store) -> Runtime:
    """A client runtime without roles."""
    made: Runtime = app.open(store, roles=())
    return made


@pytest.fixture
def up(home: Path, store: Store) -> Iterator[Up]:
    """Starts workers by name and closes them at the end of the test."""
    started: list[Proc] = []

    def up(
        worker: str,
        *options: object,
        ready: str | None = "ready",
        command: Sequence[str] = UP,
    ) -> Proc:
        argv = [*command, "--store", str(home), "--worker", worker, *map(str, options)]
        started.append(Proc.spawn(argv, ready=ready))
        return started[-1]

    yield up
    for proc in started:
        proc.close()


def up_two(up: Up, *options: object) -> dict[str, Proc]:
    """Start two workers at the same time."""
    workers = {name: up(name, *options, ready=None) for name in ("one", "two")}
    for worker in workers.values():
        worker.expect("ready")
    return workers


def lease_holder(store: Store, world: WorldHandle[Any]) -> str:
    """The worker that holds the lease of the world, or empty."""

    def look(txn: Any) -> str:
        world_id = catalog.find_id(txn, app.universe, "Counter", world.name)
        found = leases.current_status(txn, subject_of(app.universe, world_id or ""))
        live = found is not None and found.is_live(txn.now_ns, txn.generation)
        return found.worker if live and found is not None else ""

    return store.read(look)


# -- serving -------------------------------------------------------------------------------------


def test_up_prints_ready_and_serves_worlds(up: Up, runtime: Runtime) -> None:
    worker = up("one")
    assert worker.lines == ["ready one"]
    assert runtime.world(Counter, "a").ask(Added(5)) == 5


def test_up_handles_events_sent_by_another_process(up: Up, home: Path, runtime: Runtime) -> None:
    up("one")
    code = f"""
    from tests.process.counter_app import Added, Counter, app
    with app.open({str(home)!r}, roles=()) as rt:
        print("sent", rt.world(Counter, "a").send(Added(5)), flush=True)
    """
    with python_proc(code, ready="sent") as sender:
        assert sender.lines == ["sent 1"]
        assert sender.wait() == 0
    assert runtime.world(Counter, "a").ask(Added(2)) == 7


def test_up_runs_roles_in_separate_processes(up: Up, runtime: Runtime) -> None:
    up("leader", "--role", "orchestrator")
    world_worker = up("hands", "--role", "world")
    assert runtime.world(Counter, "a").ask(Added(5)) == 5
    assert lease_holder(runtime.store, runtime.world(Counter, "a")) == "hands"
    assert world_worker.running


def test_up_prints_the_ready_line_as_json(up: Up, store: Store) -> None:
    worker = up("one", "--json", "--role", "world", ready='{"ready"')
    assert '"one"' in worker.lines[0]
    assert '"roles": ["world"]' in worker.lines[0]


# -- draining and kills --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_the_worker_and_releases_its_leases(
    up: Up, runtime: Runtime, number: signal.Signals
) -> None:
    """The leases last an hour. Another worker can only take over if the signal releases them."""
    world = runtime.world(Counter, "a")
    workers = up_two(up, "--lease-s", 3600)
    assert world.ask(Added(5)) == 5
    first = workers[lease_holder(runtime.store, world)]
    os.kill(first.pid, number)
    assert first.wait() == 0
    assert first.errors == []
    assert world.ask(Added(2)) == 7
    second = workers[lease_holder(runtime.store, world)]
    assert second is not first


def test_drained_worker_hosts_its_worlds_again_after_a_restart(up: Up, runtime: Runtime) -> None:
    world = runtime.world(Counter, "a")
    for total, name in ((1, "one"), (2, "one"), (3, "another")):
        worker = up(name, "--lease-s", 3600)
        assert world.ask(Added(1)) == total
        worker.terminate()
        assert worker.wait() == 0


def test_worlds_of_a_killed_worker_fail_over_within_the_lease(up: Up, runtime: Runtime) -> None:
    world = runtime.world(Counter, "a")
    workers = up_two(up, "--lease-s", 2)
    sent = [world.ask(Added(1)) for _ in range(20)]
    first = workers[lease_holder(runtime.store, world)]
    first.kill()
    began = time.monotonic()
    unread = [world.send(Added(1)) for _ in range(20)]
    assert world.ask(Added(1)) == 41
    assert time.monotonic() - began < FAILOVER_S < WorldWorkerPolicy().lease_ttl_s
    assert workers[lease_holder(runtime.store, world)] is not first
    journal = world.journal()
    assert [entry.step.seq for entry in journal] == list(range(1, 42))
    assert len(sent) + len(unread) + 1 == len(journal)


def test_events_sent_without_a_worker_wait_for_the_next_worker(up: Up, runtime: Runtime) -> None:
    worlds = [runtime.world(Counter, f"w{n}") for n in range(10)]
    up("one", "--lease-s", 1).kill()
    for n in range(100):
        worlds[n % 10].send(Added(n))
    up("two", "--lease-s", 1)
    totals = [world.ask(Added(0)) for world in worlds]
    assert sum(totals) == sum(range(100))
    for at, world in enumerate(worlds):
        assert world.state().seen == [*range(at, 100, 10), 0]


def test_stopped_worker_loses_its_worlds_and_keeps_running(up: Up, runtime: Runtime) -> None:
    world = runtime.world(Counter, "a")
    workers = up_two(up, "--lease-s", 1)
    assert world.ask(Added(1)) == 1
    zombie = workers[lease_holder(runtime.store, world)]
    zombie.stop()
    assert world.ask(Added(1)) == 2
    zombie.cont()
    for total in range(3, 23):
        assert world.ask(Added(1)) == total
    assert [entry.step.seq for entry in world.journal()] == list(range(1, 23))
    assert all(worker.running for worker in workers.values())


def test_workers_drain_moves_worlds_without_losing_events(
    up: Up, home: Path, runtime: Runtime
) -> None:
    world = runtime.world(Counter, "a")
    for name in ("one", "two"):
        up(name, "--lease-s", 3600)
    assert world.ask(Added(1)) == 1
    first = lease_holder(runtime.store, world)
    assert main(["workers", "drain", first, "--store", str(home)]) == 0
    for _ in range(100):
        world.send(Added(1))
    assert world.ask(Added(1)) == 102
    until(lambda: lease_holder(runtime.store, world) not in ("", first), "the other worker")
    assert world.ask(Added(1)) == 103
    assert [entry.step.seq for entry in world.journal()] == list(range(1, 104))


# -- failures ------------------------------------------------------------------------------------


def test_failed_role_ends_up_with_one_error_line(up: Up, runtime: Runtime) -> None:
    worker = up("one")
    runtime.world(Counter, "a").send(Broken())
    assert worker.wait() == 1
    [line] = worker.errors
    assert line.startswith(
        "holdfast: role_failed: role='world' why='Beyond: no role survives this'"
    )


def test_up_with_an_unknown_app_exits_with_usage_error(home: Path, store: Store) -> None:
    argv = [*UP[:-1], "tests.process:app", "--store", str(home)]
    with Proc.spawn(argv, ready=None) as proc:
        assert proc.wait() == 2
        [line] = proc.errors
        assert line.startswith("holdfast: no_app: ")


@pytest.mark.parametrize(
    "option", [("--lease-s", "0"), ("--stuck-s", "nan"), ("--stuck-max", "0"), ("--role", "king")]
)
def test_up_refuses_invalid_options(home: Path, store: Store, option: tuple[str, str]) -> None:
    with Proc.spawn([*UP, "--store", str(home), *option], ready=None) as proc:
        assert proc.wait() in (1, 2)
        assert proc.lines == []


# -- stuck reducers ------------------------------------------------------------------------------


def test_stuck_reducer_ends_the_process_and_names_its_world(up: Up, runtime: Runtime) -> None:
    worker = up("one", "--stuck-s", 1)
    world = runtime.world(Counter, "a")
    assert world.ask(Added(1)) == 1
    world.send(Hung())
    assert worker.wait() == EXIT_STUCK
    [line] = worker.errors
    assert line.startswith("holdfast: stuck: role=world world=Counter/a seq=2 for_s=1 ")
    assert world.state().total == 1


@pytest.mark.slow
def test_stuck_reducer_that_holds_the_gil_ends_the_process(up: Up, runtime: Runtime) -> None:
    command = [sys.executable, "-c", UP_WITH_SHORT_HARD_TIMEOUT]
    worker = up("one", "--stuck-s", 1, command=command)
    runtime.world(Counter, "a").send(Gripped())
    assert worker.wait() == 1
    assert any("Timeout" in line for line in worker.errors)


def test_idle_worker_is_not_reported_as_stuck(up: Up, runtime: Runtime) -> None:
    worker = up("one", "--stuck-s", 1)
    world = runtime.world(Counter, "a")
    began = time.monotonic()
    # The watchdog looks four times in this second.
    until(lambda: time.monotonic() - began > 2.0, "seconds without work")
    assert world.ask(Added(1)) == 1
    assert worker.running


@pytest.mark.slow
def test_world_with_a_repeatedly_stuck_reducer_is_parked(up: Up, runtime: Runtime) -> None:
    """The test restarts the worker each time, as a supervisor does on exit code 75."""
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
        return culprit.record().status is WorldStatus.PARKED

    until(parked, "the culprit to be parked", timeout_s=60)
    assert set(exits) == {EXIT_STUCK}
    blocker = culprit.record().blocker
    assert blocker is not None
    assert blocker.code == "reducer_stuck"
    assert [world.ask(Added(1)) for world in others] == [3] * 5
    assert {world.record().status for world in others} == {WorldStatus.ACTIVE}
    assert culprit.state().total == 1
