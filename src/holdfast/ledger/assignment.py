"""Row assignment: the policy that selects the rows of a claim. It reads the run state and changes
nothing.

    1  a suspect at the commit head, isolated: the commit cannot advance before it ends
    2  free rows, lowest first, filled up with unseen rows of the same page
    3  unseen rows, unless they are too far ahead of the commit
    4  a suspect, isolated

Every step uses bisection and reads no more rows than it grants.
"""

from __future__ import annotations

from math import isqrt

from holdfast.ledger.events import RowRange
from holdfast.ledger.ranges import PagedRanges, Range
from holdfast.ledger.run_state import RunState

# Maximum number of ranges in a grant, for scattered rows.
GRANT_RANGES_MAX = 1024


def next_rows(run: RunState, rows: int, lo: int, hi: int) -> tuple[list[RowRange], bool]:
    """Select the ranges of the next grant inside [lo, hi); the flag marks suspects. Empty: no rows."""
    if run.suspects.rows:
        head = run.ledger.final_prefix()
        if lo <= head < hi and run.suspects.contains(head, head + 1):
            return _next_suspect(run, head, hi), True
    parts = _next_ready(run, rows, lo, hi)
    if parts:
        return parts, False
    return _next_suspect(run, lo, hi), True


def first_batches(run: RunState, parts: list[RowRange], begin: int) -> list[Range]:
    """Return the first `begin` rows of a grant, rounded up to whole batches."""
    begun: list[Range] = []
    for part in parts:
        if begin <= 0:
            break
        end = min(part.hi, _batch_end(run, min(part.lo + begin, part.hi)))
        begun.append((part.lo, end))
        begin -= end - part.lo
    return begun


# -- internals -----------------------------------------------------------------------------------


def _next_suspect(run: RunState, lo: int, hi: int) -> list[RowRange]:
    """Select the lowest suspect alone. For a batch it is a slice, and a single row on the last try.
    A row that crashes its interpreter thus affects few other rows, and finally none.
    """
    suspect = run.suspects.first(lo, hi)
    if suspect is None:
        return []
    first, last = suspect
    batch = first - first % run.policy.atomic_rows
    slice_rows = isqrt(run.policy.atomic_rows)
    end = batch + ((first - batch) // slice_rows + 1) * slice_rows
    last = min(last, end, batch + run.policy.atomic_rows)
    first, last, tries = run.ledger.attempts_by_range(first, last)[0]
    if tries + 1 >= run.policy.attempts_max:
        last = first + 1
    return [RowRange(first, last, tries + 1)]


def _next_ready(run: RunState, rows: int, lo: int, hi: int) -> list[RowRange]:
    first_range = run.free.first(lo, hi) or _first_unseen(run, lo, hi)
    if first_range is None:
        return []
    page_rows = run.policy.page_rows
    page = first_range[0] // page_rows * page_rows
    first, last = max(page, lo), min(page + page_rows, hi)
    parts: list[RowRange] = []
    rows -= _take_rows(run, run.free, first, last, rows, parts)
    if rows > 0 and _first_unseen(run, first, last) is not None:
        _take_rows(run, run.unseen, first, last, rows, parts)
    parts.sort(key=lambda part: part.lo)
    return parts


def _first_unseen(run: RunState, lo: int, hi: int) -> Range | None:
    """Return the first unseen range, or None if it is too far ahead of the commit."""
    unseen = run.unseen.first(lo, hi)
    ahead = run.policy.ahead_rows_max
    if unseen is not None and ahead and unseen[0] - run.next_commit > ahead:
        return None
    return unseen


def _take_rows(
    run: RunState, pool: PagedRanges, lo: int, hi: int, rows: int, parts: list[RowRange]
) -> int:
    """Append up to `rows` rows of the pool, cut at batch boundaries; return the number of rows."""
    taken = 0
    for first, last in pool.within(lo, hi):
        end = min(last, first + rows - taken)
        if end < last:
            end = max(end - end % run.policy.atomic_rows, first)
            if end == first and not parts:
                end = min(last, _batch_end(run, first + 1))
        if end == first:
            break
        runs = [(first, end, 0)] if pool is run.unseen else run.ledger.attempts_by_range(first, end)
        for a, b, tries in runs[: GRANT_RANGES_MAX - len(parts)]:
            parts.append(RowRange(a, b, tries + 1))
            taken += b - a
        if taken >= rows or len(parts) >= GRANT_RANGES_MAX:
            break
    return taken


def _batch_end(run: RunState, seq: int) -> int:
    """Return the end of the batch that contains the row before `seq`."""
    unit = run.policy.atomic_rows
    return min(-(-seq // unit) * unit, run.size)
