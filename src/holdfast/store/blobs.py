"""Large values, stored once per content, counted by reference, collected after a grace.

    put      the data row if it is not there, one reference more
    release  one reference less; at none the blob becomes idle, by time
    collect  removes blobs that have been idle for the grace
    erase    one reference less; at none the blob goes at once

Invariants: a blob with references has its data row, and is in no idle row; a blob without any is
in exactly one idle row. A row that keeps a hash owns one reference and releases it when it goes.

Why no interleaving loses a blob: references are counted, and idle blobs removed, by operations,
which run one after the other where commits are applied, each on what the former left. The data row
is written by the transaction itself so that it can read it back; when it skips that because the
row is there already, that read is validated at the commit, so a collection in between makes the
transaction run again and write it. The grace is for readers, who find a hash in one snapshot and
fetch the data in a later one.
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

_DATA = schema.prefix(schema.Space.BLOB, "data")
_REFS = schema.prefix(schema.Space.BLOB, "refs")
_IDLE = schema.prefix(schema.Space.BLOB, "idle")
# Blobs are large: few of them are read at a time.
_SCAN_BLOBS = 16


class Refs(Record, frozen=True):
    count: int
    idle_since_ns: int = 0


def put(txn: Txn, data: bytes) -> bytes:
    """Keep the data and one reference to it; its hash."""
    name = hashlib.sha256(data).digest()
    key = _DATA + tuples.pack((name,))
    if txn.get(key) is None:
        txn.put(key, data)
    retain(txn, name)
    return name


def get(txn: Txn, name: bytes, *, checked: bool = True) -> bytes:
    """The content; `StoreCorrupt` if it has another hash, unless the caller can do nothing about that."""
    data = txn.get(_DATA + tuples.pack((name,)))
    if data is None:
        raise NotFound(what="blob", hash=name.hex())
    if checked and hashlib.sha256(data).digest() != name:
        raise StoreCorrupt(what="blob", hash=name.hex(), why="its content has another hash")
    return data


def unsound(txn: Txn) -> Iterator[bytes]:
    """The names of all blobs whose content has another hash."""
    at, end = _DATA, tuples.after(_DATA)
    while rows := txn.scan(at, end, _SCAN_BLOBS):
        for key, data in rows:
            name = tuples.unpack(key)[-1]
            if hashlib.sha256(data).digest() != name:
                assert isinstance(name, bytes)
                yield name
        at = rows[-1][0] + b"\x00"


def sound(txn: Txn, name: bytes) -> bool:
    """Whether the data is there and has its hash."""
    data = txn.get(_DATA + tuples.pack((name,)))
    return data is not None and hashlib.sha256(data).digest() == name


@operation
def retain(txn: Txn, name: bytes) -> None:
    """One reference more to a blob that is there, such as for a copy of a row that names it."""
    packed = tuples.pack((name,))
    if txn.get(_DATA + packed) is None:
        raise NotFound(what="blob", hash=name.hex())
    refs = _refs(txn, packed)
    if refs.idle_since_ns:
        txn.delete(_IDLE + tuples.pack_int(refs.idle_since_ns) + packed)
    txn.put(_REFS + packed, codec.pack(Refs(refs.count + 1)))


@operation
def release(txn: Txn, name: bytes) -> None:
    packed = tuples.pack((name,))
    count = _refs(txn, packed).count - 1
    if count < 0:
        raise NotFound(what="blob reference", hash=name.hex())
    idle_since_ns = 0 if count else txn.now_ns
    if idle_since_ns:
        txn.put(_IDLE + tuples.pack_int(idle_since_ns) + packed, name)
    txn.put(_REFS + packed, codec.pack(Refs(count, idle_since_ns)))


@operation
def erase(txn: Txn, name: bytes) -> None:
    """One reference less; at none the data goes at once, for content that must not stay."""
    release.fn(txn, name)
    wipe.fn(txn, name)


@operation
def wipe(txn: Txn, name: bytes) -> None:
    """Remove a blob that is idle, without its grace."""
    packed = tuples.pack((name,))
    refs = _refs(txn, packed)
    if not refs.count and refs.idle_since_ns:
        txn.delete(_IDLE + tuples.pack_int(refs.idle_since_ns) + packed)
        txn.delete(_REFS + packed)
        txn.delete(_DATA + packed)


@operation
def collect(txn: Txn, grace_ns: int, limit: int) -> int:
    """Remove blobs that nobody has referred to for the grace, longest idle first; how many."""
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


def next_idle_ns(txn: Txn) -> int | None:
    """Since when the blob has no reference that has none for the longest; None if all have one."""
    first = txn.scan(_IDLE, tuples.after(_IDLE), 1)
    if not first:
        return None
    key, name = first[0]
    return tuples.unpack_last_int(key[: -len(tuples.pack((name,)))], len(_IDLE))


def _refs(txn: Txn, packed: bytes) -> Refs:
    row = txn.get(_REFS + packed)
    return Refs(0) if row is None else codec.unpack_as(Refs, row)
