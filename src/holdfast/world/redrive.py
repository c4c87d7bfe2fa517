"""Back into the inbox: events that a reducer failed on, or that no code knew in time (`unknown`), once
an operator has redriven them.

Such an event is a dead letter in the queue `failures(universe)`. Redriven, it is an item there, and
`redeliver` puts it at the end of its world's inbox, under a key of its own. Taking it from the queue
and delivering it are one operation: it is in one place or the other.

What cannot be delivered is buried again, with a code: the world is deleted, or the letter is no
letter. A full inbox keeps it waiting.
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
from holdfast.world import unknown
from holdfast.world.ingress import enqueue

# What one call delivers at most; a full inbox is tried again after the delay.
REDELIVERED_MAX = 100
FULL_DELAY_NS = 1 * S
_CLAIM_TTL_NS = 1 * S


class Letter(Record, frozen=True):
    """An event that became a dead letter."""

    world_id: str
    seq: int
    ingress: bytes
    # The key under which it was delivered, if it had one.
    key: str = ""


def failures(universe: str) -> str:
    """The queue where events end that a reducer failed on, or that no code knew in time."""
    return f"{universe}/failed-events"


def universe_of(queue_name: str) -> str | None:
    """The universe whose failed events are in this queue; None for any other queue."""
    universe = queue_name.rpartition("/")[0]
    return universe if universe and failures(universe) == queue_name else None


def waiting(txn: Txn, universe: str) -> bool:
    """Whether there is anything to deliver again."""
    return queue.next_due_ns(txn, failures(universe)) is not None


@operation
def redeliver(txn: Txn, universe: str, worker: str, limit: int = REDELIVERED_MAX) -> int:
    """Deliver redriven events again; how many."""
    name = failures(universe)
    delivered = 0
    for claim in queue.claim.fn(txn, name, worker, limit, _CLAIM_TTL_NS):
        try:
            letter = codec.unpack_as(Letter, queue.payload_of(txn, claim))
            ingress = codec.unpack_as(Ingress, letter.ingress)
            put = enqueue.fn(txn, universe, letter.world_id, _key(claim), ingress)
            unknown.redriven(txn, universe, letter.world_id, letter.seq, put.seq)
        except Overloaded as error:
            queue.settle.fn(
                txn, [], [queue.Failure(claim.token, error.code, str(error), True, FULL_DELAY_NS)]
            )
        except (Invalid, NotFound) as error:
            queue.bury.fn(txn, claim.token, error.code, str(error))
        else:
            queue.ack.fn(txn, [claim.token])
            delivered += 1
    return delivered


def _key(claim: Claim) -> str:
    # Numbers of a queue are never given twice: each redrive is a delivery of its own.
    return f"redrive:{claim.seq}"
