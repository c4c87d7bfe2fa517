"""Blobs: content-addressed large values with reference counts, garbage-collected after a grace period.

    put      writes the data row if it is missing and adds a reference
    release  removes a reference; a blob without references becomes idle
    collect  deletes blobs that were idle for the grace period
    erase    removes a reference; a blob without references is deleted immediately

Invariants: a blob with references has its data row and no idle row; a blob without references has
exactly one idle row. A row that holds a hash owns one reference and releases it when it is deleted.

Why no interleaving loses a blob: only operations change reference counts and delete idle blobs, and
operations run serially where commits are applied. The transaction itself writes the data row so that
it can read it back. If the row already exists, the transaction skips the write and the commit
validates that read. A concurrent collection therefore makes the transaction run again and write the
row. The grace period protects readers that find a hash in one snapshot and fetch the data in a later
one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation

_DATA = schema.key_prefix(schema.Space.BLOB, "data")
_REFS = schema.key_prefix(schema.Space.BLOB, "refs")
_IDLE = schema.key_prefix(schema.Space.BLOB, "idle")
# Blobs are large, so a scan page is small.
_SCAN_BLOBS = 16


class BlobRefs(Record, frozen=True):
    count: int
    idle_since_ns: int = 0


def put(txn: Txn, data: bytes) -> bytes:
    """Store the data, add a reference and return the hash."""
    name = hashlib.sha256(data).digest()
    key = _DATA + tuples.pack((name,))
    if txn.get(key) is None:
        txn.put(key, data)
    retain(txn, name)
    return name


def get(txn: Txn, name: bytes, *, verify_hash: bool = True) -> bytes:
    """The content. With `verify_hash`, a mismatch raises `StoreCorrupt`."""
    data = txn.get(_DATA + tuples.pack((name,)))
    if data is None:
        raise NotFound(what="blob", hash=name.hex())
    if verify_hash and hashlib.sha256(data).digest() != name:
        raise StoreCorrupt(what="blob", hash=name.hex(), why="its content has another hash")
    return data


def corrupt_blobs(txn: Txn) -> Iterator[bytes]:
    """Yield the hashes of all blobs whose content does not match."""
    at, end = _DATA, tuples.prefix_end(_DATA)
    while rows := txn.scan(at, end, _SCAN_BLOBS):
        for key, data in rows:
            name = tuples.unpack(key)[-1]
            if hashlib.sha256(data).digest() != name:
                assert isinstance(name, bytes)
                yield name
        at = rows[-1][0] + b"\x00"


def exists(txn: Txn, name: bytes) -> bool:
    """Whether the data row exists."""
    return txn.get(_DATA + tuples.pack((name,))) is not None


def is_intact(txn: Txn, name: bytes) -> bool:
    """Whether the data row exists and matches its hash."""
    data = txn.get(_DATA + tuples.pack((name,)))
    return data is not None and hashlib.sha256(data).digest() == name


@operation("blobs.retain")
def retain(txn: Txn, name: bytes) -> None:
    """Add a reference to an existing blob, for example for a copied row that holds its hash."""
    packed = tuples.pack((name,))
    if txn.get(_DATA + packed) is None:
        raise NotFound(what="blob", hash=name.hex())
    refs = _read_refs(txn, packed)
    if refs.idle_since_ns:
        txn.delete(_IDLE + tuples.pack_int(refs.idle_since_ns) + packed)
    txn.put(_REFS + packed, codec.pack(BlobRefs(refs.count + 1)))


@operation("blobs.release")
def release(txn: Txn, name: bytes) -> None:
    packed = tuples.pack((name,))
    count = _read_refs(txn, packed).count - 1
    if count < 0:
        raise NotFound(what="blob reference", hash=name.hex())
    idle_since_ns = 0 if count else txn.now_ns
    if idle_since_ns:
        txn.put(_IDLE + tuples.pack_int(idle_since_ns) + packed, name)
    txn.put(_REFS + packed, codec.pack(BlobRefs(count, idle_since_ns)))


@operation("blobs.erase")
def erase(txn: Txn, name: bytes) -> None:
    """Remove a reference and delete an unreferenced blob immediately, for content that must not remain."""
    release.fn(txn, name)
    erase_idle.fn(txn, name)


@operation("blobs.erase_idle")
def erase_idle(txn: Txn, name: bytes) -> None:
    """Delete an idle blob without waiting for the grace period."""
    packed = tuples.pack((name,))
    refs = _read_refs(txn, packed)
    if not refs.count and refs.idle_since_ns:
        txn.delete(_IDLE + tuples.pack_int(refs.idle_since_ns) + packed)
        txn.delete(_REFS + packed)
        txn.delete(_DATA + packed)


@operation("blobs.collect")
def collect(txn: Txn, grace_ns: int, limit: int) -> int:
    """Delete blobs that were idle for the grace period, longest idle first. Return their number."""
    if grace_ns < 0:
        raise Invalid(what="grace_ns", why="negative", found=grace_ns)
    if not 0 <= limit <= BATCH_MAX:
        raise Invalid(what="limit", why="out of bounds", found=limit, min=0, max=BATCH_MAX)
    until_ns = txn.now_ns - grace_ns
    idle = txn.scan(_IDLE, _IDLE + tuples.pack_int(until_ns + 1), limit)
    for key, name in idle:
        packed = tuples.pack((name,))
        txn.delete(key)
        txn.delete(_REFS + packed)
        txn.delete(_DATA + packed)
    return len(idle)


def oldest_idle_ns(txn: Txn) -> int | None:
    """The time since which the longest-idle blob has no reference; None if no blob is idle."""
    first = txn.scan(_IDLE, tuples.prefix_end(_IDLE), 1)
    if not first:
        return None
    key, name = first[0]
    return tuples.unpack_last_int(key[: -len(tuples.pack((name,)))], len(_IDLE))


def _read_refs(txn: Txn, packed: bytes) -> BlobRefs:
    row = txn.get(_REFS + packed)
    return BlobRefs(0) if row is None else codec.unpack_as(BlobRefs, row)
