"""Which rows a claim gets. Looks at a position and changes nothing.

    1  a suspect at the commit head, alone: nothing can be committed before it ends
    2  free rows, lowest first, filled up with unseen ones of the same page
    3  unseen rows, unless they are too far ahead of the commit
    4  a suspect, alone

Everything is found by bisection, and looked at no further than what is handed out.
"""

from __future__ import annotations

from math import isqrt

from holdfast.ledger.position import Position
from holdfast.ledger.ranges import Pool, Range
from holdfast.ledger.records import Part

# A grant is made of this many parts at most, however scattered its rows are.
PARTS_MAX = 1024


def choose(at: Position, rows: int, lo: int, hi: int) -> tuple[list[Part], bool]:
    """The parts of the next grant inside [lo, hi), and whether they are suspects; none: no parts."""
    if at.suspects.rows:
        head = at.ledger.final_prefix()
        if lo <= head < hi and at.suspects.holds(head, head + 1):
            return _suspect(at, head, hi), True
    parts = _ready(at, rows, lo, hi)
    if parts:
        return parts, False
    return _suspect(at, lo, hi), True


def leading(at: Position, parts: list[Part], begin: int) -> list[Range]:
    """The first `begin` rows of a grant, rounded up to whole batches."""
    begun: list[Range] = []
    for part in parts:
        if begin <= 0:
            break
        end = min(part.hi, _edge(at, min(part.lo + begin, part.hi)))
        begun.append((part.lo, end))
        begin -= end - part.lo
    return begun


# -- inside --------------------------------------------------------------------------------------


def _suspect(at: Position, lo: int, hi: int) -> list[Part]:
    """The lowest suspect, by itself. Of a batch it is a slice, and one row when it is the last try:
    a row that kills its interpreter takes few others down with it, and in the end none.
    """
    found = at.suspects.first(lo, hi)
    if found is None:
        return []
    first, last = found
    batch = first - first % at.policy.unit
    slice_rows = isqrt(at.policy.unit)
    end = batch + ((first - batch) // slice_rows + 1) * slice_rows
    last = min(last, end, batch + at.policy.unit)
    first, last, tries = at.ledger.tries(first, last)[0]
    if tries + 1 >= at.policy.attempts_max:
        last = first + 1
    return [Part(first, last, tries + 1)]


def _ready(at: Position, rows: int, lo: int, hi: int) -> list[Part]:
    found = at.free.first(lo, hi) or _fresh(at, lo, hi)
    if found is None:
        return []
    page_rows = at.policy.page_rows
    page = found[0] // page_rows * page_rows
    first, last = max(page, lo), min(page + page_rows, hi)
    parts: list[Part] = []
    rows -= _take(at, at.free, first, last, rows, parts)
    if rows > 0 and _fresh(at, first, last) is not None:
        _take(at, at.unseen, first, last, rows, parts)
    parts.sort(key=lambda part: part.lo)
    return parts


def _fresh(at: Position, lo: int, hi: int) -> Range | None:
    """Unseen rows, unless they are too far ahead of the commit."""
    found = at.unseen.first(lo, hi)
    ahead = at.policy.ahead_rows_max
    if found is not None and ahead and found[0] - at.next_commit > ahead:
        return None
    return found


def _take(at: Position, pool: Pool, lo: int, hi: int, rows: int, parts: list[Part]) -> int:
    """Add up to so many rows of the pool, cut at the edges of batches; how many."""
    took = 0
    for first, last in pool.within(lo, hi):
        end = min(last, first + rows - took)
        if end < last:
            end = max(end - end % at.policy.unit, first)
            if end == first and not parts:
                end = min(last, _edge(at, first + 1))
        if end == first:
            break
        runs = [(first, end, 0)] if pool is at.unseen else at.ledger.tries(first, end)
        for a, b, tries in runs[: PARTS_MAX - len(parts)]:
            parts.append(Part(a, b, tries + 1))
            took += b - a
        if took >= rows or len(parts) >= PARTS_MAX:
            break
    return took


def _edge(at: Position, seq: int) -> int:
    """The end of the batch that the row below lies in."""
    unit = at.policy.unit
    return min(-(-seq // unit) * unit, at.size)
