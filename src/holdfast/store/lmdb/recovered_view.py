"""The recovered view: the rows of a store after recovery, computed from one commit of the file and the logged changes.

It writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.store.api import Row
from holdfast.store.lmdb.page_reader import PageReader


class RecoveredView:
    def __init__(self, pages: PageReader, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.pages = pages
        self._changes = dict(changes)

    def get(self, key: bytes) -> bytes | None:
        return self._changes[key] if key in self._changes else self.pages.get(key)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        changed = {key: value for key, value in self._changes.items() if lo <= key < hi}
        # The changes may delete that many of the rows.
        base_limit = None if limit is None else limit + len(changed)
        rows = dict(self.pages.scan(lo, hi, base_limit, reverse))
        for key, value in changed.items():
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        merged = sorted(rows.items(), reverse=reverse)
        return merged[:limit]
