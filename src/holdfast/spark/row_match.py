"""Row match: finds the rows of one sorted run in another by key, and compares their content.

    columns_digest(fields)           names and types of the compared columns; hashes with different
                                     digests are not comparable
    MatchCursor(batches).find(rows)  for each row: its seq in the other run or -1, and whether the
                                     hashes are equal

Both runs are in key order, so one merge pass finds all matches. A cursor holds one batch of the
other run at a time and requires ascending keys. Keys are compared exactly. Content is compared by
two 64-bit hashes (`fingerprint.match_hash`), which are two additional columns of the input blocks.

This module uses Arrow and NumPy only: the ledger service and the driver share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from holdfast.spark import keys

# The hash columns of an input block. They are not part of the input.
HASH_COLUMNS = ("_holdfast_match_0", "_holdfast_match_1")

SeqArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class KeyedRows(NamedTuple):
    """Rows from `lo` on in key order. `hashes` is None if they are not comparable."""

    lo: int
    keyed: list[pa.Array]
    hashes: tuple[SeqArray, SeqArray] | None

    @property
    def rows(self) -> int:
        return len(self.keyed[0])


class MatchResult(NamedTuple):
    seqs: SeqArray
    same: BoolArray


def columns_digest(fields: Iterable[tuple[str, str]]) -> str:
    """Return the digest of (name, type) of each column, independent of order."""
    hasher = hashlib.sha256()
    for name, kind in sorted(fields):
        for text in (name, kind):
            data = text.encode()
            hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.hexdigest()[:32]


def keyed_rows_of(lo: int, table: pa.Table, key: Sequence[str], *, hashed: bool) -> KeyedRows:
    """Build keyed rows from a table with the key columns and, if `hashed`, the two hash columns."""
    batch = _single_batch(table)
    hashes = None
    if hashed:
        first, second = (batch.column(name).to_numpy(zero_copy_only=False) for name in HASH_COLUMNS)
        hashes = (first, second)
    return KeyedRows(lo, keys.comparable_columns(batch, key), hashes)


class MatchCursor:
    def __init__(self, batches: Iterator[KeyedRows]) -> None:
        self._batches = batches
        self._current: KeyedRows | None = None
        self._bounds: tuple[keys.Comparable, keys.Comparable] | None = None

    def find(self, rows: KeyedRows) -> MatchResult:
        """Find each row in this run. Calls must be in key order."""
        seqs = np.full(rows.rows, -1, dtype=np.int64)
        same = np.zeros(rows.rows, dtype=np.bool_)
        if not rows.rows:
            return MatchResult(seqs, same)
        first, last = keys.key_at(rows.keyed, 0), keys.key_at(rows.keyed, rows.rows - 1)
        at = 0
        while at < rows.rows and (current := self._load_current()) is not None:
            assert self._bounds is not None
            low, high = self._bounds
            if high < first:
                self._current = None
                continue
            if low > last:
                break
            lo = keys.lower_bound(rows.keyed, low, at) if low > first else at
            hi = rows.rows if high >= last else _upper_bound(rows.keyed, high, lo)
            a = keys.lower_bound(current.keyed, first) if low < first else 0
            b = current.rows if high <= last else _upper_bound(current.keyed, last, a)
            _match_rows(rows, lo, hi, current, a, b, seqs=seqs, same=same)
            at = hi
            if high > last:
                break
            self._current = None
        return MatchResult(seqs, same)

    def _load_current(self) -> KeyedRows | None:
        while self._current is None:
            batch = next(self._batches, None)
            if batch is None:
                return None
            if batch.rows:
                self._current = batch
                ends = keys.key_at(batch.keyed, 0), keys.key_at(batch.keyed, batch.rows - 1)
                self._bounds = ends
        return self._current


def _upper_bound(keyed: Sequence[pa.Array], bound: keys.Comparable, lo: int) -> int:
    """Return the first row from `lo` on with a key above the bound."""
    at = keys.lower_bound(keyed, bound, lo)
    return at + 1 if at < len(keyed[0]) and keys.key_at(keyed, at) == bound else at


def _match_rows(
    ours_batch: KeyedRows,
    lo: int,
    hi: int,
    theirs_batch: KeyedRows,
    a: int,
    b: int,
    *,
    seqs: SeqArray,
    same: BoolArray,
) -> None:
    """Match rows [lo, hi) of our batch with rows [a, b) of theirs and fill in the result."""
    if lo >= hi or a >= b:
        return
    ours = [column.slice(lo, hi - lo) for column in ours_batch.keyed]
    theirs = [column.slice(a, b - a) for column in theirs_batch.keyed]
    if hi - lo == b - a and all(x.equals(y) for x, y in zip(ours, theirs, strict=True)):
        places: SeqArray = np.arange(b - a, dtype=np.int64)
        rows: SeqArray = places
    else:
        codes, count = _encode_keys(ours, theirs)
        table = np.full(count, -1, dtype=np.int64)
        table[codes[hi - lo :]] = np.arange(b - a, dtype=np.int64)
        places = table[codes[: hi - lo]]
        rows = np.flatnonzero(places >= 0)
        places = places[rows]
    seqs[lo + rows] = theirs_batch.lo + a + places
    if ours_batch.hashes is not None and theirs_batch.hashes is not None:
        equal = np.ones(len(rows), dtype=np.bool_)
        for one, other in zip(ours_batch.hashes, theirs_batch.hashes, strict=True):
            equal &= one[lo + rows] == other[a + places]
        same[lo + rows] = equal


def _encode_keys(ours: Sequence[pa.Array], theirs: Sequence[pa.Array]) -> tuple[SeqArray, int]:
    """Assign equal numbers below the count to equal keys, ours first, then theirs."""
    codes: SeqArray | None = None
    count = 1
    for one, other in zip(ours, theirs, strict=True):
        column_codes, more = _dictionary_codes(pa.concat_arrays([one, other]))
        if codes is None:
            codes, count = column_codes, more
        else:
            # There are at most as many codes as rows, so the product fits.
            codes, count = _dictionary_codes(pa.array(codes * more + column_codes))
    assert codes is not None
    return codes, count


def _dictionary_codes(column: pa.Array) -> tuple[SeqArray, int]:
    encoded = pc.dictionary_encode(column)
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def _single_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
