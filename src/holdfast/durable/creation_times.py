"""A range of creation times as a range of seqs: a binary search over rows whose seqs have the order of their creation.

It reads about as many rows as the last seq has binary digits. Removed rows leave gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.store import tuples
from holdfast.store.api import Txn


class TimeRange(NamedTuple):
    """Subjects created from `since_ns` to before `until_ns`. 0: no bound."""

    since_ns: int = 0
    until_ns: int = 0


ANY_TIME = TimeRange()


def seq_range(
    txn: Txn, prefix: bytes, end: int, times: TimeRange, created_ns: Callable[[bytes], int]
) -> tuple[int, int]:
    """Return the first seq of a range of times, and the seq after its last one. The rows below `prefix` have seqs from 1 to
    before `end`; `created_ns` returns the time of a row."""
    first, after = (
        _first_at(txn, prefix, end, at_ns, created_ns) if at_ns else default
        for at_ns, default in ((times.since_ns, 1), (times.until_ns, end))
    )
    return first, after


def _first_at(
    txn: Txn, prefix: bytes, end: int, at_ns: int, created_ns: Callable[[bytes], int]
) -> int:
    """Return the first seq below `end` of a row that was created at this time or later; `end` if none was."""
    low, high, stop = 1, end, prefix + tuples.pack_int(end)
    while low < high:
        middle = (low + high) // 2
        found = txn.scan(prefix + tuples.pack_int(middle), stop, 1)
        if found and created_ns(found[0][1]) < at_ns:
            low = tuples.unpack_last_int(found[0][0], len(prefix)) + 1
        else:
            high = middle
    return low
