"""What crosses a world's border: ingress comes in, intents go out, receipts tell how they ended.

    Ingress    one thing that a world reacts to: an event, a receipt, a fired timer, fabric mail
    Intent     one thing that a world wants: an effect, a timer, a message to another world
    Receipt    how an intent ended: ok, error or timeout; exactly one for each

An intent's identity is a hash of where it was born (generation, world, height, index), or of the
user's key instead of height and index. Kind and parameters are not part of the identity; they are
kept beside it, so that the same key with other parameters is noticed as `KeyConflict`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from holdfast import codec
from holdfast.codec import Record

TIMER_SET = "timer.set"
TIMER_CANCEL = "timer.cancel"
FABRIC_SEND = "fabric.send"
EFFECT_CANCEL = "effect.cancel"
# Kinds that the runtime handles itself.
RESERVED = frozenset({TIMER_SET, TIMER_CANCEL, FABRIC_SEND, EFFECT_CANCEL})


class Kind(Enum):
    """Who produced an ingress."""

    EVENT = "event"
    RECEIPT = "receipt"
    TIMER = "timer"
    FABRIC = "fabric"


class Status(Enum):
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class Ingress(Record, frozen=True):
    """Canonical bytes of one input, as they are journaled."""

    kind: Kind
    # The event's type, or the effect's kind for a receipt.
    type: str
    value: bytes
    event_hash: bytes
    intent_hash: bytes | None = None
    correlation_id: str | None = None
    # Where a message of another world came from: for reducers that care about causes.
    from_world: str | None = None
    from_height: int | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class Intent(Record, frozen=True):
    """What waits to be dispatched. The first eight fields are the dispatch item of document 004."""

    universe_id: str
    world_id: str
    intent_hash: bytes
    effect_kind: str
    params: bytes
    origin_name: str
    policy_context_hash: bytes
    enqueued_at_ns: int
    priority: int = 0
    timeout_ns: int = 0
    tag: str = ""
    key: str | None = None
    correlation_id: str | None = None
    from_height: int = 0
    generation: int = 0
    # The dead intent that an operator wanted done again.
    redrive_of: bytes | None = None
    # Mail is answered with a receipt only where somebody handles it.
    answered: bool = True

    def wanted(self) -> bytes:
        """What a key stands for: asked for again under the same key, it must be the same."""
        return codec.digest(self.effect_kind.encode(), self.params)

    def content(self) -> bytes:
        """What replay compares: the identity and everything that was wanted, but no clock."""
        return codec.digest(
            self.intent_hash,
            self.effect_kind.encode(),
            self.params,
            self.origin_name.encode(),
            codec.pack([self.priority, self.timeout_ns, self.tag, self.key, self.correlation_id]),
        )


class Receipt(Record, frozen=True):
    """How an intent ended, as it travels to the world that wanted it."""

    intent_hash: bytes
    effect_kind: str
    status: Status
    value: bytes = b""
    code: str = ""
    error: str = ""
    attempts: int = 1
    tag: str = ""
    cost: float = 0.0
    redrive_of: bytes | None = None


class TimerSet(Record, frozen=True):
    """Parameters of `timer.set`: an event to deliver at a time. The key is a slot."""

    key: str
    type: str
    value: bytes
    delay_ns: int | None = None
    wall_ns: int | None = None
    # A rule instead of a time: it is hung again whenever it fires (`world.every`).
    cron: str = ""
    zone: str = "UTC"
    missed: str = "one"


class FabricSend(Record, frozen=True):
    """Parameters of `fabric.send`, as `sys/FabricSendParams@1` has them."""

    dest_type: str
    dest_name: str
    schema: str
    value: bytes
    dest_universe: str | None = None
    mode: str = "typed_event"
    inbox: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    correlation_id: str | None = None


class FabricReceipt(Record, frozen=True):
    """The value of a receipt for `fabric.send`, as `sys/FabricSendReceipt@1` has it."""

    status: str
    message_id: bytes
    dest_world: str
    enqueued_seq: int


def event_ingress(type: str, value: bytes, **fields: Any) -> Ingress:
    return Ingress(Kind.EVENT, type, value, codec.digest(type.encode(), value), **fields)


def receipt_ingress(receipt: Receipt, *, correlation_id: str | None = None) -> Ingress:
    value = codec.pack(receipt)
    return Ingress(
        Kind.RECEIPT,
        receipt.effect_kind,
        value,
        codec.digest(receipt.effect_kind.encode(), value),
        intent_hash=receipt.intent_hash,
        correlation_id=correlation_id,
    )


def intent_hash(generation: int, world_id: str, place: tuple[int, int] | str) -> bytes:
    """The identity of an intent: born at (height, index), or named by the user's key."""
    if isinstance(place, str):
        where = b"k" + place.encode()
    else:
        where = b"p" + place[0].to_bytes(8, "big") + place[1].to_bytes(8, "big")
    return codec.digest(generation.to_bytes(8, "big"), world_id.encode(), where)
