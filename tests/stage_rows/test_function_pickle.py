"""Pickling of the stage function: its dependencies, and the errors for unpicklable objects and missing modules."""

from __future__ import annotations

import functools
import importlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.spark import function_pickle
from tests.processes import ROOT

pytestmark = pytest.mark.timeout(60)

LOAD = """
import sys
from holdfast.spark.function_pickle import load_function
fn, retry_on, _ = load_function(sys.stdin.buffer.read())
print(fn(20), [kind.__name__ for kind in retry_on])
"""


def load_in_subprocess(data: bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Load and call the function in a separate process."""
    return subprocess.run(
        [sys.executable, "-c", LOAD],
        input=data,
        capture_output=True,
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=False,
        timeout=50,
    )


class Doubler:
    def __call__(self, row: int) -> int:
        return row * 2


def test_dump_function_round_trips_lambdas_partials_closures_and_objects() -> None:
    step = 3
    functions: list[Callable[[int], int]] = [
        lambda row: row + step,
        functools.partial(lambda add, row: row + add, 3),
        Doubler(),
        Doubler().__call__,
    ]
    loaded = [
        function_pickle.load_function(function_pickle.dump_function(fn, (TimeoutError,)))
        for fn in functions
    ]
    assert [fn(20) for fn, _, _ in loaded] == [23, 23, 40, 40]
    assert {retry_on for _, retry_on, _ in loaded} == {(TimeoutError,)}


def test_load_function_finds_a_module_on_the_driver_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text("def work(row):\n    return row + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fn = importlib.import_module("beside_the_script").work
    done = load_in_subprocess(function_pickle.dump_function(fn, (TimeoutError, OSError)), Path("/"))
    assert done.stdout == b"21 ['TimeoutError', 'OSError']\n", done.stderr.decode()


def test_load_function_reports_the_missing_module(tmp_path: Path) -> None:
    (tmp_path / "gone_by_then.py").write_text("def work(row):\n    return row\n")
    sys.path.insert(0, str(tmp_path))
    try:
        data = function_pickle.dump_function(importlib.import_module("gone_by_then").work, ())
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["gone_by_then"]
    (tmp_path / "gone_by_then.py").unlink()
    with pytest.raises(function_pickle.NotLoadable) as refused:
        function_pickle.load_function(data)
    assert "gone_by_then" in refused.value.fields["why"]
    assert "addPyFile" in refused.value.hint


def with_a_lock() -> Callable[[Any], Any]:
    lock = threading.Lock()

    def work(row: Any) -> Any:
        with lock:
            return row

    return work


def with_a_socket() -> Callable[[Any], Any]:
    client = socket.socket()
    client.close()
    return lambda row: client.send(row)


@pytest.mark.parametrize(("make", "what"), [(with_a_lock, "lock"), (with_a_socket, "socket")])
def test_dump_function_reports_the_unpicklable_object_and_its_function(
    make: Callable[[], Callable[..., Any]], what: str
) -> None:
    with pytest.raises(function_pickle.NotPicklable) as refused:
        function_pickle.dump_function(make(), ())
    assert make.__name__ in refused.value.fields["function"]
    assert what in refused.value.fields["why"]
    assert "inside the function" in refused.value.hint
