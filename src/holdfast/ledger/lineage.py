"""Lineage: which rows of a run took their outcome from another run, and which row each one was first.

A run over a grown input takes over the outcomes of the runs before it. For each of its pages one row
of the store says how: ranges of adopted rows, as (lo, hi, run, from_lo, code), and ranges of origins,
as (lo, hi, run, from_lo). Runs are numbers into a list of their ids.

- A pointer leads to the run that holds the outcome itself, never to one that adopted it.
- The origin of a row is the first run and seq that had this key with this content. Idempotency keys
  are made of it, so they stay the same however often the row is numbered anew. A row without a range
  is its own origin.
- A page is written in one commit with the log entries of its adoption. A page that is there is done:
  a service that goes on with the adoption begins at the first page that is not.
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

Seqs = NDArray[np.int64]

PAGES_CACHED = 4


class Lineage(Record, frozen=True):
    """One page of a run."""

    runs: list[str]
    # (lo, hi, number of the run, from_lo, code), ascending.
    adopted: list[tuple[int, int, int, int, int]]
    # (lo, hi, number of the run, from_lo), ascending.
    origins: list[tuple[int, int, int, int]]


NOTHING = Lineage([], [], [])


class Pointer(NamedTuple):
    """Rows [lo, hi) ended in `run` as its rows from `from_lo` on."""

    lo: int
    hi: int
    run: str
    from_lo: int
    code: int


class Origin(NamedTuple):
    """Rows [lo, hi) were first seen in `run` as its rows from `from_lo` on."""

    lo: int
    hi: int
    run: str
    from_lo: int


def page_of(txn: Txn, run_id: str, page: int) -> Lineage | None:
    row = txn.get(runs.lineage_key(run_id, page))
    return None if row is None else codec.unpack_as(Lineage, row)


class Places:
    """For ascending rows: the number of a run, or -1, and the seq there."""

    def __init__(self, ranges: Sequence[tuple[int, ...]]) -> None:
        columns = np.array([one[:4] for one in ranges], dtype=np.int64).reshape(len(ranges), 4)
        self._lo, self._hi, self._run, self._from = columns.T

    def find(self, seqs: Seqs) -> tuple[Seqs, Seqs]:
        runs_ = np.full(len(seqs), -1, dtype=np.int64)
        places = np.full(len(seqs), -1, dtype=np.int64)
        if not len(self._lo):
            return runs_, places
        at = np.searchsorted(self._lo, seqs, side="right") - 1
        inside = (at >= 0) & (seqs < self._hi[np.maximum(at, 0)])
        at = at[inside]
        runs_[inside] = self._run[at]
        places[inside] = self._from[at] + (seqs[inside] - self._lo[at])
        return runs_, places


class Ancestry:
    """The lineage of one run, page by page. A run that adopted nothing has none."""

    def __init__(self, store: Store, record: runs.RunRecord) -> None:
        self._store = store
        self._run_id = record.run_id
        self._page_rows = record.policy.page_rows
        self._empty = not record.base_run
        self._cache: OrderedDict[int, Lineage] = OrderedDict()

    def page(self, page: int) -> Lineage:
        if self._empty:
            return NOTHING
        found = self._cache.get(page)
        if found is None:
            found = self._store.read(page_of, self._run_id, page) or NOTHING
            self._cache[page] = found
            if len(self._cache) > PAGES_CACHED:
                self._cache.popitem(last=False)
        return found

    def adopted(self, lo: int, hi: int) -> list[Pointer]:
        """What of [lo, hi) was adopted."""
        found: list[Pointer] = []
        for lineage in self._within(lo, hi):
            for first, last, run, from_lo, code in lineage.adopted:
                a, b = max(lo, first), min(hi, last)
                if a < b:
                    found.append(Pointer(a, b, lineage.runs[run], from_lo + a - first, code))
        return found

    def origins(self, lo: int, hi: int) -> list[Origin]:
        """The rows of [lo, hi) that were seen in a run before."""
        found: list[Origin] = []
        for lineage in self._within(lo, hi):
            for first, last, run, from_lo in lineage.origins:
                a, b = max(lo, first), min(hi, last)
                if a < b:
                    found.append(Origin(a, b, lineage.runs[run], from_lo + a - first))
        return found

    def _within(self, lo: int, hi: int) -> list[Lineage]:
        if self._empty or lo >= hi:
            return []
        pages = range(lo // self._page_rows, (hi - 1) // self._page_rows + 1)
        return [self.page(page) for page in pages]


def ranges_of(
    seqs: Seqs, *columns: Seqs, steps: Sequence[bool] | None = None
) -> list[tuple[int, ...]]:
    """Ascending rows as (lo, hi, value of each column at lo).

    A range ends where the rows do, and where a column breaks: one whose `steps` is true goes on with
    the row (+1), another one stays the same.
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
