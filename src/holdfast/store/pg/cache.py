"""What a process knows of the rows, so that it need not ask for them again.

A row is known by its key; a *span* is a range of keys of which all rows are known, so that a scan of it
needs nobody. Everything here is as it was after the last commit that the process has heard of, or newer;
whatever is committed later is told by its keys. So what is wrong here is wrong for one reason only: others
have committed meanwhile. Whoever relies on it must find that out before it matters (see `engine`, `view`).

Not thread-safe: callers hold `lock`, save for reading `rows`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from holdfast.store.api import Row

ROWS_MAX = 200_000
BYTES_MAX = 128 * 1024 * 1024
# Larger values are asked for each time.
VALUE_BYTES_MAX = 8 * 1024
SPANS_MAX = 2_000
# A span that grows beyond this keeps its lower half: queues are taken from below.
SPAN_KEYS_MAX = 16_000
# Keys that were known until others wrote them.
LOST_MAX = 2_000
# Stands for a value that is not kept.
LARGE = bytes(VALUE_BYTES_MAX + 1)
# Stands for a row of which nothing is known: other threads may forget one between two looks at it.
UNKNOWN = b"unknown"


class Span:
    """All rows with lo <= key < hi, by their keys in order."""

    __slots__ = ("hi", "keys", "lo")

    def __init__(self, lo: bytes, hi: bytes, keys: list[bytes]) -> None:
        self.lo = lo
        self.hi = hi
        self.keys = keys


class Cache:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        # None: there is no such row.
        self.rows: dict[bytes, bytes | None] = {}
        self._bytes = 0
        # Whoever asks for one of these needs the others soon, most likely.
        self.lost: dict[bytes, None] = {}
        # In order, and none touches another.
        self._los: list[bytes] = []
        self._spans: list[Span] = []

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row] | None:
        """Rows of a range; None if not all of them are known."""
        keys = self._backward(lo, hi, limit) if reverse else self._forward(lo, hi, limit)
        if keys is None:
            return None
        rows = self.rows
        found = []
        for key in keys:
            value = rows.get(key)
            if value is None:
                return None  # it is there, but too large to be kept
            found.append((key, value))
        return found

    def known_from(self, lo: bytes) -> bytes:
        """The end of the span that a key lies in; the key itself if it lies in none."""
        span = self._find(lo)
        return lo if span is None else span.hi

    def keep(self, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        """These are the rows of their keys now."""
        for key, value in rows:
            self._set(key, value)
            if self._los:
                span = self._find(key)
                if span is not None:
                    self._place(span, key, value is not None)
        self._shrink()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Others have written these, too many to be asked for."""
        for key in keys:
            if key in self.rows:
                was = self.rows.pop(key)
                self._bytes -= 0 if was is None else len(was)
                if len(self.lost) < LOST_MAX:
                    self.lost[key] = None
            if self._los:
                at = bisect_right(self._los, key) - 1
                if at >= 0 and key < self._spans[at].hi:
                    del self._los[at], self._spans[at]

    def learn(self, lo: bytes, hi: bytes, rows: Sequence[Row]) -> None:
        """These are all rows of a range now, in order."""
        for key, value in rows:
            self._set(key, value)
        keys = [key for key, _ in rows]
        learned = Span(lo, hi, keys)
        at = bisect_left(self._los, lo)
        if at and self._spans[at - 1].hi >= lo:
            at -= 1
        end = at
        while end < len(self._spans) and self._spans[end].lo <= hi:
            span = self._spans[end]
            if span.lo < lo:
                keys = span.keys[: bisect_left(span.keys, lo)] + keys
                lo = span.lo
            if span.hi > hi:
                keys = keys + span.keys[bisect_left(span.keys, hi) :]
                hi = span.hi
            end += 1
        # Where it does not fit with what is known around it, it is what was asked for last.
        merged = Span(lo, hi, keys) if len(keys) <= SPAN_KEYS_MAX else learned
        self._los[at:end] = [merged.lo]
        self._spans[at:end] = [merged]
        self._bound(merged)
        self._shrink()

    def clear(self) -> None:
        self.rows.clear()
        self.lost.clear()
        self._bytes = 0
        self._los.clear()
        self._spans.clear()

    # -- inside ------------------------------------------------------------------------------------

    def _find(self, key: bytes) -> Span | None:
        at = bisect_right(self._los, key) - 1
        if at < 0:
            return None
        span = self._spans[at]
        return span if key < span.hi else None

    def _forward(self, lo: bytes, hi: bytes, limit: int | None) -> list[bytes] | None:
        span = self._find(lo)
        if span is None:
            return None
        start = bisect_left(span.keys, lo)
        stop = bisect_left(span.keys, min(hi, span.hi), start)
        if limit is not None and stop - start >= limit:
            stop = start + limit
        elif span.hi < hi:
            return None
        return span.keys[start:stop]

    def _backward(self, lo: bytes, hi: bytes, limit: int | None) -> list[bytes] | None:
        at = bisect_left(self._los, hi) - 1
        if at < 0 or self._spans[at].hi < hi:
            return None
        span = self._spans[at]
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
            was = rows.pop(key, None)
            self._bytes -= len(was) if was is not None else 0
            return
        was = rows.get(key)
        self._bytes += (0 if value is None else len(value)) - (0 if was is None else len(was))
        rows[key] = value

    def _place(self, span: Span, key: bytes, there: bool) -> None:
        keys = span.keys
        if there and (not keys or key > keys[-1]):
            keys.append(key)
            self._bound(span)
            return
        at = bisect_left(keys, key)
        if at < len(keys) and keys[at] == key:
            if not there:
                del keys[at]
        elif there:
            keys.insert(at, key)
            self._bound(span)

    def _bound(self, span: Span) -> None:
        if len(span.keys) > SPAN_KEYS_MAX:
            half = SPAN_KEYS_MAX // 2
            span.hi = span.keys[half]
            del span.keys[half:]

    def _shrink(self) -> None:
        if len(self.rows) > ROWS_MAX or self._bytes > BYTES_MAX:
            # The older half: a dict keeps the order in which keys came.
            kept = list(self.rows.items())[len(self.rows) // 2 :]
            self.clear()
            self.rows.update(kept)
            self._bytes = sum(len(value) for _, value in kept if value is not None)
            if self._bytes > BYTES_MAX // 2:
                self.clear()
        elif len(self._spans) > SPANS_MAX:
            self._los.clear()
            self._spans.clear()
