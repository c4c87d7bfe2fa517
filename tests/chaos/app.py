"""The application of the chaos run: orders, each with an event, an effect, a timer and a receipt, and tasks.

The state of a world lists every handled event, once for each handling. The receiver lists every call of an
effect or task with its idempotency key.
"""

from __future__ import annotations

import os
import time

import msgspec

import holdfast as hf
from holdfast.clock import MS, S
from tests.chaos import receiver

RECEIVER = "HOLDFAST_CHAOS_RECEIVER"
CALLER = "HOLDFAST_CHAOS_WHO"
WORLDS = 8
LEASE_S = 2.0
# Kills and outages must not use these up: every effect and task must succeed.
ATTEMPTS = 50


class OrderPlaced(hf.Event):
    id: str
    delay_s: float


class AlarmFired(hf.Event):
    id: str
    due_ns: int


def record_call(kind: str, id: str, key: str) -> None:
    receiver.call(os.environ[RECEIVER], os.environ.get(CALLER, "nobody"), kind, id, key)


@hf.effect("pay", attempts=ATTEMPTS, expiries_max=ATTEMPTS, timeout_s=30, concurrency=4)
def pay(call: hf.Call, id: str, seconds: float) -> str:
    record_call("effect", id, call.idempotency_key)
    time.sleep(seconds)
    return id


class OrderDesk(hf.World):
    ordered: list[str] = msgspec.field(default_factory=list)
    paid: list[str] = msgspec.field(default_factory=list)
    unpaid: list[str] = msgspec.field(default_factory=list)
    event: list[str] = msgspec.field(default_factory=list)
    early: list[str] = msgspec.field(default_factory=list)

    @hf.on(OrderPlaced)
    def order(self, event: OrderPlaced, cx: hf.Context) -> None:
        self.ordered.append(event.id)
        cx.do(pay, event.id, event.delay_s / 20, tag=event.id)
        cx.after(event.delay_s, AlarmFired(event.id, cx.now_ns + int(event.delay_s * S)))
        cx.reply(len(self.ordered))

    @hf.on(pay)
    def receipt(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        if receipt.ok:
            self.paid.append(receipt.value)
        else:
            self.unpaid.append(f"{receipt.tag} {receipt.status} {receipt.code}")

    @hf.on(AlarmFired)
    def set(self, event: AlarmFired, cx: hf.Context) -> None:
        self.event.append(event.id)
        # Timers use the worker's estimate of the server time, `cx.now_ns` is the wall clock.
        if cx.now_ns < event.due_ns - 50 * MS:
            self.early.append(event.id)


@hf.task(lease_s=LEASE_S, attempts=ATTEMPTS, expiries_max=ATTEMPTS, backoff_s=0.01)
def work(id: str, seconds: float, fails: bool) -> str:
    me = hf.current_task()
    record_call("task", id, me.idempotency_key)
    time.sleep(seconds)
    if fails and me.attempt == 1:
        raise ValueError(f"{id} fails once")
    return id


app = hf.App("chaos", worlds=[OrderDesk], tasks=[work])


def world_name(number: int) -> str:
    return f"desk-{number % WORLDS}"
