"""The row cache: single rows by key, and *cached ranges*, whose rows are all cached.

A scan of a cached range needs no server. Each entry has the state after the last commit that the process has
applied, or a newer one. The keys of later commits invalidate it. A stale entry therefore has only one cause:
a commit of another process that is not applied yet. Every use must validate against such commits (see
`engine`, `cached_snapshot`).

Not thread-safe: callers hold `lock`, except to read `rows`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from holdfast.store.api import Row

ROWS_MAX = 200_000
BYTES_MAX = 128 * 1024 * 1024
# Larger values are not cached.
VALUE_BYTES_MAX = 8 * 1024
RANGES_MAX = 2_000
# A range that grows beyond this keeps its lower half: queues are consumed from the low end.
RANGE_KEYS_MAX = 16_000
# Bound of the remembered keys that remote commits invalidated.
INVALIDATED_MAX = 2_000
# Placeholder for a value that is too large to be cached.
TOO_LARGE = bytes(VALUE_BYTES_MAX + 1)
# Sentinel for a missing entry, for a single atomic lookup: another thread may invalidate it between two lookups.
UNKNOWN = b"unknown"


class CachedRange:
    """A range lo <= key < hi whose rows are all cached, with its keys in order."""

    __slots__ = ("hi", "keys", "lo")

    def __init__(self, lo: bytes, hi: bytes, keys: list[bytes]) -> None:
        self.lo = lo
        self.hi = hi
        self.keys = keys


class RowCache:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        # None: the row does not exist.
        self.rows: dict[bytes, bytes | None] = {}
        self._bytes = 0
        # Invalidated keys. A read of one of them probably needs the rest soon (prefetch).
        self.invalidated: dict[bytes, None] = {}
        # Sorted, disjoint and not adjacent.
        self._range_starts: list[bytes] = []
        self._ranges: list[CachedRange] = []

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row] | None:
        """The rows of a range; None if not all of them are cached."""
        keys = self._scan_backward(lo, hi, limit) if reverse else self._scan_forward(lo, hi, limit)
        if keys is None:
            return None
        rows = self.rows
        scanned = []
        for key in keys:
            value = rows.get(key)
            if value is None:
                return None  # the row exists but is too large to be cached
            scanned.append((key, value))
        return scanned

    def covered_until(self, lo: bytes) -> bytes:
        """The end of the cached range that contains a key; the key itself if none does."""
        span = self._find_range(lo)
        return lo if span is None else span.hi

    def put(self, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Put the current rows of these keys."""
        for key, value in rows:
            self._set(key, value)
            if self._range_starts:
                span = self._find_range(key)
                if span is not None:
                    self._update_range(span, key, value is not None)
        self._evict()

    def invalidate(self, keys: Iterable[bytes]) -> None:
        """Invalidate keys that remote commits wrote and that are not refreshed."""
        for key in keys:
            if key in self.rows:
                old = self.rows.pop(key)
                self._bytes -= 0 if old is None else len(old)
                if len(self.invalidated) < INVALIDATED_MAX:
                    self.invalidated[key] = None
            if self._range_starts:
                at = bisect_right(self._range_starts, key) - 1
                if at >= 0 and key < self._ranges[at].hi:
                    del self._range_starts[at], self._ranges[at]

    def put_range(self, lo: bytes, hi: bytes, rows: Sequence[Row]) -> None:
        """Cache all current rows of a range, in order, and mark the range as complete."""
        for key, value in rows:
            self._set(key, value)
        keys = [key for key, _ in rows]
        new_range = CachedRange(lo, hi, keys)
        at = bisect_left(self._range_starts, lo)
        if at and self._ranges[at - 1].hi >= lo:
            at -= 1
        end = at
        while end < len(self._ranges) and self._ranges[end].lo <= hi:
            neighbour = self._ranges[end]
            if neighbour.lo < lo:
                keys = neighbour.keys[: bisect_left(neighbour.keys, lo)] + keys
                lo = neighbour.lo
            if neighbour.hi > hi:
                keys = keys + neighbour.keys[bisect_left(neighbour.keys, hi) :]
                hi = neighbour.hi
            end += 1
        # If the merged range is too large, keep only the new range.
        merged = CachedRange(lo, hi, keys) if len(keys) <= RANGE_KEYS_MAX else new_range
        self._range_starts[at:end] = [merged.lo]
        self._ranges[at:end] = [merged]
        self._trim_range(merged)
        self._evict()

    def clear(self) -> None:
        self.rows.clear()
        self.invalidated.clear()
        self._bytes = 0
        self._range_starts.clear()
        self._ranges.clear()

    # -- inside ------------------------------------------------------------------------------------

    def _find_range(self, key: bytes) -> CachedRange | None:
        at = bisect_right(self._range_starts, key) - 1
        if at < 0:
            return None
        span = self._ranges[at]
        return span if key < span.hi else None

    def _scan_forward(self, lo: bytes, hi: bytes, limit: int | None) -> list[bytes] | None:
        span = self._find_range(lo)
        if span is None:
            return None
        start = bisect_left(span.keys, lo)
        stop = bisect_left(span.keys, min(hi, span.hi), start)
        if limit is not None and stop - start >= limit:
            stop = start + limit
        elif span.hi < hi:
            return None
        return span.keys[start:stop]

    def _scan_backward(self, lo: bytes, hi: bytes, limit: int | None) -> list[bytes] | None:
        at = bisect_left(self._range_starts, hi) - 1
        if at < 0 or self._ranges[at].hi < hi:
            return None
        span = self._ranges[at]
        start = bisect_left(span.keys, max(lo, span.lo))
        stop = bisect_left(span.keys, hi)
        if limit is not None and stop - start >= limit:
            start = stop - limit
        elif span.lo > lo:
            return None
        return span.keys[start:stop][::-1]

    def _set(self, key: bytes, value: bytes | None) -> None:
        rows = self.rows
        if value is not None and len(value) > VALUE_BYTES_MAX:
            old = rows.pop(key, None)
            self._bytes -= len(old) if old is not None else 0
            return
        old = rows.get(key)
        self._bytes += (0 if value is None else len(value)) - (0 if old is None else len(old))
        rows[key] = value

    def _update_range(self, span: CachedRange, key: bytes, exists: bool) -> None:
        keys = span.keys
        if exists and (not keys or key > keys[-1]):
            keys.append(key)
            self._trim_range(span)
            return
        at = bisect_left(keys, key)
        if at < len(keys) and keys[at] == key:
            if not exists:
                del keys[at]
        elif exists:
            keys.insert(at, key)
            self._trim_range(span)

    def _trim_range(self, span: CachedRange) -> None:
        if len(span.keys) > RANGE_KEYS_MAX:
            half = RANGE_KEYS_MAX // 2
            span.hi = span.keys[half]
            del span.keys[half:]

    def _evict(self) -> None:
        if len(self.rows) > ROWS_MAX or self._bytes > BYTES_MAX:
            # Evict the older half: a dict keeps insertion order.
            kept = list(self.rows.items())[len(self.rows) // 2 :]
            self.clear()
            self.rows.update(kept)
            self._bytes = sum(len(value) for _, value in kept if value is not None)
            if self._bytes > BYTES_MAX // 2:
                self.clear()
        elif len(self._ranges) > RANGES_MAX:
            self._range_starts.clear()
            self._ranges.clear()
