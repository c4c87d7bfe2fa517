"""What a process knows of the store: rows, and the last commits by the keys that they wrote.

It is as of commit `commit_no`, or newer in places: whoever relies on it finds out before it matters, by the
number of its commit (`engine`), or by looking whether what it read was written since (`holds`). Rows that
somebody has read are kept if no commit that is known of has written them meanwhile.

Threads share it; every method takes the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import Conflict
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.applying import Ring, Written
from holdfast.store.engine import Request
from holdfast.store.pg.cache import LARGE, VALUE_BYTES_MAX, Cache

# Others' commits that are gone through, and those of them whose rows are asked for anew.
SINCE_MAX = 2_000
REFRESHED_MAX = 200
REFRESHED_KEYS_MAX = 2_000

SINCE = f"SELECT no, at_ns, keys FROM holdfast_commit WHERE no > %b ORDER BY no LIMIT {SINCE_MAX}"
# One lookup for each key: no plan goes through all rows.
CHANGED = f"""
    SELECT k, CASE WHEN octet_length(v) <= {VALUE_BYTES_MAX} THEN v END, v IS NOT NULL FROM (
        SELECT k, (SELECT value FROM holdfast_row WHERE key = k) AS v FROM (
            SELECT DISTINCT unnest(keys) AS k FROM holdfast_commit
            WHERE no > %b AND no <= %b AND cardinality(keys) <= {REFRESHED_KEYS_MAX}) AS keys
        OFFSET 0) AS rows
"""


class Gap(Exception):
    """Commits were forgotten before they were heard of, or there were too many."""


class Known:
    def __init__(self) -> None:
        self.cache = Cache()
        self.commit_no = 0
        # The time of the last commit.
        self.at_ns = 0
        self._ring = Ring(0)

    def start_from(self, no: int, at_ns: int) -> None:
        """Of what was committed up to here nothing is known."""
        with self.cache.lock:
            self.cache.clear()
            self._ring.forget(no)
            self.commit_no, self.at_ns = no, at_ns

    def forget(self) -> None:
        with self.cache.lock:
            self.cache.clear()

    def committed(self, written: Written, writes: Mapping[bytes, bytes | None], at_ns: int) -> None:
        """This process has made the next commit."""
        with self.cache.lock:
            if self.commit_no >= written.id:
                return  # somebody has heard of it before its own answer came
            self.cache.keep(writes.items())
            self._ring.add(written)
            self.commit_no, self.at_ns = written.id, at_ns

    def catch_up(
        self, since: int, commits: Sequence[Any], changed: Iterable[Any], *, latest: bool
    ) -> bool:
        """Take in what the server said of commits after `since`; True: the store itself was changed.

        `latest`: nobody can have committed after it was asked.
        """
        with self.cache.lock:
            if not commits or commits[-1][0] <= self.commit_no:
                return False
            if len(commits) >= SINCE_MAX or commits[0][0] != since + 1:
                raise Gap
            fresh = latest or since == self.commit_no
            again = False
            for no, _, keys in commits:
                if no <= self.commit_no:
                    continue
                if keys is None:
                    self.cache.clear()
                    self._ring.forget(no)
                    again = True
                    continue
                if not fresh or no > since + REFRESHED_MAX or len(keys) > REFRESHED_KEYS_MAX:
                    self.cache.forget(keys)
                written = Written(no)
                written.add(keys)
                self._ring.add(written)
                again = again or schema.META_KEY in keys or schema.MARKER_KEY in keys
            if fresh:
                # What others have written just now is what is needed next, more often than not.
                self.cache.keep(
                    (key, value if value is not None or not there else LARGE)
                    for key, value, there in changed
                )
            # Last of all: whoever reads the number reads rows that are not older (see `view`).
            self.commit_no, self.at_ns = commits[-1][:2]
            return again

    def check(self, request: Request, written: Written) -> None:
        """Raise Conflict if what a request has read was written since."""
        if request.reads or request.ranges:
            with self.cache.lock:
                self._ring.check(request, written)

    def holds(self, since: int, reads: set[bytes], ranges: list[tuple[bytes, bytes]]) -> bool:
        """Whether nothing of it was written since, as far as is known."""
        try:
            self.check(Request(0, b"", since, reads=list(reads), ranges=ranges), Written(0))
        except Conflict:
            return False
        return True

    def teach(self, since: int, rows: Mapping[bytes, bytes | None]) -> None:
        """Rows that were read after commit `since` was known."""
        with self.cache.lock:
            unchanged = self._ring.unchanged(rows, since)
            self.cache.keep([(key, rows[key]) for key in unchanged])

    def teach_range(self, since: int, lo: bytes, hi: bytes, rows: Sequence[Row]) -> None:
        """All rows of a range, in order, read after commit `since` was known."""
        with self.cache.lock:
            if self._ring.untouched(lo, hi, since):
                self.cache.learn(lo, hi, rows)
