"""The rows of a store as they are going to be after recovery: one commit of the file, and the changes behind it.

Nothing is written to look at them.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.store.api import Row
from holdfast.store.pages import Pages


class View:
    def __init__(self, pages: Pages, changes: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.pages = pages
        self._changed = dict(changes)

    def get(self, key: bytes) -> bytes | None:
        return self._changed[key] if key in self._changed else self.pages.get(key)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        changed = {key: value for key, value in self._changed.items() if lo <= key < hi}
        # As many more as may have been deleted since.
        wanted = None if limit is None else limit + len(changed)
        rows = dict(self.pages.scan(lo, hi, wanted, reverse))
        for key, value in changed.items():
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        found = sorted(rows.items(), reverse=reverse)
        return found[:limit]
