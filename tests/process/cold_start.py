"""Measure the time from the start of a process until its first task is completed. Not a test.

python -m tests.process.cold_start [--runs 10]

up        `holdfast up --role task` starts while a task waits and another process has the store open
up alone  the same without another process: `up` also starts the writer
script    a program opens its app on a new store, submits a task and waits for its result
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
from tests.process import task_app
from tests.process.conftest import LIMITS
from tests.process.watch import assert_no_process_left
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.task_app:app", "--role", "task"]
SCRIPT = """
import sys
import holdfast as hf

@hf.task
def first() -> str:
    return "done"

with hf.App("cold", tasks=[first]).open(sys.argv[1], roles=("task",)) as rt:
    print(rt.submit(first).result(30), flush=True)
"""


def measure_up(home: Path) -> float:
    with stores.open(home, limits=LIMITS) as store:
        rt: Runtime = task_app.app.open(store, roles=())
        handle = rt.submit(task_app.first)
        env = {task_app.LOG: os.devnull}
        began = time.perf_counter()
        with Proc.spawn([*UP, "--store", str(home)], ready=None, env=env, fresh=True):
            handle.result(30)
            return time.perf_counter() - began


def measure_up_alone(home: Path) -> float:
    with stores.open(home, limits=LIMITS) as store:
        rt: Runtime = task_app.app.open(store, roles=())
        rt.submit(
            task_app.long, str(home)
        )  # prints "began", then ends immediately: the path exists
    assert_no_process_left(home, LIMITS.idle_exit_s)
    env = {task_app.LOG: os.devnull}
    began = time.perf_counter()
    with Proc.spawn([*UP, "--store", str(home)], ready=None, env=env, fresh=True) as worker:
        worker.expect("began")
        return time.perf_counter() - began


def measure_script(home: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-c", SCRIPT, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"done\n"
        passed_s = time.perf_counter() - began
        program.wait()
    return passed_s


MEASUREMENTS: dict[str, Callable[[Path], float]] = {
    "up": measure_up,
    "up alone": measure_up_alone,
    "script": measure_script,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    for name, measure in MEASUREMENTS.items():
        durations_s = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                home = Path(folder) / "store"
                durations_s.append(measure(home))
                assert_no_process_left(home, 3.0, slack_s=10)
        print(
            f"{name:9} median {statistics.median(durations_s):.3f} s, best {min(durations_s):.3f} s, "
            f"worst {max(durations_s):.3f} s of {runs}",
            flush=True,
        )


if __name__ == "__main__":
    main()
