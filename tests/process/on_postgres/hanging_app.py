"""The application of `test_server_unavailable`: a task and an effect that do not end, and a world that waits for
the effect."""

from __future__ import annotations

import threading

import holdfast as hf

LONG_S = 600.0


class PurchaseMade(hf.Event):
    n: int


@hf.effect("linger", attempts=2, timeout_s=LONG_S)
def linger(call: hf.Call, n: int) -> int:
    print("begun: the effect", flush=True)
    threading.Event().wait(LONG_S)
    return n


class PurchaseWorld(hf.World):
    orders: int = 0

    @hf.on(PurchaseMade)
    def ordered(self, event: PurchaseMade, cx: hf.Context) -> None:
        self.orders += 1
        cx.do(linger, event.n)

    @hf.on(linger)
    def done(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.orders -= 1


@hf.task(lease_s=LONG_S)
def doze(n: int) -> int:
    print("begun: the task", flush=True)
    threading.Event().wait(LONG_S)
    return n


app = hf.App("lingering", worlds=[PurchaseWorld], tasks=[doze])
