"""Journals: append-only, hash-chained entries of one subject.

- Heights start at 1 and have no gaps. An append names its expected head. If the head differs, the append
  raises `HeadMoved` and writes nothing.
- The hash of an entry covers the previous hash, its height, time and body, so `verify` finds the first
  height that was altered.
- Only `truncate` and `raise_floor` remove entries, never above the checkpoint. The rest still verifies:
  the head stores the hash of the entry below the floor.
- `raise_floor` takes effect at once. `delete_below_floor` then removes the rows in bounded steps.
- `compact` packs entries below the checkpoint into segments. Each step is bounded and one transaction, so
  compaction can stop and resume anywhere. Reads and `verify` handle segments like entries.

These are plain functions: an append is part of the single transaction of a cycle. `HeadMoved` is not
`Fenced`: the lease may be valid while the state in memory is outdated, for example after a commit whose
reply was lost.
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
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import HeadMoved, Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Row, Txn

GENESIS = bytes(HASH_BYTES)


class JournalHead(Record, frozen=True):
    """The head row. `floor` is the lowest kept height, `hash_below_floor` the hash of the entry below it."""

    height: int = 0
    hash: bytes = GENESIS
    checkpoint: int = 0
    floor: int = 1
    hash_below_floor: bytes = GENESIS
    # Entries up to this height are packed in segments.
    packed_to: int = 0


class ChainedEntry(Record, frozen=True):
    height: int
    body: bytes
    hash: bytes
    at_ns: int


class EntryRow(Record, frozen=True):
    """The stored row of an entry: its body, or the hash of its blob."""

    hash: bytes
    at_ns: int
    body: bytes
    blob: bytes = b""


def append(
    txn: Txn, subject: str, bodies: Sequence[bytes], *, expected_head: int | None = None
) -> JournalHead:
    """Append entries on the expected head (None: on any head), and return the new head."""
    check_limit(len(bodies), "bodies")
    keys = _keys(subject)
    old_head = head(txn, subject)
    if expected_head is not None and old_head.height != expected_head:
        raise HeadMoved(subject=subject, expected=expected_head, found=old_head.height)
    if not bodies:
        return old_head
    height, last_hash, at_ns = old_head.height, old_head.hash, txn.now_ns
    put, prefix, pack, pack_int = txn.put, keys.entries, codec.pack, tuples.pack_int
    for body in bodies:
        height += 1
        blob = blobs.put(txn, body) if len(body) > BLOB_THRESHOLD_BYTES else b""
        last_hash = _chain_hash(last_hash, height, at_ns, body, blob)
        put(
            prefix + pack_int(height), pack(EntryRow(last_hash, at_ns, b"" if blob else body, blob))
        )
    new_head = replace(old_head, height=height, hash=last_hash)
    put(keys.head, pack(new_head))
    return new_head


def head(txn: Txn, subject: str) -> JournalHead:
    row = txn.get(_keys(subject).head)
    return JournalHead() if row is None else codec.unpack_as(JournalHead, row)


def start_at(txn: Txn, subject: str, height: int, hash: bytes) -> JournalHead:
    """Start an empty journal above an entry of another journal, for a fork."""
    if head(txn, subject).height:
        raise Invalid(what="journal", why="the journal has entries already", subject=subject)
    new_head = JournalHead(height, hash, height, height + 1, hash)
    txn.put(_keys(subject).head, codec.pack(new_head))
    return new_head


def hash_at(txn: Txn, subject: str, height: int) -> bytes:
    """Return the hash of an entry, of the head, or of the entry right below the floor."""
    current = head(txn, subject)
    if height == current.height:
        return current.hash
    if height == current.floor - 1:
        return current.hash_below_floor
    rows = _read_rows(txn, subject, height, height + 1, 1)
    if not rows:
        raise NotFound(what="journal entry", subject=subject, height=height, floor=current.floor)
    return rows[0][1].hash


def read(txn: Txn, subject: str, lo: int, hi: int, limit: int) -> list[ChainedEntry]:
    """Return entries with lo <= height < hi. A height below the floor is NotFound: a reader must see no gap."""
    check_limit(limit)
    if lo < 1:
        raise Invalid(what="lo", why="heights start at 1", found=lo)
    floor = head(txn, subject).floor
    if lo < min(floor, hi):
        raise NotFound(what="journal entry", subject=subject, height=lo, floor=floor)
    return [
        ChainedEntry(
            height,
            blobs.get(txn, entry_row.blob) if entry_row.blob else entry_row.body,
            entry_row.hash,
            entry_row.at_ns,
        )
        for height, entry_row in _read_rows(txn, subject, lo, hi, limit)
    ]


def verify(txn: Txn, subject: str) -> None:
    """Verify the hash chain. StoreCorrupt names the first bad height."""
    current = head(txn, subject)
    height, last_hash = current.floor - 1, current.hash_below_floor
    while page := _read_rows(txn, subject, height + 1, current.height + 1, SCAN_PAGE):
        for found_height, entry_row in page:
            height += 1
            if found_height != height:
                raise StoreCorrupt(subject=subject, height=height, why="the entry is missing")
            if entry_row.blob and not blobs.is_intact(txn, entry_row.blob):
                raise StoreCorrupt(
                    subject=subject, height=height, why="the content of the blob has changed"
                )
            last_hash = _chain_hash(
                last_hash, height, entry_row.at_ns, entry_row.body, entry_row.blob
            )
            if last_hash != entry_row.hash:
                raise StoreCorrupt(subject=subject, height=height, why="the hash chain is broken")
    if height != current.height:
        raise StoreCorrupt(subject=subject, height=height + 1, why="the entry is missing")
    if last_hash != current.hash:
        raise StoreCorrupt(
            subject=subject,
            height=height,
            why="the hash of the head differs from the hash of the last entry",
        )


def checkpoint(txn: Txn, subject: str, height: int) -> None:
    """Set the checkpoint: entries below it are no longer needed. It only rises, at most to the head."""
    old_head = head(txn, subject)
    if not old_head.checkpoint <= height <= old_head.height:
        raise Invalid(
            what="checkpoint",
            why="must be between the last checkpoint and the head",
            subject=subject,
            found=height,
            min=old_head.checkpoint,
            max=old_head.height,
        )
    if height != old_head.checkpoint:
        txn.put(_keys(subject).head, codec.pack(replace(old_head, checkpoint=height)))


def truncate(txn: Txn, subject: str, limit: int) -> int:
    """Remove the lowest entries below the checkpoint, and return their number.

    Packed entries are removed by whole segments, one per call.
    """
    check_limit(limit)
    keys = _keys(subject)
    old_head = head(txn, subject)
    removed: list[tuple[int, EntryRow]] = []
    if old_head.floor <= old_head.packed_to and limit:
        [(top, removed)] = _read_segments(txn, keys, old_head.floor, 1)
        txn.delete(keys.segments + tuples.pack_int(top))
    elif old_head.packed_to < old_head.floor:
        removed = _unpacked_rows(txn, keys, old_head.floor, old_head.checkpoint, limit)
        for height, _ in removed:
            txn.delete(keys.entries + tuples.pack_int(height))
    if not removed:
        return 0
    _release_blobs(txn, [entry_row for _, entry_row in removed])
    height, entry_row = removed[-1]
    txn.put(
        keys.head, codec.pack(replace(old_head, floor=height + 1, hash_below_floor=entry_row.hash))
    )
    return len(removed)


def raise_floor(txn: Txn, subject: str, height: int) -> bool:
    """Raise the floor above a height, at most the checkpoint's. Return False if the floor is higher already.

    Entries up to this height become unreadable. `delete_below_floor` removes their rows.
    """
    old_head = head(txn, subject)
    if height < old_head.floor:
        return False
    if height > old_head.checkpoint:
        raise Invalid(
            what="cut",
            why="above the checkpoint",
            subject=subject,
            found=height,
            max=old_head.checkpoint,
        )
    floor_hash = hash_at(txn, subject, height)
    txn.put(
        _keys(subject).head,
        codec.pack(replace(old_head, floor=height + 1, hash_below_floor=floor_hash)),
    )
    return True


def delete_below_floor(txn: Txn, subject: str, limit: int, *, skip_grace: bool = False) -> int:
    """Remove entries below the floor, lowest first, segments as a whole. Return the number of entries.

    A number below the limit means that none is left. With `skip_grace` their blobs are deleted at once.
    """
    check_limit(limit)
    keys = _keys(subject)
    floor = head(txn, subject).floor
    removed = 0
    while removed < limit and (segment := _read_segments(txn, keys, 0, 1)):
        [(top, entries)] = segment
        dropped = [entry_row for height, entry_row in entries if height < floor]
        if not dropped:
            break
        if top < floor:
            txn.delete(keys.segments + tuples.pack_int(top))
        else:
            remaining = [entry_row for height, entry_row in entries if height >= floor]
            txn.put(keys.segments + tuples.pack_int(top), _pack_segment(floor, remaining))
        removed += _release_blobs(txn, dropped, skip_grace=skip_grace)
    rows = _unpacked_rows(txn, keys, 0, floor, max(limit - removed, 0))
    for height, _ in rows:
        txn.delete(keys.entries + tuples.pack_int(height))
    return removed + _release_blobs(
        txn, [entry_row for _, entry_row in rows], skip_grace=skip_grace
    )


def erase(txn: Txn, subject: str, limit: int) -> bool:
    """Remove a journal in bounded steps, entries first and the head last. Return whether it is complete."""
    old_head = head(txn, subject)
    if old_head.floor <= old_head.height:
        txn.put(
            _keys(subject).head,
            codec.pack(
                replace(old_head, floor=old_head.height + 1, hash_below_floor=old_head.hash)
            ),
        )
    if delete_below_floor(txn, subject, limit, skip_grace=True) >= limit:
        return False
    txn.delete(_keys(subject).head)
    return True


def compact(txn: Txn, subject: str, limit: int = SEGMENT_ENTRIES) -> int:
    """Pack the lowest unpacked entries below the checkpoint into a segment, and return their number."""
    check_limit(limit)
    keys = _keys(subject)
    old_head = head(txn, subject)
    lo = max(old_head.packed_to + 1, old_head.floor)
    rows = _unpacked_rows(txn, keys, lo, old_head.checkpoint, limit)
    size = 0
    packed_rows: list[tuple[int, EntryRow]] = []
    for height, entry_row in rows:
        size += len(entry_row.body)
        if packed_rows and size > SEGMENT_BYTES_MAX:
            break
        packed_rows.append((height, entry_row))
    if len(packed_rows) < 2:
        return 0
    for height, _ in packed_rows:
        txn.delete(keys.entries + tuples.pack_int(height))
    top = packed_rows[-1][0]
    packed = _pack_segment(lo, [entry_row for _, entry_row in packed_rows])
    txn.put(keys.segments + tuples.pack_int(top), packed)
    txn.put(keys.head, codec.pack(replace(old_head, packed_to=top)))
    return len(packed_rows)


# -- inside --------------------------------------------------------------------------------------


class _JournalKeys:
    __slots__ = ("entries", "head", "segments")

    def __init__(self, subject: str) -> None:
        check_name("subject", subject)
        self.head = schema.key_prefix(schema.Space.JOURNAL, subject, "head")
        self.entries = schema.key_prefix(schema.Space.JOURNAL, subject, "e")
        self.segments = schema.key_prefix(schema.Space.JOURNAL, subject, "s")


_keys = lru_cache(maxsize=65536)(_JournalKeys)
_decode_row = codec.decoder(EntryRow).decode
_decode_segment = codec.decoder(tuple[int, list[EntryRow]]).decode


def _pack_segment(first: int, entries: list[EntryRow]) -> bytes:
    return zlib.compress(codec.pack([first, entries]), 1)


def _release_blobs(txn: Txn, removed: list[EntryRow], *, skip_grace: bool = False) -> int:
    """Release the blobs of removed entries, and return the number of entries."""
    drop = blobs.erase if skip_grace else blobs.release
    for entry_row in removed:
        if entry_row.blob:
            drop(txn, entry_row.blob)
    return len(removed)


def _chain_hash(previous_hash: bytes, height: int, at_ns: int, body: bytes, blob: bytes) -> bytes:
    # Everything before the body has a fixed length, so different entries have different bytes.
    kind = b"\x01" if blob else b"\x00"
    at = height.to_bytes(8, "big") + at_ns.to_bytes(8, "big", signed=True)
    return sha256(previous_hash + at + kind + (blob or body)).digest()


def _read_rows(txn: Txn, subject: str, lo: int, hi: int, limit: int) -> list[tuple[int, EntryRow]]:
    """Return entries lo <= height < hi, from segments and from single rows."""
    keys = _keys(subject)
    rows: list[tuple[int, EntryRow]] = []
    packed = head(txn, subject).packed_to
    while lo <= packed and lo < hi and len(rows) < limit:
        segment = _read_segments(txn, keys, lo, 1)
        if not segment:
            return rows
        [(top, entries)] = segment
        rows += [(height, entry_row) for height, entry_row in entries if lo <= height < hi]
        lo = top + 1
    return (rows + _unpacked_rows(txn, keys, lo, hi, max(limit - len(rows), 0)))[:limit]


def _unpacked_rows(
    txn: Txn, keys: _JournalKeys, lo: int, hi: int, limit: int
) -> list[tuple[int, EntryRow]]:
    prefix = keys.entries
    rows: list[Row] = (
        txn.scan(prefix + tuples.pack_int(lo), prefix + tuples.pack_int(hi), limit)
        if lo < hi
        else []
    )
    return [(tuples.unpack_last_int(key, len(prefix)), _decode_row(row)) for key, row in rows]


def _read_segments(
    txn: Txn, keys: _JournalKeys, lo: int, limit: int
) -> list[tuple[int, list[tuple[int, EntryRow]]]]:
    """Return segments that end at or above a height, as (top height, entries)."""
    prefix = keys.segments
    segments = []
    for key, row in txn.scan(prefix + tuples.pack_int(lo), tuples.prefix_end(prefix), limit):
        first, entries = _decode_segment(zlib.decompress(row))
        segments.append((tuples.unpack_last_int(key, len(prefix)), list(enumerate(entries, first))))
    return segments
