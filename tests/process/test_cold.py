"""From the start of a process to its first task: what is imported before the store's process is started, what
with it, and what not at all."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast.store
from holdfast.config import WriterLimits
from holdfast.store import reach, writer
from tests.process.watch import until

MODULES = ("holdfast.store.reach", "holdfast.store.address", "holdfast.app.app")

DECLARED = """
import json, sys
import holdfast as hf

@hf.task
def double(number: int) -> int:
    return 2 * number

app = hf.App("cold", tasks=[double])
"""
DONE = """
with app.open(sys.argv[1]) as runtime:
    assert runtime.submit(double, 4).result(60) == 8
"""
LOADED = "print(json.dumps(sorted(sys.modules)))"


def loaded(source: str, *argv: str) -> set[str]:
    """The modules that a fresh interpreter has when it ran the source."""
    ran = subprocess.run(
        [sys.executable, "-c", source + LOADED, *argv],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(json.loads(ran.stdout))


def of(package: str, modules: set[str]) -> set[str]:
    return {name for name in modules if name == package or name.startswith(f"{package}.")}


@pytest.mark.parametrize(
    "package",
    [
        "holdfast.roles", "holdfast.runner", "holdfast.authority", "holdfast.effects",
        "holdfast.app.runtime", "holdfast.app.shipped", "holdfast.world.context",
        "holdfast.store.engine", "holdfast.store.lmdb", "lmdb", "asyncio", "subprocess", "zoneinfo",
    ],
)  # fmt: skip
def test_tasks_are_declared_without_what_runs_them(package: str, declared: set[str]) -> None:
    assert of(package, declared) == set()


@pytest.mark.parametrize(
    "package",
    [
        "holdfast.app.handle", "holdfast.app.locating", "holdfast.store.mapping", "tomllib",
        "holdfast.world.fork", "holdfast.world.inherit", "holdfast.authority.dispatch_log",
        "holdfast.roles.dispatcher", "holdfast.ops", "holdfast.sim", "holdfast.adapters",
        "multiprocessing", "http", "email", "psycopg",
    ],
)  # fmt: skip
def test_a_task_is_done_without_what_it_has_no_use_for(package: str, done: set[str]) -> None:
    assert "holdfast.roles.task_worker" in done
    assert of(package, done) == set()


@pytest.mark.parametrize(
    "package", ["holdfast.store.writer", "holdfast.store.engine", "holdfast.store.wire"]
)
def test_a_writer_is_started_before_its_code_is_imported_here(package: str) -> None:
    assert of(package, loaded("import json, sys, holdfast.store.reach\n")) == set()


@pytest.mark.parametrize(
    "package", ["asyncio", "subprocess", "holdfast.tasks", "holdfast.world", "holdfast.durable"]
)
def test_a_writer_is_ready_before_it_knows_what_its_clients_will_call(package: str) -> None:
    assert of(package, loaded("import json, sys, holdfast.store.writer\n")) == set()


@pytest.mark.parametrize("name", writer._OPERATIONS)
def test_what_a_writer_imports_ahead_is_there(name: str) -> None:
    assert importlib.import_module(name)


def test_nothing_is_kept_of_a_writer_that_was_ready_before_anybody_asked(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    reach.begin_writer(path, limits=WriterLimits(linger_s=5))
    heard = reach._begun[path].stdout
    assert heard is not None
    until(lambda: _listens(path), "a writer that listens")
    with holdfast.store.open(path):
        assert path not in reach._begun
        assert heard.closed


def test_a_writer_that_was_begun_is_the_one_that_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.mkdir()
    reach.begin_writer(path, limits=WriterLimits(linger_s=5))
    begun = reach._begun[path].pid
    with holdfast.store.open(path) as store:
        assert path not in reach._begun
        assert begun == _pid_of(path)
        assert store.now_ns() > 0


@pytest.fixture(scope="module")
def declared() -> set[str]:
    return loaded(DECLARED)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return loaded(DECLARED + DONE, os.fspath(tmp_path_factory.mktemp("cold") / "data"))


def _listens(path: Path) -> bool:
    try:
        reach.dial(path).close()
    except OSError:
        return False
    return True


def _pid_of(path: Path) -> int:
    with reach.dial(path) as sock:
        return reach.peer_of(sock)[0]
