"""Where the parts of an output end: by rows, by bytes, and at what is kept of an earlier output.

A part ends at a multiple of `file_rows`, or before the row that would take it above `file_bytes`,
whichever comes first; a part has at least one row. It is written in row groups, which end in the same
way. Both are functions of the start of the part and of the sizes of the rows, so a repeat after any
fault makes the same parts of the same bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.spark.row_sizes import Sizes
from holdfast.spark.sinks.api import ROW_GROUP_ROWS, KeptPart

FILE_BYTES = 256 * 1024 * 1024
GROUP_BYTES = 32 * 1024 * 1024
SCAN_ROWS = 8192
LOOK_ROWS_MIN = 64


class Span(NamedTuple):
    """A part: seqs [lo, hi), the ends of its row groups, and what is kept in place of it."""

    lo: int
    hi: int
    groups: Sequence[int] = ()
    kept: KeptPart | None = None


class PartCuts:
    """`sizes` gives the bytes of rows of a final interval; `width` of every row, if that is fixed."""

    def __init__(
        self,
        size: int,
        file_rows: int,
        file_bytes: int,
        sizes: Callable[[int, int], Sizes],
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
        self._begin(0)

    def _begin(self, lo: int) -> None:
        self._lo = self._seen = lo
        self._bytes = self._group_bytes = 0
        self._groups: list[int] = []
        self._group_lo = lo

    def next(self, lo: int, final: int) -> Span | None:
        """The part that begins at `lo`, if the rows below `final` are enough to know its end."""
        if lo >= self.size:
            return None
        limit, kept = self._limit(lo)
        if kept is not None:
            return Span(lo, limit, (), kept) if limit <= final else None
        if self._width is not None:
            rows = min(max(GROUP_BYTES // max(self._width, 1), 1), ROW_GROUP_ROWS)
            ends = [*range(lo + rows, limit, rows), limit]
            return Span(lo, limit, ends) if limit <= final else None
        if lo != self._lo:
            self._begin(lo)
        upto = min(final, limit)
        while self._seen < upto:
            hi = min(self._seen + SCAN_ROWS, upto)
            end = self._scan(self._sizes(self._seen, hi))
            if end is not None:
                return self._span(end)
            self._seen = hi
        return self._span(limit) if final >= limit else None

    def limit(self, lo: int) -> int:
        """Where the part at `lo` ends at the latest, whatever the sizes of its rows. Parts of rows before it end there,
        too: the parts of [lo, limit) depend on no other row."""
        at = bisect_right(self._kept_ends, lo)
        kept = self._kept[at] if at < len(self._kept) else None
        if kept is not None and kept.lo <= lo:
            return kept.hi
        end = min(lo - lo % self._file_rows + self._file_rows, self.size)
        return end if kept is None else min(end, kept.lo)

    def kept(self, lo: int) -> KeptPart | None:
        """What is kept in place of the part at `lo`."""
        at = bisect_right(self._kept_ends, lo)
        found = self._kept[at] if at < len(self._kept) else None
        return found if found is not None and found.lo <= lo else None

    def next_look(self, lo: int) -> int:
        """How many rows are to be final before the end of the part at `lo` is looked for again."""
        limit, kept = self._limit(lo)
        if kept is not None or self._width is not None:
            return limit
        if lo != self._lo or not self._bytes:
            return min(limit, max(lo, self._seen) + LOOK_ROWS_MIN)
        mean = self._bytes / max(self._seen - self._lo, 1)
        more = max(int((self._file_bytes - self._bytes) / mean), LOOK_ROWS_MIN)
        return min(limit, self._seen + more)

    def _limit(self, lo: int) -> tuple[int, KeptPart | None]:
        """Where the part at `lo` ends at the latest, and what is kept there in place of it."""
        limit, kept = self.limit(lo), self.kept(lo)
        if kept is None and self._width is not None:
            limit = min(limit, lo + max(self._file_bytes // max(self._width, 1), 1))
        return limit, kept

    def _scan(self, sizes: Sizes) -> int | None:
        """The end of the part, if it is among the rows of `sizes`, which begin at `_seen`."""
        total = np.cumsum(sizes)
        over = int(np.searchsorted(total, self._file_bytes - self._bytes, side="right"))
        if over < len(sizes) and self._seen + over == self._lo:
            over = 1  # a row that is larger than a file
        count = min(over, len(sizes))
        at = 0
        while at < count:
            before = int(total[at - 1]) if at else 0
            room = GROUP_BYTES - self._group_bytes + before
            end = min(int(np.searchsorted(total, room, side="right")), count)
            end = min(end, self._group_lo + ROW_GROUP_ROWS - self._seen)
            if end < count:
                if self._seen + end == self._group_lo:
                    end += 1
                self._groups.append(self._seen + end)
                self._group_lo, self._group_bytes = self._seen + end, 0
            else:
                self._group_bytes += int(total[end - 1]) - before
            at = end
        self._bytes += int(total[count - 1]) if count else 0
        return self._seen + over if over < len(sizes) else None

    def _span(self, hi: int) -> Span:
        groups = [end for end in self._groups if end < hi]
        return Span(self._lo, hi, [*groups, hi])
