"""The application of `test_all_roles`: worlds, effects, timers and tasks in one app."""

from __future__ import annotations

import os

import msgspec

import holdfast as hf

LOG = "HOLDFAST_TEST_CALLS"


class PurchaseMade(hf.Event):
    n: int
    payload: bytes = b""


class DelayEnded(hf.Event):
    n: int


@hf.effect("pay", attempts=10, timeout_s=30)
def pay(call: hf.Call, n: int) -> int:
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{n} {call.idempotency_key}\n".encode())
    os.close(fd)
    return n


class PurchaseWorld(hf.World):
    paid: list[int] = msgspec.field(default_factory=list)
    woken: list[int] = msgspec.field(default_factory=list)
    payload: bytes = b""

    @hf.on(PurchaseMade)
    def ordered(self, event: PurchaseMade, cx: hf.Context) -> None:
        self.payload = event.payload or self.payload
        cx.do(pay, event.n)
        cx.after(0.2, DelayEnded(event.n))

    @hf.on(pay)
    def done(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.paid.append(receipt.value)

    @hf.on(DelayEnded)
    def woke(self, event: DelayEnded, cx: hf.Context) -> None:
        self.woken.append(event.n)


@hf.task(lease_s=2)
def double(n: int) -> int:
    return 2 * n


app = hf.App("shop", worlds=[PurchaseWorld], tasks=[double])
