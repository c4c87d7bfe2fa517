"""What a transaction that is going to write reads: what this process knows, and the server for the rest.

It is no snapshot: each row is what it was after some commit that is not older than `id`. That is enough,
because the commit finds out whether any of them was written after `id`, and then the transaction is run
again. What ends without a commit, or in an error, counts only if nobody has committed since (`current`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import psycopg

from holdfast.errors import HoldfastError
from holdfast.store.api import Row
from holdfast.store.pg.cache import Cache
from holdfast.store.pg.readers import SEEN_MAX, Asking


class Known(Protocol):
    """The engine, as far as it matters here."""

    cache: Cache
    commit_no: int


class View:
    def __init__(self, known: Known, asking: Asking) -> None:
        # Noted before anything is read: what is read may be newer, never older.
        self.id = known.commit_no
        self._cache = known.cache
        self._asking = asking
        # What the server was asked for, for whoever commits next.
        self.seen: dict[bytes, bytes | None] = {}
        self.read = False

    def get(self, key: bytes) -> bytes | None:
        self.read = True
        value = self._cache.rows.get(key, _UNKNOWN)
        if value is not _UNKNOWN:
            return value  # type: ignore[return-value]
        if key not in self.seen:
            self.seen.update(self._asking.get([key]))
        return self.seen[key]

    def prefetch(self, keys: Iterable[bytes]) -> None:
        known, seen = self._cache.rows, self.seen
        wanted = [key for key in keys if key not in known and key not in seen]
        if wanted:
            seen.update(self._asking.get(wanted))

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        self.read = True
        with self._cache.lock:
            rows = self._cache.scan(lo, hi, limit, reverse)
        if rows is None:
            rows = self._asking.scan(lo, hi, limit, reverse)
            if len(rows) <= SEEN_MAX:
                self.seen.update(rows)
        return rows

    def current(self) -> bool:
        """Whether everything that was read is as it is now, as far as that can be found out."""
        try:
            return not self.read or self._asking.last() == self.id
        except (HoldfastError, psycopg.Error):
            return False


_UNKNOWN = object()
