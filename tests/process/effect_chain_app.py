"""The application of `test_steps_killed`: chains of effects. Each call appends a line to a log file."""

import os

import msgspec

import holdfast as hf

LOG = "HOLDFAST_TEST_CALLS"


class ChainBegun(hf.Event):
    steps: int


@hf.effect("step", attempts=3)
def step(call: hf.Call, n: int) -> int:
    with open(os.environ[LOG], "a") as log:
        log.write(f"{call.idempotency_key}\n")
    return n


class Chain(hf.World):
    seen: list[int] = msgspec.field(default_factory=list)

    @hf.on(ChainBegun)
    def begin(self, event: ChainBegun, cx: hf.Context) -> None:
        cx.do(step, event.steps)

    @hf.on(step)
    def stepped(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.seen.append(receipt.value)
        if receipt.value:
            cx.do(step, receipt.value - 1)


app = hf.App("steps", worlds=[Chain])
