"""Sizes of rows and uncached reads: the same rows as a scan, on every store."""

from __future__ import annotations

from holdfast.store.api import Row, Store
from holdfast.store.row_sizes import peek_rows, row_sizes

KEYS = [(0, "sim", "size", n) for n in range(5)]


def all_rows(store: Store) -> list[Row]:
    rows: list[Row] = store.read(lambda txn: txn.scan(b"\x00", b"\xff" * 481))
    return rows


def test_row_sizes_are_the_lengths_of_all_rows(store: Store) -> None:
    for n, key in enumerate(KEYS):
        store.transact(lambda txn, key=key, n=n: txn.put(key, b"x" * (n * 100_000)))
    found = []
    lo = b""
    while page := row_sizes(store, lo, 2):
        found += page
        lo = page[-1][0] + b"\x00"
    rows = all_rows(store)
    assert found == [(key, len(value)) for key, value in rows]
    assert sum(size for _, size in found) > 1_000_000


def test_row_sizes_begin_at_the_key(store: Store) -> None:
    store.transact(lambda txn: [txn.put(key, b"v") for key in KEYS])
    keys = [key for key, _ in all_rows(store)]
    for lo, expected in ((keys[1], keys[1:4]), (keys[1] + b"\x00", keys[2:5]), (b"\xff" * 481, [])):
        assert [key for key, _ in row_sizes(store, lo, 3)] == expected


def test_peeked_rows_are_the_stored_rows(store: Store) -> None:
    store.transact(lambda txn: txn.put(KEYS[0], b"v"))
    [(key, value)] = [row for row in all_rows(store) if row[1] == b"v"]
    assert peek_rows(store, [key, b"missing"]) == {key: value, b"missing": None}
    assert peek_rows(store, []) == {}
