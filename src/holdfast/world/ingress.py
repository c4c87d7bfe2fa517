"""Delivery into a world: validate, find or create the world, put into its inbox, mark it runnable.

All producers (clients, adapters, timers, other worlds) use this operation. When it returns, the
accepted ingress is durable, ordered and deduplicated by its key. A full inbox refuses events with
`Overloaded`. Receipts are never refused.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import INBOX_DEPTH_MAX, MESSAGE_BYTES_MAX
from holdfast.durable import inbox, load_limits
from holdfast.durable.load_limits import LoadLimits
from holdfast.durable.validation import check_limit
from holdfast.errors import NotFound, Overloaded, ValueTooLarge
from holdfast.messages import Ingress, IngressKind
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, load_admission, unknown_events
from holdfast.world.unknown_events import InboxItemStatus

# The size limit of an ingress besides its value: identities and headers.
_ENVELOPE_BYTES_MAX = 64 * 1024


class WorldAddress(Record, frozen=True):
    """A world by name. `new_id` is the id to use if the world is created; None if it must exist."""

    universe: str
    type: str
    name: str
    mint: str | None = None


class IngressResult(Record, frozen=True):
    """The result of a delivery. `already`: the key was delivered before, under this seq. `item` is
    the status of that item."""

    world_id: str
    seq: int
    already: bool
    item: InboxItemStatus | None = None


def user_key(key: str | None) -> str | None:
    """Prefix a user's idempotency key, so that it cannot collide with system keys such as those of
    receipts."""
    return None if key is None else f"user:{key}"


@operation("ingress.deliver")
def deliver(
    txn: Txn, to: WorldAddress, key: str | None, ingress: Ingress, trace: bytes = b""
) -> IngressResult:
    """Accept one ingress. It is durable and ordered when this returns. `trace` is the trace context of the sender."""
    return _deliver(txn, to, key, ingress, load_limits.find(txn, to.universe), trace)


def _deliver(
    txn: Txn,
    to: WorldAddress,
    key: str | None,
    ingress: Ingress,
    limits: LoadLimits | None,
    trace: bytes,
) -> IngressResult:
    world_id = catalog.find_id(txn, to.universe, to.type, to.name)
    if world_id is None:
        if to.mint is None:
            raise NotFound(what="world", universe=to.universe, type=to.type, name=to.name)
        world_id = catalog.create(txn, to.universe, to.type, to.name, to.mint).world_id
    return put_with_limits(txn, to.universe, world_id, key, ingress, limits, trace)


@operation("ingress.deliver_many")
def deliver_many(
    txn: Txn, items: list[tuple[WorldAddress, str | None, Ingress]], trace: bytes = b""
) -> list[IngressResult]:
    """Accept many ingresses in order, all or none."""
    check_limit(len(items), "items")
    # A delivery does not change the limits, so a batch reads them once.
    limits_of = {
        universe: load_limits.find(txn, universe)
        for universe in dict.fromkeys(to.universe for to, _, _ in items)
    }
    return [
        _deliver(txn, to, key, ingress, limits_of[to.universe], trace) for to, key, ingress in items
    ]


@operation("ingress.deliver_by_id")
def deliver_by_id(
    txn: Txn,
    universe: str,
    world_id: str,
    key: str | None,
    ingress: Ingress,
    trace: bytes = b"",
) -> IngressResult:
    """Accept one ingress for a world given by its id."""
    return put_ingress(txn, universe, world_id, key, ingress, trace)


def put_ingress(
    txn: Txn,
    universe: str,
    world_id: str,
    key: str | None,
    ingress: Ingress,
    trace: bytes = b"",
) -> IngressResult:
    """Put one ingress into the inbox of a world and mark the world runnable."""
    limits = load_limits.find(txn, universe)
    return put_with_limits(txn, universe, world_id, key, ingress, limits, trace)


def put_with_limits(
    txn: Txn,
    universe: str,
    world_id: str,
    key: str | None,
    ingress: Ingress,
    limits: LoadLimits | None,
    trace: bytes = b"",
) -> IngressResult:
    """`put_ingress` for a caller that has read the load limits of the universe in this transaction."""
    # A deleted world has no assignment, so an assigned world needs no lookup of its record.
    assignment = catalog.find_assignment(txn, universe, world_id)
    if (
        assignment is None
        and catalog.get_record(txn, universe, world_id).status is catalog.WorldStatus.DELETED
    ):
        raise NotFound(what="world", universe=universe, world_id=world_id, why="it is deleted")
    subject = catalog.subject_of(universe, world_id)
    if ingress.kind is not IngressKind.RECEIPT and inbox.depth(txn, subject) >= INBOX_DEPTH_MAX:
        raise Overloaded(
            world_id=world_id, depth=INBOX_DEPTH_MAX, depth_max=INBOX_DEPTH_MAX, retry_after_s=1.0
        )
    body = codec.pack(ingress)
    if len(body) > MESSAGE_BYTES_MAX + _ENVELOPE_BYTES_MAX:
        raise ValueTooLarge(what="ingress", bytes=len(body), bytes_max=MESSAGE_BYTES_MAX)
    if limits is not None:
        # The repeat of an accepted event is never refused.
        is_new = key is None or not inbox.is_delivered(txn, subject, key)
        if ingress.kind is IngressKind.EVENT and is_new:
            load_admission.judge_event(txn, universe, world_id, len(body), limits)
    put = inbox.put_with_limits(txn, subject, key, body, None, b"", limits, trace=trace)
    if put.already:
        return IngressResult(
            world_id, put.seq, True, unknown_events.item_status(txn, universe, world_id, put.seq)
        )
    catalog.mark_runnable_with(txn, universe, world_id, assignment)
    return IngressResult(world_id, put.seq, False)
