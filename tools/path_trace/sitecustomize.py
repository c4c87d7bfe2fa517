"""The trace hook. Python imports a module of this name at the start of every process that has it on its path.

A profile function in every thread records the first call of each function of the package, once per round. A record is
a line `round time-in-ns module function` in the file `calls.PROCESS.PID`. The hook runs before the process imports the
package.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import window

PACKAGE = "HOLDFAST_TRACE_PACKAGE"
PROCESS = "HOLDFAST_TRACE_PROCESS"
WRITER_MODULE = "holdfast.store.lmdb.writer"


def process_name() -> str:
    """The writer inherits the environment of the process that started it."""
    if any(WRITER_MODULE in argument for argument in sys.orig_argv):
        return "writer"
    return os.environ.get(PROCESS, "other")


def install() -> None:
    directory, package = Path(os.environ[window.DIRECTORY]), os.environ[PACKAGE]
    file = os.open(
        directory / f"calls.{process_name()}.{os.getpid()}",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
    )
    shared = window.shared
    recorded: set[tuple[int, CodeType]] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        number = shared[window.OPEN]
        if not number or event != "call":
            return
        code = frame.f_code
        if (number, code) in recorded or not code.co_filename.startswith(package):
            return
        if code.co_name != "<module>":
            recorded.add((number, code))
            module = code.co_filename[len(package) :]
            line = f"{number} {time.monotonic_ns()} {module} {code.co_qualname}\n"
            os.write(file, line.encode())

    threading.setprofile(record)
    sys.setprofile(record)


install()
