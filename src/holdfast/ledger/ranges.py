"""Range sets: sets of seqs as sorted, disjoint ranges [lo, hi), searched by bisection.

`RowRanges` is one sorted list. Adjacent ranges are merged, so equal sets are equal values, whatever
the order of insertion. `PagedRanges` keeps one `RowRanges` per page. The page bounds the cost of an
insertion, and no range crosses a page boundary.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from holdfast.errors import Invalid

Range = tuple[int, int]


class RowRanges:
    __slots__ = ("_his", "_los", "rows")

    def __init__(self) -> None:
        self._los: list[int] = []
        self._his: list[int] = []
        self.rows = 0

    def add(self, lo: int, hi: int) -> None:
        los, his = self._los, self._his
        at = bisect_left(los, lo)
        if lo >= hi or (at and his[at - 1] > lo) or (at < len(los) and hi > los[at]):
            raise Invalid(what="range", why="empty, or already in the set", found=(lo, hi))
        left = at > 0 and his[at - 1] == lo
        right = at < len(los) and los[at] == hi
        if left and right:
            his[at - 1] = his[at]
            del los[at], his[at]
        elif left:
            his[at - 1] = hi
        elif right:
            los[at] = lo
        else:
            los.insert(at, lo)
            his.insert(at, hi)
        self.rows += hi - lo

    def remove(self, lo: int, hi: int) -> None:
        los, his = self._los, self._his
        at = bisect_right(los, lo) - 1
        if at < 0 or not lo < hi <= his[at]:
            raise Invalid(what="range", why="not in the set", found=(lo, hi))
        first, last = los[at], his[at]
        if first == lo and last == hi:
            del los[at], his[at]
        elif first == lo:
            los[at] = hi
        elif last == hi:
            his[at] = lo
        else:
            his[at] = lo
            los.insert(at + 1, hi)
            his.insert(at + 1, last)
        self.rows -= hi - lo

    def contains(self, lo: int, hi: int) -> bool:
        at = bisect_right(self._los, lo) - 1
        return at >= 0 and hi <= self._his[at]

    def within(self, lo: int, hi: int) -> Iterator[Range]:
        """Yield the ranges of [lo, hi) that are in the set, in order."""
        los, his = self._los, self._his
        at = max(bisect_right(los, lo) - 1, 0)
        while at < len(los) and los[at] < hi:
            first, last = max(los[at], lo), min(his[at], hi)
            if first < last:
                yield first, last
            at += 1

    def __iter__(self) -> Iterator[Range]:
        return iter(zip(self._los, self._his, strict=True))

    def __len__(self) -> int:
        return len(self._los)


class PagedRanges:
    __slots__ = ("_page_order", "_page_rows", "_pages", "rows")

    def __init__(self, page_rows: int) -> None:
        self._page_rows = page_rows
        self._pages: dict[int, RowRanges] = {}
        # Non-empty pages, ascending.
        self._page_order: list[int] = []
        self.rows = 0

    def add(self, lo: int, hi: int) -> None:
        for page, a, b in self._split(lo, hi):
            ranges = self._pages.get(page)
            if ranges is None:
                ranges = self._pages[page] = RowRanges()
                if self._page_order and page < self._page_order[-1]:
                    insort(self._page_order, page)
                else:
                    self._page_order.append(page)
            ranges.add(a, b)
        self.rows += hi - lo

    def remove(self, lo: int, hi: int) -> None:
        for page, a, b in self._split(lo, hi):
            ranges = self._pages.get(page)
            if ranges is None:
                raise Invalid(what="range", why="not in the set", found=(lo, hi))
            ranges.remove(a, b)
            if not ranges.rows:
                del self._pages[page]
                del self._page_order[bisect_left(self._page_order, page)]
        self.rows -= hi - lo

    def contains(self, lo: int, hi: int) -> bool:
        return all(
            page in self._pages and self._pages[page].contains(a, b)
            for page, a, b in self._split(lo, hi)
        )

    def first(self, lo: int, hi: int) -> Range | None:
        """Return the lowest range of the set inside [lo, hi)."""
        order = self._page_order
        at = bisect_left(order, lo // self._page_rows)
        # Only the page of `lo` can be non-empty and yet have no range in [lo, hi).
        while at < len(order) and order[at] * self._page_rows < hi:
            found_range = next(self._pages[order[at]].within(lo, hi), None)
            if found_range is not None:
                return found_range
            at += 1
        return None

    def within(self, lo: int, hi: int) -> Iterator[Range]:
        """Yield the set's ranges inside [lo, hi), which is within one page."""
        ranges = self._pages.get(lo // self._page_rows)
        return iter(()) if ranges is None else ranges.within(lo, hi)

    def clear(self) -> None:
        self._pages.clear()
        self._page_order.clear()
        self.rows = 0

    def __iter__(self) -> Iterator[Range]:
        for page in self._page_order:
            yield from self._pages[page]

    def _split(self, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
        size = self._page_rows
        while lo < hi:
            page = lo // size
            end = min(hi, (page + 1) * size)
            yield page, lo, end
            lo = end
