"""Runs pytest in forked children. pytest and the libraries are imported once, our code in each child.

A request is a line of JSON on standard input (`cwd`, `env`, `args`, `timeout_s`). The answer is the exit
code on a line of standard output. It is 1 for a child that exceeds its time limit. `tools/mutation.py` starts
this server. Arguments name the libraries to import, in place of LIBRARIES.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

# The third-party imports of tests and product. Missing libraries are skipped.
LIBRARIES = (
    "asyncio", "concurrent.futures", "dataclasses", "hypothesis", "lmdb", "msgspec", "multiprocessing",
    "numpy", "psycopg", "pytest", "pytest_timeout", "sqlite3", "ssl", "subprocess", "xml.etree.ElementTree",
)  # fmt: skip
LOOK_S = 0.01
KILLED = 1


def main() -> int:
    for name in sys.argv[1:] or LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.write(f"{ran(json.loads(line))}\n")
        sys.stdout.flush()
    return 0


def ran(request: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        os._exit(_child(request))
    deadline = time.monotonic() + request["timeout_s"]
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return abs(os.waitstatus_to_exitcode(status))
        time.sleep(LOOK_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return KILLED


def _child(request: dict[str, Any]) -> int:
    os.setpgid(0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.path[:0] = [request["cwd"], os.path.join(request["cwd"], "src")]
    import pytest

    try:
        return int(pytest.main(request["args"]))
    except BaseException:
        return KILLED


if __name__ == "__main__":
    sys.exit(main())
