"""What a process knows of the store: rows, and the last commits by the keys that they wrote.

It is as of commit `commit_no`, or newer in places: whoever relies on it finds out before it matters, by the
number of its commit (`engine`), or by looking whether what it read was written since (`holds`). Rows that
somebody has read are kept if no commit that is known of has written them meanwhile.

Threads share it; every method takes the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
# Fewer new rows are not worth a statement of their own.
NEW_MIN = 32

# What was committed since, and the rows that it changed: one statement, so that the rows are as of the last of
# these commits. With the last one that is known, which must be the one that it was. One lookup for each key: no
# plan goes through all rows.
NEWS = f"""
    WITH commits AS MATERIALIZED (
        SELECT no, at_ns, CASE WHEN no > %b THEN keys END AS keys
        FROM holdfast_commit WHERE no >= %b ORDER BY no LIMIT {SINCE_MAX})
    SELECT no, at_ns, keys, NULL::bytea, NULL::bytea, false FROM commits
    UNION ALL
    SELECT NULL, NULL, NULL, k, CASE WHEN octet_length(v) <= {VALUE_BYTES_MAX} THEN v END, v IS NOT NULL
    FROM (
        SELECT k, (SELECT value FROM holdfast_row WHERE key = k) AS v FROM (
            SELECT DISTINCT unnest(keys) AS k FROM commits
            WHERE no <= %b AND cardinality(keys) <= {REFRESHED_KEYS_MAX}) AS keys
        OFFSET 0) AS rows
"""


class Gap(Exception):
    """The last commit that is known is not there: it was forgotten, or the server has another history; or
    there are too many after it."""


class Asked(NamedTuple):
    """Where somebody was who asked what has been committed since."""

    no: int
    at_ns: int
    taught: int

    @property
    def values(self) -> tuple[int, int, int]:
        """Those of the question."""
        return self.no, self.no, self.no + REFRESHED_MAX


class Known:
    def __init__(self) -> None:
        self.cache = Cache()
        self.commit_no = 0
        # The time of the last commit.
        self.at_ns = 0
        self._ring = Ring(0)
        # How often rows were taken in that may be newer than `commit_no`, and how many of these times lie
        # before what was last heard of others' commits.
        self._taught = 0
        self._settled = 0

    def start_from(self, no: int, at_ns: int) -> None:
        """Of what was committed up to here nothing is known."""
        with self.cache.lock:
            self.cache.clear()
            self._ring.forget(no)
            self.commit_no, self.at_ns = no, at_ns

    def forget(self) -> None:
        with self.cache.lock:
            self.cache.clear()

    def committed(
        self, written: Written, writes: Mapping[bytes, bytes | None], at_ns: int, taught: int
    ) -> None:
        """This process has made the next commit, after what was `taught` by then."""
        with self.cache.lock:
            # It was the next: nobody had written any of that since.
            self._settled = max(self._settled, taught)
            if self.commit_no >= written.id:
                return  # somebody has heard of it before its own answer came
            self.cache.keep(writes.items())
            self._ring.add(written)
            self.commit_no, self.at_ns = written.id, at_ns

    def asking(self) -> Asked:
        with self.cache.lock:
            return Asked(self.commit_no, self.at_ns, self._taught)

    @property
    def taught(self) -> int:
        """How often rows were taken in that may be newer."""
        return self._taught

    @property
    def settled(self) -> bool:
        """Whether nothing here is newer than `commit_no`."""
        return self._settled == self._taught

    def catch_up(self, asked: Asked, news: Sequence[Any], *, latest: bool) -> bool:
        """Take in what the server said of commits from `asked` on; True: the store itself was changed.

        `latest`: nobody can have committed after it was asked.
        """
        since = asked.no
        commits = sorted(row[:3] for row in news if row[0] is not None)
        with self.cache.lock:
            if since:
                if not commits or tuple(commits[0][:2]) != (since, asked.at_ns):
                    raise Gap
                commits = commits[1:]
            if len(commits) >= SINCE_MAX - 1 or (commits and commits[0][0] != since + 1):
                raise Gap
            self._settled = max(self._settled, self._taught if latest else asked.taught)
            if not commits or commits[-1][0] <= self.commit_no:
                return False
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
                    for no, _, _, key, value, there in news
                    if no is None
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

    def new_among(self, puts: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """Rows that are written, and apart from them those that were not there before, most likely."""
        rows, lost = self.cache.rows, self.cache.lost
        new = {
            key: value
            for key, value in puts.items()
            # Whoever writes a row again has read it before. What is large is not kept, read or not.
            if rows.get(key) is None and key not in lost and len(value) <= VALUE_BYTES_MAX
        }
        if len(new) < NEW_MIN:
            return puts, {}
        return {key: value for key, value in puts.items() if key not in new}, new

    def with_lost(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Keys to ask for, and with them some that were known until others wrote them."""
        if not self.cache.lost:
            return keys
        with self.cache.lock:
            lost, self.cache.lost = self.cache.lost, {}
        rows = self.cache.rows
        return [*keys, *(lost.keys() - rows.keys() - set(keys))]

    def teach(self, since: int, rows: Mapping[bytes, bytes | None]) -> None:
        """Rows that were read after commit `since` was known."""
        with self.cache.lock:
            unchanged = self._ring.unchanged(rows, since)
            self.cache.keep([(key, rows[key]) for key in unchanged])
            self._taught += 1

    def teach_range(self, since: int, lo: bytes, hi: bytes, rows: Sequence[Row]) -> None:
        """All rows of a range, in order, read after commit `since` was known."""
        with self.cache.lock:
            if self._ring.untouched(lo, hi, since):
                self.cache.learn(lo, hi, rows)
                self._taught += 1
