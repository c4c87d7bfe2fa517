"""Mail delivery: checks a `fabric.send` request and puts its message into the destination's inbox
once.

    check_sendable   runs in the reducer: invalid mail raises Invalid there and changes nothing
    accept           runs at the destination: one inbox item for each (destination, message id)

- The destination checks its dedupe records first. A duplicate is `already_enqueued`, even if the
  inbox is full or the message was consumed long ago. The same id with another body is
  `key_conflict`.
- A world name resolves to a world. If none exists, it is created under an id derived from the
  intent, so that a repeated delivery finds the same world. A world id must belong to a world that
  is not deleted.
- `accept` returns errors and does not raise, because it runs inside the commits of other
  operations.
"""

from __future__ import annotations

from typing import Literal

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import HEADERS_BYTES_MAX, MESSAGE_ID_BYTES_MAX
from holdfast.durable import inbox, load_limits
from holdfast.durable.validation import check_limit
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import (
    FABRIC_PARAMS,
    FABRIC_SEND,
    INBOX,
    TYPED_EVENT,
    FabricSendParams,
    FabricSendReceipt,
    Ingress,
    IngressKind,
    Intent,
    IntentReceipt,
    ReceiptStatus,
    WorldName,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import Space
from holdfast.world import catalog, load_admission, unknown_events

OK: Literal["ok"] = "ok"
ALREADY_ENQUEUED: Literal["already_enqueued"] = "already_enqueued"
ERROR: Literal["error"] = "error"
FULL: Literal["full"] = "full"
# The fields of a message that each mode requires. The fields of the other mode are not allowed.
_FIELDS_BY_MODE = {TYPED_EVENT: ("schema", "value_cbor"), INBOX: ("inbox", "payload_cbor")}
SEQ_BYTES = 8


class DeliveryResult(Record, frozen=True):
    """The result of a delivery. `full` is not final: the delivery is retried."""

    status: Literal["ok", "already_enqueued", "error", "full"]
    dest_world: str = ""
    seq: int = 0
    code: str = ""
    error: str = ""


# -- at the sender -------------------------------------------------------------------------------


def check_sendable(mail: FabricSendParams, universe: str) -> None:
    """Raise Invalid unless a world of this universe can send this mail."""
    mode_fields = _FIELDS_BY_MODE.get(mail.mode)
    if mode_fields is None:
        raise Invalid(
            what=FABRIC_PARAMS, field="mode", found=mail.mode, expected=list(_FIELDS_BY_MODE)
        )
    for fields in _FIELDS_BY_MODE.values():
        for field in fields:
            there = getattr(mail, field) is not None
            if there != (fields is mode_fields):
                why = (
                    f"mode {mail.mode} does not allow this field"
                    if there
                    else f"mode {mail.mode} needs this field"
                )
                raise Invalid(what=FABRIC_PARAMS, field=field, why=why)
    catalog.check_text(mode_fields[0], mail.body()[0])
    if mail.dest_universe is not None:
        catalog.check_universe(mail.dest_universe)
    if isinstance(mail.dest_world, WorldName):
        to = mail.dest_world
        catalog.check_address(mail.dest_universe or universe, to.type, to.name)
    else:
        catalog.check_text("dest_world", mail.dest_world)
    if mail.correlation_id is not None:
        catalog.check_text("correlation_id", mail.correlation_id)
    size = len(codec.pack(mail.headers)) if mail.headers else 0
    if size > HEADERS_BYTES_MAX:
        raise Invalid(what="headers", why="too large", bytes=size, bytes_max=HEADERS_BYTES_MAX)
    if mail.message_id is not None and not 1 <= len(mail.message_id) <= MESSAGE_ID_BYTES_MAX:
        size = len(mail.message_id)
        raise Invalid(what="message_id", bytes=size, bytes_min=1, bytes_max=MESSAGE_ID_BYTES_MAX)


def is_cross_universe(intent: Intent, mail: FabricSendParams) -> bool:
    """Whether this mail goes to another universe, and therefore through a queue."""
    return mail.dest_universe is not None and mail.dest_universe != intent.universe_id


# -- at the destination --------------------------------------------------------------------------


def mail_of(intent: Intent) -> FabricSendParams:
    return codec.unpack_as(FabricSendParams, intent.params)


@operation("messages.accept_many")
def accept_many(txn: Txn, mails: list[tuple[Intent, int]]) -> list[DeliveryResult]:
    """Accept mail from another store, in order, each with its age: how long it may have been
    retried.

    An age, not a timestamp: the clocks of two stores may differ widely.
    """
    check_limit(len(mails), "mails")
    now_ns = txn.now_ns
    return [accept(txn, intent, None, max(now_ns - age_ns, 0)) for intent, age_ns in mails]


def accept(
    txn: Txn, intent: Intent, mail: FabricSendParams | None = None, issued_ns: int | None = None
) -> DeliveryResult:
    """Put a message into the inbox of its destination, unless it was delivered before."""
    try:
        return _accept(txn, intent, mail or mail_of(intent), issued_ns)
    except HoldfastError as error:
        return DeliveryResult(ERROR, code=error.code, error=str(error))


def universe_exists(txn: Txn, universe: str) -> bool:
    """Whether a universe exists in this store: it has worlds, or workers."""
    prefixes = [schema.key_prefix(space, universe) for space in (Space.WORLD, Space.WORKER)]
    return any(txn.scan(prefix, tuples.prefix_end(prefix), 1) for prefix in prefixes)


def make_receipt(intent: Intent, mail: FabricSendParams, result: DeliveryResult) -> IntentReceipt:
    """Make the receipt for the sender."""
    assert result.status != "full"
    receipt_value = FabricSendReceipt(
        result.status,
        mail.message_id or intent.intent_hash,
        result.dest_world,
        result.seq.to_bytes(SEQ_BYTES, "big") if result.seq else None,
    )
    return IntentReceipt(
        intent.intent_hash,
        FABRIC_SEND,
        ReceiptStatus.ERROR if result.status == ERROR else ReceiptStatus.OK,
        codec.pack(receipt_value),
        result.code,
        result.error,
        tag=intent.tag,
        redrive_of=intent.redrive_of,
    )


# -- inside --------------------------------------------------------------------------------------


def _accept(
    txn: Txn, intent: Intent, mail: FabricSendParams, issued_ns: int | None
) -> DeliveryResult:
    universe = mail.dest_universe or intent.universe_id
    key = f"fabric:{(mail.message_id or intent.intent_hash).hex()}"
    meaning = mail.idempotency_digest()
    to = mail.dest_world
    if isinstance(to, WorldName):
        # The id it gets if this makes it.
        new_id = codec.digest(b"world", intent.intent_hash)[:16].hex()
        existing_id = catalog.find_id(txn, universe, to.type, to.name)
        if existing_id is None and _world_exists(txn, universe, new_id):
            # This message made a world, which was deleted since: it has been delivered.
            return DeliveryResult(ALREADY_ENQUEUED, new_id)
        world_id = existing_id or new_id
    else:
        existing_id = world_id = to
        if catalog.get_record(txn, universe, to).status is catalog.WorldStatus.DELETED:
            raise NotFound(what="world", universe=universe, world_id=to, why="it is deleted")
    subject = catalog.subject_of(universe, world_id)
    limits = load_limits.find(txn, universe)
    full = inbox.depth(txn, subject) >= load_admission.inbox_max(limits)
    if full or existing_id is None:
        first = inbox.seq_of_key(txn, subject, key, meaning, issued_ns)
        if first is not None:
            return _duplicate_result(txn, universe, world_id, first)
    if full:
        return DeliveryResult(FULL, world_id)
    if isinstance(to, WorldName) and existing_id is None:
        catalog.create(txn, universe, to.type, to.name, world_id)
    body = codec.pack(_ingress(intent, mail, universe))
    put = inbox.put_with_limits(
        txn, subject, key, body, issued_ns, meaning, limits, trace=intent.trace
    )
    if put.already:
        return _duplicate_result(txn, universe, world_id, put.seq)
    catalog.mark_runnable(txn, universe, world_id)
    return DeliveryResult(OK, world_id, put.seq)


def _duplicate_result(txn: Txn, universe: str, world_id: str, seq: int) -> DeliveryResult:
    """Return the result of a duplicate. Its code reports if the first message became a dead
    letter."""
    first = unknown_events.item_status(txn, universe, world_id, seq)
    if first.state != "dead":
        return DeliveryResult(ALREADY_ENQUEUED, world_id, seq)
    text = f"the first is a dead letter: no worker knew {first.type!r} in time"
    return DeliveryResult(ALREADY_ENQUEUED, world_id, seq, catalog.UNKNOWN_EVENT, text)


def _world_exists(txn: Txn, universe: str, world_id: str) -> bool:
    try:
        catalog.get_record(txn, universe, world_id)
    except NotFound:
        return False
    return True


def _ingress(intent: Intent, mail: FabricSendParams, universe: str) -> Ingress:
    name, value = mail.body()
    return Ingress(
        IngressKind.INBOX if mail.mode == INBOX else IngressKind.FABRIC,
        name,
        value,
        codec.digest(name.encode(), value),
        intent_hash=intent.intent_hash,
        correlation_id=mail.correlation_id,
        from_world=intent.world_id,
        from_height=intent.from_height,
        headers=mail.headers,
        from_universe=None if intent.universe_id == universe else intent.universe_id,
        message_id=mail.message_id,
    )
