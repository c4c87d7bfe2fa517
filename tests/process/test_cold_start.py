"""Cold start: the modules that a process imports before it starts the writer, before its first task, and never."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import holdfast.store
from holdfast.config import WriterLimits
from holdfast.store.lmdb import writer, writer_process
from tests.process.watch import until

MODULES = (
    "holdfast.store.lmdb.writer_process",
    "holdfast.store.lmdb.writer_address",
    "holdfast.app.app",
)

DECLARE_SCRIPT = """
import json, sys
import holdfast as hf

@hf.task
def double(number: int) -> int:
    return 2 * number

app = hf.App("cold", tasks=[double])
"""
RUN_SCRIPT = """
with app.open(sys.argv[1]) as runtime:
    assert runtime.submit(double, 4).result(60) == 8
"""
PRINT_MODULES_SCRIPT = "print(json.dumps(sorted(sys.modules)))"


@cache
def modules_after(source: str, *argv: str) -> set[str]:
    """The names of the modules that a new interpreter has imported after it ran the source."""
    ran = subprocess.run(
        [sys.executable, "-c", source + PRINT_MODULES_SCRIPT, *argv],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(json.loads(ran.stdout))


def modules_of(package: str, modules: set[str]) -> set[str]:
    return {name for name in modules if name == package or name.startswith(f"{package}.")}


@pytest.mark.parametrize(
    "package",
    [
        "holdfast.workers", "holdfast.runner", "holdfast.leadership", "holdfast.effects",
        "holdfast.app.runtime", "holdfast.app.builtin_effects", "holdfast.world.context",
        "holdfast.store.engine", "holdfast.store.lmdb.store", "lmdb", "asyncio", "subprocess", "zoneinfo",
    ],
)  # fmt: skip
def test_declaring_tasks_does_not_import_the_runtime(package: str, declared: set[str]) -> None:
    assert modules_of(package, declared) == set()


@pytest.mark.parametrize(
    "package",
    [
        "holdfast.app.world_handle", "holdfast.app.universe_location", "holdfast.store.admin.routing", "tomllib",
        "holdfast.world.fork", "holdfast.world.fork_inheritance", "holdfast.dispatch.log",
        "holdfast.workers.dispatch.dispatcher", "holdfast.ops", "holdfast.sim", "holdfast.adapters",
        "multiprocessing", "http", "email", "psycopg",
    ],
)  # fmt: skip
def test_running_a_task_does_not_import_unused_packages(package: str, done: set[str]) -> None:
    assert "holdfast.workers.tasks.worker" in done
    assert modules_of(package, done) == set()


@pytest.mark.parametrize(
    "package",
    ["holdfast.store.lmdb.writer", "holdfast.store.engine", "holdfast.store.lmdb.protocol"],
)
def test_starting_a_writer_does_not_import_its_code_in_the_client(package: str) -> None:
    assert (
        modules_of(package, modules_after("import json, sys, holdfast.store.lmdb.writer_process\n"))
        == set()
    )


@pytest.mark.parametrize(
    "package", ["asyncio", "subprocess", "holdfast.tasks", "holdfast.world", "holdfast.durable"]
)
def test_writer_module_does_not_import_client_operations(package: str) -> None:
    assert (
        modules_of(package, modules_after("import json, sys, holdfast.store.lmdb.writer\n"))
        == set()
    )


@pytest.mark.parametrize("name", writer._PRELOADED_MODULES)
def test_modules_preloaded_by_the_writer_exist(name: str) -> None:
    assert importlib.import_module(name)


def test_open_closes_the_pipe_of_a_prestarted_writer(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    writer_process.prestart_writer(path, limits=WriterLimits(idle_exit_s=5))
    status_pipe = writer_process._prestarted[path].stdout
    assert status_pipe is not None
    until(lambda: _accepts_connections(path), "a writer that listens")
    with holdfast.store.open(path):
        assert path not in writer_process._prestarted
        assert status_pipe.closed


def test_open_connects_to_the_prestarted_writer(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    writer_process.prestart_writer(path, limits=WriterLimits(idle_exit_s=5))
    prestarted_pid = writer_process._prestarted[path].pid
    with holdfast.store.open(path) as store:
        assert path not in writer_process._prestarted
        assert prestarted_pid == _writer_pid(path)
        assert store.now_ns() > 0


@pytest.fixture(scope="module")
def declared() -> set[str]:
    return modules_after(DECLARE_SCRIPT)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return modules_after(
        DECLARE_SCRIPT + RUN_SCRIPT, os.fspath(tmp_path_factory.mktemp("cold") / "data")
    )


def _accepts_connections(path: Path) -> bool:
    try:
        writer_process.connect(path).close()
    except OSError:
        return False
    return True


def _writer_pid(path: Path) -> int:
    with writer_process.connect(path) as sock:
        return writer_process.peer_of(sock)[0]
