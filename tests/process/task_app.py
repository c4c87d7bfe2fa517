"""The application of `test_tasks_killed`: each run of a task first appends a line to a log file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import holdfast as hf

LOG = "HOLDFAST_TEST_RUNS"
LEASE_S = 1.0
# A hundred random kills must not use these up. An isolated task takes a second to start.
EXPIRIES_MAX = 50
POISON_EXPIRIES_MAX = 3


def log_run(name: str) -> None:
    me = hf.current_task()
    line = f"{name} {me.id} {me.attempt} {me.idempotency_key}\n".encode()
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line)
    os.close(fd)


@hf.task(lease_s=LEASE_S, attempts=3, expiries_max=EXPIRIES_MAX, backoff_s=0.01)
def work(n: int, seconds: float, failures: int) -> int:
    """Sleep, then fail in the first `failures` runs."""
    log_run("work")
    time.sleep(seconds)
    if previous_failures(n) < failures:
        raise ValueError(f"{n} fails")
    return n


@hf.task(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX)
async def doze(n: int, seconds: float) -> int:
    log_run("doze")
    await asyncio.sleep(seconds)
    return n


@hf.task(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX, isolation="process")
def apart(n: int, seconds: float) -> int:
    log_run("apart")
    time.sleep(seconds)
    return n


@hf.task(lease_s=LEASE_S, expiries_max=POISON_EXPIRIES_MAX, backoff_s=0.01)
def poison(n: int, how: str) -> int:
    """Every run of this task ends its process."""
    log_run("poison")
    end_process(how)
    return n


@hf.task(lease_s=LEASE_S, expiries_max=POISON_EXPIRIES_MAX, backoff_s=0.01, isolation="process")
def poison_apart(n: int, how: str) -> int:
    log_run("poison_apart")
    end_process(how)
    return n


# `expiries_max=1`: a long lease, so that it does not expire on a busy machine.
@hf.task(lease_s=10, attempts=1, expiries_max=1, execution_window_s=600)
def long(path: str) -> str:
    """Print that it began, then run until the file exists."""
    log_run("long")
    print(f"began {hf.current_task().attempt}", flush=True)
    while not os.path.exists(path):
        if hf.current_task().cancelled:
            return "given up"
        time.sleep(0.005)
    return "done"


@hf.task(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX, report="each")
def each(n: int) -> int:
    """A quick task whose outcome is committed separately (`report="each"`)."""
    log_run("each")
    return n


@hf.task
def first() -> str:
    return "done"


def end_process(how: str) -> None:
    if how == "exit":
        os._exit(9)
    signal.raise_signal(signal.Signals[how])


def previous_failures(n: int) -> int:
    """The number of earlier runs of this task, counted in a file."""
    path = f"{os.environ[LOG]}-{n}"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(fd).st_size
        os.write(fd, b".")
        return size
    finally:
        os.close(fd)


app = hf.App(
    "tasking",
    tasks=[work, doze, apart, poison, poison_apart, long, each, first],
    queues=[hf.Queue("default"), hf.Queue("narrow", concurrency=4, per_key=1)],
)

if __name__ == "__main__":
    sys.exit("it is run by `holdfast up`")
