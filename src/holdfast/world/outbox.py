"""Mail that could not be delivered where it was sent: it waits in a queue, and ends with its item.

    deliver    to a world of this store, in the commit that ends the item
    forward    to the lane of another store: a queue of its own, so that a store that is slow or gone
               delays no mail but its own
    conclude   what another store answered, in the commit that ends the item
    announce   that some pool has a route to a universe: then any other may put mail into its lane

These join the commit of a queue item. Sending is answered at most once: a message that was cancelled
or answered meanwhile has no pending row, and what is found out about it later counts for nothing.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.config import NAME_BYTES_MAX, RETRY_FULL_NS, ROUTE_KEPT_NS
from holdfast.durable import queue
from holdfast.errors import NotFound
from holdfast.messages import FABRIC_SEND, FabricSendParams, Intent
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, fabric, publish
from holdfast.world.fabric import Accepted


def lane(universe: str, dest_universe: str) -> str:
    """The queue of mail from one universe to another in another store."""
    name = publish.effects(universe, f"{FABRIC_SEND}>{dest_universe}")
    if len(name.encode()) <= NAME_BYTES_MAX:
        return name
    return publish.effects(universe, f"{FABRIC_SEND}>{codec.digest(name.encode()).hex()[:32]}")


@operation
def deliver(txn: Txn, intent: Intent) -> None:
    """To a world of this store. If its inbox is full, the message waits some more."""
    mail = fabric.read(intent)
    found = fabric.accept(txn, intent, mail)
    if found.status == fabric.FULL:
        publish.moved(txn, intent, publish.enqueue(txn, intent, txn.now_ns + RETRY_FULL_NS))
    else:
        _end(txn, intent, mail, found)


@operation
def forward(txn: Txn, intent: Intent, dest_universe: str) -> None:
    """Into the lane of a store that this one only knows by its URL."""
    name = lane(intent.universe_id, dest_universe)
    payload = codec.pack(intent)
    seq = queue.put.fn(txn, name, payload, intent.priority, 0, intent.world_id, publish.WILL)
    publish.moved(txn, intent, seq, name)


@operation
def announce(txn: Txn, universe: str, dest_universe: str) -> None:
    """Say that mail from one universe to another has somebody who brings it."""
    txn.put(_route_key(universe, dest_universe), schema.int_bytes(txn.now_ns))


def routed(txn: Txn, universe: str, dest_universe: str) -> bool:
    """Whether some pool has announced a route, not too long ago."""
    row = txn.get(_route_key(universe, dest_universe))
    return row is not None and txn.now_ns < schema.int_of(row) + ROUTE_KEPT_NS


def routes(txn: Txn, universe: str, limit: int) -> list[str]:
    """The universes that some pool had a route to, ever."""
    prefix = schema.prefix(schema.Space.WORLD, universe, "route")
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    return [str(tuples.unpack(key)[3]) for key, _ in rows]


@operation
def conclude(txn: Txn, intent: Intent, found: Accepted) -> None:
    """Tell the sender what became of its message."""
    _end(txn, intent, fabric.read(intent), found)


def open_mail(txn: Txn, intent: Intent) -> bool:
    """Whether somebody still wants this delivered."""
    found = publish.pending(txn, intent.universe_id, intent.intent_hash)
    return found is not None and not found.dead


def _route_key(universe: str, dest_universe: str) -> bytes:
    return schema.prefix(schema.Space.WORLD, universe, "route", dest_universe)


def _end(txn: Txn, intent: Intent, mail: FabricSendParams, found: Accepted) -> None:
    universe = intent.universe_id
    if publish.end(txn, universe, intent.intent_hash) is None:
        return
    try:
        sender = catalog.record(txn, universe, intent.world_id)
    except NotFound:
        return
    if sender.status is not catalog.Status.DELETED:
        publish.tell(txn, intent, fabric.receipt_of(intent, mail, found))
