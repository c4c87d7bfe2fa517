"""Redrive of failed events: events that a reducer failed on, or that no worker declared in time
(`unknown_events`), are delivered again after an operator redrives them.

Such an event is a dead letter in the queue `failed_events_queue(universe)`. A redrive turns it into
an item of that queue, and `redeliver` puts it at the end of its world's inbox under a new key. One
operation removes it from the queue and delivers it, so it exists in exactly one place.

An event that cannot be delivered becomes a dead letter again, with a code: the world is deleted, or
the payload is invalid. A full inbox delays the delivery.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.clock import S
from holdfast.codec import Record
from holdfast.durable import queue
from holdfast.durable.queue import Claim
from holdfast.errors import Invalid, NotFound, Overloaded
from holdfast.messages import Ingress
from holdfast.store.api import Txn, operation
from holdfast.world import unknown_events
from holdfast.world.ingress import deliver_by_id

# The maximum number of deliveries per call, and the retry delay for a full inbox.
REDELIVERED_MAX = 100
FULL_DELAY_NS = 1 * S
_CLAIM_TTL_NS = 1 * S


class FailedEventRow(Record, frozen=True):
    """The payload of a failed event's dead letter."""

    world_id: str
    seq: int
    ingress: bytes
    # The dedupe key of the first delivery, if it had one.
    key: str = ""
    # The trace context of the sender.
    trace: bytes = b""


def failed_events_queue(universe: str) -> str:
    """The name of the queue for failed and undeclared events."""
    return f"{universe}/failed-events"


def universe_of(queue_name: str) -> str | None:
    """Return the universe of a failed-events queue; None for any other queue."""
    universe = queue_name.rpartition("/")[0]
    return universe if universe and failed_events_queue(universe) == queue_name else None


def has_redriven(txn: Txn, universe: str) -> bool:
    """Whether there are redriven events to deliver."""
    return queue.next_due_ns(txn, failed_events_queue(universe)) is not None


@operation("events.redeliver")
def redeliver(txn: Txn, universe: str, worker: str, limit: int = REDELIVERED_MAX) -> int:
    """Deliver redriven events. Return their number."""
    name = failed_events_queue(universe)
    delivered = 0
    for claim in queue.claim.fn(txn, name, worker, limit, _CLAIM_TTL_NS):
        try:
            letter = codec.unpack_as(FailedEventRow, queue.payload_of(txn, claim))
            ingress = codec.unpack_as(Ingress, letter.ingress)
            key = _redrive_key(claim)
            put = deliver_by_id.fn(txn, universe, letter.world_id, key, ingress, letter.trace)
            unknown_events.record_redrive(txn, universe, letter.world_id, letter.seq, put.seq)
        except Overloaded as error:
            queue.finish_batch.fn(
                txn,
                [],
                [queue.ItemFailure(claim.token, error.code, str(error), True, FULL_DELAY_NS)],
            )
        except (Invalid, NotFound) as error:
            queue.dead_letter.fn(txn, claim.token, error.code, str(error))
        else:
            queue.ack.fn(txn, [claim.token])
            delivered += 1
    return delivered


def _redrive_key(claim: Claim) -> str:
    # A queue never reuses a seq, so each redrive has a unique key.
    return f"redrive:{claim.seq}"
