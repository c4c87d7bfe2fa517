"""Row match: the match cursor over the sorted rows of two runs, compared with a dictionary of all keys."""

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
from holdfast.spark.row_match import (
    HASH_COLUMNS,
    KeyedRows,
    MatchCursor,
    columns_digest,
    keyed_rows_of,
)

ValueByKey = dict[tuple[Any, ...], int]


def make_table(rows: list[tuple[tuple[Any, ...], int]], kinds: list[pa.DataType]) -> pa.Table:
    columns = [pa.array([key[i] for key, _ in rows], kind) for i, kind in enumerate(kinds)]
    hashes = [pa.array([f(value) for _, value in rows], pa.int64()) for f in (abs, lambda v: v % 3)]
    return pa.table([*columns, *hashes], names=[*_names(kinds), *HASH_COLUMNS])


def make_keyed_rows(
    rows: ValueByKey, kinds: list[pa.DataType], cuts: list[int], *, hashed: bool = True
) -> list[KeyedRows]:
    whole = make_table(list(rows.items()), kinds)
    batch = (
        keys.comparable_columns(whole.combine_chunks().to_batches()[0], _names(kinds))
        if rows
        else []
    )
    ordered = whole.take(keys.sort_order(batch)) if rows else whole
    batches, lo = [], 0
    for size in [*cuts, len(rows)]:
        piece = ordered.slice(lo, size)
        if piece.num_rows:
            batches.append(keyed_rows_of(lo, piece, _names(kinds), hashed=hashed))
        lo += piece.num_rows
    return batches


def _names(kinds: list[pa.DataType]) -> list[str]:
    return [f"k{i}" for i in range(len(kinds))]


def iter_rows(
    batches: list[KeyedRows],
) -> Iterator[tuple[int, tuple[Any, ...], tuple[int, int] | None]]:
    for batch in batches:
        for row in range(batch.rows):
            hashes = None if batch.hashes is None else (batch.hashes[0][row], batch.hashes[1][row])
            yield batch.lo + row, keys.key_at(batch.keyed, row), hashes


def check_matches(new: list[KeyedRows], old: list[KeyedRows]) -> None:
    known = {key: (seq, hashes) for seq, key, hashes in iter_rows(old)}
    cursor = MatchCursor(iter(old))
    seqs: list[int] = []
    same: list[bool] = []
    for batch in new:
        matches = cursor.find(batch)
        seqs += matches.seqs.tolist()
        same += matches.same.tolist()
    expected = [known.get(key, (-1, None)) for _, key, _ in iter_rows(new)]
    assert seqs == [seq for seq, _ in expected]
    assert same == [
        seq >= 0 and hashes is not None and theirs is not None and hashes == theirs
        for (_, _, hashes), (seq, theirs) in zip(iter_rows(new), expected, strict=True)
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
def test_match_cursor_equals_a_dictionary_lookup(kind: str, data: st.DataObject) -> None:
    kinds, key = KINDS[kind]
    rows = st.dictionaries(key, st.integers(-4, 4), max_size=30)
    cuts = st.lists(st.integers(1, 6), max_size=8)
    new, old = data.draw(rows), data.draw(rows)
    if data.draw(st.booleans()):
        old = {**new, **old}
    check_matches(
        make_keyed_rows(new, kinds, data.draw(cuts)),
        make_keyed_rows(old, kinds, data.draw(cuts), hashed=data.draw(st.booleans())),
    )


def test_match_cursor_matches_every_row_of_equal_runs() -> None:
    rows: ValueByKey = {(n,): n for n in range(100)}
    check_matches(
        make_keyed_rows(rows, [pa.int64()], [40, 3]), make_keyed_rows(rows, [pa.int64()], [40, 3])
    )
    check_matches(
        make_keyed_rows(rows, [pa.int64()], []), make_keyed_rows(rows, [pa.int64()], [1] * 100)
    )


def test_columns_digest_depends_on_names_and_types_but_not_on_order() -> None:
    text, number = ("a", "string"), ("b", "bigint")
    assert columns_digest([text, number]) == columns_digest([number, text])
    others = [[text], [number], [("a", "bigint"), ("b", "string")], [("ab", "string")], []]
    digests = [columns_digest(columns) for columns in [[text, number], *others]]
    assert len(set(digests)) == len(digests)


def test_rows_without_hashes_never_match_as_same() -> None:
    rows: ValueByKey = {(n,): n for n in range(5)}
    [new], [old] = (
        make_keyed_rows(rows, [pa.int64()], []),
        make_keyed_rows(rows, [pa.int64()], [], hashed=False),
    )
    matches = MatchCursor(iter([old])).find(new)
    assert matches.seqs.tolist() == [0, 1, 2, 3, 4]
    assert not np.any(matches.same)
