"""Into another world's inbox: what `fabric.send` wants, checked where it is wanted and done once.

    check     in the reducer: what cannot be sent at all is Invalid there, and changes nothing
    accept    where the destination is: one inbox item for each (destination, message id)

- A destination remembers ids before it looks at anything else: a repeat is `already_enqueued`, though
  the inbox is full or the message long consumed. The same id with another body is `key_conflict`.
- A name leads to a world, which is made if there is none, under an id that follows from the intent, so
  that a repeat finds what it made. An id must lead to a world that is not deleted.
- `accept` answers, and does not raise: mail is delivered inside the commits of others.
"""

from __future__ import annotations

from typing import Literal

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import HEADERS_BYTES_MAX, INBOX_DEPTH_MAX, MESSAGE_ID_BYTES_MAX
from holdfast.durable import inbox
from holdfast.durable.bounds import check_limit
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.messages import (
    FABRIC_PARAMS,
    FABRIC_SEND,
    INBOX,
    TYPED_EVENT,
    FabricSendParams,
    FabricSendReceipt,
    Ingress,
    Intent,
    Kind,
    Receipt,
    Status,
    WorldName,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import Space
from holdfast.world import catalog, unknown

OK: Literal["ok"] = "ok"
ALREADY: Literal["already_enqueued"] = "already_enqueued"
ERROR: Literal["error"] = "error"
FULL: Literal["full"] = "full"
# Of the fields of a message, those that each mode has, and no other.
_FIELDS = {TYPED_EVENT: ("schema", "value_cbor"), INBOX: ("inbox", "payload_cbor")}
SEQ_BYTES = 8


class Accepted(Record, frozen=True):
    """What became of a message where it was to go. A full inbox is no answer: it is tried again."""

    status: Literal["ok", "already_enqueued", "error", "full"]
    dest_world: str = ""
    seq: int = 0
    code: str = ""
    error: str = ""


# -- where it is wanted --------------------------------------------------------------------------


def check(mail: FabricSendParams, universe: str) -> None:
    """Invalid unless this can be sent, from a world of this universe."""
    mine = _FIELDS.get(mail.mode)
    if mine is None:
        raise Invalid(what=FABRIC_PARAMS, field="mode", found=mail.mode, expected=list(_FIELDS))
    for fields in _FIELDS.values():
        for field in fields:
            there = getattr(mail, field) is not None
            if there != (fields is mine):
                why = f"mode {mail.mode} has none" if there else f"mode {mail.mode} needs it"
                raise Invalid(what=FABRIC_PARAMS, field=field, why=why)
    catalog.check_text(mine[0], mail.body()[0])
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


def leaves(intent: Intent, mail: FabricSendParams) -> bool:
    """Whether this goes to another universe, and so by the queue."""
    return mail.dest_universe is not None and mail.dest_universe != intent.universe_id


# -- where it goes -------------------------------------------------------------------------------


def read(intent: Intent) -> FabricSendParams:
    return codec.unpack_as(FabricSendParams, intent.params)


@operation
def accept_many(txn: Txn, mails: list[tuple[Intent, int]]) -> list[Accepted]:
    """Take mail of another store, in order, each with its age: for how long it may have been tried.

    An age, and no time: the clocks of two stores may be far apart.
    """
    check_limit(len(mails), "mails")
    now_ns = txn.now_ns
    return [accept(txn, intent, None, max(now_ns - age_ns, 0)) for intent, age_ns in mails]


def accept(
    txn: Txn, intent: Intent, mail: FabricSendParams | None = None, issued_ns: int | None = None
) -> Accepted:
    """Put a message into the inbox of its destination, unless it was put there before."""
    try:
        return _accept(txn, intent, mail or read(intent), issued_ns)
    except HoldfastError as error:
        return Accepted(ERROR, code=error.code, error=str(error))


def known(txn: Txn, universe: str) -> bool:
    """Whether a universe is in this store: it has worlds, or workers that wait for some."""
    prefixes = [schema.prefix(space, universe) for space in (Space.WORLD, Space.WORKER)]
    return any(txn.scan(prefix, tuples.after(prefix), 1) for prefix in prefixes)


def receipt_of(intent: Intent, mail: FabricSendParams, found: Accepted) -> Receipt:
    """What its sender is told."""
    assert found.status != "full"
    told = FabricSendReceipt(
        found.status,
        mail.message_id or intent.intent_hash,
        found.dest_world,
        found.seq.to_bytes(SEQ_BYTES, "big") if found.seq else None,
    )
    return Receipt(
        intent.intent_hash,
        FABRIC_SEND,
        Status.ERROR if found.status == ERROR else Status.OK,
        codec.pack(told),
        found.code,
        found.error,
        tag=intent.tag,
        redrive_of=intent.redrive_of,
    )


# -- inside --------------------------------------------------------------------------------------


def _accept(txn: Txn, intent: Intent, mail: FabricSendParams, issued_ns: int | None) -> Accepted:
    universe = mail.dest_universe or intent.universe_id
    key = f"fabric:{(mail.message_id or intent.intent_hash).hex()}"
    meaning = mail.meaning()
    to = mail.dest_world
    if isinstance(to, WorldName):
        # The id it gets if this makes it.
        mint = codec.digest(b"world", intent.intent_hash)[:16].hex()
        found = catalog.find(txn, universe, to.type, to.name)
        if found is None and _made(txn, universe, mint):
            # This message made a world, which was deleted since: it has been delivered.
            return Accepted(ALREADY, mint)
        world_id = found or mint
    else:
        found = world_id = to
        if catalog.record(txn, universe, to).status is catalog.Status.DELETED:
            raise NotFound(what="world", universe=universe, world_id=to, why="it is deleted")
    subject = catalog.subject_of(universe, world_id)
    full = inbox.depth(txn, subject) >= INBOX_DEPTH_MAX
    if full or found is None:
        first = inbox.first(txn, subject, key, meaning, issued_ns)
        if first is not None:
            return _repeated(txn, universe, world_id, first)
    if full:
        return Accepted(FULL, world_id)
    if isinstance(to, WorldName) and found is None:
        catalog.create(txn, universe, to.type, to.name, world_id)
    body = codec.pack(_ingress(intent, mail, universe))
    put = inbox.put.fn(txn, subject, key, body, issued_ns, meaning)
    if put.already:
        return _repeated(txn, universe, world_id, put.seq)
    catalog.hint(txn, universe, world_id)
    return Accepted(OK, world_id, put.seq)


def _repeated(txn: Txn, universe: str, world_id: str, seq: int) -> Accepted:
    """It was put there before. A sender is told, by a code, that the first one is a dead letter."""
    first = unknown.item(txn, universe, world_id, seq)
    if first.state != "dead":
        return Accepted(ALREADY, world_id, seq)
    text = f"the first is a dead letter: no worker knew {first.type!r} in time"
    return Accepted(ALREADY, world_id, seq, catalog.UNKNOWN_EVENT, text)


def _made(txn: Txn, universe: str, world_id: str) -> bool:
    try:
        catalog.record(txn, universe, world_id)
    except NotFound:
        return False
    return True


def _ingress(intent: Intent, mail: FabricSendParams, universe: str) -> Ingress:
    name, value = mail.body()
    return Ingress(
        Kind.INBOX if mail.mode == INBOX else Kind.FABRIC,
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
