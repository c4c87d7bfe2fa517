"""Snapshots: states of a subject at a height. The baseline is the one to restore from.

- A height has one state: saving it again is idle, saving another there is refused.
- The baseline names a snapshot that exists and never moves down; pruning never takes it, nor the
  one that the journal stands on, where it does not begin at 1: without it nothing repeats the journal.
- What is loaded is what was saved: the hash is checked.

Equal states are stored once (large ones are blobs), so snapshots of a world at rest cost a row.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BLOB_THRESHOLD_BYTES, SCAN_PAGE
from holdfast.durable import journal
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn


class Baseline(Record, frozen=True):
    height: int
    hash: bytes


class Saved(Record, frozen=True):
    """The row of a snapshot: the state, or nothing when a blob of this hash holds it."""

    hash: bytes
    at_ns: int
    size_bytes: int
    state: bytes | None


def save(txn: Txn, subject: str, height: int, state: bytes) -> bytes:
    """Keep the state after an entry; its hash."""
    key = _at(subject, height)
    hash = sha256(state).digest()
    row = txn.get(key)
    if row is not None:
        if _decode(row).hash != hash:
            raise Invalid(
                what="snapshot", why="another state at this height", subject=subject, height=height
            )
        return hash
    large = len(state) > BLOB_THRESHOLD_BYTES
    if large:
        blobs.put(txn, state)
    saved = Saved(hash, txn.now_ns, len(state), None if large else state)
    txn.put(key, codec.pack(saved))
    return hash


def load(txn: Txn, subject: str, height: int) -> bytes:
    saved = _saved(txn, subject, height)
    state = blobs.get(txn, saved.hash) if saved.state is None else saved.state
    if sha256(state).digest() != saved.hash:
        raise StoreCorrupt(subject=subject, height=height, why="the snapshot was changed")
    return state


def heights(txn: Txn, subject: str, limit: int) -> list[int]:
    """Heights that have a snapshot, highest first."""
    check_limit(limit)
    prefix = _keys(subject).states
    rows = txn.scan(prefix, tuples.after(prefix), limit, reverse=True)
    return [tuples.unpack_last_int(key, len(prefix)) for key, _ in rows]


def set_baseline(txn: Txn, subject: str, height: int) -> Baseline:
    was = baseline(txn, subject)
    if was is not None and height < was.height:
        raise Invalid(
            what="baseline",
            why="it never moves down",
            subject=subject,
            found=height,
            min=was.height,
        )
    now = Baseline(height, _saved(txn, subject, height).hash)
    if now != was:
        txn.put(_keys(subject).baseline, codec.pack(now))
    return now


def baseline(txn: Txn, subject: str) -> Baseline | None:
    row = txn.get(_keys(subject).baseline)
    return None if row is None else codec.unpack_as(Baseline, row)


def prune(txn: Txn, subject: str, keep: int) -> int:
    """Remove all but the highest `keep`, the baseline and the lowest that is needed, a page at a time;
    how many."""
    check_limit(keep, "keep")
    prefix = _keys(subject).states
    base = baseline(txn, subject)
    spared = {_at(subject, journal.head(txn, subject).floor - 1)}
    if base is not None:
        spared.add(_at(subject, base.height))
    rows = txn.scan(prefix, tuples.after(prefix), keep + SCAN_PAGE, reverse=True)[keep:]
    gone = [(key, _decode(row)) for key, row in rows if key not in spared]
    for key, saved in gone:
        txn.delete(key)
        if saved.state is None:
            blobs.release(txn, saved.hash)
    return len(gone)


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    __slots__ = ("baseline", "states")

    def __init__(self, subject: str) -> None:
        check_name("subject", subject)
        self.states = schema.prefix(schema.Space.SNAPSHOT, subject, "s")
        self.baseline = schema.prefix(schema.Space.SNAPSHOT, subject, "baseline")


_keys = lru_cache(maxsize=65536)(_Keys)
_decode = codec.decoder(Saved).decode


def _at(subject: str, height: int) -> bytes:
    if height < 0:
        raise Invalid(what="height", why="negative", found=height)
    return _keys(subject).states + tuples.pack_int(height)


def _saved(txn: Txn, subject: str, height: int) -> Saved:
    row = txn.get(_at(subject, height))
    if row is None:
        raise NotFound(what="snapshot", subject=subject, height=height)
    return _decode(row)
