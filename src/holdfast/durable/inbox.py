"""The inbox of a world: ordered, deduplicated ingress, read after a cursor.

- Each ingress gets the next seq of its world. Seqs have no gaps.
- A key is delivered once. A repeat returns the seq of the first delivery, even after it was consumed.
  The same key with another body is `KeyConflict`. `dedupe` stores the keys of all worlds under one scope,
  so that one job expires them by time.
- The cursor only rises, and only to an existing seq. Rows that it passes are deleted in the same
  transaction, so no row is below it.

`put` is an operation, so producers conflict neither with each other nor with the reader: `advance` does
not touch the rows that `put` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from zlib import crc32

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES, INBOX_READ_BYTES_MAX, SCAN_PAGE
from holdfast.durable import dedupe, load_limits
from holdfast.durable.load_limits import LoadLimits
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.prefix_scan import iter_rows

DEDUPE_SCOPE = "inbox"


class InboxEntry(Record, frozen=True):
    seq: int
    key: str | None
    body: bytes
    at_ns: int
    trace: bytes = b""


class PutResult(Record, frozen=True):
    """The result of `put`. With `already`, the key was delivered before under this seq."""

    seq: int
    already: bool


class InboxRow(Record, frozen=True):
    """The stored row of an ingress: its body, or the hash of its blob."""

    key: str | None
    at_ns: int
    body: bytes
    blob: bytes = b""
    # Checksum of the fields above. 0 in rows of releases without checksums.
    crc: int = 0
    # The trace context of the sender. Neither the hash of the body nor the journal includes it.
    trace: bytes = b""


@operation("inbox.put")
def put(
    txn: Txn,
    world: str,
    key: str | None,
    body: bytes,
    issued_ns: int | None = None,
    key_digest: bytes = b"",
) -> PutResult:
    """Deliver an ingress once per key, or always without a key. A system key has its time of issue.

    `key_digest` is compared on reuse of the key, in place of the hash of the whole body.
    """
    limits = load_limits.find_at(txn, _keys(world).limits)
    return put_with_limits(txn, world, key, body, issued_ns, key_digest, limits)


def put_with_limits(
    txn: Txn,
    world: str,
    key: str | None,
    body: bytes,
    issued_ns: int | None,
    key_digest: bytes,
    limits: LoadLimits | None,
    *,
    trace: bytes = b"",
) -> PutResult:
    """`put` for a caller that has read the load limits of the universe in this transaction."""
    keys = _keys(world)
    body_hash = key_digest or (sha256(body).digest() if key is not None else b"")
    if key is not None:
        first_seq = dedupe.check(
            txn, DEDUPE_SCOPE, _dedupe_key(world, key), body_hash, issued_ns=issued_ns
        )
        if first_seq is not None:
            return PutResult(schema.decode_int(first_seq), already=True)
    blob = blobs.put(txn, body) if len(body) > BLOB_THRESHOLD_BYTES else b""
    inline_body = b"" if blob else body
    crc = _checksum(key, txn.now_ns, inline_body, blob)
    inbox_row = InboxRow(key, txn.now_ns, inline_body, blob, crc, trace)
    seq = txn.append(keys.entries, codec.pack(inbox_row)).value
    if limits is not None and limits.bytes_in_flight:
        load_limits.add_to(txn, keys.universe, load_limits.BYTES, len(body))
    if key is not None:
        value = schema.encode_int(seq)
        dedupe.remember(
            txn, DEDUPE_SCOPE, _dedupe_key(world, key), body_hash, value, issued_ns=issued_ns
        )
    txn.notify(keys.topic)
    return PutResult(seq, already=False)


@operation("inbox.put_many")
def put_many(txn: Txn, items: list[tuple[str, str | None, bytes]]) -> list[PutResult]:
    """Deliver (world, key, body), all or none, in order."""
    check_limit(len(items), "items")
    return [put.fn(txn, world, key, body) for world, key, body in items]


def read(txn: Txn, world: str, limit: int) -> list[InboxEntry]:
    """Return the next ingress after the cursor. The read ends after the entry that exceeds `INBOX_READ_BYTES_MAX`.

    A damaged row ends the read. It raises `StoreCorrupt` when it is the first row of a read.
    """
    check_limit(limit)
    size = 0
    prefix = _keys(world).entries
    lo = prefix + tuples.pack_int(cursor(txn, world) + 1)
    entries: list[InboxEntry] = []
    for key, row in txn.scan(lo, tuples.prefix_end(prefix), limit):
        seq = tuples.unpack_last_int(key, len(prefix))
        try:
            inbox_row = _decode_row(row)
            body = blobs.get(txn, inbox_row.blob) if inbox_row.blob else inbox_row.body
        except (StoreCorrupt, NotFound, *codec.DECODE_ERRORS) as error:
            if entries:
                break
            raise StoreCorrupt(
                world=world, seq=seq, why=f"an ingress is damaged: {error}"
            ) from None
        if not _is_intact(inbox_row):
            if entries:
                break
            raise StoreCorrupt(
                world=world, seq=seq, why="an ingress is damaged: its checksum differs"
            )
        entries.append(InboxEntry(seq, inbox_row.key, body, inbox_row.at_ns, inbox_row.trace))
        size += len(body)
        if size > INBOX_READ_BYTES_MAX:
            break
    return entries


def iter_damaged(txn: Txn, world: str) -> Iterator[tuple[int, str]]:
    """Yield seq and reason of each damaged unread row."""
    prefix = _keys(world).entries
    start_key = prefix + tuples.pack_int(cursor(txn, world) + 1)
    while rows := txn.scan(start_key, tuples.prefix_end(prefix), SCAN_PAGE):
        for key, row in rows:
            inbox_row = _decode_row(row)
            seq = tuples.unpack_last_int(key, len(prefix))
            if not _is_intact(inbox_row):
                yield seq, "another checksum"
            elif inbox_row.blob and not blobs.is_intact(txn, inbox_row.blob):
                yield seq, "no blob with its hash"
        start_key = rows[-1][0] + b"\x00"


def advance(txn: Txn, world: str, to_seq: int, inline_count: int = 0) -> None:
    """Consume all ingress up to and including this seq.

    The last `inline_count` of them arrive in this transaction: they get seqs but no rows. Only for
    operations, and only if `last_seq` is `to_seq - inline_count`.
    """
    keys = _keys(world)
    if inline_count:
        if last_seq(txn, world) != to_seq - inline_count:
            raise Invalid(
                what="inbox", why="other ingress arrived first", world=world, to_seq=to_seq
            )
        txn.put(keys.last_seq, schema.encode_int(to_seq))
    old_cursor = txn.count(keys.cursor)
    if not old_cursor <= to_seq <= old_cursor + BATCH_MAX:
        raise Invalid(
            what="inbox cursor",
            why="the cursor never moves down, and moves up by at most one batch",
            world=world,
            found=to_seq,
            min=old_cursor,
            max=old_cursor + BATCH_MAX,
        )
    # Seqs have no gaps, so each row is read by key.
    txn.prefetch(
        keys.entries + tuples.pack_int(seq)
        for seq in range(old_cursor + 1, to_seq - inline_count + 1)
    )
    has_rows = to_seq > old_cursor + inline_count
    since_ns = load_limits.find_bytes_since(txn, keys.limits) if has_rows else None
    size = 0
    for seq in range(old_cursor + 1, to_seq - inline_count + 1):
        key = keys.entries + tuples.pack_int(seq)
        row = txn.get(key)
        if row is None:
            raise NotFound(what="ingress", world=world, seq=seq, cursor=old_cursor)
        txn.delete(key)
        read_row = _decode_row(row)
        if since_ns is not None and read_row.at_ns >= since_ns:
            size += _body_size(txn, read_row)
        if read_row.blob:
            blobs.release(txn, read_row.blob)
    if size:
        load_limits.add_to(txn, keys.universe, load_limits.BYTES, -size)
    if to_seq > old_cursor:
        txn.put(keys.cursor, schema.encode_int(to_seq))


def seq_of_key(
    txn: Txn, world: str, key: str, key_digest: bytes, issued_ns: int | None = None
) -> int | None:
    """Return the seq under which a key was delivered, or None when the key is new."""
    stored_seq = dedupe.check(
        txn, DEDUPE_SCOPE, _dedupe_key(world, key), key_digest, issued_ns=issued_ns
    )
    return None if stored_seq is None else schema.decode_int(stored_seq)


def is_delivered(txn: Txn, world: str, key: str) -> bool:
    """Whether a dedupe record for this key exists."""
    return dedupe.lookup(txn, DEDUPE_SCOPE, _dedupe_key(world, key)) is not None


def cursor(txn: Txn, world: str) -> int:
    """The last consumed seq; 0 before any."""
    return txn.count(_keys(world).cursor)


def last_seq(txn: Txn, world: str) -> int:
    """The last assigned seq; 0 before any."""
    return txn.count(_keys(world).last_seq)


def depth(txn: Txn, world: str) -> int:
    """The number of unread ingress: the last seq minus the cursor, because seqs have no gaps."""
    keys = _keys(world)
    return txn.count(keys.last_seq) - txn.count(keys.cursor)


def unread_bytes(txn: Txn, world: str, since_ns: int) -> int:
    """Return the bytes of the unread ingress that arrived since a time. Reads every unread row."""
    prefix = _keys(world).entries
    rows = [_decode_row(row) for _, row in iter_rows(txn, prefix)]
    return sum(_body_size(txn, row) for row in rows if row.at_ns >= since_ns)


def erase(txn: Txn, world: str, limit: int) -> bool:
    """Remove an inbox in bounded steps: unread rows, then keys, then cursor and last seq. Return whether it
    is complete."""
    check_limit(limit)
    keys = _keys(world)
    rows = txn.scan(keys.entries, tuples.prefix_end(keys.entries), limit)
    since_ns = load_limits.find_bytes_since(txn, keys.limits) if rows else None
    size = 0
    for key, row in rows:
        txn.delete(key)
        unread = _decode_row(row)
        if since_ns is not None and unread.at_ns >= since_ns:
            size += _body_size(txn, unread)
        if unread.blob:
            blobs.erase(txn, unread.blob)
    load_limits.add_to(txn, keys.universe, load_limits.BYTES, -size)
    removed = len(rows)
    removed += dedupe.erase(txn, DEDUPE_SCOPE, _dedupe_key(world, "-")[:-1], limit - removed)
    if removed >= limit:
        return False
    txn.delete(keys.cursor)
    txn.delete(keys.last_seq)
    return True


def topic(world: str) -> str:
    return f"inbox/{world}"


# -- inside --------------------------------------------------------------------------------------


class _InboxKeys:
    __slots__ = ("cursor", "entries", "last_seq", "limits", "topic", "universe")

    def __init__(self, world: str) -> None:
        check_name("world", world)
        self.entries = schema.key_prefix(schema.Space.INBOX, world, "e")
        self.cursor = schema.key_prefix(schema.Space.INBOX, world, "cursor")
        self.last_seq = schema.sequence_key(self.entries)
        self.topic = topic(world)
        self.universe = world.partition("/")[0]
        self.limits = load_limits.limits_key(self.universe)


_keys = lru_cache(maxsize=65536)(_InboxKeys)
_decode_row = codec.decoder(InboxRow).decode


def _body_size(txn: Txn, row: InboxRow) -> int:
    return len(blobs.get(txn, row.blob)) if row.blob else len(row.body)


def _checksum(key: str | None, at_ns: int, body: bytes, blob: bytes) -> int:
    head = f"{at_ns} {'' if key is None else key}".encode(errors="surrogatepass")
    return crc32(blob, crc32(body, crc32(head))) or 1


def _is_intact(inbox_row: InboxRow) -> bool:
    return not inbox_row.crc or inbox_row.crc == _checksum(
        inbox_row.key, inbox_row.at_ns, inbox_row.body, inbox_row.blob
    )


def _dedupe_key(world: str, key: str) -> str:
    if not key:
        raise Invalid(what="key", why="empty; None means without a key", world=world)
    # The length distinguishes ("a", "b:c") from ("a:b", "c").
    return f"{len(world)}:{world}:{key}"
