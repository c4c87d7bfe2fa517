"""A page of the ledger as range records, for checkpoints.

A run is (rows, state, attempts, reason). A page with so many runs that they would be longer than the
rows themselves (outcomes that alternate) is kept as its three arrays instead, compressed.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from holdfast.codec import Record
from holdfast.errors import Invalid

Bytes = NDArray[np.uint8]

RUNS_MAX = 2048


class Page(Record, frozen=True):
    runs: list[tuple[int, int, int, int]]
    rows: bytes = b""


def encode_page(state: Bytes, attempts: Bytes, reason: Bytes) -> Page:
    changes = state[1:] != state[:-1]
    # Most pages have no retries and no reasons; looking whether they do is cheaper than comparing.
    for column in (attempts, reason):
        if column.any():
            changes |= column[1:] != column[:-1]
    cuts = np.flatnonzero(changes)
    if len(cuts) >= RUNS_MAX:
        whole = b"".join(column.tobytes() for column in (state, attempts, reason))
        return Page([], zlib.compress(whole, 1))
    starts = np.concatenate((np.zeros(1, dtype=np.int64), cuts + 1))
    lengths = np.diff(starts, append=len(state))
    columns = (lengths, state[starts], attempts[starts], reason[starts])
    return Page(list(zip(*(column.tolist() for column in columns), strict=True)))


def decode_page(page: Page, state: Bytes, attempts: Bytes, reason: Bytes) -> None:
    """Fill the three arrays of a page."""
    if page.rows:
        try:
            whole = np.frombuffer(zlib.decompress(page.rows), dtype=np.uint8)
        except zlib.error as error:
            raise Invalid(what="page", why=str(error)) from None
        if len(whole) != 3 * len(state):
            raise Invalid(what="page", why="other rows", found=len(whole), expected=3 * len(state))
        state[:], attempts[:], reason[:] = whole.reshape(3, len(state))
        return
    at = 0
    for rows, *values in page.runs:
        for column, value in zip((state, attempts, reason), values, strict=True):
            column[at : at + rows] = value
        at += rows
    if at != len(state):
        raise Invalid(what="page", why="other rows", found=at, expected=len(state))
