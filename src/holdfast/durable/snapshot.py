"""Snapshots: states of a subject at a height. The baseline is the one to restore from.

- A height has one state: saving it again is idle, saving another there is refused.
- The baseline names a snapshot that exists and never moves down; pruning never takes it, nor the
  one that the journal stands on, where it does not begin at 1: without it nothing repeats the journal.
- What is loaded is what was saved: the hash is checked.

Equal states are stored once (large ones are blobs), so snapshots of a world at rest cost a row. A state
that is larger than a value may be is stored in parts, each a blob.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BLOB_THRESHOLD_BYTES, SCAN_PAGE, SNAPSHOT_PART_BYTES
from holdfast.durable import journal
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn


class Baseline(Record, frozen=True):
    height: int
    hash: bytes


class Saved(Record, frozen=True):
    """The row of a snapshot: the state, or nothing when a blob of this hash holds it, or its parts do."""

    hash: bytes
    at_ns: int
    size_bytes: int
    state: bytes | None
    # The blobs that hold a state in parts, in order.
    parts: tuple[bytes, ...] = ()

    @property
    def blobs(self) -> tuple[bytes, ...]:
        return self.parts or ((self.hash,) if self.state is None else ())


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
    parts: tuple[bytes, ...] = ()
    if len(state) > SNAPSHOT_PART_BYTES:
        starts = range(0, len(state), SNAPSHOT_PART_BYTES)
        parts = tuple(blobs.put(txn, state[at : at + SNAPSHOT_PART_BYTES]) for at in starts)
    elif large:
        blobs.put(txn, state)
    saved = Saved(hash, txn.now_ns, len(state), None if large else state, parts)
    txn.put(key, codec.pack(saved))
    return hash


def load(txn: Txn, subject: str, height: int) -> bytes:
    saved = _saved(txn, subject, height)
    state = saved.state
    try:
        if state is None:
            state = b"".join(blobs.get(txn, name) for name in saved.blobs)
        changed = sha256(state).digest() != saved.hash
    except StoreCorrupt:
        changed = True
    if changed or state is None:
        raise StoreCorrupt(subject=subject, height=height, why="the snapshot was changed")
    return state


def hash_at(txn: Txn, subject: str, height: int) -> bytes | None:
    """The hash of the snapshot at a height, None if there is no such snapshot."""
    row = txn.get(_at(subject, height))
    return None if row is None else _decode(row).hash


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


class Window(NamedTuple):
    """What a journal keeps: so many entries, and what is so young. It is cut at a snapshot, so some stay
    in it, one for each part."""

    entries: int
    ns: int
    parts: int


def prune(txn: Txn, subject: str, keep: int, window: Window | None = None) -> int:
    """Remove all but the highest `keep`, the baseline, the lowest that is needed, and those that the
    journal is to be cut at, a page at a time; how many."""
    check_limit(keep, "keep")
    prefix = _keys(subject).states
    base = baseline(txn, subject)
    head = journal.head(txn, subject)
    spared = {_at(subject, head.floor - 1)}
    if base is not None:
        spared.add(_at(subject, base.height))
    rows = txn.scan(prefix, tuples.after(prefix), keep + SCAN_PAGE, reverse=True)[keep:]
    found = [(key, _decode(row)) for key, row in reversed(rows)]
    if window is not None:
        spared |= _marks(prefix, found, head.height, window)
    gone = [(key, saved) for key, saved in found if key not in spared]
    for key, saved in gone:
        _drop(txn, key, saved)
    return len(gone)


def latest(txn: Txn, subject: str, lo: int, hi: int, before_ns: int) -> int | None:
    """The highest height, lo <= height < hi, whose snapshot was saved before a time."""
    prefix = _keys(subject).states
    end = prefix + tuples.pack_int(hi)
    while lo < hi and (
        rows := txn.scan(prefix + tuples.pack_int(lo), end, SCAN_PAGE, reverse=True)
    ):
        for key, row in rows:
            if _decode(row).at_ns < before_ns:
                return tuples.unpack_last_int(key, len(prefix))
        end = rows[-1][0]
    return None


def earliest(txn: Txn, subject: str, lo: int) -> tuple[int, int] | None:
    """The lowest height from `lo` on that has a snapshot, and when it was saved."""
    prefix = _keys(subject).states
    for key, row in txn.scan(prefix + tuples.pack_int(lo), tuples.after(prefix), 1):
        return tuples.unpack_last_int(key, len(prefix)), _decode(row).at_ns
    return None


def drop_below(txn: Txn, subject: str, height: int, limit: int) -> int:
    """Remove the snapshots below a height, lowest first, never the baseline; how many."""
    check_limit(limit)
    base = baseline(txn, subject)
    top = height if base is None else min(height, base.height)
    return _remove(txn, subject, top, limit)


def erase(txn: Txn, subject: str, limit: int) -> bool:
    """Remove all snapshots of a subject, and its baseline; whether that is done."""
    check_limit(limit)
    txn.delete(_keys(subject).baseline)
    return _remove(txn, subject, None, limit, at_once=True) < limit


# -- inside --------------------------------------------------------------------------------------


def _marks(
    prefix: bytes, found: list[tuple[bytes, Saved]], head: int, window: Window
) -> set[bytes]:
    """Of snapshots in their order: by height those in the window, by time those below it, each a part
    of the window above the one before; and the highest below it, where the journal is cut next."""
    spared: set[bytes] = set()
    top, last, last_ns = b"", 0, 0
    for key, saved in found:
        height = tuples.unpack_last_int(key, len(prefix))
        if height <= head - window.entries:
            top = key
            if window.ns and saved.at_ns - last_ns >= window.ns // window.parts:
                spared.add(key)
                last_ns = saved.at_ns
        elif height - last >= window.entries // window.parts:
            spared.add(key)
            last = height
    return spared | {top}


def _remove(txn: Txn, subject: str, below: int | None, limit: int, *, at_once: bool = False) -> int:
    prefix = _keys(subject).states
    end = tuples.after(prefix) if below is None else prefix + tuples.pack_int(max(below, 0))
    rows = txn.scan(prefix, end, limit) if prefix < end else []
    for key, row in rows:
        _drop(txn, key, _decode(row), at_once=at_once)
    return len(rows)


def _drop(txn: Txn, key: bytes, saved: Saved, *, at_once: bool = False) -> None:
    txn.delete(key)
    for name in saved.blobs:
        (blobs.erase if at_once else blobs.release)(txn, name)


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
