"""A world's inbox: ordered, deduplicated ingress, read after a cursor.

- Ingress gets the next number of its world and keeps it; numbers have no gap.
- A key is delivered once: a repeat answers with the number of the first, though that may be long
  consumed, and the same key with another body is `KeyConflict`. Keys are kept by `dedupe` under one
  scope for all worlds, so that one collector forgets them by time.
- The cursor only rises, and never over a number that is not there. What it passes is deleted in
  the same transaction, so no row lies below it.

`put` is an operation, so that producers neither conflict with each other nor with the reader:
`advance` touches no row that a put does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from zlib import crc32

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES, INBOX_READ_BYTES_MAX, SCAN_PAGE
from holdfast.durable import dedupe
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn, operation

SCOPE = "inbox"


class Ingress(Record, frozen=True):
    seq: int
    key: str | None
    body: bytes
    at_ns: int


class Put(Record, frozen=True):
    """`already` says that the key was delivered before, under this seq."""

    seq: int
    already: bool


class Kept(Record, frozen=True):
    """The row of an ingress: the body, or the hash of the blob that holds it."""

    key: str | None
    at_ns: int
    body: bytes
    blob: bytes = b""
    # A checksum of the fields above; 0 in rows from before there was one.
    crc: int = 0


@operation
def put(
    txn: Txn,
    world: str,
    key: str | None,
    body: bytes,
    issued_ns: int | None = None,
    meaning: bytes = b"",
) -> Put:
    """Deliver once per key; without a key, every time. A key of the system has its time of issue.

    `meaning` is what the key stands for, if that is less than the whole body.
    """
    keys = _keys(world)
    body_hash = meaning or (sha256(body).digest() if key is not None else b"")
    if key is not None:
        first = dedupe.check(txn, SCOPE, _scoped(world, key), body_hash, issued_ns=issued_ns)
        if first is not None:
            return Put(schema.int_of(first), already=True)
    blob = blobs.put(txn, body) if len(body) > BLOB_THRESHOLD_BYTES else b""
    small = b"" if blob else body
    kept = Kept(key, txn.now_ns, small, blob, _crc(key, txn.now_ns, small, blob))
    seq = txn.append(keys.entries, codec.pack(kept)).value
    if key is not None:
        value = schema.int_bytes(seq)
        dedupe.remember(txn, SCOPE, _scoped(world, key), body_hash, value, issued_ns=issued_ns)
    txn.notify(keys.topic)
    return Put(seq, already=False)


@operation
def put_many(txn: Txn, items: list[tuple[str, str | None, bytes]]) -> list[Put]:
    """Deliver (world, key, body), all or none, in order."""
    check_limit(len(items), "items")
    return [put.fn(txn, world, key, body) for world, key, body in items]


def read(txn: Txn, world: str, limit: int) -> list[Ingress]:
    """The next ingress after the cursor, `INBOX_READ_BYTES_MAX` of it and a last one at most.

    One that was changed by damage is `StoreCorrupt`, once all before it were read.
    """
    check_limit(limit)
    size = 0
    prefix = _keys(world).entries
    lo = prefix + tuples.pack_int(cursor(txn, world) + 1)
    found: list[Ingress] = []
    for key, row in txn.scan(lo, tuples.after(prefix), limit):
        seq = tuples.unpack_last_int(key, len(prefix))
        try:
            kept = _decode(row)
            body = blobs.get(txn, kept.blob) if kept.blob else kept.body
        except (StoreCorrupt, NotFound, *codec.UNREADABLE) as error:
            if found:
                break
            raise StoreCorrupt(
                world=world, seq=seq, why=f"an ingress is damaged: {error}"
            ) from None
        if not _is_whole(kept):
            if found:
                break
            raise StoreCorrupt(
                world=world, seq=seq, why="an ingress is damaged: its checksum differs"
            )
        found.append(Ingress(seq, kept.key, body, kept.at_ns))
        size += len(body)
        if size > INBOX_READ_BYTES_MAX:
            break
    return found


def damaged(txn: Txn, world: str) -> Iterator[tuple[int, str]]:
    """The unread ingress that was changed by damage: its seq, and what is wrong."""
    prefix = _keys(world).entries
    at = prefix + tuples.pack_int(cursor(txn, world) + 1)
    while rows := txn.scan(at, tuples.after(prefix), SCAN_PAGE):
        for key, row in rows:
            kept = _decode(row)
            seq = tuples.unpack_last_int(key, len(prefix))
            if not _is_whole(kept):
                yield seq, "another checksum"
            elif kept.blob and not blobs.sound(txn, kept.blob):
                yield seq, "no blob with its hash"
        at = rows[-1][0] + b"\x00"


def advance(txn: Txn, world: str, to_seq: int, arriving: int = 0) -> None:
    """Consume everything up to and with this seq.

    The last `arriving` of it come in this very transaction: they get their numbers, and no rows. For
    operations, and only if `last_seq` is what it must be then.
    """
    keys = _keys(world)
    if arriving:
        if last_seq(txn, world) != to_seq - arriving:
            raise Invalid(what="inbox", why="others came first", world=world, to_seq=to_seq)
        txn.put(keys.last_seq, schema.int_bytes(to_seq))
    was = cursor(txn, world)
    if not was <= to_seq <= was + BATCH_MAX:
        raise Invalid(
            what="inbox cursor",
            why="it rises by a batch at most",
            world=world,
            found=to_seq,
            min=was,
            max=was + BATCH_MAX,
        )
    # Numbers have no gap, so each row is found by its key.
    txn.prefetch(
        keys.entries + tuples.pack_int(seq) for seq in range(was + 1, to_seq - arriving + 1)
    )
    for seq in range(was + 1, to_seq - arriving + 1):
        key = keys.entries + tuples.pack_int(seq)
        row = txn.get(key)
        if row is None:
            raise NotFound(what="ingress", world=world, seq=seq, cursor=was)
        txn.delete(key)
        blob = _decode(row).blob
        if blob:
            blobs.release(txn, blob)
    if to_seq > was:
        txn.put(keys.cursor, schema.int_bytes(to_seq))


def first(
    txn: Txn, world: str, key: str, meaning: bytes, issued_ns: int | None = None
) -> int | None:
    """The seq under which a key was delivered; None when it is new."""
    found = dedupe.check(txn, SCOPE, _scoped(world, key), meaning, issued_ns=issued_ns)
    return None if found is None else schema.int_of(found)


def delivered(txn: Txn, world: str, key: str) -> bool:
    """Whether something came under this key, and is remembered."""
    return dedupe.recall(txn, SCOPE, _scoped(world, key)) is not None


def cursor(txn: Txn, world: str) -> int:
    """The last consumed seq; 0 before any."""
    return txn.count(_keys(world).cursor)


def last_seq(txn: Txn, world: str) -> int:
    """The last number given; 0 before any."""
    return txn.count(_keys(world).last_seq)


def depth(txn: Txn, world: str) -> int:
    """How much is unread: the last number given less the cursor, for numbers have no gap."""
    keys = _keys(world)
    return txn.count(keys.last_seq) - txn.count(keys.cursor)


def erase(txn: Txn, world: str, limit: int) -> bool:
    """Remove an inbox whole: what is unread, the keys, the numbers last; whether that is done."""
    check_limit(limit)
    keys = _keys(world)
    rows = txn.scan(keys.entries, tuples.after(keys.entries), limit)
    for key, row in rows:
        txn.delete(key)
        blob = _decode(row).blob
        if blob:
            blobs.erase(txn, blob)
    gone = len(rows)
    gone += dedupe.erase(txn, SCOPE, _scoped(world, "-")[:-1], limit - gone)
    if gone >= limit:
        return False
    txn.delete(keys.cursor)
    txn.delete(keys.last_seq)
    return True


def topic(world: str) -> str:
    return f"inbox/{world}"


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    __slots__ = ("cursor", "entries", "last_seq", "topic")

    def __init__(self, world: str) -> None:
        check_name("world", world)
        self.entries = schema.prefix(schema.Space.INBOX, world, "e")
        self.cursor = schema.prefix(schema.Space.INBOX, world, "cursor")
        self.last_seq = schema.sequence_key(self.entries)
        self.topic = topic(world)


_keys = lru_cache(maxsize=65536)(_Keys)
_decode = codec.decoder(Kept).decode


def _crc(key: str | None, at_ns: int, body: bytes, blob: bytes) -> int:
    head = f"{at_ns} {'' if key is None else key}".encode(errors="surrogatepass")
    return crc32(blob, crc32(body, crc32(head))) or 1


def _is_whole(kept: Kept) -> bool:
    return not kept.crc or kept.crc == _crc(kept.key, kept.at_ns, kept.body, kept.blob)


def _scoped(world: str, key: str) -> str:
    if not key:
        raise Invalid(what="key", why="empty; None means without a key", world=world)
    # The length keeps ("a", "b:c") and ("a:b", "c") apart.
    return f"{len(world)}:{world}:{key}"
