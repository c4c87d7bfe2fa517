"""Sizes of rows in key order, and reads that bypass the row cache, for background work over a whole store.

Each call is one short snapshot. It copies no value on LMDB and fetches none from PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from holdfast.config import KEY_BYTES_MAX
from holdfast.store.api import Row, Store

RowSize = tuple[bytes, int]
Peeked = dict[bytes, bytes | None]
_END = b"\xff" * (KEY_BYTES_MAX + 1)


def row_sizes(store: Store, lo: bytes, limit: int) -> list[RowSize]:
    """Return the keys of at most `limit` rows from a key on, and the lengths of their values."""
    read: Callable[[bytes, int], list[RowSize]] = getattr(
        store, "row_sizes", partial(_scanned_sizes, store)
    )
    return read(lo, limit)


def peek_rows(store: Store, keys: Sequence[bytes]) -> Peeked:
    """Return rows by their keys, without a place in the row cache."""
    read: Callable[[Sequence[bytes]], Peeked] = getattr(
        store, "peek_rows", partial(_get_all, store)
    )
    return read(keys)


def _scanned_sizes(store: Store, lo: bytes, limit: int) -> list[RowSize]:
    rows: list[Row] = store.read(lambda txn: txn.scan(lo, _END, limit))
    return [(key, len(value)) for key, value in rows]


def _get_all(store: Store, keys: Sequence[bytes]) -> Peeked:
    found: Peeked = store.read(lambda txn: {key: txn.get(key) for key in keys})
    return found
