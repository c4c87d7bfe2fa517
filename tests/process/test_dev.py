"""`holdfast dev` in real processes: a changed source file replaces the code of the worker and keeps the store."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.cli.source_files import SourceFiles
from holdfast.tasks.ids import parse_task_id
from holdfast.tasks.queries import get_task
from holdfast.tasks.states import TaskState
from tests.process.test_up_http import call
from tests.process.watch import OsProcess, assert_no_client_left, os_process, until
from tests.processes import TIMEOUT_S, Proc

MODULES = ("holdfast.cli.dev", "holdfast.cli.parent_pipe", "holdfast.cli.source_files")

CODE = """
import pathlib, time
import holdfast as hf

@hf.task
def scale(n: int) -> int:
    pathlib.Path("started").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return FACTOR * n

app = hf.App("shop", tasks=[scale])
"""

pytestmark = pytest.mark.timeout(120)


def write(directory: Path, code: str) -> None:
    """Write the file of the application as an editor does: a new file in the place of the old one."""
    (directory / "new").write_text(code, encoding="utf-8")
    os.replace(directory / "new", directory / "shop.py")


def code_of(factor: int) -> str:
    return CODE.replace("FACTOR", str(factor))


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Proc]:
    write(tmp_path, code_of(2))
    argv = [sys.executable, "-m", "holdfast.cli", "dev", "shop:app", "--http", "127.0.0.1:0"]
    proc = Proc.spawn(
        [*argv, "--store", "data", "--worker", "one"], ready="ready one", cwd=tmp_path
    )
    yield proc
    proc.close()
    assert_no_client_left(tmp_path / "data")


def submit(proc: Proc) -> str:
    made = call(proc, "POST", "/v1/tasks", {"name": "scale", "args": [7]})
    return str(made["id"])


def await_error(proc: Proc, text: str) -> None:
    until(lambda: any(text in line for line in proc.errors), text)


@pytest.mark.slow
def test_dev_reloads_changed_code_keeps_the_store_and_prints_its_errors(
    dev: Proc, tmp_path: Path
) -> None:
    first = submit(dev)
    until((tmp_path / "started").exists, "the task runs")
    write(tmp_path, "def broken(:\n")
    await_error(dev, "reload: shop.py changed")
    # The old code stops as at SIGTERM: its running task ends.
    (tmp_path / "go").touch()
    await_error(dev, "SyntaxError")
    await_error(dev, "ended with code 2; it starts at the next change")
    write(tmp_path, code_of(3))
    dev.expect("ready one")
    tasks = [call(dev, "GET", f"/v1/tasks/{id}?wait_s=30") for id in (first, submit(dev))]
    assert [(task["result"], task["attempt"]) for task in tasks] == [(14, 1), (21, 1)]
    dev.terminate()
    assert dev.wait() == 0


def children_of(pid: int) -> list[OsProcess]:
    """The children of a process, without its zombies."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(os_process, map(int, found)) if child.alive]


def test_application_stops_when_dev_is_killed(dev: Proc, tmp_path: Path) -> None:
    task = submit(dev)
    until((tmp_path / "started").exists, "the task runs")
    [child] = children_of(dev.pid)
    assert dev.kill() == -signal.SIGKILL
    # The application stops as at SIGTERM: its running task ends.
    (tmp_path / "go").touch()
    assert child.wait(TIMEOUT_S)
    with stores.open(tmp_path / "data") as store:
        row = store.read(get_task, "shop", parse_task_id(task))
    assert (row.status.state, row.status.attempt) == (TaskState.COMPLETED, 1)


def test_changes_of_source_files_are_found_once(tmp_path: Path) -> None:
    for name in ("a.py", "lib/b.py", "data/c.py", ".git/d.py", "venv/pyvenv.cfg", "venv/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1", encoding="utf-8")
    files = SourceFiles(tmp_path, Path("data"))
    assert files.changes() == []
    for name in ("lib/b.py", "data/c.py", ".git/d.py", "venv/e.py", "notes.txt"):
        (tmp_path / name).write_text("x = 12", encoding="utf-8")
    (tmp_path / "holdfast.toml").write_text("", encoding="utf-8")
    (tmp_path / "a.py").unlink()
    assert files.changes() == ["a.py", "holdfast.toml", "lib/b.py"]
    assert files.changes() == []
