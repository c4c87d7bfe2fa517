"""Receipts: deliver the single receipt of an effect to its world.

These operations join the commit that ends a queue item: the ack of a worker, or the dead-lettering
of an item. An intent therefore ends together with the receipt in its world's inbox, or it has not
ended. A second receipt for the same intent changes nothing.

Delivery does not raise: a receipt for a deleted world is dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.durable import queue
from holdfast.durable.queue import DeadLetter
from holdfast.effects import budget
from holdfast.effects.budget import Cost
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import (
    FLOW_WORLD_PREFIX,
    TIMER_SET,
    Intent,
    IntentReceipt,
    ReceiptStatus,
    TimerSet,
    receipt_ingress,
)
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, intents, timers
from holdfast.world.ingress import put_ingress


@operation("effects.deliver_receipt")
def deliver_receipt(txn: Txn, intent: Intent, receipt: IntentReceipt) -> None:
    """Deliver the receipt of an effect."""
    if intents.resolve(txn, intent.universe_id, intent.intent_hash) is not None:
        _put_in_inbox(txn, intent, receipt)


@operation("effects.deliver_dead_receipt")
def deliver_dead_receipt(txn: Txn, dead_letter: DeadLetter) -> None:
    """Deliver an error receipt for a dead-lettered effect (the item's `on_dead` callback)."""
    # Imported here: every worker imports this module, and few applications dispatch prompts.
    from holdfast.dispatch import log
    from holdfast.dispatch.request import request_id_of

    try:
        intent = codec.unpack_as(Intent, queue.payload_of(txn, dead_letter))
    except HoldfastError:
        return
    timeout = dead_letter.code in ("timeout", "expiries_exhausted")
    receipt = IntentReceipt(
        intent.intent_hash,
        intent.effect_kind,
        ReceiptStatus.TIMEOUT if timeout else ReceiptStatus.ERROR,
        code=dead_letter.code,
        error=dead_letter.error,
        attempts=dead_letter.failures + dead_letter.expiries,
        tag=intent.tag,
        redrive_of=intent.redrive_of,
        failed_attempts=dead_letter.failed_attempts,
    )
    # The cost of the call is unknown, so the whole reservation counts as spent.
    budget.settle_by_claim.fn(txn, intent.universe_id, intent.intent_hash.hex(), None)
    # A pending dispatch ends with its effect.
    log.abandon.fn(txn, intent.universe_id, request_id_of(intent), dead_letter.code)
    if intents.resolve(txn, intent.universe_id, intent.intent_hash, dead=True) is not None:
        _put_in_inbox(txn, intent, receipt)


@operation("effects.record_late_cost")
def record_late_cost(txn: Txn, intent: Intent, claim: int, charges: list[Cost] | None) -> None:
    """Record the cost of a call whose claim was lost, unless a later claimant has recorded it."""
    budget.settle_after_loss.fn(txn, intent.universe_id, intent.intent_hash.hex(), claim, charges)


@operation("effects.redrive_effects")
def redrive_effects(txn: Txn, universe: str, kind: str, seqs: list[int]) -> list[bytes]:
    """Retry dead effects. Each becomes a new intent linked to the old one. Returns the new intent
    hashes.
    """
    name = intents.effect_queue(universe, kind)
    new_hashes: list[bytes] = []
    for seq in seqs:
        dead_letters = queue.list_dead(txn, name, seq - 1, 1)
        if not dead_letters or dead_letters[0].seq != seq:
            raise NotFound(what="dead letter", queue=name, seq=seq)
        old = codec.unpack_as(Intent, queue.payload_of(txn, dead_letters[0]))
        if not _world_exists(txn, old):
            raise Invalid(what="redrive", why="its world is deleted", seq=seq)
        redriven = replace(
            old,
            intent_hash=codec.digest(b"redrive", old.intent_hash, seq.to_bytes(8, "big")),
            enqueued_at_ns=txn.now_ns,
            # The idempotency key of the user belongs to the first intent.
            key=None,
            redrive_of=old.intent_hash,
        )
        queue.discard_dead.fn(txn, name, [seq])
        intents.drop_dead(txn, universe, old.intent_hash, seq)
        intents.dispatch(txn, redriven)
        new_hashes.append(redriven.intent_hash)
    return new_hashes


@operation("effects.delete_dead_letters")
def delete_dead_letters(txn: Txn, name: str, seqs: list[int]) -> list[int]:
    """Delete dead letters atomically. Returns their seqs. The worlds already have their receipts."""
    for seq in seqs:
        dead_letters = queue.list_dead(txn, name, seq - 1, 1) if seq > 0 else []
        if not dead_letters or dead_letters[0].seq != seq:
            raise NotFound(what="dead letter", queue=name, seq=seq)
        try:
            intent = codec.unpack_as(Intent, queue.payload_of(txn, dead_letters[0]))
        except HoldfastError:
            continue
        if intent.effect_kind == TIMER_SET:
            timers.consume(txn, intent, codec.unpack_as(TimerSet, intent.params).key)
        else:
            intents.drop_dead(txn, intent.universe_id, intent.intent_hash, seq)
    queue.discard_dead.fn(txn, name, seqs)
    return seqs


def _put_in_inbox(txn: Txn, intent: Intent, receipt: IntentReceipt) -> None:
    if intent.world_id.startswith(FLOW_WORLD_PREFIX):
        # Imported here: every effect worker imports this module, and few applications have flows.
        from holdfast.flows import children

        children.on_receipt(txn, intent, receipt)
        return
    if _world_exists(txn, intent):
        ingress = receipt_ingress(receipt, correlation_id=intent.correlation_id)
        put_ingress(txn, intent.universe_id, intent.world_id, None, ingress, intent.trace)


def _world_exists(txn: Txn, intent: Intent) -> bool:
    try:
        record = catalog.get_record(txn, intent.universe_id, intent.world_id)
    except NotFound:
        return False
    return record.status is not catalog.WorldStatus.DELETED
