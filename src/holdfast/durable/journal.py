"""A journal: the append-only entries of one subject, each chained to the one before.

- Heights start at 1 and have no gap. An append names the head it was computed on; if the journal
  has gone on meanwhile it is `HeadMoved`, and nothing is written.
- An entry's hash covers the hash before it, its height, its time and its body, so `verify` finds
  the first height at which anything differs from what was appended.
- Entries go away only by `truncate` and `cut`, and never one above the checkpoint. What is left
  still verifies: the head keeps the hash on which the lowest kept entry stands.
- `cut` raises the floor at once; `sweep` then removes the rows below it, a bounded number at a time.
- `compact` packs entries below the checkpoint into segments, a bounded number at a time and in one
  transaction, so it can stop and go on anywhere. Nothing is lost by it: reading and verifying go
  through segments as through entries.

These are plain functions: an append belongs into the one transaction of its writer, together with
whatever else that cycle decided. `HeadMoved` is not `Fenced`: the lease may well be good, and it is
the state in memory that is old, as after a commit whose answer was lost.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import HASH_BYTES, Record
from holdfast.config import BLOB_THRESHOLD_BYTES, SCAN_PAGE, SEGMENT_BYTES_MAX, SEGMENT_ENTRIES
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import HeadMoved, Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Row, Txn

GENESIS = bytes(HASH_BYTES)


class Head(Record, frozen=True):
    """`floor` is the lowest height that is kept, `below` the hash of the entry under it."""

    height: int = 0
    hash: bytes = GENESIS
    checkpoint: int = 0
    floor: int = 1
    below: bytes = GENESIS
    # Entries up to this height are in segments.
    packed: int = 0


class Entry(Record, frozen=True):
    height: int
    body: bytes
    hash: bytes
    at_ns: int


class Kept(Record, frozen=True):
    """The row of an entry: the body, or the hash of the blob that holds it."""

    hash: bytes
    at_ns: int
    body: bytes
    blob: bytes = b""


def append(
    txn: Txn, subject: str, bodies: Sequence[bytes], *, expected_head: int | None = None
) -> Head:
    """Add entries on top of the head that the caller knows (None: on whatever it is); the new head."""
    check_limit(len(bodies), "bodies")
    keys = _keys(subject)
    was = head(txn, subject)
    if expected_head is not None and was.height != expected_head:
        raise HeadMoved(subject=subject, expected=expected_head, found=was.height)
    if not bodies:
        return was
    height, last, at_ns = was.height, was.hash, txn.now_ns
    put, prefix, pack, pack_int = txn.put, keys.entries, codec.pack, tuples.pack_int
    for body in bodies:
        height += 1
        blob = blobs.put(txn, body) if len(body) > BLOB_THRESHOLD_BYTES else b""
        last = _link(last, height, at_ns, body, blob)
        put(prefix + pack_int(height), pack(Kept(last, at_ns, b"" if blob else body, blob)))
    now = replace(was, height=height, hash=last)
    put(keys.head, pack(now))
    return now


def head(txn: Txn, subject: str) -> Head:
    row = txn.get(_keys(subject).head)
    return Head() if row is None else codec.unpack_as(Head, row)


def begin_at(txn: Txn, subject: str, height: int, hash: bytes) -> Head:
    """Start an empty journal above a height, on top of another's entry: a fork's first row."""
    if head(txn, subject).height:
        raise Invalid(what="journal", why="it has entries already", subject=subject)
    now = Head(height, hash, height, height + 1, hash)
    txn.put(_keys(subject).head, codec.pack(now))
    return now


def hash_at(txn: Txn, subject: str, height: int) -> bytes:
    """The hash of an entry, of the head, or of what lies right below the lowest kept one."""
    now = head(txn, subject)
    if height == now.height:
        return now.hash
    if height == now.floor - 1:
        return now.below
    found = _kept(txn, subject, height, height + 1, 1)
    if not found:
        raise NotFound(what="journal entry", subject=subject, height=height, floor=now.floor)
    return found[0][1].hash


def read(txn: Txn, subject: str, lo: int, hi: int, limit: int) -> list[Entry]:
    """Entries with lo <= height < hi. Below the floor is NotFound: a reader must see no gap."""
    check_limit(limit)
    if lo < 1:
        raise Invalid(what="lo", why="heights start at 1", found=lo)
    floor = head(txn, subject).floor
    if lo < min(floor, hi):
        raise NotFound(what="journal entry", subject=subject, height=lo, floor=floor)
    return [
        Entry(height, blobs.get(txn, kept.blob) if kept.blob else kept.body, kept.hash, kept.at_ns)
        for height, kept in _kept(txn, subject, lo, hi, limit)
    ]


def verify(txn: Txn, subject: str) -> None:
    """Walk the chain; StoreCorrupt names the first height that does not fit."""
    now = head(txn, subject)
    height, last = now.floor - 1, now.below
    while page := _kept(txn, subject, height + 1, now.height + 1, SCAN_PAGE):
        for found, kept in page:
            height += 1
            if found != height:
                raise StoreCorrupt(subject=subject, height=height, why="the entry is missing")
            if kept.blob and not blobs.sound(txn, kept.blob):
                raise StoreCorrupt(
                    subject=subject, height=height, why="the blob is not what it was"
                )
            last = _link(last, height, kept.at_ns, kept.body, kept.blob)
            if last != kept.hash:
                raise StoreCorrupt(subject=subject, height=height, why="the chain is broken")
    if height != now.height:
        raise StoreCorrupt(subject=subject, height=height + 1, why="the entry is missing")
    if last != now.hash:
        raise StoreCorrupt(subject=subject, height=height, why="the head was changed")


def checkpoint(txn: Txn, subject: str, height: int) -> None:
    """Say that nothing below this height is needed any more. It only ever rises, up to the head."""
    was = head(txn, subject)
    if not was.checkpoint <= height <= was.height:
        raise Invalid(
            what="checkpoint",
            why="between the last one and the head",
            subject=subject,
            found=height,
            min=was.checkpoint,
            max=was.height,
        )
    if height != was.checkpoint:
        txn.put(_keys(subject).head, codec.pack(replace(was, checkpoint=height)))


def truncate(txn: Txn, subject: str, limit: int) -> int:
    """Remove the lowest entries, never the checkpoint's nor one above it; how many.

    What is packed goes by whole segments, one a call.
    """
    check_limit(limit)
    keys = _keys(subject)
    was = head(txn, subject)
    gone: list[tuple[int, Kept]] = []
    if was.floor <= was.packed and limit:
        [(top, gone)] = _segments(txn, keys, was.floor, 1)
        txn.delete(keys.segments + tuples.pack_int(top))
    elif was.packed < was.floor:
        gone = _singles(txn, keys, was.floor, was.checkpoint, limit)
        for height, _ in gone:
            txn.delete(keys.entries + tuples.pack_int(height))
    if not gone:
        return 0
    _release(txn, [kept for _, kept in gone])
    height, kept = gone[-1]
    txn.put(keys.head, codec.pack(replace(was, floor=height + 1, below=kept.hash)))
    return len(gone)


def cut(txn: Txn, subject: str, height: int) -> bool:
    """Let the journal begin above a height, up to the checkpoint's; whether it began below.

    From then on no entry up to it is read. `sweep` removes their rows.
    """
    was = head(txn, subject)
    if height < was.floor:
        return False
    if height > was.checkpoint:
        raise Invalid(
            what="cut",
            why="above the checkpoint",
            subject=subject,
            found=height,
            max=was.checkpoint,
        )
    below = hash_at(txn, subject, height)
    txn.put(_keys(subject).head, codec.pack(replace(was, floor=height + 1, below=below)))
    return True


def sweep(txn: Txn, subject: str, limit: int, *, at_once: bool = False) -> int:
    """Remove rows of entries below the floor, lowest first, a segment as a whole; how many entries.

    Fewer than the limit means that none is left. With `at_once` their blobs have no grace.
    """
    check_limit(limit)
    keys = _keys(subject)
    floor = head(txn, subject).floor
    gone = 0
    while gone < limit and (segment := _segments(txn, keys, 0, 1)):
        [(top, entries)] = segment
        dropped = [kept for height, kept in entries if height < floor]
        if not dropped:
            break
        if top < floor:
            txn.delete(keys.segments + tuples.pack_int(top))
        else:
            stay = [kept for height, kept in entries if height >= floor]
            txn.put(keys.segments + tuples.pack_int(top), _pack_segment(floor, stay))
        gone += _release(txn, dropped, at_once=at_once)
    found = _singles(txn, keys, 0, floor, max(limit - gone, 0))
    for height, _ in found:
        txn.delete(keys.entries + tuples.pack_int(height))
    return gone + _release(txn, [kept for _, kept in found], at_once=at_once)


def erase(txn: Txn, subject: str, limit: int) -> bool:
    """Remove a journal whole, entries first and its head last; whether that is done."""
    was = head(txn, subject)
    if was.floor <= was.height:
        txn.put(_keys(subject).head, codec.pack(replace(was, floor=was.height + 1, below=was.hash)))
    if sweep(txn, subject, limit, at_once=True) >= limit:
        return False
    txn.delete(_keys(subject).head)
    return True


def compact(txn: Txn, subject: str, limit: int = SEGMENT_ENTRIES) -> int:
    """Pack the lowest single entries, strictly below the checkpoint, into a segment; how many."""
    check_limit(limit)
    keys = _keys(subject)
    was = head(txn, subject)
    lo = max(was.packed + 1, was.floor)
    found = _singles(txn, keys, lo, was.checkpoint, limit)
    size = 0
    taken: list[tuple[int, Kept]] = []
    for height, kept in found:
        size += len(kept.body)
        if taken and size > SEGMENT_BYTES_MAX:
            break
        taken.append((height, kept))
    if len(taken) < 2:
        return 0
    for height, _ in taken:
        txn.delete(keys.entries + tuples.pack_int(height))
    top = taken[-1][0]
    packed = _pack_segment(lo, [kept for _, kept in taken])
    txn.put(keys.segments + tuples.pack_int(top), packed)
    txn.put(keys.head, codec.pack(replace(was, packed=top)))
    return len(taken)


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    __slots__ = ("entries", "head", "segments")

    def __init__(self, subject: str) -> None:
        check_name("subject", subject)
        self.head = schema.prefix(schema.Space.JOURNAL, subject, "head")
        self.entries = schema.prefix(schema.Space.JOURNAL, subject, "e")
        self.segments = schema.prefix(schema.Space.JOURNAL, subject, "s")


_keys = lru_cache(maxsize=65536)(_Keys)
_decode = codec.decoder(Kept).decode
_decode_segment = codec.decoder(tuple[int, list[Kept]]).decode


def _pack_segment(first: int, entries: list[Kept]) -> bytes:
    return zlib.compress(codec.pack([first, entries]), 1)


def _release(txn: Txn, gone: list[Kept], *, at_once: bool = False) -> int:
    """Give up the blobs of entries whose rows go; how many entries."""
    drop = blobs.erase if at_once else blobs.release
    for kept in gone:
        if kept.blob:
            drop(txn, kept.blob)
    return len(gone)


def _link(last: bytes, height: int, at_ns: int, body: bytes, blob: bytes) -> bytes:
    # All before the body has a fixed length, so no two entries have the same bytes.
    kind = b"\x01" if blob else b"\x00"
    at = height.to_bytes(8, "big") + at_ns.to_bytes(8, "big", signed=True)
    return sha256(last + at + kind + (blob or body)).digest()


def _kept(txn: Txn, subject: str, lo: int, hi: int, limit: int) -> list[tuple[int, Kept]]:
    """Entries lo <= height < hi, from segments and from rows of their own."""
    keys = _keys(subject)
    found: list[tuple[int, Kept]] = []
    packed = head(txn, subject).packed
    while lo <= packed and lo < hi and len(found) < limit:
        segment = _segments(txn, keys, lo, 1)
        if not segment:
            return found
        [(top, entries)] = segment
        found += [(height, kept) for height, kept in entries if lo <= height < hi]
        lo = top + 1
    return (found + _singles(txn, keys, lo, hi, max(limit - len(found), 0)))[:limit]


def _singles(txn: Txn, keys: _Keys, lo: int, hi: int, limit: int) -> list[tuple[int, Kept]]:
    prefix = keys.entries
    rows: list[Row] = (
        txn.scan(prefix + tuples.pack_int(lo), prefix + tuples.pack_int(hi), limit)
        if lo < hi
        else []
    )
    return [(tuples.unpack_last_int(key, len(prefix)), _decode(row)) for key, row in rows]


def _segments(
    txn: Txn, keys: _Keys, lo: int, limit: int
) -> list[tuple[int, list[tuple[int, Kept]]]]:
    """Segments that reach to a height or above: (their top, their entries)."""
    prefix = keys.segments
    found = []
    for key, row in txn.scan(prefix + tuples.pack_int(lo), tuples.after(prefix), limit):
        first, entries = _decode_segment(zlib.decompress(row))
        found.append((tuples.unpack_last_int(key, len(prefix)), list(enumerate(entries, first))))
    return found
