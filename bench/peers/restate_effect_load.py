"""Run by the peers' interpreter: the client of `restate_effects`, with the connections of `restate_load`.

python restate_effect_load.py INGRESS_PORT LATENESS_FILE
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import lateness
from answers import serve
from restate_load import Connection, all_of

SETTERS = 64
POLL_S = 0.05
WITHIN_S = 60.0


async def chains(port: int, callers: int, seconds: float, steps: int) -> dict[str, Any]:
    """Each caller starts its next chain when its last one ends."""
    pool = [await Connection(port).open() for _ in range(callers)]
    body, ended = str(steps).encode(), 0
    began = time.perf_counter()

    async def call(connection: Connection) -> None:
        nonlocal ended
        while time.perf_counter() - began < seconds:
            assert await connection.post("/Flow/chain", body) == steps
            ended += 1

    await asyncio.gather(*(call(connection) for connection in pool))
    took = time.perf_counter() - began
    for connection in pool:
        connection.close()
    return {"rate": ended * steps / took, "steps": ended * steps, "took_s": took}


async def steps(port: int, count: int, per_s: float) -> dict[str, Any]:
    connection = await Connection(port).open()
    times: dict[str, Any] = {"journaled": [], "whole": []}
    due = time.perf_counter()
    for _ in range(count):
        due += 1 / per_s
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        began = time.perf_counter()
        times["journaled"].append(await connection.post("/Flow/step"))
        times["whole"].append(1000 * (time.perf_counter() - began))
    connection.close()
    return times


async def singles(port: int, count: int, per_s: float) -> dict[str, Any]:
    connection = await Connection(port).open()
    times: dict[str, Any] = {"first": [], "journaled": [], "whole": []}
    due = time.perf_counter()
    for _ in range(count):
        due += 1 / per_s
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        began = time.perf_counter()
        first_ms, step_ms = await connection.post("/Flow/single", repr(time.time()).encode())
        times["whole"].append(1000 * (time.perf_counter() - began))
        times["first"].append(first_ms)
        times["journaled"].append(step_ms)
    connection.close()
    return times


async def timers(
    port: int, file: Path, count: int, spread_s: float, lead_s: float, delayed: bool
) -> dict[str, Any]:
    """`delayed`: sends with a delay, instead of handlers that sleep."""
    lateness.clear(file)
    pool = [await Connection(port).open() for _ in range(SETTERS)]
    began = time.time()
    dues = [began + lead_s + at * spread_s / count for at in range(count)]
    # Requests queue for a free connection, so the delay is computed at the send.
    await all_of(pool, (_send(due, delayed) for due in dues))
    set_s = time.time() - began
    if set_s > lead_s:
        raise TimeoutError(f"setting {count} timers took {set_s:.1f} s of {lead_s:.1f} s")
    for connection in pool:
        connection.close()
    await asyncio.sleep(max(dues[-1] - time.time(), 0))
    while len(late := lateness.lines(file)) < count:
        if time.time() > dues[-1] + WITHIN_S:
            raise TimeoutError(f"{len(late)} of {count} timers fired")
        await asyncio.sleep(POLL_S)
    return {"late": late, "set_s": set_s}


def _send(due: float, delayed: bool) -> tuple[str, bytes]:
    body = repr(due).encode()
    if not delayed:
        return "/Flow/wake/send", body
    wait_ms = round(1000 * (due - time.time()))
    return f"/Flow/note/send?delay={wait_ms}ms", body


def main() -> None:
    port, file = int(sys.argv[1]), Path(sys.argv[2])
    serve(
        {
            "chains": lambda **asked: asyncio.run(chains(port, **asked)),
            "steps": lambda **asked: asyncio.run(steps(port, **asked)),
            "singles": lambda **asked: asyncio.run(singles(port, **asked)),
            "timers": lambda **asked: asyncio.run(timers(port, file, **asked)),
        }
    )


if __name__ == "__main__":
    main()
