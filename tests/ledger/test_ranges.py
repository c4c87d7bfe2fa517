"""Sets of seqs as ranges, compared with sets of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid
from holdfast.ledger.ranges import PagedRanges, Range, RowRanges

SPAN = 40
BOUNDS = st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(lambda ab: (min(ab), max(ab)))


def expected_ranges(rows: set[int], *, page_rows: int = 1 << 30) -> list[Range]:
    ranges: list[Range] = []
    for row in sorted(rows):
        if ranges and ranges[-1][1] == row and row % page_rows:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges


@pytest.mark.parametrize("page_rows", [4, 7, 1 << 20])
@given(steps=st.lists(st.tuples(st.booleans(), BOUNDS)), window=BOUNDS)
def test_paged_ranges_equal_a_set_of_integers(
    page_rows: int, steps: list[tuple[bool, Range]], window: Range
) -> None:
    pool, rows = PagedRanges(page_rows), set[int]()
    for adding, (lo, hi) in steps:
        span = set(range(lo, hi))
        if adding and not span & rows:
            pool.add(lo, hi)
            rows |= span
        elif not adding and span <= rows:
            pool.remove(lo, hi)
            rows -= span
    assert list(pool) == expected_ranges(rows, page_rows=page_rows)
    assert pool.rows == len(rows)
    lo, hi = window
    inside = expected_ranges(rows & set(range(lo, hi)), page_rows=page_rows)
    assert pool.first(lo, hi) == (inside[0] if inside else None)
    assert pool.contains(lo, hi) == (set(range(lo, hi)) <= rows)
    page_end = min(hi, (lo // page_rows + 1) * page_rows)
    assert list(pool.within(lo, page_end)) == expected_ranges(rows & set(range(lo, page_end)))


@given(steps=st.lists(st.tuples(st.booleans(), BOUNDS)))
def test_row_ranges_refuse_duplicate_adds_and_missing_removes(
    steps: list[tuple[bool, Range]],
) -> None:
    ranges, rows = RowRanges(), set[int]()
    for adding, (lo, hi) in steps:
        span = set(range(lo, hi))
        fits = bool(span) and (not span & rows if adding else span <= rows)
        act = ranges.add if adding else ranges.remove
        if fits:
            act(lo, hi)
            rows = rows | span if adding else rows - span
        else:
            with pytest.raises(Invalid):
                act(lo, hi)
        assert list(ranges) == expected_ranges(rows)


def test_paged_ranges_do_not_depend_on_the_insertion_order() -> None:
    ascending, descending = PagedRanges(8), PagedRanges(8)
    for lo in range(0, 24, 2):
        ascending.add(lo, lo + 2)
    for lo in reversed(range(0, 24, 2)):
        descending.add(lo, lo + 2)
    assert list(ascending) == list(descending) == [(0, 8), (8, 16), (16, 24)]
