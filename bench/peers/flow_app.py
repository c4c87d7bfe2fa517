"""The application of the flow benchmarks, as a user would write it: `holdfast up bench.peers.flow_app:app`."""

from __future__ import annotations

import time

import holdfast as hf
from bench.peers import lateness

STEPS = 5


class Proceed(hf.Event):
    pass


async def noop() -> int:
    return 1


async def since(sent_s: float) -> float:
    """Milliseconds since the client called `start`."""
    return 1000 * (time.time() - sent_s)


@hf.flow
async def chain(steps: int) -> int:
    done = 0
    for _ in range(steps):
        done += await hf.step(noop)
    return done


@hf.flow
async def single(sent_s: float) -> list[float]:
    """Milliseconds from the start to the first step, and of one step until it is durable and the flow continues."""
    first_ms = await hf.step(since, sent_s)
    began = time.perf_counter()
    await hf.step(noop)
    return [first_ms, 1000 * (time.perf_counter() - began)]


@hf.flow
async def sleeper(due_s: float) -> None:
    """Sleeps until a time of day, so that many of them wake at once. Then it records its lateness."""
    await hf.sleep(max(due_s - hf.now().timestamp(), 0))
    lateness.mark(due_s)


@hf.flow
async def long(steps: int) -> int:
    """Records its steps, then waits for an event. The event causes a replay of all of them."""
    done = 0
    for at in range(0, steps, 100):
        futures = [hf.step(noop) for _ in range(at, min(at + 100, steps))]
        for future in futures:
            done += await future
    await hf.receive(Proceed)
    return done


# Its queue has no activation of a flow, so that the queue counters are those of this task.
@hf.task(queue="delayed")
def delayed(due_s: float) -> None:
    """Is submitted with a delay until a time of day, and then records its lateness."""
    lateness.mark(due_s)


app = hf.App("bench-flows", flows=[chain, single, sleeper, long], tasks=[delayed], events=[Proceed])
