"""`python -m bench loop_lag`: the lag of an event loop that uses `rt.aio` while PostgreSQL stands still.

    python -m bench loop_lag [--frozen-s 3] [--repeats 3] [--callers 100]

The command starts a PostgreSQL server. Coroutines of one event loop call all of `rt.aio` without a pause, and
a ticker of the same loop sleeps 1 ms at a time. The lag of a tick is the time by which it comes late. Then SIGSTOP stops
every process of the server for `--frozen-s` seconds. The target is the p99 of the lag in that time. The workers of the
runtime are in the same process, so their threads count too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from statistics import quantiles
from typing import Any

import holdfast as hf
from bench.record import Record, Sample, Target, gather
from tests.pgcluster import USER, PostgresCluster

TICK_S = 0.001
TARGET_MS = 5.0
# Calls before the server stops, so that pools and threads exist.
WARM_UP_S = 1.0
ANSWER_S = 120.0


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


async def call(rt: hf.Runtime, number: int) -> None:
    """Call `rt.aio` until cancelled."""
    world = rt.world(LagWorld, f"w{number % 10}")
    while True:
        await rt.aio.result(await rt.aio.submit(add, number), timeout=ANSWER_S)
        await rt.aio.send(world, LagEvent())
        await rt.aio.ask(world, LagEvent(), timeout=ANSWER_S)
        await rt.aio.state(world)
        await rt.aio.result(await rt.aio.start(twice, number), timeout=ANSWER_S)


async def measure(rt: hf.Runtime, server: Any, *, callers: int, frozen_s: float) -> Sample:
    ticker = LagTicker()
    tick = asyncio.ensure_future(ticker.run())
    calls = [asyncio.ensure_future(call(rt, number)) for number in range(callers)]
    await asyncio.sleep(WARM_UP_S)
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
    failed = [one for one in calls if one.done()]
    assert not failed, failed[0].exception()
    for one in (*calls, tick):
        one.cancel()
    await asyncio.gather(*calls, tick, return_exceptions=True)
    return {"p99_ms": quantiles(ticker.lags_ms, n=100)[98], "max_ms": max(ticker.lags_ms)}


def loop_lag(*, callers: int, frozen_s: float, repeats: int) -> Record:
    samples: list[Sample] = []
    with PostgresCluster(standby=False) as cluster:
        server = cluster.primary
        with server.admin() as connection:
            connection.execute("CREATE DATABASE lag")
        with app.open(f"postgresql://{USER}@{server.host}:{server.port}/lag") as rt:
            for _ in range(repeats):
                samples.append(asyncio.run(measure(rt, server, callers=callers, frozen_s=frozen_s)))
    return Record(
        "loop_lag",
        f"lag of an event loop with {callers} coroutines in rt.aio while PostgreSQL stands still for {frozen_s:g} s",
        gather(samples, {"p99_ms": "ms", "max_ms": "ms"}),
        (Target("p99_ms", below=TARGET_MS),),
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench loop_lag", description=__doc__)
    parser.add_argument("--frozen-s", type=float, default=3.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--callers", type=int, default=100, metavar="N")
    args = parser.parse_args(argv)
    record = loop_lag(callers=args.callers, frozen_s=args.frozen_s, repeats=args.repeats)
    print(json.dumps(record.document()))
    return 0 if record.met else 1
