"""The cached snapshot: reads of a transaction from the local state, with the server as fallback.

Each row has the state of commit `id` or of a newer commit. That suffices for a writing transaction: the commit
validates that no commit after `id` wrote its reads, and otherwise the transaction runs again. For a read-only
transaction `LocalState.is_unchanged` makes the same check. If it passes, all reads are consistent as of commit `id`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.store.api import Row
from holdfast.store.postgres.local_state import LocalState
from holdfast.store.postgres.read_pool import CoalescedReads
from holdfast.store.postgres.row_cache import UNKNOWN
from holdfast.store.postgres.rows import covered_range, widened_range

# A larger scan runs on a server snapshot.
SCANNED_MAX = 2_000


class ScanTooLarge(BaseException):
    """A scan too large for the row cache. A BaseException, because it must pass through code that catches
    `Exception`."""


class CachedSnapshot:
    def __init__(self, local_state: LocalState, server_reads: CoalescedReads) -> None:
        # Set before the first read: rows may be newer than this commit, never older.
        self.id = local_state.commit_no
        self._local_state = local_state
        self._server_reads = server_reads
        self.has_read = False
        # Whether the server was read: its rows may include commits not applied here.
        self.used_server = False

    def get(self, key: bytes) -> bytes | None:
        self.has_read = True
        value = self._local_state.cache.rows.get(key, UNKNOWN)
        if value is not UNKNOWN:
            return value
        return self._fetch([key])[key]

    def prefetch(self, keys: Iterable[bytes]) -> None:
        cached = self._local_state.cache.rows
        missing = [key for key in keys if key not in cached]
        if missing:
            self._fetch(missing)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        self.has_read = True
        if lo >= hi:
            return []
        cache = self._local_state.cache
        with cache.lock:
            rows = cache.scan(lo, hi, limit, reverse)
            if rows is not None:
                return rows
            scan_range = widened_range(cache, lo, hi, limit, reverse)
        self.used_server = True
        if limit is None or limit > SCANNED_MAX:
            return self._scan_whole(lo, hi, reverse)
        since = self._local_state.commit_no
        self._local_state.fill_range(
            since, *covered_range(scan_range, self._server_reads.scan(*scan_range))
        )
        with cache.lock:
            rows = cache.scan(lo, hi, limit, reverse)
        if rows is None:
            # Written by another process meanwhile, or too large to be cached.
            rows = self._server_reads.scan(lo, hi, limit, reverse)
        return rows

    def _scan_whole(self, lo: bytes, hi: bytes, reverse: bool) -> list[Row]:
        """Scan a whole range. Most ranges are small and are cached completely."""
        if self._server_reads.is_large(lo, hi):
            raise ScanTooLarge
        since = self._local_state.commit_no
        rows = self._server_reads.scan(lo, hi, SCANNED_MAX + 1, reverse)
        if len(rows) > SCANNED_MAX:
            self._server_reads.note_large(lo, hi)
            raise ScanTooLarge
        self._local_state.fill_range(since, lo, hi, rows[::-1] if reverse else rows)
        return rows

    def _fetch(self, keys: list[bytes]) -> dict[bytes, bytes | None]:
        self.used_server = True
        since = self._local_state.commit_no
        rows = self._server_reads.get(self._local_state.with_invalidated(keys))
        self._local_state.fill(since, rows)
        return rows
