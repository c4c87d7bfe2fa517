"""The client of a trace: `python client.py STORE FIRST_ROUND WARM_UP ROUNDS PATH…`. It runs the rounds of each path."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import window
from traced_app import CallWanted, Counter, Noted, app, double

from holdfast.app.runtime import Runtime

# The time after the end of an item in which its last commit and its clean-up are recorded.
TAIL_S = 0.05
# The time between two rounds, in which the processes become idle.
PAUSE_S = 0.05
ROUND_S_MAX = 60.0


def run_task(runtime: Runtime) -> None:
    window.open_next()
    runtime.submit(double, 21).result(timeout=ROUND_S_MAX)
    window.finish()


def run_message(runtime: Runtime) -> None:
    counter = runtime.world(Counter, "a")
    window.open_next()
    counter.send(Noted())


def run_effect(runtime: Runtime) -> None:
    runtime.world(Counter, "a").send(CallWanted())


PATHS: dict[str, Callable[[Runtime], None]] = {
    "task": run_task,
    "message": run_message,
    "effect": run_effect,
}


def run_round(runtime: Runtime, path: str, number: int) -> None:
    window.shared[window.NEXT] = number
    PATHS[path](runtime)
    deadline = time.monotonic() + ROUND_S_MAX
    while window.shared[window.FINISHED] != number:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: round {number} did not finish in {ROUND_S_MAX:.0f} s")
        time.sleep(0.001)
    time.sleep(TAIL_S)
    window.shared[window.OPEN] = 0
    time.sleep(PAUSE_S)


def main() -> None:
    store, first, warm_up, rounds, *paths = sys.argv[1:]
    number = int(first)
    with app.open(store, roles=()) as runtime:
        for path in paths:
            for _ in range(int(warm_up) + int(rounds)):
                run_round(runtime, path, number)
                number += 1
    print("done", flush=True)


if __name__ == "__main__":
    main()
