"""Out of a world: its intents become queue items, timers and mail, in the commit of their entry.

    fabric.send    into the destination's inbox, at once (`fabric`); what is full or in another
                   universe gets it later, by the queue (`outbox`), and the sender goes on
    timer.set      into its slot, to wait for its time (`timers`)
    timer.cancel   empties the slot
    an effect      into the queue of its kind, once per intent, worlds taking turns
    effect.cancel  out of that queue, even if somebody has claimed it: its receipt is `cancelled`

An intent without a key is born at one height of one journal, and is published by the commit of that
entry alone: nothing could dispatch it twice. One with a user's key is remembered: wanted again, it is the
same intent, and has one receipt. With other parameters it is another one, whose receipt is the error
`key_conflict`.

An effect that has no receipt yet is *pending*: it has a row, and delivering its receipt takes the row
away (`end`). So there is one receipt, whoever brings it: an adapter, a cancel, a will, an operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable import dedupe, inbox, queue
from holdfast.durable import item as items
from holdfast.errors import KeyConflict, NotFound
from holdfast.messages import (
    EFFECT_CANCEL,
    FABRIC_SEND,
    TIMER_CANCEL,
    TIMER_SET,
    Intent,
    Receipt,
    Status,
    receipt_ingress,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import answers, fabric, timers
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import Delivered, deliver_to

# Whoever wanted an effect that dies is told by this operation (it lives above: only named here).
WILL = "holdfast.roles.receipts:bereave"


class Pending(Record, frozen=True):
    """An effect without a receipt: whose it is, what it wants, and its place in the queue."""

    world_id: str
    effect_kind: str
    seq: int
    correlation_id: str | None = None
    tag: str = ""
    # It is a dead letter and has had its receipt: the row is kept to find the letter by.
    dead: bool = False
    # The queue it is in, if not that of its kind: mail that is on its way to another store.
    lane: str = ""
    redrive_of: bytes | None = None

    def queue(self, universe: str) -> str:
        return self.lane or effects(universe, self.effect_kind)


@operation
def publish(txn: Txn, intents: list[Intent], wanted_ns: int = 0) -> None:
    """Dispatch what worlds emitted, at `wanted_ns`. The caller checks the leases in this commit."""
    plain: list[Intent] = []
    for intent in intents:
        if intent.effect_kind == FABRIC_SEND:
            _send(txn, intent)
        elif intent.effect_kind == TIMER_SET:
            timers.set_timer(txn, intent, wanted_ns)
        elif intent.effect_kind == TIMER_CANCEL:
            timers.cancel_timer(txn, intent)
        elif intent.effect_kind == EFFECT_CANCEL:
            # What it cancels may be among those that were wanted right before it.
            _dispatch(txn, plain)
            plain.clear()
            _cancel(txn, intent)
        elif intent.key is None or not _used(txn, intent):
            plain.append(intent)
    _dispatch(txn, plain)


def pending(txn: Txn, universe: str, intent_hash: bytes) -> Pending | None:
    """The effect that waits or is being done, or lies dead; None when it is done, or never was."""
    row = txn.get(_pending_key(universe, intent_hash))
    return None if row is None else _decode_pending(row)


def pending_page(txn: Txn, universe: str, after: bytes, limit: int) -> list[tuple[bytes, Pending]]:
    """Effects of a universe that have no receipt or lie dead, by intent, after one."""
    prefix = _pending_of(universe)
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [(_intent_in(key), _decode_pending(row)) for key, row in rows]


def end(txn: Txn, universe: str, intent_hash: bytes, *, dead: bool = False) -> Pending | None:
    """It gets its receipt now, and no other after that; None when it has had it."""
    key = _pending_key(universe, intent_hash)
    row = txn.get(key)
    if row is None:
        return None
    found = _decode_pending(row)
    if found.dead:
        return None
    if dead:
        txn.put(key, codec.pack(replace(found, dead=True)))
    else:
        txn.delete(key)
    return found


def moved(txn: Txn, intent: Intent, seq: int, lane: str = "") -> None:
    """It waits at another place now."""
    found = pending(txn, intent.universe_id, intent.intent_hash)
    if found is not None:
        key = _pending_key(intent.universe_id, intent.intent_hash)
        txn.put(key, codec.pack(replace(found, seq=seq, lane=lane)))


def forget(txn: Txn, universe: str, intent_hash: bytes) -> None:
    """Its dead letter, or its item, is gone."""
    txn.delete(_pending_key(universe, intent_hash))


def forget_dead(txn: Txn, universe: str, intent_hash: bytes, seq: int) -> None:
    """The dead letter of this number is gone. The same key may have been wanted anew since."""
    found = pending(txn, universe, intent_hash)
    if found is not None and found.dead and found.seq == seq:
        forget(txn, universe, intent_hash)


def receipt_key(intent_hash: bytes) -> str:
    """The key of an intent's receipt where it might be brought twice."""
    return f"receipt:{intent_hash.hex()}"


@operation
def answer(txn: Txn, universe: str, world_id: str, receipt: Receipt) -> Delivered:
    """Give an effect its receipt by hand, whoever is at it. Given again, it is the same answer."""
    key = receipt_key(receipt.intent_hash)
    found = end(txn, universe, receipt.intent_hash)
    correlation_id = None
    if found is not None:
        correlation_id = found.correlation_id
        queue.withdraw.fn(txn, found.queue(universe), found.seq, True)
    elif not inbox.delivered(txn, subject_of(universe, world_id), key):
        raise NotFound(
            what="intent",
            universe=universe,
            intent_hash=receipt.intent_hash.hex(),
            why="it has its receipt, or never was",
        )
    ingress = receipt_ingress(receipt, correlation_id=correlation_id)
    return deliver_to(txn, universe, world_id, key, ingress)


def effects(universe: str, kind: str) -> str:
    """The queue of effects of one kind."""
    return f"{universe}/effects/{kind}"


def scope(universe: str) -> str:
    """Where the identities of dispatched effects are remembered."""
    return f"{universe}/effects"


def dispatch(txn: Txn, intent: Intent) -> None:
    """Put an effect into the queue of its kind, unless its key was used before."""
    if intent.key is None or not _used(txn, intent):
        _dispatch(txn, [intent])


def know(txn: Txn, intent: Intent, names: Iterable[bytes]) -> None:
    """A world may cancel this intent by these names, too."""
    for name in names:
        txn.put(_known_key(intent.universe_id, intent.world_id, name), intent.intent_hash)


def _known_key(universe: str, world_id: str, name: bytes) -> bytes:
    return schema.prefix(schema.Space.WORLD, universe, "r", world_id) + tuples.pack((name,))


def _dispatch(txn: Txn, intents: list[Intent]) -> None:
    """Into the queues of their kinds, those of one kind together. Worlds take turns, and one whose
    effect dies is told so in the same commit."""
    queues: dict[str, list[Intent]] = {}
    for intent in intents:
        queues.setdefault(effects(intent.universe_id, intent.effect_kind), []).append(intent)
    for name, some in queues.items():
        wanted = [queue.Wanted(codec.pack(one), one.priority, one.world_id, WILL) for one in some]
        for intent, seq in zip(some, queue.put_all(txn, name, wanted), strict=True):
            waits = Pending(
                intent.world_id,
                intent.effect_kind,
                seq,
                intent.correlation_id,
                intent.tag,
                redrive_of=intent.redrive_of,
            )
            txn.put(_pending_key(intent.universe_id, intent.intent_hash), codec.pack(waits))


def _used(txn: Txn, intent: Intent) -> bool:
    """Whether the user's key was used before. If it was for something else, the world is told."""
    kept, name, content = scope(intent.universe_id), intent.intent_hash.hex(), intent.wanted()
    found = dedupe.recall(txn, kept, name)
    first = _awaited(txn, intent) if found is None else found.body_hash
    if first is None:
        dedupe.remember(txn, kept, name, content, b"")
        return False
    if first != content:
        deliver_to(txn, intent.universe_id, intent.world_id, None, answers.refused(intent))
    return True


def _awaited(txn: Txn, intent: Intent) -> bytes | None:
    """What a key stands for that was forgotten while its effect waits: it is the same wish still."""
    waits = pending(txn, intent.universe_id, intent.intent_hash)
    if waits is None or waits.dead:
        return None
    keys = items.keys_of(waits.queue(intent.universe_id))
    item = items.load(txn, keys, items.pack_int(waits.seq))
    return codec.unpack_as(Intent, queue.payload_of(txn, item)).wanted()


def _pending_key(universe: str, intent_hash: bytes) -> bytes:
    return _pending_of(universe) + tuples.pack((intent_hash,))


@lru_cache(maxsize=1024)
def _pending_of(universe: str) -> bytes:
    return schema.prefix(schema.Space.WORLD, universe, "i")


def _intent_in(key: bytes) -> bytes:
    found = tuples.unpack(key)[-1]
    assert isinstance(found, bytes)
    return found


_decode_pending = codec.decoder(Pending).decode


def enqueue(txn: Txn, intent: Intent, not_before_ns: int = 0) -> int:
    """Worlds take turns, and one whose effect dies is told so in the same commit."""
    name = effects(intent.universe_id, intent.effect_kind)
    return queue.put.fn(
        txn, name, codec.pack(intent), intent.priority, not_before_ns, intent.world_id, WILL
    )


def _send(txn: Txn, intent: Intent) -> None:
    """Mail within the universe is delivered here and now; other mail, and to the full, by the queue."""
    if intent.key is not None and _used(txn, intent):
        return
    mail = fabric.read(intent)
    if fabric.leaves(intent, mail):
        _dispatch(txn, [intent])
        return
    found = fabric.accept(txn, intent, mail)
    if found.status == fabric.FULL:
        # The sender's commit does not fail for a full neighbour.
        _dispatch(txn, [intent])
    else:
        tell(txn, intent, fabric.receipt_of(intent, mail, found))


def tell(txn: Txn, intent: Intent, receipt: Receipt) -> None:
    """Answer a sender that asks, or whose mail cannot be delivered."""
    if intent.answered or receipt.status is not Status.OK:
        ingress = receipt_ingress(receipt, correlation_id=intent.correlation_id)
        key = receipt_key(intent.intent_hash)
        # There is one answer, however often it is found.
        with contextlib.suppress(KeyConflict):
            deliver_to(txn, intent.universe_id, intent.world_id, key, ingress)


# -- cancelling ------------------------------------------------------------------------------------


def _cancel(txn: Txn, intent: Intent) -> None:
    """Take an effect back, from a worker too: whatever that still brings counts for nothing."""
    universe, world_id, wanted = intent.universe_id, intent.world_id, intent.params
    waits = pending(txn, universe, wanted)
    if waits is None or waits.world_id != world_id:
        # A fork knows what was reissued for it by its parent's intent.
        again = txn.get(_known_key(universe, world_id, wanted))
        if again is None:
            return
        wanted = again
    found = end(txn, universe, wanted)
    if found is None:
        return
    queue.withdraw.fn(txn, found.queue(universe), found.seq, True)
    told = answers.cancelled(
        wanted,
        found.effect_kind,
        tag=found.tag,
        correlation_id=found.correlation_id,
        redrive_of=found.redrive_of,
    )
    deliver_to(txn, universe, world_id, None, told)
