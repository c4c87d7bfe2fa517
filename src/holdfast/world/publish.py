"""Out of a world: its intents become queue items, timers and mail, in the commit of their entry.

    fabric.send    into the destination's inbox, at once, deduplicated by the intent; a full one
                   gets it later, by the queue, and the sender goes on
    timer.set      into the timers' queue, not before its time; its key is a slot that holds one
    timer.cancel   empties the slot
    an effect      into the queue of its kind, once per intent, worlds taking turns
    effect.cancel  out of that queue, if nobody has claimed it: its receipt is the error `cancelled`

An intent with a user's key that was used before is not dispatched again; with other parameters its
receipt is the error `key_conflict`.
"""

from __future__ import annotations

import contextlib

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import RETRY_FULL_NS
from holdfast.durable import dedupe, queue
from holdfast.durable.bounds import TIME_NS_MAX
from holdfast.errors import KeyConflict, Overloaded
from holdfast.messages import (
    EFFECT_CANCEL,
    FABRIC_SEND,
    TIMER_CANCEL,
    TIMER_SET,
    FabricReceipt,
    FabricSend,
    Ingress,
    Intent,
    Kind,
    Receipt,
    Status,
    TimerSet,
    receipt_ingress,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import every
from holdfast.world.ingress import Address, deliver, deliver_to

# Whoever wanted an effect that dies is told by this operation (it lives above: only named here).
WILL = "holdfast.roles.receipts:bereave"


class Dispatched(Record, frozen=True):
    """What is remembered of an intent: whose it is, what it wants, and its place in the queue."""

    world_id: str
    effect_kind: str
    seq: int
    correlation_id: str | None = None
    tag: str = ""


@operation
def publish(txn: Txn, intents: list[Intent]) -> None:
    """Dispatch what one cycle of a world emitted. The caller checks the lease in this commit."""
    for intent in intents:
        if intent.effect_kind == FABRIC_SEND:
            _send(txn, intent)
        elif intent.effect_kind == TIMER_SET:
            _set_timer(txn, intent)
        elif intent.effect_kind == TIMER_CANCEL:
            slot: str = codec.unpack(intent.params)
            _empty_slot(txn, intent.universe_id, intent.world_id, slot)
        elif intent.effect_kind == EFFECT_CANCEL:
            _cancel(txn, intent)
        else:
            dispatch(txn, intent)


def dispatched(txn: Txn, universe: str, intent_hash: bytes) -> Dispatched | None:
    """Whose intent this is and what it wants; None when no such effect was ever dispatched."""
    found = dedupe.recall(txn, scope(universe), intent_hash.hex())
    return None if found is None else codec.unpack_as(Dispatched, found.value)


def receipt_key(intent_hash: bytes) -> str:
    """The key of an intent's one receipt in the inbox of its world."""
    return f"receipt:{intent_hash.hex()}"


def effects(universe: str, kind: str) -> str:
    """The queue of effects of one kind."""
    return f"{universe}/effects/{kind}"


def scope(universe: str) -> str:
    """Where the identities of dispatched effects are remembered."""
    return f"{universe}/effects"


def timers(universe: str) -> str:
    return f"{universe}/timers"


def dispatch(txn: Txn, intent: Intent) -> None:
    """Put an effect into the queue of its kind, unless it was dispatched before."""
    kept = scope(intent.universe_id)
    name = intent.intent_hash.hex()
    content = intent.wanted()
    try:
        if dedupe.check(txn, kept, name, content) is not None:
            return
    except KeyConflict:
        refusal = Receipt(
            intent.intent_hash,
            intent.effect_kind,
            Status.ERROR,
            code=KeyConflict.code,
            error=KeyConflict.hint,
            tag=intent.tag,
        )
        ingress = receipt_ingress(refusal, correlation_id=intent.correlation_id)
        # Whatever the refusal tells is part of its key: refused once more, it is the same message.
        key = f"receipt:{name}:{intent.content().hex()}"
        deliver_to(txn, intent.universe_id, intent.world_id, key, ingress)
        return
    seq = _enqueue(txn, intent)
    told = Dispatched(intent.world_id, intent.effect_kind, seq, intent.correlation_id, intent.tag)
    dedupe.remember(txn, kept, name, content, codec.pack(told))


def _enqueue(txn: Txn, intent: Intent, not_before_ns: int = 0) -> int:
    """Worlds take turns, and one whose effect dies is told so in the same commit."""
    name = effects(intent.universe_id, intent.effect_kind)
    return queue.put.fn(
        txn, name, codec.pack(intent), intent.priority, not_before_ns, intent.world_id, WILL
    )


def _send(txn: Txn, intent: Intent) -> None:
    try:
        _mail(txn, intent)
    except Overloaded:
        # The sender's commit does not fail for a full neighbour: the queue delivers it later.
        dispatch(txn, intent)


def _mail(txn: Txn, intent: Intent) -> None:
    mail = codec.unpack_as(FabricSend, intent.params)
    ingress = Ingress(
        Kind.FABRIC,
        mail.schema,
        mail.value,
        codec.digest(mail.schema.encode(), mail.value),
        intent_hash=intent.intent_hash,
        correlation_id=mail.correlation_id,
        from_world=intent.world_id,
        from_height=intent.from_height,
        headers=mail.headers,
    )
    # The destination's id, if this creates it, follows from the intent, so that a replay agrees.
    mint = codec.digest(b"world", intent.intent_hash)[:16].hex()
    to = Address(intent.universe_id, mail.dest_type, mail.dest_name, mint)
    put = deliver.fn(txn, to, f"fabric:{intent.intent_hash.hex()}", ingress)
    if intent.answered:
        told = FabricReceipt(
            "already_enqueued" if put.already else "ok", intent.intent_hash, put.world_id, put.seq
        )
        _answer(
            txn,
            intent,
            Receipt(intent.intent_hash, FABRIC_SEND, Status.OK, codec.pack(told), tag=intent.tag),
        )


@operation
def send_again(txn: Txn, intent: Intent) -> None:
    """Deliver mail that found its destination full before. If it still is, it waits some more."""
    try:
        _mail(txn, intent)
    except Overloaded:
        _enqueue(txn, intent, txn.now_ns + RETRY_FULL_NS)


def _answer(txn: Txn, intent: Intent, receipt: Receipt) -> None:
    """Into the sender's inbox, unless it has had its answer: there is only one."""
    ingress = receipt_ingress(receipt, correlation_id=intent.correlation_id)
    key = receipt_key(intent.intent_hash)
    with contextlib.suppress(KeyConflict):
        deliver_to(txn, intent.universe_id, intent.world_id, key, ingress)


# -- timers and cancelling -------------------------------------------------------------------------


class Slot(Record, frozen=True):
    """What a timer's key holds: the pending timer, and its place in the queue."""

    intent_hash: bytes
    seq: int


def slots_of(txn: Txn, universe: str, world_id: str, limit: int) -> list[tuple[str, Slot]]:
    """The pending timers of a world."""
    prefix = schema.prefix(schema.Space.WORLD, universe, "t", world_id)
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    return [
        (str(tuples.unpack(key[len(prefix) :])[0]), codec.unpack_as(Slot, row)) for key, row in rows
    ]


def slot(txn: Txn, universe: str, world_id: str, key: str) -> Slot | None:
    """What a timer's key holds."""
    row = txn.get(_slot_key(universe, world_id, key))
    return None if row is None else codec.unpack_as(Slot, row)


def clear_slot(txn: Txn, universe: str, world_id: str, slot: str, intent: Intent) -> bool:
    """Free a slot for whom it holds; False when the timer was replaced or cancelled meanwhile."""
    key = _slot_key(universe, world_id, slot)
    row = txn.get(key)
    if row is None or codec.unpack_as(Slot, row).intent_hash != intent.intent_hash:
        return False
    txn.delete(key)
    return True


def _set_timer(txn: Txn, intent: Intent) -> None:
    timer = codec.unpack_as(TimerSet, intent.params)
    universe, world_id = intent.universe_id, intent.world_id
    _empty_slot(txn, universe, world_id, timer.key)
    due_ns = txn.now_ns + (timer.delay_ns or 0)
    wall_ns = timer.wall_ns
    if timer.cron:
        intent, wall_ns = every.first(intent, timer)
    if wall_ns is not None:
        # A calendar time: as far from now as the wall clock that the reducer saw says.
        due_ns = txn.now_ns + max(wall_ns - intent.enqueued_at_ns, 0)
    hang_timer(txn, intent, timer.key, due_ns)


def hang_timer(txn: Txn, intent: Intent, slot: str, due_ns: int) -> None:
    """Let a timer wait for a time, in its slot."""
    universe = intent.universe_id
    # A far calendar time on a store clock that runs ahead: the last time that there is.
    due_ns = min(due_ns, TIME_NS_MAX)
    seq = queue.put.fn(txn, timers(universe), codec.pack(intent), 0, due_ns)
    key = _slot_key(universe, intent.world_id, slot)
    txn.put(key, codec.pack(Slot(intent.intent_hash, seq)))


def _empty_slot(txn: Txn, universe: str, world_id: str, slot: str) -> None:
    key = _slot_key(universe, world_id, slot)
    row = txn.get(key)
    if row is not None:
        queue.withdraw.fn(txn, timers(universe), codec.unpack_as(Slot, row).seq)
        txn.delete(key)


def _slot_key(universe: str, world_id: str, slot: str) -> bytes:
    return schema.prefix(schema.Space.WORLD, universe, "t", world_id, slot)


def _cancel(txn: Txn, intent: Intent) -> None:
    """Withdraw an effect that waits. One that is being done ends as it ends."""
    found = dispatched(txn, intent.universe_id, intent.params)
    if found is None or found.world_id != intent.world_id:
        return
    name = effects(intent.universe_id, found.effect_kind)
    if queue.withdraw.fn(txn, name, found.seq):
        told = Receipt(
            intent.params,
            found.effect_kind,
            Status.ERROR,
            code="cancelled",
            error="by its world",
            attempts=0,
            tag=found.tag,
        )
        ingress = receipt_ingress(told, correlation_id=found.correlation_id)
        key = receipt_key(intent.params)
        deliver_to(txn, intent.universe_id, intent.world_id, key, ingress)
