"""What a transaction reads without a snapshot of its own: what this process knows, the server for the rest.

Each row is what it was after some commit that is not older than `id`. That is enough for whoever writes: the
commit finds out whether any of them was written after `id`, and then the transaction is run again. For whoever
only reads, `holds` says so: then everything it saw was there at once, after the commit `id`.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.store.api import Row
from holdfast.store.pg.cache import UNKNOWN
from holdfast.store.pg.known import Known
from holdfast.store.pg.readers import Asking
from holdfast.store.pg.rows import covered, widened

# A scan that finds more than this is a matter for a snapshot.
SCANNED_MAX = 2_000


class TooMuch(BaseException):
    """What is to be read is more than is worth keeping. It passes through whoever catches any `Exception`."""


class View:
    def __init__(self, known: Known, asking: Asking) -> None:
        # Noted before anything is read: what is read may be newer, never older.
        self.id = known.commit_no
        self._known = known
        self._asking = asking
        self.read = False
        # Whether the server was asked: then it may have told of commits that are not known here.
        self.asked = False

    def get(self, key: bytes) -> bytes | None:
        self.read = True
        value = self._known.cache.rows.get(key, UNKNOWN)
        if value is not UNKNOWN:
            return value
        return self._ask([key])[key]

    def prefetch(self, keys: Iterable[bytes]) -> None:
        known = self._known.cache.rows
        wanted = [key for key in keys if key not in known]
        if wanted:
            self._ask(wanted)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        self.read = True
        if lo >= hi:
            return []
        cache = self._known.cache
        with cache.lock:
            rows = cache.scan(lo, hi, limit, reverse)
            if rows is not None:
                return rows
            wider = widened(cache, lo, hi, limit, reverse)
        self.asked = True
        if limit is None or limit > SCANNED_MAX:
            return self._scan_whole(lo, hi, reverse)
        since = self._known.commit_no
        self._known.teach_range(since, *covered(wider, self._asking.scan(*wider)))
        with cache.lock:
            rows = cache.scan(lo, hi, limit, reverse)
        if rows is None:
            # Others wrote meanwhile, or it is too large to be kept.
            rows = self._asking.scan(lo, hi, limit, reverse)
        return rows

    def _scan_whole(self, lo: bytes, hi: bytes, reverse: bool) -> list[Row]:
        """A scan for as many as there are: mostly there are few, and then all of them are kept."""
        if self._asking.is_large(lo, hi):
            raise TooMuch
        since = self._known.commit_no
        rows = self._asking.scan(lo, hi, SCANNED_MAX + 1, reverse)
        if len(rows) > SCANNED_MAX:
            self._asking.note_large(lo, hi)
            raise TooMuch
        self._known.teach_range(since, lo, hi, rows[::-1] if reverse else rows)
        return rows

    def _ask(self, keys: list[bytes]) -> dict[bytes, bytes | None]:
        self.asked = True
        since = self._known.commit_no
        found = self._asking.get(self._known.with_lost(keys))
        self._known.teach(since, found)
        return found
