"""The application of `test_machines`: everything that a machine does is told outside, by its name.

The outside is reached by a Unix socket, so that a machine whose network is cut could still do harm there.
"""

from __future__ import annotations

import os
import time

import msgspec

import holdfast as hf
from tests.chaos.app import WHO, outside

# The machine that will be cut off.
CUT = "a"
GATE = "HOLDFAST_CHAOS_GATE"
TASK_LEASE_S = 2.0
PAY_S = 0.02
POLL_S = 0.01
HELD_S = 120.0


class Ordered(hf.Event):
    id: str


class Held(hf.Event):
    id: str


@hf.effect("pay", attempts=50, timeout_s=30, concurrency=4)
def pay(call: hf.Call, id: str) -> str:
    outside("effect", id, call.idempotency_key)
    time.sleep(PAY_S)
    return id


@hf.effect("hold", attempts=50, timeout_s=HELD_S, concurrency=4)
def hold(call: hf.Call, id: str) -> str:
    """On the machine that is cut off it goes on until the gate opens; elsewhere it is done at once."""
    outside("effect", id, call.idempotency_key)
    _await_gate(lambda: False)
    return f"{id} by {os.environ[WHO]}"


class Desk(hf.World):
    ordered: list[str] = msgspec.field(default_factory=list)
    paid: list[str] = msgspec.field(default_factory=list)

    @hf.on(Ordered)
    def order(self, event: Ordered, cx: hf.Context) -> None:
        self.ordered.append(event.id)
        cx.do(pay, event.id)

    @hf.on(Held)
    def held(self, event: Held, cx: hf.Context) -> None:
        self.ordered.append(event.id)
        cx.do(hold, event.id)

    @hf.on(pay, hold)
    def receipt(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.paid.append(receipt.value if receipt.ok else f"{receipt.status} {receipt.code}")


@hf.task(lease_s=TASK_LEASE_S, attempts=50, expiries_max=50, backoff_s=0.01)
def work(id: str) -> str:
    me = hf.current_task()
    outside("task", id, me.idempotency_key)
    time.sleep(PAY_S)
    return id


@hf.task(lease_s=TASK_LEASE_S, attempts=50, expiries_max=50, backoff_s=0.01)
def keep(id: str) -> str:
    """On the machine that is cut off it goes on until it is told that nobody waits for it."""
    me = hf.current_task()
    outside("task", id, me.idempotency_key)
    _await_gate(lambda: me.cancelled)
    if me.cancelled:
        outside("told", id, me.idempotency_key)
    return f"{id} by {os.environ[WHO]}"


def _await_gate(given_up: object) -> None:
    assert callable(given_up)
    deadline = time.monotonic() + HELD_S
    while os.environ[WHO] == CUT and not os.path.exists(os.environ[GATE]):
        if given_up() or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


app = hf.App("isolated", worlds=[Desk], tasks=[work, keep])
