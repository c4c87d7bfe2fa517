"""The demo's work: orders to be charged once each, some flaky, one that nobody can handle.

A handler may run again after a crash; its *effect* may not happen again. So the charge and the memory
of its key are one transaction: a repeat finds the key and changes nothing.
"""

from __future__ import annotations

import msgspec

from holdfast import codec
from holdfast.clock import MS, SYSTEM
from holdfast.codec import Record
from holdfast.durable import dedupe
from holdfast.errors import HoldfastError
from holdfast.retry import Backoff
from holdfast.runner import Handler, Policy, Work
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn

QUEUE = "orders"
TIMERS = "reminders"
SHOP = "shop"

# Calling a payment service takes a moment; without it all would be over before anything is killed.
CALL_S = 0.003
POLICY = Policy(
    # Short, so that what a killed worker held is soon somebody else's.
    lease_ttl_ms=1_500,
    max_batch=20,
    retry_budget_max=5,
    # A machine that stalls for seconds is no reason to bury an order.
    expiries_max=20,
    idle_sleep_max_ms=200,
    backoff=Backoff(first_ns=100 * MS),
)

_SCOPE = "demo charges"
_CHARGES = schema.prefix(schema.Space.APP_STATE, "demo", "charges")
_REMINDED = schema.prefix(schema.Space.APP_STATE, "demo", "reminded")
_FOUND = schema.prefix(schema.Space.APP_STATE, "demo", "found again")


class Order(msgspec.Struct, frozen=True):
    """A queue takes any bytes; JSON can be read by people, as in `holdfast dead show`."""

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


class Reminded(Record, frozen=True):
    order: int
    worker: str
    at_ns: int


class CardServiceDown(HoldfastError):
    code = "card_service_down"
    retryable = True


def handler(store: Store, worker: str) -> Handler:
    def handle(work: Work) -> None:
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
    """The effect, once per order however often it is called."""
    key, body = f"order-{order.order}", codec.digest(order.payload)
    if dedupe.check(txn, _SCOPE, key, body) is not None:
        txn.add(_FOUND, 1)
        return
    dedupe.remember(txn, _SCOPE, key, body, b"charged")
    txn.append(_CHARGES, codec.pack(Charge(order.order, order.cents, worker, attempt)))


def remind(txn: Txn, order: Order, worker: str) -> None:
    key = _REMINDED + tuples.pack_int(order.order)
    if txn.get(key) is None:
        txn.put(key, codec.pack(Reminded(order.order, worker, txn.now_ns)))


def charges(txn: Txn) -> list[Charge]:
    rows = txn.scan(_CHARGES, tuples.after(_CHARGES))
    return [codec.unpack_as(Charge, row) for _, row in rows]


def reminders(txn: Txn) -> list[Reminded]:
    rows = txn.scan(_REMINDED, tuples.after(_REMINDED))
    return [codec.unpack_as(Reminded, row) for _, row in rows]


def found_again(txn: Txn) -> int:
    """How often a handler ran again and found its effect there already."""
    return txn.count(_FOUND)
