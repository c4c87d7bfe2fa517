"""What crosses a world's border: ingress comes in, intents go out, receipts tell how they ended.

    Ingress    one thing that a world reacts to: an event, a receipt, a fired timer, mail
    Intent     one thing that a world wants: an effect, a timer, a message to another world
    Receipt    how an intent ended: ok, error or timeout; exactly one for each

An intent's identity tells where it was born: a hash of generation and world, then height and index. Under
a user's key it is a hash of world and key instead, without the generation: a store that was restored still
knows what the key was used for, so wanted again it is the same intent. Kind and parameters are not part of
the identity; they are kept beside it, so that the same key with other parameters is noticed as `KeyConflict`.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any, Literal

import msgspec

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.item import Tried

TIMER_SET = "timer.set"
TIMER_CANCEL = "timer.cancel"
FABRIC_SEND = "fabric.send"
EFFECT_CANCEL = "effect.cancel"
# The schemas of its parameters and of its receipt, as document 004 names them.
FABRIC_PARAMS = "sys/FabricSendParams@1"
FABRIC_RECEIPT = "sys/FabricSendReceipt@1"
TYPED_EVENT: Literal["typed_event"] = "typed_event"
INBOX: Literal["inbox"] = "inbox"
Mode = Literal["typed_event", "inbox"]
# Kinds that the runtime handles itself.
RESERVED = frozenset({TIMER_SET, TIMER_CANCEL, FABRIC_SEND, EFFECT_CANCEL})


class Kind(Enum):
    """Who produced an ingress."""

    EVENT = "event"
    RECEIPT = "receipt"
    TIMER = "timer"
    # Mail of another world: an event, or whatever was put into a named inbox.
    FABRIC = "fabric"
    INBOX = "inbox"


class Status(Enum):
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class Ingress(Record, frozen=True):
    """Canonical bytes of one input, as they are journaled."""

    kind: Kind
    # The event's type, the effect's kind for a receipt, the inbox for mail to one.
    type: str
    value: bytes
    event_hash: bytes
    intent_hash: bytes | None = None
    correlation_id: str | None = None
    # Where a message of another world came from: for reducers that care about causes.
    from_world: str | None = None
    from_height: int | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    # Of mail: the universe it came from, if not ours; its id, if not the intent's hash.
    from_universe: str | None = None
    message_id: bytes | None = None


class Intent(Record, frozen=True):
    """What waits to be dispatched. The first eight fields are the dispatch item of document 004."""

    universe_id: str
    world_id: str
    intent_hash: bytes
    effect_kind: str
    params: bytes
    origin_name: str
    # The hash of the effect's policy where it was wanted; empty for what has none: mail and timers.
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
    # Which of the intents of its entry it is.
    index: int = 0

    def place_hash(self) -> bytes:
        """The identity that it would have without its key: that of this one use of the key."""
        return intent_hash(self.generation, self.world_id, (self.from_height, self.index))

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
    # The attempts that came to nothing, if there were any.
    tried: tuple[Tried, ...] = ()


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


class WorldName(Record, frozen=True):
    """A world as people call it, where the document has only ids."""

    type: str
    name: str


class FabricSendParams(Record, frozen=True, kw_only=True):
    """Parameters of `fabric.send`: `sys/FabricSendParams@1`, and an id for the message."""

    # None: the sender's.
    dest_universe: str | None = None
    # By its id it must be there; by its name it is made if it is not.
    dest_world: str | WorldName
    mode: Mode = TYPED_EVENT
    # A typed event: the name of its type, and its bytes.
    schema: str | None = None
    value_cbor: bytes | None = None
    # Mail to a named inbox: the name, and any bytes of ours (`codec`).
    inbox: str | None = None
    payload_cbor: bytes | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    correlation_id: str | None = None
    # Instead of the intent's hash: sent again under the same id, it arrives once.
    message_id: bytes | None = None

    def body(self) -> tuple[str, bytes]:
        """What it is called and what it says, in either mode."""
        if self.mode == INBOX:
            return self.inbox or "", self.payload_cbor or b""
        return self.schema or "", self.value_cbor or b""

    def meaning(self) -> bytes:
        """What its id stands for: sent again under the same id, it must be the same."""
        name, value = self.body()
        return codec.digest(self.mode.encode(), name.encode(), value)


class FabricSendReceipt(Record, frozen=True):
    """The value of a receipt for `fabric.send`: `sys/FabricSendReceipt@1`."""

    status: Literal["ok", "already_enqueued", "error"]
    message_id: bytes
    # Empty where no world was found.
    dest_world: str
    # Its place in the inbox, in bytes that sort as it does.
    enqueued_seq: bytes | None = None

    @property
    def seq(self) -> int | None:
        """The place in the inbox as a number, as `send` returns it."""
        return None if self.enqueued_seq is None else int.from_bytes(self.enqueued_seq, "big")


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


def intent_hash(generation: int, world_id: str, place: tuple[int, int]) -> bytes:
    """The identity of an intent without a key: born at (height, index).

    Height and index stay readable at its end, behind a hash of the world. So those of one world
    lie side by side in a store, in the order in which they were wanted, and not all over it.
    """
    height, index = place
    return _birth(generation, world_id) + height.to_bytes(8, "big") + index.to_bytes(4, "big")


def keyed_hash(world_id: str, key: str) -> bytes:
    """The identity of an intent that its world's user named by a key, in whatever generation."""
    return codec.digest(world_id.encode(), b"k" + key.encode())


@lru_cache(maxsize=65536)
def _birth(generation: int, world_id: str) -> bytes:
    return codec.digest(generation.to_bytes(8, "big"), world_id.encode(), b"p")[:20]
