"""Rows of one run that are rows of another: the walk over both against a dictionary of all keys."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.spark import keys
from holdfast.spark.match import HASHES, Cursor, Lot, digest, lot_of

Rows = dict[tuple[Any, ...], int]


def table(rows: list[tuple[tuple[Any, ...], int]], kinds: list[pa.DataType]) -> pa.Table:
    columns = [pa.array([key[i] for key, _ in rows], kind) for i, kind in enumerate(kinds)]
    hashes = [pa.array([f(value) for _, value in rows], pa.int64()) for f in (abs, lambda v: v % 3)]
    return pa.table([*columns, *hashes], names=[*_names(kinds), *HASHES])


def lots(
    rows: Rows, kinds: list[pa.DataType], cuts: list[int], *, hashed: bool = True
) -> list[Lot]:
    whole = table(list(rows.items()), kinds)
    batch = keys.columns(whole.combine_chunks().to_batches()[0], _names(kinds)) if rows else []
    ordered = whole.take(keys.order(batch)) if rows else whole
    found, lo = [], 0
    for size in [*cuts, len(rows)]:
        piece = ordered.slice(lo, size)
        if piece.num_rows:
            found.append(lot_of(lo, piece, _names(kinds), hashed=hashed))
        lo += piece.num_rows
    return found


def _names(kinds: list[pa.DataType]) -> list[str]:
    return [f"k{i}" for i in range(len(kinds))]


def plain(found: list[Lot]) -> Iterator[tuple[int, tuple[Any, ...], tuple[int, int] | None]]:
    for lot in found:
        for row in range(lot.rows):
            hashes = None if lot.hashes is None else (lot.hashes[0][row], lot.hashes[1][row])
            yield lot.lo + row, keys.at(lot.keyed, row), hashes


def check(new: list[Lot], old: list[Lot]) -> None:
    known = {key: (seq, hashes) for seq, key, hashes in plain(old)}
    cursor = Cursor(iter(old))
    seqs: list[int] = []
    same: list[bool] = []
    for lot in new:
        found = cursor.find(lot)
        seqs += found.seqs.tolist()
        same += found.same.tolist()
    expected = [known.get(key, (-1, None)) for _, key, _ in plain(new)]
    assert seqs == [seq for seq, _ in expected]
    assert same == [
        seq >= 0 and hashes is not None and theirs is not None and hashes == theirs
        for (_, _, hashes), (seq, theirs) in zip(plain(new), expected, strict=True)
    ]


KINDS: dict[str, tuple[list[pa.DataType], st.SearchStrategy[tuple[Any, ...]]]] = {
    "whole": ([pa.int64()], st.tuples(st.integers(-20, 20))),
    "text": ([pa.string()], st.tuples(st.text("ab\x00é", max_size=3))),
    "pair": ([pa.int32(), pa.string()], st.tuples(st.integers(0, 3), st.text("ab", max_size=2))),
    "day": (
        [pa.date32()],
        st.tuples(st.dates(datetime.date(2020, 1, 1), datetime.date(2020, 2, 1))),
    ),
    "decimal": (
        [pa.decimal128(20, 2)],
        st.tuples(st.integers(-30, 30).map(lambda n: decimal.Decimal(n) / 4)),
    ),
    "three": (
        [pa.bool_(), pa.binary(), pa.int64()],
        st.tuples(st.booleans(), st.binary(max_size=1), st.integers(0, 2)),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_the_walk_finds_what_a_dictionary_finds(kind: str, data: st.DataObject) -> None:
    kinds, key = KINDS[kind]
    rows = st.dictionaries(key, st.integers(-4, 4), max_size=30)
    cuts = st.lists(st.integers(1, 6), max_size=8)
    new, old = data.draw(rows), data.draw(rows)
    if data.draw(st.booleans()):
        old = {**new, **old}
    check(
        lots(new, kinds, data.draw(cuts)),
        lots(old, kinds, data.draw(cuts), hashed=data.draw(st.booleans())),
    )


def test_equal_runs_are_found_row_by_row() -> None:
    rows: Rows = {(n,): n for n in range(100)}
    check(lots(rows, [pa.int64()], [40, 3]), lots(rows, [pa.int64()], [40, 3]))
    check(lots(rows, [pa.int64()], []), lots(rows, [pa.int64()], [1] * 100))


def test_a_digest_tells_names_and_types_apart() -> None:
    text, number = ("a", "string"), ("b", "bigint")
    assert digest([text, number]) == digest([number, text])
    others = [[text], [number], [("a", "bigint"), ("b", "string")], [("ab", "string")], []]
    made = [digest(one) for one in [[text, number], *others]]
    assert len(set(made)) == len(made)


def test_lots_without_hashes_are_never_the_same() -> None:
    rows: Rows = {(n,): n for n in range(5)}
    [new], [old] = lots(rows, [pa.int64()], []), lots(rows, [pa.int64()], [], hashed=False)
    found = Cursor(iter([old])).find(new)
    assert found.seqs.tolist() == [0, 1, 2, 3, 4]
    assert not np.any(found.same)
