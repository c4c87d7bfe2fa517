"""The outbox: mail that could not be delivered in the sender's commit. It waits in a queue, and the
delivery is fused with the commit that finishes the queue item.

    deliver_local      deliver to a world of this store
    forward_to_peer    move the message to the queue of another store, so that a slow or unreachable
                       store delays only its own mail
    finish             apply the answer of another store
    announce_route     record that some pool has a route to a universe; any other pool may then put
                       mail into the queue of that universe

A message has at most one receipt. A message that was cancelled or answered meanwhile has no pending
row, and later results are ignored.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.config import FULL_INBOX_RETRY_NS, NAME_BYTES_MAX, ROUTE_TTL_NS
from holdfast.durable import queue
from holdfast.errors import NotFound
from holdfast.messages import FABRIC_SEND, FabricSendParams, Intent
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, intents
from holdfast.world.messaging import delivery
from holdfast.world.messaging.delivery import DeliveryResult


def peer_queue_name(universe: str, dest_universe: str) -> str:
    """The name of the queue for mail from one universe to a universe in another store."""
    name = intents.effect_queue(universe, f"{FABRIC_SEND}>{dest_universe}")
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    return intents.effect_queue(universe, f"{FABRIC_SEND}>{codec.digest(name.encode()).hex()[:32]}")


@operation("outbox.deliver_local")
def deliver_local(txn: Txn, intent: Intent) -> None:
    """Deliver mail to a world of this store. If the inbox is full, requeue the message with a
    delay."""
    mail = delivery.mail_of(intent)
    result = delivery.accept(txn, intent, mail)
    if result.status == delivery.FULL:
        intents.relocate(
            txn, intent, intents.enqueue_effect(txn, intent, txn.now_ns + FULL_INBOX_RETRY_NS)
        )
    else:
        _finish(txn, intent, mail, result)


@operation("outbox.forward_to_peer")
def forward_to_peer(txn: Txn, intent: Intent, dest_universe: str) -> None:
    """Move mail to the queue of a store that this store knows only by its URL."""
    name = peer_queue_name(intent.universe_id, dest_universe)
    payload = codec.pack(intent)
    seq = queue.put.fn(
        txn, name, payload, intent.priority, 0, intent.world_id, intents.ON_DEAD_OPERATION
    )
    intents.relocate(txn, intent, seq, name)


@operation("outbox.announce_route")
def announce_route(txn: Txn, universe: str, dest_universe: str) -> None:
    """Record that some pool delivers mail from one universe to another."""
    txn.put(_route_key(universe, dest_universe), schema.encode_int(txn.now_ns))


def has_route(txn: Txn, universe: str, dest_universe: str) -> bool:
    """Whether some pool announced a route recently."""
    row = txn.get(_route_key(universe, dest_universe))
    return row is not None and txn.now_ns < schema.decode_int(row) + ROUTE_TTL_NS


def announced_universes(txn: Txn, universe: str, limit: int) -> list[str]:
    """Return the universes that any pool has ever announced a route to."""
    prefix = schema.key_prefix(schema.Space.WORLD, universe, "route")
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    return [str(tuples.unpack(key)[3]) for key, _ in rows]


@operation("outbox.finish")
def finish(txn: Txn, intent: Intent, found: DeliveryResult) -> None:
    """Resolve a message with the result of its delivery and send the receipt to its sender."""
    _finish(txn, intent, delivery.mail_of(intent), found)


def is_mail_pending(txn: Txn, intent: Intent) -> bool:
    """Whether the message is still pending."""
    pending = intents.find_pending(txn, intent.universe_id, intent.intent_hash)
    return pending is not None and not pending.dead


def _route_key(universe: str, dest_universe: str) -> bytes:
    return schema.key_prefix(schema.Space.WORLD, universe, "route", dest_universe)


def _finish(txn: Txn, intent: Intent, mail: FabricSendParams, found: DeliveryResult) -> None:
    universe = intent.universe_id
    if intents.resolve(txn, universe, intent.intent_hash) is None:
        return
    try:
        sender = catalog.get_record(txn, universe, intent.world_id)
    except NotFound:
        return
    if sender.status is not catalog.WorldStatus.DELETED:
        intents.deliver_receipt(txn, intent, delivery.make_receipt(intent, mail, found))
