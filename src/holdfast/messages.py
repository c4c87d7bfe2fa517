"""Messages into and out of a world: ingress, intents and receipts.

    Ingress        one input of a world: an event, a receipt, a fired timer, mail
    Intent         one output of a world: an effect, a timer, a message to another world
    IntentReceipt  the outcome of an intent: ok, error or timeout; exactly one per intent

The id of an intent is positional: a hash of generation and world, then height and index. With a user's
idempotency key the id is a hash of world and key. It leaves out the generation, so a restored store maps
the key to the same intent. Kind and parameters are not part of the id. They are stored beside it, so that
the same key with other parameters raises `KeyConflict`.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Any, Literal

import msgspec

from holdfast import codec
from holdfast.codec import Record
from holdfast.durable.item import FailedAttempt

TIMER_SET = "timer.set"
TIMER_CANCEL = "timer.cancel"
FABRIC_SEND = "fabric.send"
# The effect kind of an intent that starts a flow is this prefix and the name of the flow.
FLOW_START_PREFIX = "flow:"
# An intent of a flow has an id with this prefix in the place of the world id.
FLOW_WORLD_PREFIX = "flow/"
EFFECT_CANCEL = "effect.cancel"
# Schema names of the parameters and the receipt of `fabric.send`, from document 004.
FABRIC_PARAMS = "sys/FabricSendParams@1"
FABRIC_RECEIPT = "sys/FabricSendReceipt@1"
TYPED_EVENT: Literal["typed_event"] = "typed_event"
INBOX: Literal["inbox"] = "inbox"
DeliveryMode = Literal["typed_event", "inbox"]
# Effect kinds that the runtime handles without a user handler.
RESERVED_KINDS = frozenset({TIMER_SET, TIMER_CANCEL, FABRIC_SEND, EFFECT_CANCEL})


class IngressKind(Enum):
    """The source of an ingress."""

    EVENT = "event"
    RECEIPT = "receipt"
    TIMER = "timer"
    # Mail from another world: a typed event (FABRIC), or a message to a named inbox (INBOX).
    FABRIC = "fabric"
    INBOX = "inbox"


class ReceiptStatus(Enum):
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


class Ingress(Record, frozen=True):
    """One input of a world, as the journal stores it."""

    kind: IngressKind
    # The event type, the effect kind of a receipt, or the name of the inbox.
    type: str
    value: bytes
    event_hash: bytes
    intent_hash: bytes | None = None
    correlation_id: str | None = None
    # Sender of a message from another world, for reducers that track causality.
    from_world: str | None = None
    from_height: int | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    # Mail only: the sender's universe if it differs, and the message id if it is not the intent hash.
    from_universe: str | None = None
    message_id: bytes | None = None


class Intent(Record, frozen=True):
    """One output of a world, queued for dispatch. The first eight fields are the dispatch item of document 004."""

    universe_id: str
    world_id: str
    intent_hash: bytes
    effect_kind: str
    params: bytes
    origin_name: str
    # Hash of the effect's policy at emission. Empty for mail and timers, which have no policy.
    policy_context_hash: bytes
    enqueued_at_ns: int
    priority: int = 0
    timeout_ns: int = 0
    tag: str = ""
    key: str | None = None
    correlation_id: str | None = None
    from_height: int = 0
    generation: int = 0
    # The dead intent that an operator redrove.
    redrive_of: bytes | None = None
    # Whether the sender gets a receipt. Mail has one only if the world handles it.
    wants_receipt: bool = True
    # Position among the intents of its journal entry.
    index: int = 0
    # The declared properties of the flow that the intent starts. Not compared by a replay, like a policy.
    flow_spec: bytes = b""
    # The trace context of the reducer or the flow. No digest includes it.
    trace: bytes = b""

    def positional_id(self) -> bytes:
        """Return the id that the intent would have without its key. It identifies this use of the key."""
        return intent_hash(self.generation, self.world_id, (self.from_height, self.index))

    def idempotency_digest(self) -> bytes:
        """Return the digest that must match when the key is reused."""
        return codec.digest(self.effect_kind.encode(), self.params)

    def replay_digest(self) -> bytes:
        """Return the digest that replay compares: the id and all parameters, without times."""
        return codec.digest(
            self.intent_hash,
            self.effect_kind.encode(),
            self.params,
            self.origin_name.encode(),
            codec.pack([self.priority, self.timeout_ns, self.tag, self.key, self.correlation_id]),
        )


class IntentReceipt(Record, frozen=True):
    """The outcome of an intent, as it is delivered to the world that emitted it."""

    intent_hash: bytes
    effect_kind: str
    status: ReceiptStatus
    value: bytes = b""
    code: str = ""
    error: str = ""
    attempts: int = 1
    tag: str = ""
    cost: float = 0.0
    redrive_of: bytes | None = None
    # Failed attempts, oldest first.
    failed_attempts: tuple[FailedAttempt, ...] = ()


class TimerSet(Record, frozen=True):
    """Parameters of `timer.set`: an event to deliver at a time. A key holds one timer at most."""

    key: str
    type: str
    value: bytes
    delay_ns: int | None = None
    wall_ns: int | None = None
    # A cron rule instead of a time: the timer is rescheduled each time it fires (`world.recurring_timers`).
    cron: str = ""
    zone: str = "UTC"
    missed: str = "one"


class WorldName(Record, frozen=True):
    """A world by type and name. Document 004 has only ids."""

    type: str
    name: str


class FabricSendParams(Record, frozen=True, kw_only=True):
    """Parameters of `fabric.send`: `sys/FabricSendParams@1` plus a message id."""

    # None: the sender's universe.
    dest_universe: str | None = None
    # An id must name an existing world. A name creates the world if it does not exist.
    dest_world: str | WorldName
    mode: DeliveryMode = TYPED_EVENT
    # Mode typed_event: type name and encoded value.
    schema: str | None = None
    value_cbor: bytes | None = None
    # Mode inbox: inbox name and payload, encoded by `codec`.
    inbox: str | None = None
    payload_cbor: bytes | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    correlation_id: str | None = None
    # Replaces the intent hash as the idempotency key: a repeated send with this id is delivered once.
    message_id: bytes | None = None

    def body(self) -> tuple[str, bytes]:
        """Return the name (event type or inbox) and the encoded value, in either mode."""
        if self.mode == INBOX:
            return self.inbox or "", self.payload_cbor or b""
        return self.schema or "", self.value_cbor or b""

    def idempotency_digest(self) -> bytes:
        """Return the digest that must match when the message id is reused."""
        name, value = self.body()
        return codec.digest(self.mode.encode(), name.encode(), value)


class FabricSendReceipt(Record, frozen=True):
    """The value of a receipt for `fabric.send`: `sys/FabricSendReceipt@1`."""

    status: Literal["ok", "already_enqueued", "error"]
    message_id: bytes
    # Empty if no destination world was found.
    dest_world: str
    # The sequence number in the inbox, as big-endian bytes.
    enqueued_seq: bytes | None = None

    @property
    def seq(self) -> int | None:
        """The sequence number in the inbox, as `send` returns it."""
        return None if self.enqueued_seq is None else int.from_bytes(self.enqueued_seq, "big")


def event_ingress(type: str, value: bytes, **fields: Any) -> Ingress:
    return Ingress(IngressKind.EVENT, type, value, codec.digest(type.encode(), value), **fields)


def receipt_ingress(receipt: IntentReceipt, *, correlation_id: str | None = None) -> Ingress:
    value = codec.pack(receipt)
    return Ingress(
        IngressKind.RECEIPT,
        receipt.effect_kind,
        value,
        codec.digest(receipt.effect_kind.encode(), value),
        intent_hash=receipt.intent_hash,
        correlation_id=correlation_id,
    )


def intent_hash(generation: int, world_id: str, position: tuple[int, int]) -> bytes:
    """Return the id of an intent without a key, emitted at (height, index).

    The id is a hash of generation and world, followed by height and index. The intents of a world are
    therefore adjacent in the store, in emission order.
    """
    height, index = position
    return (
        _origin_prefix(generation, world_id) + height.to_bytes(8, "big") + index.to_bytes(4, "big")
    )


def keyed_hash(world_id: str, key: str) -> bytes:
    """Return the id of an intent with a user's key. It is the same in every generation."""
    return codec.digest(world_id.encode(), b"k" + key.encode())


@lru_cache(maxsize=65536)
def _origin_prefix(generation: int, world_id: str) -> bytes:
    return codec.digest(generation.to_bytes(8, "big"), world_id.encode(), b"p")[:20]
