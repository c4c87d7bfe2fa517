"""`python -m bench loop_lag`: the lag of an event loop that uses `rt.aio` while PostgreSQL stands still.

    python -m bench loop_lag [--frozen-s 3] [--repeats 3] [--callers 100] [--save]

The command starts a PostgreSQL server. Coroutines of one event loop call all of `rt.aio` without a pause: tasks (`submit`,
`submit_many`, `map`, `result`), flows (`start`, `flow`, `result`) and worlds (`send`, `ask`, `state`, `wait_for`). A
ticker of the same loop sleeps 1 ms at a time. The lag of a tick is the time by which it comes late. Then SIGSTOP stops
every process of the server for `--frozen-s` seconds. The target is the p99 of the lag in that time. The workers of the
runtime are in the same process, so their threads count too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

import holdfast as hf
from bench import history
from bench.record import Record, Sample, Target, gather
from tests.pgcluster import USER, PostgresCluster

TICK_S = 0.001
TARGET_MS = 5.0
# Calls before the server stops, so that pools and threads exist.
WARM_UP_S = 1.0
ANSWER_S = 120.0
BATCH = 10
# The parts of a round of calls: tasks, flows, worlds.
PARTS = 3


class LagEvent(hf.Event):
    pass


class LagWorld(hf.World):
    count: int = 0

    @hf.on(LagEvent)
    def counted(self, event: LagEvent, cx: hf.Context) -> None:
        self.count += 1
        cx.reply(self.count)


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.flow
async def twice(n: int) -> int:
    return 2 * n


app = hf.App("lag", worlds=[LagWorld], tasks=[add], flows=[twice])


class LagTicker:
    """Measures the lag of its event loop."""

    def __init__(self) -> None:
        self.lags_ms: list[float] = []
        self.on = False

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            if self.on:
                self.lags_ms.append((time.perf_counter() - due) * 1e3)


async def call_tasks(rt: hf.Runtime, number: int) -> None:
    assert await rt.aio.result(await rt.aio.submit(add, number), timeout=ANSWER_S) == number + 1
    handles = await rt.aio.submit_many(add, [(number, at) for at in range(BATCH)])
    for at, handle in enumerate(handles):
        assert await rt.aio.result(handle, timeout=ANSWER_S) == number + at
    numbers = range(BATCH)
    results = [result async for result in rt.aio.map(add, numbers, timeout=ANSWER_S)]
    assert results == [number + 1 for number in numbers]


async def call_flows(rt: hf.Runtime, number: int) -> None:
    handle = await rt.aio.start(twice, number)
    assert await rt.aio.result(handle, timeout=ANSWER_S) == 2 * number
    assert (await rt.aio.flow(handle.id)).id == handle.id


async def call_worlds(rt: hf.Runtime, number: int) -> None:
    world = rt.world(LagWorld, f"w{number % 10}")
    await rt.aio.send(world, LagEvent())
    count = await rt.aio.ask(world, LagEvent(), timeout=ANSWER_S)
    state = await rt.aio.wait_for(world, lambda state: state.count >= count, timeout=ANSWER_S)
    assert (await rt.aio.state(world)).count >= state.count


async def call(rt: hf.Runtime, number: int, counts: Counter[str]) -> None:
    """Call `rt.aio` until cancelled."""
    while True:
        for part in (call_tasks, call_flows, call_worlds):
            await part(rt, number)
            counts[part.__name__] += 1


async def measure(
    rt: hf.Runtime, server: Any, called: Counter[str], *, callers: int, frozen_s: float
) -> Sample:
    """`called` counts the completed parts of all repeats."""
    ticker, counts = LagTicker(), Counter[str]()
    tick = asyncio.ensure_future(ticker.run())
    calls = [asyncio.ensure_future(call(rt, number, counts)) for number in range(callers)]
    await asyncio.sleep(WARM_UP_S)
    await _until_each(counts, calls)
    frozen = await asyncio.to_thread(server.freeze)
    try:
        ticker.on = True
        await asyncio.sleep(frozen_s)
        ticker.on = False
    finally:
        for process in frozen:
            process.cont()
    # The calls continue: none has failed, and each is answered.
    assert await rt.aio.result(await rt.aio.submit(add, 1), timeout=ANSWER_S) == 2
    called += counts
    counts.clear()
    await _until_each(counts, calls)
    for one in (*calls, tick):
        one.cancel()
    await asyncio.gather(*calls, tick, return_exceptions=True)
    called += counts
    return {"p99_ms": quantiles(ticker.lags_ms, n=100)[98], "max_ms": max(ticker.lags_ms)}


async def _until_each(counts: Counter[str], calls: Sequence[asyncio.Task[None]]) -> None:
    """Wait until some caller has completed each part of the calls. Raise the error of a call that failed."""
    until = time.monotonic() + ANSWER_S
    while len(counts) < PARTS:
        for one in calls:
            if one.done():
                one.result()
        if time.monotonic() > until:
            raise TimeoutError(f"only {', '.join(counts)} within {ANSWER_S:g} s")
        await asyncio.sleep(TICK_S)


def loop_lag(*, callers: int, frozen_s: float, repeats: int) -> Record:
    samples: list[Sample] = []
    called: Counter[str] = Counter()
    with PostgresCluster(standby=False) as cluster:
        server = cluster.primary
        with server.admin() as connection:
            connection.execute("CREATE DATABASE lag")
        with app.open(f"postgresql://{USER}@{server.host}:{server.port}/lag") as rt:
            for _ in range(repeats):
                samples.append(
                    asyncio.run(measure(rt, server, called, callers=callers, frozen_s=frozen_s))
                )
    return Record(
        "loop_lag",
        f"lag of an event loop with {callers} coroutines that call tasks, flows and worlds by rt.aio while PostgreSQL stands still for {frozen_s:g} s",
        gather(samples, {"p99_ms": "ms", "max_ms": "ms"}),
        (Target("p99_ms", below=TARGET_MS),),
        {"calls": dict(called)},
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench loop_lag", description=__doc__)
    parser.add_argument("--frozen-s", type=float, default=3.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--callers", type=int, default=100, metavar="N")
    history.add_save_option(parser)
    args = parser.parse_args(argv)
    load_before = os.getloadavg()[0]
    record = loop_lag(callers=args.callers, frozen_s=args.frozen_s, repeats=args.repeats)
    print(json.dumps(record.document()))
    if args.save:
        command = f"loop_lag --frozen-s {args.frozen_s:g} --callers {args.callers}"
        run = history.entry(
            [record.document()], budget_s=0, load_before=load_before, command=command
        )
        history.save(run, args.save)
    return 0 if record.met else 1
