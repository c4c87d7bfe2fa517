"""Sets of seqs as ranges: the same as sets of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Invalid
from holdfast.ledger.ranges import Pool, Range, Ranges

SPAN = 40
BOUNDS = st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(lambda ab: (min(ab), max(ab)))


def ranges_of(rows: set[int], *, page_rows: int = 1 << 30) -> list[Range]:
    found: list[Range] = []
    for row in sorted(rows):
        if found and found[-1][1] == row and row % page_rows:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return found


@pytest.mark.parametrize("page_rows", [4, 7, 1 << 20])
@given(steps=st.lists(st.tuples(st.booleans(), BOUNDS)), window=BOUNDS)
def test_a_pool_is_the_set_of_its_rows(
    page_rows: int, steps: list[tuple[bool, Range]], window: Range
) -> None:
    pool, rows = Pool(page_rows), set[int]()
    for adding, (lo, hi) in steps:
        span = set(range(lo, hi))
        if adding and not span & rows:
            pool.add(lo, hi)
            rows |= span
        elif not adding and span <= rows:
            pool.remove(lo, hi)
            rows -= span
    assert list(pool) == ranges_of(rows, page_rows=page_rows)
    assert pool.rows == len(rows)
    lo, hi = window
    inside = ranges_of(rows & set(range(lo, hi)), page_rows=page_rows)
    assert pool.first(lo, hi) == (inside[0] if inside else None)
    assert pool.holds(lo, hi) == (set(range(lo, hi)) <= rows)
    page_end = min(hi, (lo // page_rows + 1) * page_rows)
    assert list(pool.within(lo, page_end)) == ranges_of(rows & set(range(lo, page_end)))


@given(steps=st.lists(st.tuples(st.booleans(), BOUNDS)))
def test_ranges_refuse_what_is_there_and_what_is_not(steps: list[tuple[bool, Range]]) -> None:
    ranges, rows = Ranges(), set[int]()
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
        assert list(ranges) == ranges_of(rows)


def test_the_order_of_building_does_not_show() -> None:
    one, other = Pool(8), Pool(8)
    for lo in range(0, 24, 2):
        one.add(lo, lo + 2)
    for lo in reversed(range(0, 24, 2)):
        other.add(lo, lo + 2)
    assert list(one) == list(other) == [(0, 8), (8, 16), (16, 24)]
