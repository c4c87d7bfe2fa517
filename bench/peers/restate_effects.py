"""Run by the peers' interpreter: the effect workload as a Restate service, over HTTP/2 by hypercorn.

    python restate_effects.py PORT WORKERS LATENESS_FILE

`chain` is five durable steps, `step` is one timed step, `single` times the start too, `wake` is a durable
sleep, and `note` is the target of a delayed send. `wake` and `note` write their lateness to a file, so that the
client need not wait for answers. The flow workload uses `chain`, `single` and `wake`, too.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import lateness
import restate
from restate_service import serve_app

AS_INT = restate.RunOptions(type_hint=int)
AS_FLOAT = restate.RunOptions(type_hint=float)

flow = restate.Service("Flow")


async def noop() -> int:
    return 1


@flow.handler()
async def chain(ctx: restate.Context, steps: int) -> int:
    done = 0
    for _ in range(steps):
        done += await ctx.run_typed("step", noop, AS_INT)
    return done


@flow.handler()
async def step(ctx: restate.Context) -> float:
    """Milliseconds until the outcome of a step is durable and the handler continues."""
    began = time.perf_counter()
    await ctx.run_typed("step", noop, AS_INT)
    return 1000 * (time.perf_counter() - began)


@flow.handler()
async def single(ctx: restate.Context, sent_s: float) -> list[float]:
    """Milliseconds from the call to the first step, and of the second step."""

    async def since() -> float:
        return 1000 * (time.time() - sent_s)

    first_ms = await ctx.run_typed("since", since, AS_FLOAT)
    began = time.perf_counter()
    await ctx.run_typed("step", noop, AS_INT)
    return [first_ms, 1000 * (time.perf_counter() - began)]


@flow.handler()
async def wake(ctx: restate.Context, due_s: float) -> None:
    await ctx.sleep(timedelta(seconds=max(due_s - time.time(), 0)))
    lateness.mark(due_s)


@flow.handler()
async def note(ctx: restate.Context, due_s: float) -> None:
    lateness.mark(due_s)


app = restate.app(services=[flow])

if __name__ == "__main__":
    port, workers, os.environ[lateness.VARIABLE] = sys.argv[1:]
    serve_app(f"{__file__}:app", int(port), int(workers))
