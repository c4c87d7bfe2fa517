"""Into a world: validate at the door, find or make the world, put into its inbox, leave a hint.

One operation for every producer (senders, adapters, timers, other worlds), so that what is accepted
is durable, ordered and deduplicated by its key when the call returns. A full inbox refuses events
with `Overloaded`; receipts are never refused.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import INBOX_DEPTH_MAX, MESSAGE_BYTES_MAX
from holdfast.durable import inbox
from holdfast.durable.bounds import check_limit
from holdfast.errors import NotFound, Overloaded, ValueTooLarge
from holdfast.messages import Ingress, Kind
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, unknown
from holdfast.world.unknown import Item

# What an ingress may hold besides its value: identities, headers.
_ENVELOPE_BYTES_MAX = 64 * 1024


class Address(Record, frozen=True):
    """A world by name. `mint` is the id it gets if there is none yet; None: it must be there."""

    universe: str
    type: str
    name: str
    mint: str | None = None


class Delivered(Record, frozen=True):
    """`already` says that the key was delivered before, under this seq; `item` what became of it."""

    world_id: str
    seq: int
    already: bool
    item: Item | None = None


def user_key(key: str | None) -> str | None:
    """A user's idempotency key, apart from the system's: nobody can use up a receipt's key."""
    return None if key is None else f"user:{key}"


@operation
def deliver(txn: Txn, to: Address, key: str | None, ingress: Ingress) -> Delivered:
    """Accept one ingress: durable and in order when this returns."""
    world_id = catalog.find(txn, to.universe, to.type, to.name)
    if world_id is None:
        if to.mint is None:
            raise NotFound(what="world", universe=to.universe, type=to.type, name=to.name)
        world_id = catalog.create(txn, to.universe, to.type, to.name, to.mint).world_id
    return deliver_to(txn, to.universe, world_id, key, ingress)


@operation
def deliver_many(txn: Txn, items: list[tuple[Address, str | None, Ingress]]) -> list[Delivered]:
    """Accept many, all or none, in order."""
    check_limit(len(items), "items")
    return [deliver.fn(txn, to, key, ingress) for to, key, ingress in items]


@operation
def enqueue(txn: Txn, universe: str, world_id: str, key: str | None, ingress: Ingress) -> Delivered:
    """Accept one ingress for a world that is known by id."""
    return deliver_to(txn, universe, world_id, key, ingress)


def deliver_to(
    txn: Txn, universe: str, world_id: str, key: str | None, ingress: Ingress
) -> Delivered:
    # What is deleted has no worker: whoever has one need not be looked up.
    placed = catalog.assignment(txn, universe, world_id) is not None
    if not placed and catalog.record(txn, universe, world_id).status is catalog.Status.DELETED:
        raise NotFound(what="world", universe=universe, world_id=world_id, why="it is deleted")
    subject = catalog.subject_of(universe, world_id)
    if ingress.kind is not Kind.RECEIPT and inbox.depth(txn, subject) >= INBOX_DEPTH_MAX:
        raise Overloaded(
            world_id=world_id, depth=INBOX_DEPTH_MAX, depth_max=INBOX_DEPTH_MAX, retry_after_s=1.0
        )
    body = codec.pack(ingress)
    if len(body) > MESSAGE_BYTES_MAX + _ENVELOPE_BYTES_MAX:
        raise ValueTooLarge(what="ingress", bytes=len(body), bytes_max=MESSAGE_BYTES_MAX)
    put = inbox.put.fn(txn, subject, key, body)
    if put.already:
        return Delivered(world_id, put.seq, True, unknown.item(txn, universe, world_id, put.seq))
    catalog.hint(txn, universe, world_id)
    return Delivered(world_id, put.seq, False)
