"""Run by the peers' interpreter: the effect workload on DBOS, worker and caller in one process.

    python dbos_effects.py DATABASE_URL

Workflows start in the process that runs them. No queue is polled, and no caller polls for their end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from answers import serve

SETTERS = 64

StartTimer = Callable[[float], Awaitable[Any]]


def main(url: str) -> None:
    from dbos import DBOS

    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "log_level": "ERROR",
            "application_version": "1",
            "sys_db_pool_size": 40,
        }
    )
    late: list[float] = []

    @DBOS.step()
    def noop() -> int:
        return 1

    @DBOS.workflow(name="chain")
    def chain(steps: int) -> int:
        return sum(noop() for _ in range(steps))

    @DBOS.workflow(name="step")
    def step() -> float:
        began = time.perf_counter()
        noop()
        return 1000 * (time.perf_counter() - began)

    @DBOS.step()
    def since(sent_s: float) -> float:
        return 1000 * (time.time() - sent_s)

    @DBOS.workflow(name="single")
    def single(sent_s: float) -> list[float]:
        first_ms = since(sent_s)
        began = time.perf_counter()
        noop()
        return [first_ms, 1000 * (time.perf_counter() - began)]

    @DBOS.workflow(name="wake")
    async def wake(due_s: float) -> None:
        await DBOS.sleep_async(max(due_s - time.time(), 0))
        late.append(1000 * (time.time() - due_s))

    DBOS.launch()

    async def start_timer(due_s: float) -> Any:
        return await DBOS.start_workflow_async(wake, due_s)

    serve(
        {
            "chains": partial(run_chains, chain),
            "steps": partial(run_steps, step),
            "singles": partial(run_singles, single),
            "timers": lambda **sizes: asyncio.run(run_timers(start_timer, late, **sizes)),
        }
    )
    DBOS.destroy()


def run_chains(
    chain: Callable[[int], int], callers: int, seconds: float, steps: int
) -> dict[str, Any]:
    """Each thread starts its next chain when its last one ends."""
    ended: list[int] = []
    began = time.perf_counter()

    def call() -> None:
        while time.perf_counter() - began < seconds:
            assert chain(steps) == steps
            ended.append(steps)

    threads = [threading.Thread(target=call) for _ in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    return {"rate": sum(ended) / took, "steps": sum(ended), "took_s": took}


def run_steps(step: Callable[[], float], count: int, per_s: float) -> dict[str, Any]:
    times: dict[str, Any] = {"journaled": [], "whole": []}
    due = time.perf_counter()
    for _ in range(count):
        due += 1 / per_s
        time.sleep(max(due - time.perf_counter(), 0))
        began = time.perf_counter()
        times["journaled"].append(step())
        times["whole"].append(1000 * (time.perf_counter() - began))
    return times


def run_singles(single: Callable[[float], list[float]], count: int, per_s: float) -> dict[str, Any]:
    times: dict[str, Any] = {"first": [], "journaled": [], "whole": []}
    due = time.perf_counter()
    for _ in range(count):
        due += 1 / per_s
        time.sleep(max(due - time.perf_counter(), 0))
        began = time.perf_counter()
        first_ms, step_ms = single(time.time())
        times["whole"].append(1000 * (time.perf_counter() - began))
        times["first"].append(first_ms)
        times["journaled"].append(step_ms)
    return times


async def run_timers(
    start_timer: StartTimer, late: list[float], count: int, spread_s: float, lead_s: float
) -> dict[str, Any]:
    late.clear()
    began = time.time()
    dues = [began + lead_s + at * spread_s / count for at in range(count)]
    guard, handles = asyncio.Semaphore(SETTERS), []

    async def start(due: float) -> None:
        async with guard:
            handles.append(await start_timer(due))

    await asyncio.gather(*(start(due) for due in dues))
    set_s = time.time() - began
    if set_s > lead_s:
        raise TimeoutError(f"setting {count} timers took {set_s:.1f} s of {lead_s:.1f} s")
    await asyncio.sleep(max(dues[-1] - time.time(), 0))
    for handle in handles:
        await handle.get_result()
    return {"late": late, "set_s": set_s}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
