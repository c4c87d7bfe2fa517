"""Publishing of intents: they become queue items, timers and mail, in the commit of their journal
entry.

    fabric.send    goes to the destination's inbox at once (`messaging.delivery`); mail to a full
                   inbox or another universe goes through a queue (`messaging.outbox`), and the
                   sender continues
    timer.set      schedules the timer in its slot (`timers`)
    timer.cancel   clears the slot
    flow:NAME      starts a flow (`flow_callbacks`); its end is the receipt
    an effect      goes to the queue of its kind, once per intent, with fair shares between worlds
    effect.cancel  removes it from that queue, even if it is claimed; its receipt is `cancelled`

An intent without a key belongs to one height of one journal. Only the commit of that entry
publishes it, so it cannot be dispatched twice. An intent with a user's idempotency key is recorded.
Requested again, it is the same intent with one receipt. The same key with other parameters gets the
receipt `key_conflict`.

An effect without a receipt is *pending*: it has a row, and delivering its receipt deletes the row
(`resolve`). So an effect has exactly one receipt, from an adapter, a cancel, a dead-letter callback
or an operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import dedupe, inbox, queue, tags
from holdfast.durable import item as items
from holdfast.errors import KeyConflict, NotFound
from holdfast.messages import (
    EFFECT_CANCEL,
    FABRIC_SEND,
    FLOW_START_PREFIX,
    TIMER_CANCEL,
    TIMER_SET,
    Intent,
    IntentReceipt,
    ReceiptStatus,
    receipt_ingress,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import flow_callbacks, synthetic_receipts, timers
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import IngressResult, put_ingress
from holdfast.world.messaging import delivery

# The dead-letter callback of an effect: it delivers the receipt. Referenced by name, because it is
# defined in a higher layer.
ON_DEAD_OPERATION = "effects.deliver_dead_receipt"


class PendingEffect(Record, frozen=True):
    """An effect without a receipt: its world, its kind, and its position in the queue."""

    world_id: str
    effect_kind: str
    seq: int
    correlation_id: str | None = None
    tag: str = ""
    # The effect is a dead letter and has its receipt. The row remains to find the dead letter.
    dead: bool = False
    # The queue that holds the item, if it differs from the queue of its kind: mail to another
    # store.
    lane: str = ""
    redrive_of: bytes | None = None
    # Whether the index of tags has a row of it. Rows of older versions have none.
    listed: bool = False

    @property
    def starts_flow(self) -> bool:
        """Whether the intent started a flow. `seq` is the number of the flow."""
        return self.effect_kind.startswith(FLOW_START_PREFIX)

    def queue(self, universe: str) -> str:
        return self.lane or effect_queue(universe, self.effect_kind)


@operation("intents.publish")
def publish(txn: Txn, intents: list[Intent], wanted_ns: int = 0) -> None:
    """Publish the intents of worlds, emitted at `emitted_ns`. The caller checks the leases in this
    commit."""
    plain: list[Intent] = []
    for intent in intents:
        if intent.effect_kind == FABRIC_SEND:
            _send(txn, intent)
        elif intent.effect_kind == TIMER_SET:
            timers.set_timer(txn, intent, wanted_ns)
        elif intent.effect_kind == TIMER_CANCEL:
            timers.cancel_timer(txn, intent)
        elif intent.effect_kind == EFFECT_CANCEL:
            # The cancelled effect may be among the intents right before it.
            _dispatch(txn, plain)
            plain.clear()
            _cancel(txn, intent)
        elif intent.key is None or not _is_key_used(txn, intent):
            plain.append(intent)
    _dispatch(txn, plain)


def find_pending(txn: Txn, universe: str, intent_hash: bytes) -> PendingEffect | None:
    """Return the pending or dead effect; None if it has its receipt or never existed."""
    row = txn.get(_pending_key(universe, intent_hash))
    return None if row is None else _decode_pending(row)


def pending_page(
    txn: Txn, universe: str, after: bytes, limit: int
) -> list[tuple[bytes, PendingEffect]]:
    """Return pending and dead effects of a universe, ordered by intent hash, after a given one."""
    prefix = _pending_prefix(universe)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [(_intent_hash_of(key), _decode_pending(row)) for key, row in rows]


def tagged_page(
    txn: Txn, universe: str, tag: str, after: bytes, limit: int
) -> list[tuple[bytes, PendingEffect]]:
    """Return pending and dead effects with a tag, ordered by intent hash, after a given one."""
    prefix = tag_prefix(universe) + tags.pack_tag(tag)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    hashes = [_intent_hash_of(key) for key, _ in txn.scan(lo, tuples.prefix_end(prefix), limit)]
    found = [(one, find_pending(txn, universe, one)) for one in hashes]
    return [(one, pending_effect) for one, pending_effect in found if pending_effect is not None]


def resolve(
    txn: Txn, universe: str, intent_hash: bytes, *, dead: bool = False
) -> PendingEffect | None:
    """Mark an effect as resolved, so that it gets exactly one receipt. Return None if it already
    has one."""
    key = _pending_key(universe, intent_hash)
    row = txn.get(key)
    if row is None:
        return None
    pending_effect = _decode_pending(row)
    if pending_effect.dead:
        return None
    if dead:
        txn.put(key, codec.pack(replace(pending_effect, dead=True)))
    else:
        txn.delete(key)
        _unlist(txn, universe, intent_hash, pending_effect)
    return pending_effect


def relocate(txn: Txn, intent: Intent, seq: int, lane: str = "") -> None:
    """Record the new queue position of a pending effect."""
    pending_effect = find_pending(txn, intent.universe_id, intent.intent_hash)
    if pending_effect is not None:
        key = _pending_key(intent.universe_id, intent.intent_hash)
        txn.put(key, codec.pack(replace(pending_effect, seq=seq, lane=lane)))


def drop(txn: Txn, universe: str, intent_hash: bytes) -> None:
    """Delete the rows of an effect whose dead letter or queue item is gone."""
    pending_effect = find_pending(txn, universe, intent_hash)
    if pending_effect is not None:
        txn.delete(_pending_key(universe, intent_hash))
        _unlist(txn, universe, intent_hash, pending_effect)


def drop_dead(txn: Txn, universe: str, intent_hash: bytes, seq: int) -> None:
    """Delete the row of a dead effect whose dead letter `seq` is gone. A newer effect under the
    same key is not affected."""
    pending_effect = find_pending(txn, universe, intent_hash)
    if pending_effect is not None and pending_effect.dead and pending_effect.seq == seq:
        drop(txn, universe, intent_hash)


def withdraw(txn: Txn, universe: str, pending_effect: PendingEffect) -> None:
    """Remove a resolved effect from its queue, even if it is claimed, or cancel the started flow."""
    if pending_effect.starts_flow:
        flow_callbacks.cancel(txn, universe, pending_effect.seq)
    else:
        queue.cancel.fn(txn, pending_effect.queue(universe), pending_effect.seq, True)


def receipt_key(intent_hash: bytes) -> str:
    """The dedupe key of an intent's receipt where it might be delivered twice."""
    return f"receipt:{intent_hash.hex()}"


@operation("intents.resolve_manually")
def resolve_manually(
    txn: Txn, universe: str, world_id: str, receipt: IntentReceipt
) -> IngressResult:
    """Deliver a receipt on behalf of an operator, even if the effect is claimed. Repeating the call
    returns the same result."""
    key = receipt_key(receipt.intent_hash)
    pending_effect = resolve(txn, universe, receipt.intent_hash)
    correlation_id = None
    if pending_effect is not None:
        correlation_id = pending_effect.correlation_id
        withdraw(txn, universe, pending_effect)
    elif not inbox.is_delivered(txn, subject_of(universe, world_id), key):
        raise NotFound(
            what="intent",
            universe=universe,
            intent_hash=receipt.intent_hash.hex(),
            why="the intent has its receipt already, or never existed",
        )
    ingress = receipt_ingress(receipt, correlation_id=correlation_id)
    return put_ingress(txn, universe, world_id, key, ingress)


def effect_queue(universe: str, kind: str) -> str:
    """The name of the queue for effects of one kind."""
    return f"{universe}/effects/{kind}"


def dedupe_scope(universe: str) -> str:
    """The dedupe scope of dispatched effects."""
    return f"{universe}/effects"


def dispatch(txn: Txn, intent: Intent) -> None:
    """Put an effect into the queue of its kind, unless its key was used before."""
    if intent.key is None or not _is_key_used(txn, intent):
        _dispatch(txn, [intent])


def add_aliases(txn: Txn, intent: Intent, aliases: Iterable[bytes]) -> None:
    """Add aliases by which a world may also cancel this intent."""
    for alias in aliases:
        txn.put(_alias_key(intent.universe_id, intent.world_id, alias), intent.intent_hash)


def _alias_key(universe: str, world_id: str, name: bytes) -> bytes:
    return schema.key_prefix(schema.Space.WORLD, universe, "r", world_id) + tuples.pack((name,))


def _dispatch(txn: Txn, intents: list[Intent]) -> None:
    """Put intents into the queues of their kinds, one batch per kind. Worlds have fair shares, and
    the world of a dead effect gets its receipt in the same commit."""
    queues: dict[str, list[Intent]] = {}
    for intent in intents:
        if intent.effect_kind.startswith(FLOW_START_PREFIX):
            _start_flow(txn, intent)
            continue
        queues.setdefault(effect_queue(intent.universe_id, intent.effect_kind), []).append(intent)
    for name, batch in queues.items():
        new_items = [
            queue.NewItem(codec.pack(one), one.priority, one.world_id, ON_DEAD_OPERATION)
            for one in batch
        ]
        for intent, seq in zip(batch, queue.put_all(txn, name, new_items), strict=True):
            _put_pending(txn, intent, seq)


def _put_pending(txn: Txn, intent: Intent, seq: int) -> None:
    if intent.key is not None:
        # A dead effect may have the same key and another tag.
        drop(txn, intent.universe_id, intent.intent_hash)
    pending_effect = PendingEffect(
        intent.world_id,
        intent.effect_kind,
        seq,
        intent.correlation_id,
        intent.tag,
        redrive_of=intent.redrive_of,
        listed=bool(intent.tag),
    )
    txn.put(_pending_key(intent.universe_id, intent.intent_hash), codec.pack(pending_effect))
    tags.add(txn, tag_prefix(intent.universe_id), intent.tag, tuples.pack((intent.intent_hash,)))


def _start_flow(txn: Txn, intent: Intent) -> None:
    """Start the flow of an intent. The key of the flow is the hash of the intent."""
    seq = flow_callbacks.start(txn, intent)
    if seq is not None:
        _put_pending(txn, intent, seq)
        flow_callbacks.answer_if_ended(txn, intent, seq)
    else:
        conflict = synthetic_receipts.key_conflict_receipt(intent)
        put_ingress(txn, intent.universe_id, intent.world_id, None, conflict, intent.trace)


def _is_key_used(txn: Txn, intent: Intent) -> bool:
    """Whether the user's key was used before. If it was used with other parameters, deliver a
    `key_conflict` receipt."""
    scope_name, name, digest = (
        dedupe_scope(intent.universe_id),
        intent.intent_hash.hex(),
        intent.idempotency_digest(),
    )
    record = dedupe.lookup(txn, scope_name, name)
    first = _pending_digest(txn, intent) if record is None else record.body_hash
    if first is None:
        dedupe.remember(txn, scope_name, name, digest, b"")
        return False
    if first != digest:
        put_ingress(
            txn,
            intent.universe_id,
            intent.world_id,
            None,
            synthetic_receipts.key_conflict_receipt(intent),
            intent.trace,
        )
    return True


def _pending_digest(txn: Txn, intent: Intent) -> bytes | None:
    """Return the digest of a pending effect whose dedupe record has expired: the same request is
    still a duplicate."""
    pending_effect = find_pending(txn, intent.universe_id, intent.intent_hash)
    if pending_effect is None or pending_effect.dead:
        return None
    if pending_effect.starts_flow:
        return flow_callbacks.idempotency_digest(txn, intent.universe_id, pending_effect.seq)
    keys = items.keys_of(pending_effect.queue(intent.universe_id))
    item = items.load_item(txn, keys, items.pack_int(pending_effect.seq))
    return codec.unpack_as(Intent, queue.payload_of(txn, item)).idempotency_digest()


def _pending_key(universe: str, intent_hash: bytes) -> bytes:
    return _pending_prefix(universe) + tuples.pack((intent_hash,))


@lru_cache(maxsize=1024)
def _pending_prefix(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.WORLD, universe, "i")


@lru_cache(maxsize=1024)
def tag_prefix(universe: str) -> bytes:
    """The prefix of the index of effects by tag."""
    return schema.key_prefix(schema.Space.WORLD, universe, "it")


def _unlist(txn: Txn, universe: str, intent_hash: bytes, pending_effect: PendingEffect) -> None:
    if pending_effect.listed:
        packed = tuples.pack((intent_hash,))
        tags.remove(txn, tag_prefix(universe), pending_effect.tag, packed)


def _intent_hash_of(key: bytes) -> bytes:
    intent_hash = tuples.unpack(key)[-1]
    assert isinstance(intent_hash, bytes)
    return intent_hash


_decode_pending = codec.decoder(PendingEffect).decode


def enqueue_effect(txn: Txn, intent: Intent, not_before_ns: int = 0) -> int:
    """Put an effect into the queue of its kind with a start time. Worlds have fair shares, and the
    world of a dead effect gets its receipt in the same commit."""
    name = effect_queue(intent.universe_id, intent.effect_kind)
    return queue.put.fn(
        txn,
        name,
        codec.pack(intent),
        intent.priority,
        not_before_ns,
        intent.world_id,
        ON_DEAD_OPERATION,
    )


def _send(txn: Txn, intent: Intent) -> None:
    """Deliver mail within the universe at once. Use the queue for other universes and for full
    inboxes."""
    if intent.key is not None and _is_key_used(txn, intent):
        return
    mail = delivery.mail_of(intent)
    if delivery.is_cross_universe(intent, mail):
        _dispatch(txn, [intent])
        return
    result = delivery.accept(txn, intent, mail)
    if result.status == delivery.FULL:
        # The sender's commit does not fail for a full neighbour.
        _dispatch(txn, [intent])
    else:
        deliver_receipt(txn, intent, delivery.make_receipt(intent, mail, result))


def deliver_receipt(txn: Txn, intent: Intent, receipt: IntentReceipt) -> None:
    """Deliver the receipt of mail if the sender requests receipts, or if the delivery failed."""
    if intent.wants_receipt or receipt.status is not ReceiptStatus.OK:
        ingress = receipt_ingress(receipt, correlation_id=intent.correlation_id)
        key = receipt_key(intent.intent_hash)
        # The key deduplicates the receipt if several deliveries produce one.
        with contextlib.suppress(KeyConflict):
            put_ingress(txn, intent.universe_id, intent.world_id, key, ingress, intent.trace)


def cancel_silently(txn: Txn, universe: str, intent_hash: bytes) -> None:
    """Cancel the effect of a flow. Its step gets no outcome, so no receipt is delivered."""
    resolved = resolve(txn, universe, intent_hash)
    if resolved is not None:
        queue.cancel.fn(txn, resolved.queue(universe), resolved.seq, True)


# -- cancelling ------------------------------------------------------------------------------------


def _cancel(txn: Txn, intent: Intent) -> None:
    """Cancel an effect, even if a worker has claimed it: a later result of the worker is
    ignored."""
    universe, world_id, cancelled_hash = intent.universe_id, intent.world_id, intent.params
    pending_effect = find_pending(txn, universe, cancelled_hash)
    if pending_effect is None or pending_effect.world_id != world_id:
        # A fork refers to a reissued intent by the hash of its parent's intent.
        reissued_hash = txn.get(_alias_key(universe, world_id, cancelled_hash))
        if reissued_hash is None:
            return
        cancelled_hash = reissued_hash
    resolved = resolve(txn, universe, cancelled_hash)
    if resolved is None:
        return
    withdraw(txn, universe, resolved)
    receipt = synthetic_receipts.cancelled_receipt(
        cancelled_hash,
        resolved.effect_kind,
        tag=resolved.tag,
        correlation_id=resolved.correlation_id,
        redrive_of=resolved.redrive_of,
    )
    put_ingress(txn, universe, world_id, None, receipt, intent.trace)
