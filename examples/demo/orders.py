"""Work of the demo: orders, each charged once. Some fail at first, one always fails.

A handler may run again after a crash, but its effect must happen once. The charge and the dedupe
record of its key are therefore one transaction: a repeated call finds the key and changes nothing.
"""

from __future__ import annotations

import msgspec

from holdfast import codec
from holdfast.clock import MS, SYSTEM
from holdfast.codec import Record
from holdfast.durable import dedupe
from holdfast.errors import HoldfastError
from holdfast.retry import Backoff
from holdfast.runner import RunnerPolicy, WorkHandler, WorkItem
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn

QUEUE = "orders"
TIMERS = "reminders"
SHOP = "shop"

# Simulated latency of the payment service. Without it all orders are done before anything is
# killed.
CALL_S = 0.003
POLICY = RunnerPolicy(
    # Short, so that other workers soon get the claims of a killed worker.
    lease_ttl_ms=1_500,
    max_batch=20,
    retry_budget_max=5,
    # A machine that stalls for seconds must not dead-letter an order.
    expiries_max=20,
    idle_sleep_max_ms=200,
    backoff=Backoff(first_ns=100 * MS),
)

_SCOPE = "demo charges"
_CHARGES = schema.key_prefix(schema.Space.APP_STATE, "demo", "charges")
_REMINDERS = schema.key_prefix(schema.Space.APP_STATE, "demo", "reminded")
_REPEATS = schema.key_prefix(schema.Space.APP_STATE, "demo", "found again")


class Order(msgspec.Struct, frozen=True):
    """A queue accepts any bytes. JSON is readable in `holdfast dead show`."""

    order: int
    cents: int
    flaky: bool = False

    @property
    def payload(self) -> bytes:
        return msgspec.json.encode(self)


class Charge(Record, frozen=True):
    order: int
    cents: int
    worker: str
    attempt: int


class Reminder(Record, frozen=True):
    order: int
    worker: str
    at_ns: int


class CardServiceDown(HoldfastError):
    code = "card_service_down"
    retryable = True


def handler(store: Store, worker: str) -> WorkHandler:
    def handle(work: WorkItem) -> None:
        order = msgspec.json.decode(work.payload, type=Order)
        if work.kind == "timer":
            store.transact(remind, order, worker)
            return
        if order.flaky and work.attempt == 1:
            raise CardServiceDown(order=order.order)
        if order.cents <= 0:
            raise ValueError(f"order {order.order} is for {order.cents} cents")
        SYSTEM.sleep(CALL_S)
        store.transact(charge, order, worker, work.attempt)

    return handle


def charge(txn: Txn, order: Order, worker: str, attempt: int) -> None:
    """Charge an order once, regardless of the number of calls."""
    key, body = f"order-{order.order}", codec.digest(order.payload)
    if dedupe.check(txn, _SCOPE, key, body) is not None:
        txn.add(_REPEATS, 1)
        return
    dedupe.remember(txn, _SCOPE, key, body, b"charged")
    txn.append(_CHARGES, codec.pack(Charge(order.order, order.cents, worker, attempt)))


def remind(txn: Txn, order: Order, worker: str) -> None:
    key = _REMINDERS + tuples.pack_int(order.order)
    if txn.get(key) is None:
        txn.put(key, codec.pack(Reminder(order.order, worker, txn.now_ns)))


def charges(txn: Txn) -> list[Charge]:
    rows = txn.scan(_CHARGES, tuples.prefix_end(_CHARGES))
    return [codec.unpack_as(Charge, row) for _, row in rows]


def reminders(txn: Txn) -> list[Reminder]:
    rows = txn.scan(_REMINDERS, tuples.prefix_end(_REMINDERS))
    return [codec.unpack_as(Reminder, row) for _, row in rows]


def repeat_count(txn: Txn) -> int:
    """Number of handler runs that found an existing charge."""
    return txn.count(_REPEATS)
