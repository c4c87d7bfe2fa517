"""Match: which rows of one sorted run are rows of another, by key, and whether their content is the same.

    digest(fields)           names and types of the columns that are compared; hashes of another digest
                             say nothing about each other
    Cursor(lots).find(lot)   for each row of a lot: its seq in the other run or -1, and whether the
                             hashes are equal

Both runs are numbered in the order of their keys, so one walk over both finds everything: a cursor
holds one lot of the other run at a time and is asked with ascending keys. Keys are compared exactly.
The content is compared by two 64-bit hashes (`fingerprint.match_hash`), which lie in the input blocks
as two columns beside those of the input.

Everything here is Arrow and NumPy: the ledger service and the driver share it.
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

# The hash columns of an input block. They are no part of the input.
HASHES = ("_holdfast_match_0", "_holdfast_match_1")

Seqs = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Lot(NamedTuple):
    """Rows from `lo` on in the order of their keys. `hashes` is None where none can be compared."""

    lo: int
    keyed: list[pa.Array]
    hashes: tuple[Seqs, Seqs] | None

    @property
    def rows(self) -> int:
        return len(self.keyed[0])


class Found(NamedTuple):
    seqs: Seqs
    same: Flags


def digest(fields: Iterable[tuple[str, str]]) -> str:
    """Of (name, type) of each column, in any order."""
    made = hashlib.sha256()
    for name, kind in sorted(fields):
        for text in (name, kind):
            data = text.encode()
            made.update(len(data).to_bytes(8, "big") + data)
    return made.hexdigest()[:32]


def lot_of(lo: int, table: pa.Table, key: Sequence[str], *, hashed: bool) -> Lot:
    """A lot of a table with the key columns and, if `hashed`, the two of the hashes."""
    batch = _one(table)
    hashes = None
    if hashed:
        first, second = (batch.column(name).to_numpy(zero_copy_only=False) for name in HASHES)
        hashes = (first, second)
    return Lot(lo, keys.columns(batch, key), hashes)


class Cursor:
    def __init__(self, lots: Iterator[Lot]) -> None:
        self._lots = lots
        self._held: Lot | None = None
        self._bounds: tuple[keys.Comparable, keys.Comparable] | None = None

    def find(self, lot: Lot) -> Found:
        """Each row of the lot in this run. Lots are asked in the order of their keys."""
        seqs = np.full(lot.rows, -1, dtype=np.int64)
        same = np.zeros(lot.rows, dtype=np.bool_)
        if not lot.rows:
            return Found(seqs, same)
        first, last = keys.at(lot.keyed, 0), keys.at(lot.keyed, lot.rows - 1)
        at = 0
        while at < lot.rows and (held := self._hold()) is not None:
            assert self._bounds is not None
            low, high = self._bounds
            if high < first:
                self._held = None
                continue
            if low > last:
                break
            lo = keys.lower_bound(lot.keyed, low, at) if low > first else at
            hi = lot.rows if high >= last else _above(lot.keyed, high, lo)
            a = keys.lower_bound(held.keyed, first) if low < first else 0
            b = held.rows if high <= last else _above(held.keyed, last, a)
            _pair(lot, lo, hi, held, a, b, seqs, same)
            at = hi
            if high > last:
                break
            self._held = None
        return Found(seqs, same)

    def _hold(self) -> Lot | None:
        while self._held is None:
            held = next(self._lots, None)
            if held is None:
                return None
            if held.rows:
                self._held = held
                ends = keys.at(held.keyed, 0), keys.at(held.keyed, held.rows - 1)
                self._bounds = ends
        return self._held


def _above(keyed: Sequence[pa.Array], bound: keys.Comparable, lo: int) -> int:
    """The first row from `lo` on whose key is above the bound."""
    at = keys.lower_bound(keyed, bound, lo)
    return at + 1 if at < len(keyed[0]) and keys.at(keyed, at) == bound else at


def _pair(lot: Lot, lo: int, hi: int, held: Lot, a: int, b: int, seqs: Seqs, same: Flags) -> None:
    """Fill in what rows [a, b) of `held` have to say of rows [lo, hi) of `lot`."""
    if lo >= hi or a >= b:
        return
    ours = [column.slice(lo, hi - lo) for column in lot.keyed]
    theirs = [column.slice(a, b - a) for column in held.keyed]
    if hi - lo == b - a and all(x.equals(y) for x, y in zip(ours, theirs, strict=True)):
        places: Seqs = np.arange(b - a, dtype=np.int64)
        rows: Seqs = places
    else:
        codes, count = _codes(ours, theirs)
        table = np.full(count, -1, dtype=np.int64)
        table[codes[hi - lo :]] = np.arange(b - a, dtype=np.int64)
        places = table[codes[: hi - lo]]
        rows = np.flatnonzero(places >= 0)
        places = places[rows]
    seqs[lo + rows] = held.lo + a + places
    if lot.hashes is not None and held.hashes is not None:
        equal = np.ones(len(rows), dtype=np.bool_)
        for one, other in zip(lot.hashes, held.hashes, strict=True):
            equal &= one[lo + rows] == other[a + places]
        same[lo + rows] = equal


def _codes(ours: Sequence[pa.Array], theirs: Sequence[pa.Array]) -> tuple[Seqs, int]:
    """A number for each key, ours then theirs: equal keys have equal numbers, below the count."""
    codes: Seqs | None = None
    count = 1
    for one, other in zip(ours, theirs, strict=True):
        found, more = _encoded(pa.concat_arrays([one, other]))
        if codes is None:
            codes, count = found, more
        else:
            # As many different numbers as rows at most, so the product fits.
            codes, count = _encoded(pa.array(codes * more + found))
    assert codes is not None
    return codes, count


def _encoded(column: pa.Array) -> tuple[Seqs, int]:
    encoded = pc.dictionary_encode(column)
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def _one(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
