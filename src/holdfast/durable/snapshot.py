"""Snapshots: states of a subject at journal heights. Restore starts from the baseline snapshot.

- A height has one state. Saving the same state again has no effect, saving a different one is refused.
- The baseline references an existing snapshot and never moves down. Pruning keeps the baseline. It also
  keeps the snapshot right below a truncated journal, which replay starts from.
- Loading checks the hash of the state.

Equal large states share a blob, so a snapshot of an unchanged world costs one row. A state that exceeds
the maximum value size is stored in parts, each a blob.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BLOB_THRESHOLD_BYTES, SCAN_PAGE, SNAPSHOT_PART_BYTES
from holdfast.durable import journal
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, NotFound, StoreCorrupt
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn


class Baseline(Record, frozen=True):
    height: int
    hash: bytes


class SnapshotRow(Record, frozen=True):
    """The stored row of a snapshot: the state itself, or None if the blob with this hash or the parts store it."""

    hash: bytes
    at_ns: int
    size_bytes: int
    state: bytes | None
    # Hashes of the blobs of a state in parts, in order.
    parts: tuple[bytes, ...] = ()

    @property
    def blobs(self) -> tuple[bytes, ...]:
        return self.parts or ((self.hash,) if self.state is None else ())


def save(txn: Txn, subject: str, height: int, state: bytes) -> bytes:
    """Save the state after a journal entry, and return its hash."""
    key = _key_at(subject, height)
    hash = sha256(state).digest()
    row = txn.get(key)
    if row is not None:
        if _decode_row(row).hash != hash:
            raise Invalid(
                what="snapshot",
                why="the store has another state for this height",
                subject=subject,
                height=height,
            )
        return hash
    is_large = len(state) > BLOB_THRESHOLD_BYTES
    parts: tuple[bytes, ...] = ()
    if len(state) > SNAPSHOT_PART_BYTES:
        starts = range(0, len(state), SNAPSHOT_PART_BYTES)
        parts = tuple(blobs.put(txn, state[at : at + SNAPSHOT_PART_BYTES]) for at in starts)
    elif is_large:
        blobs.put(txn, state)
    row_to_store = SnapshotRow(hash, txn.now_ns, len(state), None if is_large else state, parts)
    txn.put(key, codec.pack(row_to_store))
    return hash


def load(txn: Txn, subject: str, height: int) -> bytes:
    snapshot_row = _load_row(txn, subject, height)
    state = snapshot_row.state
    try:
        if state is None:
            state = b"".join(blobs.get(txn, name) for name in snapshot_row.blobs)
        is_damaged = sha256(state).digest() != snapshot_row.hash
    except StoreCorrupt:
        is_damaged = True
    if is_damaged or state is None:
        raise StoreCorrupt(
            subject=subject, height=height, why="the snapshot does not match its hash"
        )
    return state


def hash_at(txn: Txn, subject: str, height: int) -> bytes | None:
    """The hash of the snapshot at a height, or None if there is no snapshot."""
    row = txn.get(_key_at(subject, height))
    return None if row is None else _decode_row(row).hash


def heights(txn: Txn, subject: str, limit: int) -> list[int]:
    """Heights that have a snapshot, highest first."""
    check_limit(limit)
    prefix = _keys(subject).states
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit, reverse=True)
    return [tuples.unpack_last_int(key, len(prefix)) for key, _ in rows]


def set_baseline(txn: Txn, subject: str, height: int) -> Baseline:
    old = baseline(txn, subject)
    if old is not None and height < old.height:
        raise Invalid(
            what="baseline",
            why="the new height is below the present baseline",
            subject=subject,
            found=height,
            min=old.height,
        )
    new = Baseline(height, _load_row(txn, subject, height).hash)
    if new != old:
        txn.put(_keys(subject).baseline, codec.pack(new))
    return new


def baseline(txn: Txn, subject: str) -> Baseline | None:
    row = txn.get(_keys(subject).baseline)
    return None if row is None else codec.unpack_as(Baseline, row)


class RetentionWindow(NamedTuple):
    """The retention window of a journal: a number of entries and an age. Truncation needs a snapshot at its
    height, so the window keeps one snapshot for each of its `parts`."""

    entries: int
    ns: int
    parts: int


def prune(txn: Txn, subject: str, keep: int, window: RetentionWindow | None = None) -> int:
    """Remove snapshots, at most a page per call, and return their number. Kept are the highest `keep`, the
    baseline, the one below the journal's floor, and the future truncation points of the window."""
    check_limit(keep, "keep")
    prefix = _keys(subject).states
    base = baseline(txn, subject)
    head = journal.head(txn, subject)
    kept_keys = {_key_at(subject, head.floor - 1)}
    if base is not None:
        kept_keys.add(_key_at(subject, base.height))
    rows = txn.scan(prefix, tuples.prefix_end(prefix), keep + SCAN_PAGE, reverse=True)[keep:]
    candidates = [(key, _decode_row(row)) for key, row in reversed(rows)]
    if window is not None:
        kept_keys |= _kept_by_window(prefix, candidates, head.height, window)
    removed = [(key, snapshot_row) for key, snapshot_row in candidates if key not in kept_keys]
    for key, snapshot_row in removed:
        _delete_row(txn, key, snapshot_row)
    return len(removed)


def latest_before(txn: Txn, subject: str, lo: int, hi: int, before_ns: int) -> int | None:
    """Return the highest height, lo <= height < hi, with a snapshot older than a time."""
    prefix = _keys(subject).states
    end = prefix + tuples.pack_int(hi)
    while lo < hi and (
        rows := txn.scan(prefix + tuples.pack_int(lo), end, SCAN_PAGE, reverse=True)
    ):
        for key, row in rows:
            if _decode_row(row).at_ns < before_ns:
                return tuples.unpack_last_int(key, len(prefix))
        end = rows[-1][0]
    return None


def first_from(txn: Txn, subject: str, lo: int) -> tuple[int, int] | None:
    """Return height and save time of the lowest snapshot at or above `lo`."""
    prefix = _keys(subject).states
    for key, row in txn.scan(prefix + tuples.pack_int(lo), tuples.prefix_end(prefix), 1):
        return tuples.unpack_last_int(key, len(prefix)), _decode_row(row).at_ns
    return None


def drop_below(txn: Txn, subject: str, height: int, limit: int) -> int:
    """Remove snapshots below a height, lowest first, never the baseline. Return their number."""
    check_limit(limit)
    base = baseline(txn, subject)
    top = height if base is None else min(height, base.height)
    return _delete_rows(txn, subject, top, limit)


def erase(txn: Txn, subject: str, limit: int) -> bool:
    """Remove the baseline and all snapshots of a subject in bounded steps. Return whether it is complete."""
    check_limit(limit)
    txn.delete(_keys(subject).baseline)
    return _delete_rows(txn, subject, None, limit, skip_grace=True) < limit


# -- inside --------------------------------------------------------------------------------------


def _kept_by_window(
    prefix: bytes, candidates: list[tuple[bytes, SnapshotRow]], head: int, window: RetentionWindow
) -> set[bytes]:
    """Return the keys of snapshots that the window keeps. Inside the window they are spaced by height, below
    it by time, one per part. The highest snapshot below the window is the next truncation point."""
    kept_keys: set[bytes] = set()
    highest_below, last_height, last_ns = b"", 0, 0
    for key, snapshot_row in candidates:
        height = tuples.unpack_last_int(key, len(prefix))
        if height <= head - window.entries:
            highest_below = key
            if window.ns and snapshot_row.at_ns - last_ns >= window.ns // window.parts:
                kept_keys.add(key)
                last_ns = snapshot_row.at_ns
        elif height - last_height >= window.entries // window.parts:
            kept_keys.add(key)
            last_height = height
    return kept_keys | {highest_below}


def _delete_rows(
    txn: Txn, subject: str, below: int | None, limit: int, *, skip_grace: bool = False
) -> int:
    prefix = _keys(subject).states
    end = tuples.prefix_end(prefix) if below is None else prefix + tuples.pack_int(max(below, 0))
    rows = txn.scan(prefix, end, limit) if prefix < end else []
    for key, row in rows:
        _delete_row(txn, key, _decode_row(row), skip_grace=skip_grace)
    return len(rows)


def _delete_row(
    txn: Txn, key: bytes, snapshot_row: SnapshotRow, *, skip_grace: bool = False
) -> None:
    txn.delete(key)
    for name in snapshot_row.blobs:
        (blobs.erase if skip_grace else blobs.release)(txn, name)


class _SnapshotKeys:
    __slots__ = ("baseline", "states")

    def __init__(self, subject: str) -> None:
        check_name("subject", subject)
        self.states = schema.key_prefix(schema.Space.SNAPSHOT, subject, "s")
        self.baseline = schema.key_prefix(schema.Space.SNAPSHOT, subject, "baseline")


_keys = lru_cache(maxsize=65536)(_SnapshotKeys)
_decode_row = codec.decoder(SnapshotRow).decode


def _key_at(subject: str, height: int) -> bytes:
    if height < 0:
        raise Invalid(what="height", why="negative", found=height)
    return _keys(subject).states + tuples.pack_int(height)


def _load_row(txn: Txn, subject: str, height: int) -> SnapshotRow:
    row = txn.get(_key_at(subject, height))
    if row is None:
        raise NotFound(what="snapshot", subject=subject, height=height)
    return _decode_row(row)
