"""A pytest plugin: the worker processes import different test modules first.

Python compiles a module when a process imports it for the first time, and pytest rewrites its assertions. The result
is stored for all later imports. Without this plugin the workers of the first run after a checkout collect the same
modules at the same time, so each worker compiles all of them. With it, each worker imports its share before the
collection and loads what other workers have stored.
"""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def pytest_collection(session: Any) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    ignored = [Path(path).resolve() for path in session.config.getoption("ignore") or ()]
    directories = [Path(arg).resolve() for arg in session.config.args]
    modules = modules_below(directories, ignored, root=session.config.rootpath)
    number = int(worker["workerid"].removeprefix("gw")) % worker["workercount"]
    for name in share(modules, number, worker["workercount"]):
        try:
            importlib.import_module(name)
        except (Exception, pytest.skip.Exception):
            # The collection imports it again, and reports the error.
            continue


def modules_below(directories: Iterable[Path], ignored: Sequence[Path], *, root: Path) -> list[str]:
    """Return the names of the test modules below directories of `root`."""
    files = {file for directory in directories for file in directory.rglob("test_*.py")}
    return [
        ".".join(file.relative_to(root).with_suffix("").parts)
        for file in sorted(files)
        if file.is_relative_to(root) and not any(file.is_relative_to(path) for path in ignored)
    ]


def share(modules: Sequence[str], number: int, count: int) -> list[str]:
    """Return the modules that worker `number` of `count` imports first."""
    return list(modules[number::count])
