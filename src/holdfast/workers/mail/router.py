"""Mail routing: the next hop of mail that the sender's commit could not deliver.

    destination with a route of any pool    forward to the peer queue of its store
    destination in this store               deliver to the inbox, in the commit that acks the item
    other destination                       retry with backoff

Every pool routes mail, also a pool started without routes, so routes announced by other pools
count, too. An unannounced destination is not an error yet, because pools start one after the other.
The mail waits with a visible reason and ends as `no_route` after about an hour of retries. The
limit counts retries, not age, so mail stored while no pool ran gets the full hour.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import codec
from holdfast.clock import Clock, S
from holdfast.config import ROUTE_LOOKUP_PAUSE_PER_MESSAGE_NS, ROUTE_LOOKUPS_MAX
from holdfast.durable import queue
from holdfast.errors import HoldfastError
from holdfast.messages import Intent
from holdfast.runner import WorkItem
from holdfast.store.api import Store, Txn
from holdfast.world.messaging import delivery, outbox
from holdfast.world.messaging.delivery import DeliveryResult

# How often a pool checks whether a universe now exists in this store.
LOCAL_CHECK_EVERY_NS = 2 * S


class NoMailRoute(HoldfastError):
    code = "no_route"
    retryable = True
    hint = (
        "check the name of the universe, and set its store: in [stores] of holdfast.toml, with "
        "--peer UNIVERSE=URL, or with stores={universe: url}"
    )


class MailRouter:
    """The queue handler that chooses the next hop of waiting mail."""

    def __init__(self, store: Store, universe: str, has_peer_queue: Callable[[str], bool]) -> None:
        """`has_peer_queue` returns whether this pool has a peer queue for a universe."""
        self._store = store
        self._universe = universe
        self._has_peer_queue = has_peer_queue

    def __call__(self, work: WorkItem) -> None:
        intent = codec.unpack_as(Intent, work.payload)
        dest_universe = delivery.mail_of(intent).dest_universe or self._universe
        if dest_universe == self._universe:
            work.on_ack(outbox.deliver_local, intent)
        elif self._has_peer_queue(dest_universe) or self._store.read(
            outbox.has_route, self._universe, dest_universe
        ):
            work.on_ack(outbox.forward_to_peer, intent, dest_universe)
        elif self._store.read(delivery.universe_exists, dest_universe):
            work.on_ack(outbox.deliver_local, intent)
        else:
            retry_routing(self._store, work, intent, dest_universe)


class LocalRedelivery:
    """The handler and throttle of a peer queue whose universe is now routed to this store. It
    delivers the queued mail locally once the universe exists here.
    """

    def __init__(self, store: Store, to: str, clock: Clock) -> None:
        self._store = store
        self._dest_universe = to
        self._clock = clock
        self._known = False
        self._check_at_ns = 0

    def __call__(self, work: WorkItem) -> None:
        work.on_ack(outbox.deliver_local, codec.unpack_as(Intent, work.payload))

    def available(self, wanted: int) -> int:
        if not self._known and not self.wait_ns():
            self._known = self._store.read(delivery.universe_exists, self._dest_universe)
            self._check_at_ns = self._clock.mono_ns() + LOCAL_CHECK_EVERY_NS
        return wanted if self._known else 0

    acquire = available

    def wait_ns(self) -> int:
        return 0 if self._known else max(0, self._check_at_ns - self._clock.mono_ns())


def has_peer_route(txn: Txn, universe: str, to: str) -> bool:
    """Whether the peer queue of a universe holds mail, or a route to it is announced."""
    counts = queue.counts(txn, outbox.peer_queue_name(universe, to))
    return outbox.has_route(txn, universe, to) or bool(
        counts.ready + counts.delayed + counts.claimed
    )


def retry_routing(store: Store, work: WorkItem, intent: Intent, to: str) -> None:
    """Retry mail to an unknown universe later, with `no_route` as the visible reason. After the
    last retry it ends with that error. The more mail waits, the longer is the delay.
    """
    if work.claim.failures + 1 >= ROUTE_LOOKUPS_MAX:
        error = NoMailRoute(universe=to)
        answer = DeliveryResult(delivery.ERROR, code=error.code, error=str(error))
        work.on_ack(outbox.finish, intent, answer)
        return
    counts = store.read(queue.counts, work.claim.queue)
    pause_s = (counts.ready + counts.delayed) * ROUTE_LOOKUP_PAUSE_PER_MESSAGE_NS // S
    raise NoMailRoute(universe=to, retry_after_s=pause_s) if pause_s else NoMailRoute(universe=to)
