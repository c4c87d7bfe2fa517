"""Lineage: the source run of each adopted outcome, and the origin of each row.

A run over a changed input adopts outcomes of earlier runs. One store row per page holds its
lineage: ranges of adopted rows as (lo, hi, run, from_lo, code), and ranges of origins as (lo, hi,
run, from_lo). Runs are indexes into a list of run ids.

- An outcome pointer leads to the run that holds the outcome, never to a run that adopted it.
- The origin of a row is the first run and seq with this key and content. Idempotency keys are
  derived from it, so they stay the same when the row gets another seq. A row without a range is its
  own origin.
- A page is written in one commit with the log entries of its adoption. A stored page is complete. A
  service that continues an adoption starts at the first missing page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast import codec
from holdfast.codec import Record
from holdfast.ledger import runs
from holdfast.store.api import Store, Txn

SeqArray = NDArray[np.int64]

PAGES_CACHED = 4


class PageLineage(Record, frozen=True):
    """The lineage of one page of a run."""

    runs: list[str]
    # (lo, hi, number of the run, from_lo, code), ascending.
    adopted: list[tuple[int, int, int, int, int]]
    # (lo, hi, number of the run, from_lo), ascending.
    origins: list[tuple[int, int, int, int]]


EMPTY_LINEAGE = PageLineage([], [], [])


class OutcomePointer(NamedTuple):
    """Rows [lo, hi) ended in `run` as its rows from `from_lo` on."""

    lo: int
    hi: int
    run: str
    from_lo: int
    code: int


class RowOrigin(NamedTuple):
    """Rows [lo, hi) first appeared in `run` as its rows from `from_lo` on."""

    lo: int
    hi: int
    run: str
    from_lo: int


def read_page(txn: Txn, run_id: str, page: int) -> PageLineage | None:
    row = txn.get(runs.lineage_key(run_id, page))
    return None if row is None else codec.unpack_as(PageLineage, row)


class SeqMap:
    """Maps ascending seqs to (run index or -1, seq in that run)."""

    def __init__(self, ranges: Sequence[tuple[int, ...]]) -> None:
        columns = np.array([one[:4] for one in ranges], dtype=np.int64).reshape(len(ranges), 4)
        self._lo, self._hi, self._run, self._from = columns.T

    def find(self, seqs: SeqArray) -> tuple[SeqArray, SeqArray]:
        run_numbers = np.full(len(seqs), -1, dtype=np.int64)
        source_seqs = np.full(len(seqs), -1, dtype=np.int64)
        if not len(self._lo):
            return run_numbers, source_seqs
        at = np.searchsorted(self._lo, seqs, side="right") - 1
        inside = (at >= 0) & (seqs < self._hi[np.maximum(at, 0)])
        at = at[inside]
        run_numbers[inside] = self._run[at]
        source_seqs[inside] = self._from[at] + (seqs[inside] - self._lo[at])
        return run_numbers, source_seqs


class RunLineage:
    """The lineage of one run, read page by page. It is empty for a run that adopted nothing."""

    def __init__(self, store: Store, record: runs.RunRecord) -> None:
        self._store = store
        self._run_id = record.run_id
        self._page_rows = record.policy.page_rows
        self._empty = not record.base_run
        self._cache: OrderedDict[int, PageLineage] = OrderedDict()

    def page(self, page: int) -> PageLineage:
        if self._empty:
            return EMPTY_LINEAGE
        lineage = self._cache.get(page)
        if lineage is None:
            lineage = self._store.read(read_page, self._run_id, page) or EMPTY_LINEAGE
            self._cache[page] = lineage
            if len(self._cache) > PAGES_CACHED:
                self._cache.popitem(last=False)
        return lineage

    def adopted(self, lo: int, hi: int) -> list[OutcomePointer]:
        """Return the adopted ranges of [lo, hi)."""
        pointers: list[OutcomePointer] = []
        for lineage in self._pages_within(lo, hi):
            for first, last, run, from_lo, code in lineage.adopted:
                a, b = max(lo, first), min(hi, last)
                if a < b:
                    pointers.append(
                        OutcomePointer(a, b, lineage.runs[run], from_lo + a - first, code)
                    )
        return pointers

    def origins(self, lo: int, hi: int) -> list[RowOrigin]:
        """Return the ranges of [lo, hi) that appeared in an earlier run."""
        origins: list[RowOrigin] = []
        for lineage in self._pages_within(lo, hi):
            for first, last, run, from_lo in lineage.origins:
                a, b = max(lo, first), min(hi, last)
                if a < b:
                    origins.append(RowOrigin(a, b, lineage.runs[run], from_lo + a - first))
        return origins

    def _pages_within(self, lo: int, hi: int) -> list[PageLineage]:
        if self._empty or lo >= hi:
            return []
        pages = range(lo // self._page_rows, (hi - 1) // self._page_rows + 1)
        return [self.page(page) for page in pages]


def compress_ranges(
    seqs: SeqArray, *columns: SeqArray, steps: Sequence[bool] | None = None
) -> list[tuple[int, ...]]:
    """Compress ascending rows into (lo, hi, value of each column at lo).

    A range ends at a gap in the rows or at a break in a column. A column with a true `steps` flag
    increases by 1 with each row. Any other column stays constant.
    """
    if not len(seqs):
        return []
    steps = steps or [False] * len(columns)
    breaks = np.diff(seqs) != 1
    for column, step in zip(columns, steps, strict=True):
        breaks |= np.diff(column) != (1 if step else 0)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    ends = np.concatenate((starts[1:], [len(seqs)])) - 1
    parts = [seqs[starts], seqs[ends] + 1, *(column[starts] for column in columns)]
    return list(zip(*(part.tolist() for part in parts), strict=True))
