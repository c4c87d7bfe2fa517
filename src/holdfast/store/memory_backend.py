"""The memory backend: rows in a dict, for tests, the simulator and `memory:`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from holdfast import failpoints
from holdfast.errors import HoldfastError
from holdfast.store.api import Row


class MemoryBackend:
    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []
        self.id = 0

    def begin(self) -> MemoryTxn:
        return MemoryTxn(self)

    def snapshot(self) -> MemoryBackend:
        """Return the backend itself: InProcessStore runs one transaction at a time."""
        return self

    def close(self) -> None: ...

    def to_store_error(self, error: Exception) -> HoldfastError | None:
        return None

    def last_id(self) -> int:
        return self.id

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        start, end = bisect_left(self.keys, lo), bisect_left(self.keys, hi)
        if limit is not None:
            if reverse:
                start = max(start, end - limit)
            else:
                end = min(end, start + limit)
        rows = [(key, self.rows[key]) for key in self.keys[start:end]]
        return rows[::-1] if reverse else rows

    def set(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            if key in self.rows:
                del self.rows[key]
                del self.keys[bisect_left(self.keys, key)]
        else:
            if key not in self.rows:
                insort(self.keys, key)
            self.rows[key] = value


class MemoryTxn:
    """A write transaction that writes in place. `abort` restores the former values."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend
        self._undo: list[tuple[bytes, bytes | None]] = []
        self.id = backend.id + 1
        self.get = backend.get
        self.scan = backend.scan

    def put_many(self, rows: Iterable[Row]) -> None:
        for key, value in rows:
            self._undo.append((key, self._backend.rows.get(key)))
            self._backend.set(key, value)
        if failpoints.armed:
            failpoints.hit("memory.rows_put", self)

    def delete(self, key: bytes) -> None:
        self._undo.append((key, self._backend.rows.get(key)))
        self._backend.set(key, None)

    def commit(self) -> None:
        if failpoints.armed:
            failpoints.hit("memory.commit", self)
        self._backend.id = self.id

    def abort(self) -> None:
        for key, value in reversed(self._undo):
            self._backend.set(key, value)
