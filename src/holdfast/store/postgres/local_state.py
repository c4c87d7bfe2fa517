"""The local state: a row cache plus the write sets of recent commits, used to validate reads and to invalidate rows.

Rows have the state of commit `commit_no` or of a newer commit. A use is validated by the number of its commit
(`engine`), or by a check that no later commit wrote its reads (`is_unchanged`). A row read from the server is cached
only if no applied commit has written it since the read began.

Thread-safe: every method takes the lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import Conflict
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.postgres.row_cache import TOO_LARGE, VALUE_BYTES_MAX, RowCache
from holdfast.store.requests import CommitRequest
from holdfast.store.validation import RecentCommits, WriteSet

# Bounds of one sync: remote commits read, and commits and keys whose rows are refreshed.
COMMITS_READ_MAX = 2_000
COMMITS_REFRESHED_MAX = 200
KEYS_REFRESHED_MAX = 2_000
# Fewer inserts are not worth a separate statement.
INSERTS_MIN = 32

# The commits since a position and their changed rows, in one statement, so that the rows have the state of the last
# of these commits. The result includes the last applied commit, which must be unchanged. One lookup per key keeps the
# planner from scanning all rows.
REMOTE_COMMITS = f"""
    WITH commits AS MATERIALIZED (
        SELECT no, at_ns, CASE WHEN no > %b THEN keys END AS keys
        FROM holdfast_commit WHERE no >= %b ORDER BY no LIMIT {COMMITS_READ_MAX})
    SELECT no, at_ns, keys, NULL::bytea, NULL::bytea, false FROM commits
    UNION ALL
    SELECT NULL, NULL, NULL, k, CASE WHEN octet_length(v) <= {VALUE_BYTES_MAX} THEN v END, v IS NOT NULL
    FROM (
        SELECT k, (SELECT value FROM holdfast_row WHERE key = k) AS v FROM (
            SELECT DISTINCT unnest(keys) AS k FROM commits
            WHERE no <= %b AND cardinality(keys) <= {KEYS_REFRESHED_MAX}) AS keys
        OFFSET 0) AS rows
"""


class HistoryGap(Exception):
    """The remote commits cannot be applied: the last applied commit is missing (pruned, or the server has another
    history), or there are too many newer ones."""


class SyncPosition(NamedTuple):
    """The position of the local state before a query for remote commits."""

    no: int
    at_ns: int
    fills: int

    @property
    def parameters(self) -> tuple[int, int, int]:
        """The parameters of the query."""
        return self.no, self.no, self.no + COMMITS_REFRESHED_MAX


class LocalState:
    def __init__(self) -> None:
        self.cache = RowCache()
        self.commit_no = 0
        # The time of the last commit.
        self.at_ns = 0
        self._recent_commits = RecentCommits(0)
        # The number of fills with rows that may be newer than `commit_no`, and how many of them precede the
        # last sync of remote commits.
        self._fills = 0
        self._confirmed_fills = 0

    def reset_to(self, no: int, at_ns: int) -> None:
        """Clear the state. Nothing is known about commits up to this one."""
        with self.cache.lock:
            self.cache.clear()
            self._recent_commits.reset_to(no)
            self.commit_no, self.at_ns = no, at_ns

    def clear_rows(self) -> None:
        with self.cache.lock:
            self.cache.clear()

    def record_own_commit(
        self, written: WriteSet, writes: Mapping[bytes, bytes | None], at_ns: int, fills: int
    ) -> None:
        """Record the next commit, made by this process after `fills` fills."""
        with self.cache.lock:
            # It was the next commit, so no remote commit has written any of these rows.
            self._confirmed_fills = max(self._confirmed_fills, fills)
            if self.commit_no >= written.id:
                return  # another thread already applied it as a remote commit
            self.cache.put(writes.items())
            self._recent_commits.add(written)
            self.commit_no, self.at_ns = written.id, at_ns

    def position(self) -> SyncPosition:
        with self.cache.lock:
            return SyncPosition(self.commit_no, self.at_ns, self._fills)

    @property
    def fills(self) -> int:
        """The number of fills with rows that may be newer than `commit_no`."""
        return self._fills

    @property
    def is_current(self) -> bool:
        """Whether no cached row is newer than `commit_no`."""
        return self._confirmed_fills == self._fills

    def apply_remote_commits(
        self, position: SyncPosition, rows: Sequence[Any], *, latest: bool
    ) -> bool:
        """Apply the remote commits since `position`. Return True if the meta row or marker may have changed.

        `latest`: the caller holds the commit lock, so there is no newer commit.
        """
        since = position.no
        commits = sorted(row[:3] for row in rows if row[0] is not None)
        with self.cache.lock:
            if since:
                if not commits or tuple(commits[0][:2]) != (since, position.at_ns):
                    raise HistoryGap
                commits = commits[1:]
            if len(commits) >= COMMITS_READ_MAX - 1 or (commits and commits[0][0] != since + 1):
                raise HistoryGap
            self._confirmed_fills = max(
                self._confirmed_fills, self._fills if latest else position.fills
            )
            if not commits or commits[-1][0] <= self.commit_no:
                return False
            rows_current = latest or since == self.commit_no
            store_changed = False
            for no, _, keys in commits:
                if no <= self.commit_no:
                    continue
                if keys is None:
                    self.cache.clear()
                    self._recent_commits.reset_to(no)
                    store_changed = True
                    continue
                if (
                    not rows_current
                    or no > since + COMMITS_REFRESHED_MAX
                    or len(keys) > KEYS_REFRESHED_MAX
                ):
                    self.cache.invalidate(keys)
                written = WriteSet(no)
                written.add(keys)
                self._recent_commits.add(written)
                store_changed = (
                    store_changed or schema.META_KEY in keys or schema.MARKER_KEY in keys
                )
            if rows_current:
                # Rows just written by other processes are usually needed next.
                self.cache.put(
                    (key, value if value is not None or not exists else TOO_LARGE)
                    for no, _, _, key, value, exists in rows
                    if no is None
                )
            # Set last: a reader that sees the number must see rows that are not older (see `cached_snapshot`).
            self.commit_no, self.at_ns = commits[-1][:2]
            return store_changed

    def check(self, request: CommitRequest, written: WriteSet) -> None:
        """Raise Conflict if a commit since the request's snapshot wrote its reads."""
        if request.reads or request.ranges:
            with self.cache.lock:
                self._recent_commits.check(request, written)

    def is_unchanged(
        self, since: int, reads: set[bytes], ranges: list[tuple[bytes, bytes]]
    ) -> bool:
        """Whether no applied commit after `since` wrote these keys or ranges."""
        try:
            self.check(CommitRequest(0, b"", since, reads=list(reads), ranges=ranges), WriteSet(0))
        except Conflict:
            return False
        return True

    def split_inserts(
        self, puts: dict[bytes, bytes]
    ) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """Split writes into upserts and probable inserts of new rows."""
        rows, invalidated = self.cache.rows, self.cache.invalidated
        inserts = {
            key: value
            for key, value in puts.items()
            # An update usually follows a read, so an uncached row is probably new. Large values are never cached.
            if rows.get(key) is None and key not in invalidated and len(value) <= VALUE_BYTES_MAX
        }
        if len(inserts) < INSERTS_MIN:
            return puts, {}
        return {key: value for key, value in puts.items() if key not in inserts}, inserts

    def with_invalidated(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return `keys` plus the keys that remote commits invalidated, and clear that set. One read fetches both."""
        if not self.cache.invalidated:
            return keys
        with self.cache.lock:
            invalidated, self.cache.invalidated = self.cache.invalidated, {}
        rows = self.cache.rows
        return [*keys, *(invalidated.keys() - rows.keys() - set(keys))]

    def fill(self, since: int, rows: Mapping[bytes, bytes | None]) -> None:
        """Cache rows that were read after commit `since` was applied."""
        with self.cache.lock:
            unwritten = self._recent_commits.unwritten_keys(rows, since)
            self.cache.put([(key, rows[key]) for key in unwritten])
            self._fills += 1

    def fill_range(self, since: int, lo: bytes, hi: bytes, rows: Sequence[Row]) -> None:
        """Cache all rows of a range, in order, read after commit `since` was applied."""
        with self.cache.lock:
            if self._recent_commits.is_range_unwritten(lo, hi, since):
                self.cache.put_range(lo, hi, rows)
                self._fills += 1
