"""The application of `test_network_partition`: each effect and task reports to the receiver with its machine's name.

The receiver listens on a Unix socket, so that a machine without network can still reach it.
"""

from __future__ import annotations

import os
import time

import msgspec

import holdfast as hf
from tests.chaos.app import CALLER, record_call

# The name of the machine that will be cut off.
CUT_OFF_MACHINE = "a"
GATE = "HOLDFAST_CHAOS_GATE"
TASK_LEASE_S = 2.0
PAY_S = 0.02
POLL_S = 0.01
LONG_WORK_MAX_S = 120.0


class OrderPlaced(hf.Event):
    id: str


class LongCallRequested(hf.Event):
    id: str


@hf.effect("pay", attempts=50, timeout_s=30, concurrency=4)
def pay(call: hf.Call, id: str) -> str:
    record_call("effect", id, call.idempotency_key)
    time.sleep(PAY_S)
    return id


@hf.effect("hold", attempts=50, timeout_s=LONG_WORK_MAX_S, concurrency=4)
def hold(call: hf.Call, id: str) -> str:
    """On the cut-off machine, wait until the gate opens. On another machine, return immediately."""
    record_call("effect", id, call.idempotency_key)
    _wait_for_gate(lambda: False)
    return f"{id} by {os.environ[CALLER]}"


class OrderDesk(hf.World):
    ordered: list[str] = msgspec.field(default_factory=list)
    paid: list[str] = msgspec.field(default_factory=list)

    @hf.on(OrderPlaced)
    def order(self, event: OrderPlaced, cx: hf.Context) -> None:
        self.ordered.append(event.id)
        cx.do(pay, event.id)

    @hf.on(LongCallRequested)
    def held(self, event: LongCallRequested, cx: hf.Context) -> None:
        self.ordered.append(event.id)
        cx.do(hold, event.id)

    @hf.on(pay, hold)
    def receipt(self, receipt: hf.Receipt[str], cx: hf.Context) -> None:
        self.paid.append(receipt.value if receipt.ok else f"{receipt.status} {receipt.code}")


@hf.task(lease_s=TASK_LEASE_S, attempts=50, expiries_max=50, backoff_s=0.01)
def work(id: str) -> str:
    me = hf.current_task()
    record_call("task", id, me.idempotency_key)
    time.sleep(PAY_S)
    return id


@hf.task(lease_s=TASK_LEASE_S, attempts=50, expiries_max=50, backoff_s=0.01)
def keep(id: str) -> str:
    """On the cut-off machine, wait until the task is cancelled or the gate opens."""
    me = hf.current_task()
    record_call("task", id, me.idempotency_key)
    _wait_for_gate(lambda: me.cancelled)
    if me.cancelled:
        record_call("told", id, me.idempotency_key)
    return f"{id} by {os.environ[CALLER]}"


def _wait_for_gate(is_cancelled: object) -> None:
    assert callable(is_cancelled)
    deadline = time.monotonic() + LONG_WORK_MAX_S
    while os.environ[CALLER] == CUT_OFF_MACHINE and not os.path.exists(os.environ[GATE]):
        if is_cancelled() or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


app = hf.App("isolated", worlds=[OrderDesk], tasks=[work, keep])
