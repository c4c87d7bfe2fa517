"""A flow of two steps. Each step writes its name, its process and its idempotency key into a file.

python -m tests.process.two_step_app STORE      a worker that dies when the outcome of the first step is committed
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import holdfast as hf
from holdfast import failpoints
from holdfast.flows.operations import FlowCommit
from holdfast.flows.records import StepCompleted

CALLS = "HOLDFAST_TEST_CALLS"
LEASE_S = 1.0


def note(step: str) -> None:
    line = f"{step} {os.getpid()} {hf.current_step().idempotency_key}\n"
    with Path(os.environ[CALLS]).open("a") as file:
        file.write(line)


async def first() -> int:
    note("first")
    return 1


async def second(n: int) -> int:
    note("second")
    return n + 1


@hf.flow(lease_s=LEASE_S)
async def two_steps() -> int:
    return await hf.step(second, await hf.step(first))


app = hf.App("steps", flows=[two_steps])


def die_between_steps(work: FlowCommit) -> None:
    if any(isinstance(record, StepCompleted) and record.name == "first" for record in work.records):
        os.kill(os.getpid(), signal.SIGKILL)


def main(store: str) -> None:
    with (
        failpoints.on("flows.committed", calls=die_between_steps),
        app.open(store, roles=("task", "timer")),
    ):
        print("ready", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
