"""How long from the start of a process until its first task is done; figures, not a test.

python -m tests.process.cold_start [--runs 10]

up        `holdfast up --role task` is started while a task waits, and somebody has the store open
up alone  the same, and nobody has: its writer is started, too
script    a program that opens its app on a new store, submits a task and waits for its result
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from tests.process import tasking
from tests.process.conftest import LIMITS
from tests.process.watch import assert_nobody_is_left
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.tasking:app", "--role", "task"]
SCRIPT = """
import sys
import holdfast as hf

@hf.task
def first() -> str:
    return "done"

with hf.App("cold", tasks=[first]).open(sys.argv[1], roles=("task",)) as rt:
    print(rt.submit(first).result(30), flush=True)
"""


def up(home: Path) -> float:
    with stores.open(home, limits=LIMITS) as store:
        rt: Runtime = tasking.app.open(store, roles=())
        handle = rt.submit(tasking.first)
        env = {tasking.LOG: os.devnull}
        began = time.perf_counter()
        with Proc.spawn([*UP, "--store", str(home)], ready=None, env=env):
            handle.result(30)
            return time.perf_counter() - began


def up_alone(home: Path) -> float:
    with stores.open(home, limits=LIMITS) as store:
        rt: Runtime = tasking.app.open(store, roles=())
        rt.submit(tasking.long, str(home))  # it ends as soon as it has begun, and says so
    assert_nobody_is_left(home, LIMITS.linger_s)
    env = {tasking.LOG: os.devnull}
    began = time.perf_counter()
    with Proc.spawn([*UP, "--store", str(home)], ready=None, env=env) as worker:
        worker.expect("began")
        return time.perf_counter() - began


def script(home: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-c", SCRIPT, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"done\n"
        passed_s = time.perf_counter() - began
        program.wait()
    return passed_s


KINDS: dict[str, Callable[[Path], float]] = {"up": up, "up alone": up_alone, "script": script}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    for name, measure in KINDS.items():
        found = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder) / "store"
                found.append(measure(home))
                assert_nobody_is_left(home, 3.0, slack_s=10)
        print(
            f"{name:9} median {statistics.median(found):.3f} s, best {min(found):.3f} s, "
            f"worst {max(found):.3f} s of {runs}",
            flush=True,
        )


if __name__ == "__main__":
    main()
