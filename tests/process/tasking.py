"""The application of `test_tasks_killed`: each run of a task writes a line outside before it goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import holdfast as hf

LOG = "HOLDFAST_TEST_RUNS"
LEASE_S = 1.0
# So many that a hundred kills at random do not use them up: an isolated task takes a second to begin.
EXPIRIES_MAX = 50
POISON_EXPIRIES_MAX = 3


def write_down(what: str) -> None:
    me = hf.current_task()
    line = f"{what} {me.id} {me.attempt} {me.idempotency_key}\n".encode()
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line)
    os.close(fd)


@hf.task(lease_s=LEASE_S, attempts=3, expiries_max=EXPIRIES_MAX, backoff_s=0.01)
def work(n: int, seconds: float, failures: int) -> int:
    """Take a while; fail so often before that."""
    write_down("work")
    time.sleep(seconds)
    if failed_before(n) < failures:
        raise ValueError(f"{n} fails")
    return n


@hf.task(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX)
async def doze(n: int, seconds: float) -> int:
    write_down("doze")
    await asyncio.sleep(seconds)
    return n


@hf.task(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX, isolation="process")
def apart(n: int, seconds: float) -> int:
    write_down("apart")
    time.sleep(seconds)
    return n


@hf.task(lease_s=LEASE_S, expiries_max=POISON_EXPIRIES_MAX, backoff_s=0.01)
def poison(n: int, how: str) -> int:
    """Every run of this ends the process that makes it."""
    write_down("poison")
    end_with(how)
    return n


@hf.task(lease_s=LEASE_S, expiries_max=POISON_EXPIRIES_MAX, backoff_s=0.01, isolation="process")
def poison_apart(n: int, how: str) -> int:
    write_down("poison_apart")
    end_with(how)
    return n


# It may outlive no lease: so none runs out on a busy machine.
@hf.task(lease_s=10, attempts=1, expiries_max=1, execution_window_s=600)
def long(path: str) -> str:
    """Say that it has begun, and go on until the file is there."""
    write_down("long")
    print(f"began {hf.current_task().attempt}", flush=True)
    while not os.path.exists(path):
        if hf.current_task().cancelled:
            return "given up"
        time.sleep(0.005)
    return "done"


@hf.task(lease_s=LEASE_S, expiries_max=EXPIRIES_MAX, report="each")
def each(n: int) -> int:
    """Quick, and each outcome is committed by itself."""
    write_down("each")
    return n


@hf.task
def first() -> str:
    return "done"


def end_with(how: str) -> None:
    if how == "exit":
        os._exit(9)
    signal.raise_signal(signal.Signals[how])


def failed_before(n: int) -> int:
    """How often this one has failed before, as the outside knows."""
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
