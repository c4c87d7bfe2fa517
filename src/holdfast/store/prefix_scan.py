"""Scans over a key prefix: all rows below it, or the distinct names that follow it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.config import SCAN_PAGE
from holdfast.store import tuples
from holdfast.store.api import Row, Txn


def iter_rows(txn: Txn, prefix: bytes, page_rows: int = SCAN_PAGE) -> Iterator[Row]:
    """Yield all rows below a prefix, read in pages."""
    at, end = prefix, tuples.prefix_end(prefix)
    while page := txn.scan(at, end, page_rows):
        yield from page
        at = page[-1][0] + b"\x00"


def iter_names(txn: Txn, path: tuples.Key) -> Iterator[str]:
    """Yield the distinct names that follow a key path, with one seek per name."""
    prefix = tuples.pack(path)
    at, end = prefix, tuples.prefix_end(prefix)
    while rows := txn.scan(at, end, 1):
        name = str(tuples.unpack(rows[0][0])[len(path)])
        yield name
        at = tuples.prefix_end(prefix + tuples.pack((name,)))
