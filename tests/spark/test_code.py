"""The function on its way to a child: what it needs goes along, and what cannot travel is named."""

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

from holdfast.spark import code
from tests.processes import ROOT

pytestmark = pytest.mark.timeout(60)

LOAD = """
import sys
from holdfast.spark import code
fn, retry_on, _ = code.load(sys.stdin.buffer.read())
print(fn(20), [kind.__name__ for kind in retry_on])
"""


def elsewhere(data: bytes, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """Load and call it in a process that knows nothing of this one."""
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


def test_lambdas_partials_closures_and_objects_come_out_as_they_went_in() -> None:
    step = 3
    functions: list[Callable[[int], int]] = [
        lambda row: row + step,
        functools.partial(lambda add, row: row + add, 3),
        Doubler(),
        Doubler().__call__,
    ]
    loaded = [code.load(code.dump(fn, (TimeoutError,))) for fn in functions]
    assert [fn(20) for fn, _, _ in loaded] == [23, 23, 40, 40]
    assert {retry_on for _, retry_on, _ in loaded} == {(TimeoutError,)}


def test_a_function_of_a_module_beside_the_script_is_found_where_the_driver_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text("def work(row):\n    return row + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    fn = importlib.import_module("beside_the_script").work
    done = elsewhere(code.dump(fn, (TimeoutError, OSError)), Path("/"))
    assert done.stdout == b"21 ['TimeoutError', 'OSError']\n", done.stderr.decode()


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone_by_then.py").write_text("def work(row):\n    return row\n")
    sys.path.insert(0, str(tmp_path))
    try:
        data = code.dump(importlib.import_module("gone_by_then").work, ())
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["gone_by_then"]
    (tmp_path / "gone_by_then.py").unlink()
    with pytest.raises(code.NotLoadable) as refused:
        code.load(data)
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
def test_what_cannot_be_pickled_is_named_with_its_function(
    make: Callable[[], Callable[..., Any]], what: str
) -> None:
    with pytest.raises(code.NotPicklable) as refused:
        code.dump(make(), ())
    assert make.__name__ in refused.value.fields["function"]
    assert what in refused.value.fields["why"]
    assert "inside the function" in refused.value.hint
