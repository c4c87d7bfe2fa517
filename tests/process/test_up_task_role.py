"""`holdfast up --role task`: the queues that it serves, its CPU use while idle, its invalid options."""

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
from tests.process import task_app
from tests.process.conftest import LIMITS
from tests.process.watch import OsProcess, os_process, until, writer_of
from tests.processes import Proc

MODULES = ("holdfast.cli.up", "holdfast.workers.tasks.worker")

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.task_app:app"]
MEASURED_S = 5.0
CPU_SHARE_MAX = 0.01

Up = Callable[..., Proc]


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with stores.open(home, limits=LIMITS) as opened:
        yield opened


@pytest.fixture
def rt(store: Store) -> Runtime:
    made: Runtime = task_app.app.open(store, roles=())
    return made


@pytest.fixture
def up(home: Path, tmp_path: Path, store: Store) -> Iterator[Up]:
    with ExitStack() as running:

        def up(*options: str, ready: str | None = "ready") -> Proc:
            argv = [*UP, "--store", str(home), "--role", "task", *options]
            env = {task_app.LOG: str(tmp_path / "runs")}
            return running.enter_context(Proc.spawn(argv, ready=ready, env=env))

        yield up


def test_up_serves_only_the_queues_of_its_option(up: Up, rt: Runtime) -> None:
    up("--queues", "a,b")
    in_a, in_b = (rt.submit(task_app.first.options(queue=queue)) for queue in "ab")
    elsewhere = rt.submit(task_app.first)
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
def test_up_refuses_invalid_task_options(up: Up, options: tuple[str, ...], word: str) -> None:
    process = up(*options, ready=None)
    assert process.wait() == 1
    assert word in process.errors[-1]


def test_up_role_task_refuses_an_app_without_tasks(home: Path) -> None:
    with stores.open(home, limits=LIMITS):
        argv = [*UP[:-1], "tests.process.counter_app:app", "--store", str(home), "--role", "task"]
        with Proc.spawn(argv, ready=None) as process:
            assert process.wait() == 1
            assert "tasks" in process.errors[-1]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_idle_task_worker_uses_no_cpu(up: Up, rt: Runtime, home: Path) -> None:
    worker = up()
    # Measure after the first task, when every module is imported.
    assert rt.submit(task_app.first).result(30) == "done"
    rt.submit(task_app.first.options(delay_s=3600))
    watched = {"worker": os_process(worker.pid), "writer": writer_of(home)}
    wait_until_cpu_idle(watched)
    began_s = time.monotonic()
    before = {name: process.cpu_s() for name, process in watched.items()}
    until(lambda: time.monotonic() - began_s > MEASURED_S, "the measured time")
    passed_s = time.monotonic() - began_s
    for name, process in watched.items():
        share = (process.cpu_s() - before[name]) / passed_s
        print(f"idle task {name}: {100 * share:.2f} % of a core over {passed_s:.1f} s")
        assert share < CPU_SHARE_MAX, name


def wait_until_cpu_idle(watched: dict[str, OsProcess]) -> None:
    """Wait until the processes have used no CPU time for half a second."""
    used, since_s = -1.0, time.monotonic()

    def quiet() -> bool:
        nonlocal used, since_s
        now = sum(process.cpu_s() for process in watched.values())
        if now != used:
            used, since_s = now, time.monotonic()
        return time.monotonic() - since_s > 0.5

    until(quiet, "that it comes to rest")
