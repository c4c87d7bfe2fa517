"""The application of the effect benchmarks, as a user would write it: `holdfast up bench.peers.effect_app:app`.

- `Go` starts a chain of no-op effects. Each receipt requests the next effect, up to the given number.
- `StepsRequested` requests many effects at once: a backlog, or a flood. The world only counts their receipts.
- `Wake` sets a timer for a wall-clock time or for a delay. `TimerDue` is its event.
"""

from __future__ import annotations

from datetime import UTC, datetime

import holdfast as hf

STEPS = 5


class Go(hf.Event):
    steps: int = STEPS
    is_async: bool = False


class StepsRequested(hf.Event):
    count: int


class Wake(hf.Event):
    due_ns: int
    after: bool = False


class TimerDue(hf.Event):
    due_ns: int


# Default options, including the concurrency.
@hf.effect("chain.step")
def step(call: hf.Call, n: int) -> int:
    return n


@hf.effect("chain.async_step")
async def async_step(call: hf.Call, n: int) -> int:
    return n


@hf.effect("chain.bulk")
def bulk(call: hf.Call, n: int) -> int:
    return n


class EffectChain(hf.World):
    left: int = 0
    done: int = 0
    woken: int = 0

    @hf.on(Go)
    def go(self, event: Go, cx: hf.Context) -> None:
        self.left = event.steps
        cx.do(async_step if event.is_async else step, self.left)

    @hf.on(step)
    def stepped(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.left -= 1
        self.done += 1
        if self.left:
            cx.do(step, self.left)

    @hf.on(async_step)
    def async_stepped(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.left -= 1
        self.done += 1
        if self.left:
            cx.do(async_step, self.left)

    @hf.on(StepsRequested)
    def request_effects(self, event: StepsRequested, cx: hf.Context) -> None:
        for n in range(event.count):
            cx.do(bulk, n)

    @hf.on(bulk)
    def bulk_done(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.done += 1

    @hf.on(Wake)
    def wake(self, event: Wake, cx: hf.Context) -> None:
        woken = TimerDue(event.due_ns)
        if event.after:
            cx.after(max(event.due_ns - cx.now_ns, 0) / 1e9, woken)
        else:
            cx.at(datetime.fromtimestamp(event.due_ns / 1e9, UTC), woken)

    @hf.on(TimerDue)
    def was_woken(self, event: TimerDue, cx: hf.Context) -> None:
        self.woken += 1


app = hf.App("bench-effects", worlds=[EffectChain], effects=[step, async_step, bulk])
