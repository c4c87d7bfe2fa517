"""A pytest plugin: writes the lines of given source files that tests execute, as JSON.

`tools/mutation.py` loads it with `-p tools.mutation_trace`. The variable names the output and the files,
relative to the working directory. It traces only the call phase of tests, in all threads that they start.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

OUT, *FILES = json.loads(os.environ["HOLDFAST_MUTATION_TRACE"])
WANTED = {str(Path(name).resolve()): name for name in FILES}
# Lines by test, without its parameters, and by file.
EXECUTED: dict[str, dict[str, set[int]]] = {}
_now: dict[str, set[int]] = {}


def _enter(frame: FrameType, event: str, arg: object) -> Any:
    return _line if frame.f_code.co_filename in WANTED else None


def _line(frame: FrameType, event: str, arg: object) -> Any:
    if event == "line":
        _now.setdefault(WANTED[frame.f_code.co_filename], set()).add(frame.f_lineno)
    return _line


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _now.clear()
    threading.settrace(_enter)
    sys.settrace(_enter)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        files = EXECUTED.setdefault(item.nodeid.partition("[")[0], {})
        for name, lines in _now.items():
            files.setdefault(name, set()).update(lines)


def pytest_sessionfinish() -> None:
    document = {
        test: {name: sorted(lines) for name, lines in files.items()}
        for test, files in EXECUTED.items()
    }
    Path(OUT).write_text(json.dumps(document), encoding="utf-8")
