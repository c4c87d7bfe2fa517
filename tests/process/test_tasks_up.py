"""`holdfast up --role task`: the queues it serves, what it costs while nothing happens, what it refuses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.store.api import Store
from tests.process import tasking
from tests.process.conftest import LIMITS
from tests.process.watch import Seen, seen, until, writer_of
from tests.processes import Proc

MODULES = ("holdfast.cli.up", "holdfast.roles.task_worker")

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.tasking:app"]
MEASURED_S = 5.0
CPU_SHARE_MAX = 0.01

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def rt(store: Store) -> Runtime:
    made: Runtime = tasking.app.open(store, roles=())
    return made


@pytest.fixture
def up(home: Path, tmp_path: Path, store: Store) -> Iterator[Up]:
    with ExitStack() as running:

        def up(*options: str, ready: str | None = "ready") -> Proc:
            argv = [*UP, "--store", str(home), "--role", "task", *options]
            env = {tasking.LOG: str(tmp_path / "runs")}
            return running.enter_context(Proc.spawn(argv, ready=ready, env=env))

        yield up


def test_it_serves_the_queues_it_is_given_and_no_other(up: Up, rt: Runtime) -> None:
    up("--queues", "a,b")
    in_a, in_b = (rt.submit(tasking.first.options(queue=queue)) for queue in "ab")
    elsewhere = rt.submit(tasking.first)
    assert (in_a.result(30), in_b.result(30)) == ("done", "done")
    up()
    assert elsewhere.result(30) == "done"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--queues", "a,,b"), "queue"),
        (("--concurrency", "0"), "concurrency"),
        (("--grace-s", "nan"), "grace"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused_at_the_start(
    up: Up, options: tuple[str, ...], word: str
) -> None:
    process = up(*options, ready=None)
    assert process.wait() == 1
    assert word in process.errors[-1]


def test_an_app_without_tasks_has_no_task_worker(home: Path) -> None:
    with stores.open(home, limits=LIMITS):
        argv = [*UP[:-1], "tests.process.counting:app", "--store", str(home), "--role", "task"]
        with Proc.spawn(argv, ready=None) as process:
            assert process.wait() == 1
            assert "tasks" in process.errors[-1]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_that_has_nothing_to_do_uses_no_cpu(up: Up, rt: Runtime, home: Path) -> None:
    worker = up()
    # Not before the first task: by then everything is loaded.
    assert rt.submit(tasking.first).result(30) == "done"
    rt.submit(tasking.first.options(delay_s=3600))
    watched = {"worker": seen(worker.pid), "writer": writer_of(home)}
    settle(watched)
    began_s = time.monotonic()
    before = {who: process.cpu_s() for who, process in watched.items()}
    until(lambda: time.monotonic() - began_s > MEASURED_S, "the measured time")
    passed_s = time.monotonic() - began_s
    for who, process in watched.items():
        share = (process.cpu_s() - before[who]) / passed_s
        print(f"idle task {who}: {100 * share:.2f} % of a core over {passed_s:.1f} s")
        assert share < CPU_SHARE_MAX, who


def settle(watched: dict[str, Seen]) -> None:
    """Wait until nothing has been used for half a second: what came before is not counted."""
    used, since_s = -1.0, time.monotonic()

    def quiet() -> bool:
        nonlocal used, since_s
        now = sum(process.cpu_s() for process in watched.values())
        if now != used:
            used, since_s = now, time.monotonic()
        return time.monotonic() - since_s > 0.5

    until(quiet, "that it comes to rest")
