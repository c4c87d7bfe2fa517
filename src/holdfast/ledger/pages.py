"""Ledger pages: range records of row state, for checkpoints.

A run of equal rows is (rows, state, attempts, reason). If a page has `PAGE_RUNS_MAX` or more runs,
for example alternating outcomes, the page stores its three arrays compressed instead.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from holdfast.codec import Record
from holdfast.errors import Invalid

ByteArray = NDArray[np.uint8]

PAGE_RUNS_MAX = 2048


class LedgerPage(Record, frozen=True):
    runs: list[tuple[int, int, int, int]]
    rows: bytes = b""


def encode_page(state: ByteArray, attempts: ByteArray, reason: ByteArray) -> LedgerPage:
    changes = state[1:] != state[:-1]
    # Most pages have no retries and no reasons. Testing for non-zero values is cheaper than
    # comparing.
    for column in (attempts, reason):
        if column.any():
            changes |= column[1:] != column[:-1]
    cuts = np.flatnonzero(changes)
    if len(cuts) >= PAGE_RUNS_MAX:
        raw = b"".join(column.tobytes() for column in (state, attempts, reason))
        return LedgerPage([], zlib.compress(raw, 1))
    starts = np.concatenate((np.zeros(1, dtype=np.int64), cuts + 1))
    lengths = np.diff(starts, append=len(state))
    columns = (lengths, state[starts], attempts[starts], reason[starts])
    return LedgerPage(list(zip(*(column.tolist() for column in columns), strict=True)))


def decode_page(page: LedgerPage, state: ByteArray, attempts: ByteArray, reason: ByteArray) -> None:
    """Fill the three arrays from a page."""
    if page.rows:
        try:
            raw = np.frombuffer(zlib.decompress(page.rows), dtype=np.uint8)
        except zlib.error as error:
            raise Invalid(what="page", why=str(error)) from None
        if len(raw) != 3 * len(state):
            raise Invalid(
                what="page", why="wrong number of bytes", found=len(raw), expected=3 * len(state)
            )
        state[:], attempts[:], reason[:] = raw.reshape(3, len(state))
        return
    offset = 0
    for rows, *values in page.runs:
        for column, value in zip((state, attempts, reason), values, strict=True):
            column[offset : offset + rows] = value
        offset += rows
    if offset != len(state):
        raise Invalid(what="page", why="wrong number of rows", found=offset, expected=len(state))
