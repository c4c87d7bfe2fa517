"""Back into a world: the one receipt of an intent, and the event of a timer.

These operations join the commit that ends a queue item: the ack of a worker that has done the work,
or the burial of an item that nobody will do. So an intent ends with a receipt in its world's inbox,
in the same commit, or it has not ended. A second receipt for the same intent changes nothing.

None of them raises: what cannot be delivered any more (the world is deleted) is dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.durable import queue
from holdfast.durable.queue import Dead
from holdfast.effects import budget
from holdfast.effects.budget import Charge
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import TIMER_SET, Intent, Receipt, Status, TimerSet, receipt_ingress
from holdfast.store.api import Txn, operation
from holdfast.world import catalog, publish, timers
from holdfast.world.ingress import deliver_to


@operation
def receive(txn: Txn, intent: Intent, receipt: Receipt) -> None:
    """Deliver how an effect ended."""
    if publish.end(txn, intent.universe_id, intent.intent_hash) is not None:
        _deliver(txn, intent, receipt)


@operation
def bereave(txn: Txn, letter: Dead) -> None:
    """The will of an effect: whoever wanted it is told that it will not be done."""
    # Few programs dispatch prompts, and every worker imports this module.
    from holdfast.authority import dispatch_log
    from holdfast.authority.dispatch import request_id_of

    try:
        intent = codec.unpack_as(Intent, queue.payload_of(txn, letter))
    except HoldfastError:
        return
    timeout = letter.code in ("timeout", "expiries_exhausted")
    told = Receipt(
        intent.intent_hash,
        intent.effect_kind,
        Status.TIMEOUT if timeout else Status.ERROR,
        code=letter.code,
        error=letter.error,
        attempts=letter.failures + letter.expiries,
        tag=intent.tag,
        redrive_of=intent.redrive_of,
        tried=letter.tried,
    )
    # What was set aside for a call of which nobody knows the bill is taken as spent.
    budget.close.fn(txn, intent.universe_id, intent.intent_hash.hex(), None)
    # A dispatch that was under way ends with its effect.
    dispatch_log.abandon.fn(txn, intent.universe_id, request_id_of(intent), letter.code)
    if publish.end(txn, intent.universe_id, intent.intent_hash, dead=True) is not None:
        _deliver(txn, intent, told)


@operation
def book_late(txn: Txn, intent: Intent, claim: int, charges: list[Charge] | None) -> None:
    """Book a call whose claim was lost, unless whoever claimed the effect since has done so."""
    budget.book_late.fn(txn, intent.universe_id, intent.intent_hash.hex(), claim, charges)


@operation
def redrive_effects(txn: Txn, universe: str, kind: str, seqs: list[int]) -> list[bytes]:
    """Want dead effects again, each as a new intent linked to the old; the new identities."""
    name = publish.effects(universe, kind)
    made: list[bytes] = []
    for seq in seqs:
        found = queue.dead(txn, name, seq - 1, 1)
        if not found or found[0].seq != seq:
            raise NotFound(what="dead letter", queue=name, seq=seq)
        old = codec.unpack_as(Intent, queue.payload_of(txn, found[0]))
        if not _reachable(txn, old):
            raise Invalid(what="redrive", why="its world is deleted", seq=seq)
        again = replace(
            old,
            intent_hash=codec.digest(b"redrive", old.intent_hash, seq.to_bytes(8, "big")),
            enqueued_at_ns=txn.now_ns,
            # Its user's key stands for the first: this one has a name of its own.
            key=None,
            redrive_of=old.intent_hash,
        )
        queue.discard_dead.fn(txn, name, [seq])
        publish.forget_dead(txn, universe, old.intent_hash, seq)
        publish.dispatch(txn, again)
        made.append(again.intent_hash)
    return made


@operation
def drop_dead(txn: Txn, name: str, seqs: list[int]) -> list[int]:
    """Remove dead letters for good, all or none; their numbers. An effect's world has had its receipt."""
    for seq in seqs:
        found = queue.dead(txn, name, seq - 1, 1) if seq > 0 else []
        if not found or found[0].seq != seq:
            raise NotFound(what="dead letter", queue=name, seq=seq)
        try:
            intent = codec.unpack_as(Intent, queue.payload_of(txn, found[0]))
        except HoldfastError:
            continue
        if intent.effect_kind == TIMER_SET:
            timers.take(txn, intent, codec.unpack_as(TimerSet, intent.params).key)
        else:
            publish.forget_dead(txn, intent.universe_id, intent.intent_hash, seq)
    queue.discard_dead.fn(txn, name, seqs)
    return seqs


def _deliver(txn: Txn, intent: Intent, receipt: Receipt) -> None:
    if _reachable(txn, intent):
        ingress = receipt_ingress(receipt, correlation_id=intent.correlation_id)
        deliver_to(txn, intent.universe_id, intent.world_id, None, ingress)


def _reachable(txn: Txn, intent: Intent) -> bool:
    try:
        record = catalog.record(txn, intent.universe_id, intent.world_id)
    except NotFound:
        return False
    return record.status is not catalog.Status.DELETED
