"""Part boundaries of an output: by rows, by bytes, and at the kept parts of an earlier output.

A part ends at a multiple of `file_rows`, or before the row that would exceed `file_bytes`, whichever is
first. A part has at least one row. Its row groups end by the same rule. Both depend only on the start of
the part and on the row sizes, so a repetition after any fault produces the same parts with the same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.spark.row_sizes import RowSizes
from holdfast.spark.sinks.api import ROW_GROUP_ROWS, KeptPart

FILE_BYTES = 256 * 1024 * 1024
GROUP_BYTES = 32 * 1024 * 1024
SCAN_ROWS = 8192
SCAN_ROWS_MIN = 64


class PartSpan(NamedTuple):
    """A part: seqs [lo, hi), the ends of its row groups, and the kept part that replaces it."""

    lo: int
    hi: int
    groups: Sequence[int] = ()
    kept: KeptPart | None = None


class PartCuts:
    """`sizes` returns the row sizes of a final interval. `width` is the size of every row, if it is
    fixed.
    """

    def __init__(
        self,
        size: int,
        file_rows: int,
        file_bytes: int,
        sizes: Callable[[int, int], RowSizes],
        *,
        width: int | None = None,
        kept: Sequence[KeptPart] = (),
    ) -> None:
        self.size = size
        self._file_rows = file_rows
        self._file_bytes = file_bytes
        self._sizes = sizes
        self._width = width
        self._kept = kept
        self._kept_ends = [one.hi for one in kept]
        self._start_part(0)

    def _start_part(self, lo: int) -> None:
        self._lo = self._scanned = lo
        self._bytes = self._group_bytes = 0
        self._groups: list[int] = []
        self._group_lo = lo

    def next_part(self, lo: int, final: int) -> PartSpan | None:
        """Return the part that begins at `lo`, if the rows below `final` determine its end."""
        if lo >= self.size:
            return None
        limit, kept = self._latest_end(lo)
        if kept is not None:
            return PartSpan(lo, limit, (), kept) if limit <= final else None
        if self._width is not None:
            rows = min(max(GROUP_BYTES // max(self._width, 1), 1), ROW_GROUP_ROWS)
            ends = [*range(lo + rows, limit, rows), limit]
            return PartSpan(lo, limit, ends) if limit <= final else None
        if lo != self._lo:
            self._start_part(lo)
        upto = min(final, limit)
        while self._scanned < upto:
            hi = min(self._scanned + SCAN_ROWS, upto)
            end = self._scan(self._sizes(self._scanned, hi))
            if end is not None:
                return self._finish_part(end)
            self._scanned = hi
        return self._finish_part(limit) if final >= limit else None

    def hard_end(self, lo: int) -> int:
        """Return the latest end of the part at `lo`, independent of row sizes. Earlier parts end
        there as well, so the parts up to it depend on no other row.
        """
        at = bisect_right(self._kept_ends, lo)
        kept = self._kept[at] if at < len(self._kept) else None
        if kept is not None and kept.lo <= lo:
            return kept.hi
        end = min(lo - lo % self._file_rows + self._file_rows, self.size)
        return end if kept is None else min(end, kept.lo)

    def kept_at(self, lo: int) -> KeptPart | None:
        """Return the kept part that replaces the part at `lo`."""
        at = bisect_right(self._kept_ends, lo)
        found = self._kept[at] if at < len(self._kept) else None
        return found if found is not None and found.lo <= lo else None

    def next_scan_at(self, lo: int) -> int:
        """Return how many rows must be final before the end of the part at `lo` is searched again."""
        limit, kept = self._latest_end(lo)
        if kept is not None or self._width is not None:
            return limit
        if lo != self._lo or not self._bytes:
            return min(limit, max(lo, self._scanned) + SCAN_ROWS_MIN)
        mean = self._bytes / max(self._scanned - self._lo, 1)
        more = max(int((self._file_bytes - self._bytes) / mean), SCAN_ROWS_MIN)
        return min(limit, self._scanned + more)

    def _latest_end(self, lo: int) -> tuple[int, KeptPart | None]:
        """Return the latest end of the part at `lo`, and the kept part that replaces it."""
        limit, kept = self.hard_end(lo), self.kept_at(lo)
        if kept is None and self._width is not None:
            limit = min(limit, lo + max(self._file_bytes // max(self._width, 1), 1))
        return limit, kept

    def _scan(self, sizes: RowSizes) -> int | None:
        """Return the end of the part, if it is among the rows of `sizes`, which begin at
        `_scanned`.
        """
        total = np.cumsum(sizes)
        over = int(np.searchsorted(total, self._file_bytes - self._bytes, side="right"))
        if over < len(sizes) and self._scanned + over == self._lo:
            over = 1  # a single row exceeds the file size
        count = min(over, len(sizes))
        at = 0
        while at < count:
            before = int(total[at - 1]) if at else 0
            room = GROUP_BYTES - self._group_bytes + before
            end = min(int(np.searchsorted(total, room, side="right")), count)
            end = min(end, self._group_lo + ROW_GROUP_ROWS - self._scanned)
            if end < count:
                if self._scanned + end == self._group_lo:
                    end += 1
                self._groups.append(self._scanned + end)
                self._group_lo, self._group_bytes = self._scanned + end, 0
            else:
                self._group_bytes += int(total[end - 1]) - before
            at = end
        self._bytes += int(total[count - 1]) if count else 0
        return self._scanned + over if over < len(sizes) else None

    def _finish_part(self, hi: int) -> PartSpan:
        groups = [end for end in self._groups if end < hi]
        return PartSpan(self._lo, hi, [*groups, hi])
