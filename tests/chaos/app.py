"""The application under chaos: an order is a message, an effect, a timer and a receipt; a task is a task.

Whatever a desk has handled is in its state, once for each time it was handled; whatever was done outside is
with the receiver, under its idempotency key.
"""

from __future__ import annotations

import os
import time

import msgspec

import holdfast as hf
from holdfast.clock import MS, S
from tests.chaos import receiver

RECEIVER = "HOLDFAST_CHAOS_RECEIVER"
WHO = "HOLDFAST_CHAOS_WHO"
DESKS = 8
LEASE_S = 2.0
# So many that no number of kills and outages uses them up: here nothing may end but well.
ATTEMPTS = 50


class Ordered(hf.Event):
    id: str
    delay_s: float


class Rang(hf.Event):
    id: str
    due_ns: int


def outside(what: str, id: str, key: str) -> None:
    receiver.call(os.environ[RECEIVER], os.environ.get(WHO, "nobody"), what, id, key)


@hf.effect("pay", attempts=ATTEMPTS, timeout_s=30, concurrency=4)
def pay(call: hf.Call, id: str, seconds: float) -> str:
    outside("effect", id, call.idempotency_key)
    time.sleep(seconds)
    return id


class Desk(hf.World):
    ordered: list[str] = msgspec.field(default_factory=list)
    paid: list[str] = msgspec.field(default_factory=list)
    unpaid: list[str] = msgspec.field(default_factory=list)
    rung: list[str] = msgspec.field(default_factory=list)
    early: list[str] = msgspec.field(default_factory=list)

    @hf.on(Ordered)
    def order(self, event: Ordered, cx: hf.Context) -> None:
        self.ordered.append(event.id)
        cx.do(pay, event.id, event.delay_s / 20, tag=event.id)
        cx.after(event.delay_s, Rang(event.id, cx.now_ns + int(event.delay_s * S)))
        cx.reply(len(self.ordered))

    @hf.on(pay)
    def receipt(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        if receipt.ok:
            self.paid.append(receipt.value)
        else:
            self.unpaid.append(f"{receipt.tag} {receipt.status} {receipt.code}")

    @hf.on(Rang)
    def ring(self, event: Rang, cx: hf.Context) -> None:
        self.rung.append(event.id)
        # Timers run on the server's time, as far as a worker knows it; this is the clock on the wall.
        if cx.now_ns < event.due_ns - 50 * MS:
            self.early.append(event.id)


@hf.task(lease_s=LEASE_S, attempts=ATTEMPTS, expiries_max=ATTEMPTS, backoff_s=0.01)
def work(id: str, seconds: float, fails: bool) -> str:
    me = hf.current_task()
    outside("task", id, me.idempotency_key)
    time.sleep(seconds)
    if fails and me.attempt == 1:
        raise ValueError(f"{id} fails once")
    return id


app = hf.App("chaos", worlds=[Desk], tasks=[work])


def desk_of(number: int) -> str:
    return f"desk-{number % DESKS}"
