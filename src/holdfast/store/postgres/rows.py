"""Rows of a PostgreSQL store: the read statements and the transaction of a commit.

`PgTxn` buffers the writes of a commit, which are sent together at its end. It reads from the row cache and
fetches only cache misses from the server. A scan prefetches additional rows and reads beyond its end: a queue
that is scanned up to the current time is soon scanned again up to a later time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast import failpoints
from holdfast.store import tuples
from holdfast.store.api import Row
from holdfast.store.postgres.local_state import LocalState
from holdfast.store.postgres.row_cache import UNKNOWN, RowCache
from holdfast.store.postgres.statements import (
    ByteaArray,
    CommitCounters,
    PostgresConnection,
    Statement,
    run_pipelined,
    run_statement,
)
from holdfast.store.txn import insert_sorted, merged_scan

# The prefetch of a scan: a multiple of its limit plus a constant, bounded.
PREFETCH_TIMES = 4
PREFETCH_ROWS = 64
PREFETCH_ROWS_MAX = 2_000

GET = "SELECT value FROM holdfast_row WHERE key = %b"
GET_MANY = "SELECT key, value FROM holdfast_row WHERE key = ANY(%b)"
_SCAN = "SELECT key, value FROM holdfast_row WHERE key >= %b AND key < %b ORDER BY key {} LIMIT %b"
SCAN = _SCAN.format("ASC")
SCAN_BACK = _SCAN.format("DESC")
ROW_SIZES = (
    "SELECT key, octet_length(value) FROM holdfast_row WHERE key >= %b ORDER BY key LIMIT %b"
)

ScanRange = tuple[bytes, bytes, int | None, bool]


def read_row(connection: PostgresConnection, key: bytes) -> bytes | None:
    row = connection.execute(GET, (key,), binary=True).fetchone()
    return None if row is None else row[0]


class CacheMiss(BaseException):
    """A cache miss. A BaseException, because it must pass through operations that catch `Exception`."""

    def __init__(self, keys: Sequence[bytes] = (), ranges: Sequence[ScanRange] = ()) -> None:
        super().__init__()
        self.keys = keys
        self.ranges = ranges


class CommitReads:
    """Reads of a commit: fetches cache misses from the server and adds them to the cache."""

    def __init__(
        self, connection: PostgresConnection, local_state: LocalState, counters: CommitCounters
    ) -> None:
        self._connection = connection
        self._local_state = local_state
        self._cache = local_state.cache
        self._counters = counters
        # Whether a miss raises CacheMiss, so that the batch fetches several misses together.
        self.raises_misses = False

    def get(self, key: bytes) -> bytes | None:
        if self.raises_misses:
            raise CacheMiss([key])
        if self._cache.invalidated:
            self.fetch([key])
            cached = self._cache.rows.get(key, UNKNOWN)
            if cached is not UNKNOWN:
                return cached
        self._counters.misses += 1
        since = self._local_state.commit_no
        rows = run_statement(self._connection, self._counters, GET, key)
        value: bytes | None = rows[0][0] if rows else None
        if failpoints.armed:
            failpoints.hit("postgres.row_read", key)
        self._local_state.fill(since, {key: value})
        return value

    def fetch(self, keys: Sequence[bytes], ranges: Sequence[ScanRange] = ()) -> None:
        """Fetch rows and ranges into the cache in one round trip."""
        if self.raises_misses:
            raise CacheMiss(keys, ranges)
        self._counters.misses += 1
        since = self._local_state.commit_no
        keys = self._local_state.with_invalidated(keys) if keys else keys
        with self._cache.lock:
            widened_ranges = [widened_range(self._cache, *scan_range) for scan_range in ranges]
        statements: list[Statement] = []
        if keys:
            statements.append((GET_MANY, (ByteaArray(keys),)))
        statements += [
            (SCAN_BACK if scan_range[3] else SCAN, scan_range[:3]) for scan_range in widened_ranges
        ]
        results = run_pipelined(self._connection, self._counters, statements)
        if keys:
            rows: dict[bytes, bytes | None] = dict.fromkeys(keys)
            rows.update(results.pop(0))
            self._local_state.fill(since, rows)
        for scan_range, page in zip(widened_ranges, results, strict=True):
            self._local_state.fill_range(since, *covered_range(scan_range, page))

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        if lo >= hi:
            return []
        with self._cache.lock:
            rows = self._cache.scan(lo, hi, limit, reverse)
        if rows is None:
            self.fetch((), [(lo, hi, limit, reverse)])
            with self._cache.lock:
                rows = self._cache.scan(lo, hi, limit, reverse)
        if rows is None:
            # Too large to be cached, or written by another process meanwhile.
            statement = SCAN_BACK if reverse else SCAN
            rows = run_statement(self._connection, self._counters, statement, lo, hi, limit)
        return rows


def written_bytes(writes: Mapping[bytes, bytes | None]) -> int:
    return sum(map(len, writes)) + sum(len(value) for value in writes.values() if value)


def split_by_size(rows: Mapping[bytes, bytes], size: int) -> list[dict[bytes, bytes]]:
    """Split rows into parts of about `size` bytes: at least one part, each with at least one row if there is any."""
    chunks: list[dict[bytes, bytes]] = [{}]
    remaining = size
    for key, value in rows.items():
        remaining -= len(key) + len(value)
        if remaining < 0 and chunks[-1]:
            chunks.append({})
            remaining = size - len(key) - len(value)
        chunks[-1][key] = value
    return chunks


def covered_range(scan_range: ScanRange, page: list[Row]) -> tuple[bytes, bytes, list[Row]]:
    """The range that a page covers completely, and its rows in order."""
    lo, hi, limit, reverse = scan_range
    if limit is not None and len(page) == limit:
        if reverse:
            lo = page[-1][0]
        else:
            hi = page[-1][0] + b"\x00"
    return lo, hi, page[::-1] if reverse else page


def widened_range(
    cache: RowCache, lo: bytes, hi: bytes, limit: int | None, reverse: bool
) -> ScanRange:
    """Widen a scan with a prefetch, so that the next similar scan hits the cache."""
    if reverse:
        return lo, hi, limit, reverse
    covered_until = min(cache.covered_until(lo), hi)
    if limit is None:
        return covered_until, hi, None, False
    if hi.startswith(lo):
        # Typically a scan up to a time: the following rows are needed next.
        hi = max(hi, tuples.prefix_end(lo))
    lo = covered_until
    ahead = min(limit * PREFETCH_TIMES + PREFETCH_ROWS, PREFETCH_ROWS_MAX)
    return lo, hi, limit + ahead, False


class PgTxn:
    """The transaction of a commit. It sees its own writes and sends them at its end."""

    def __init__(self, reads: CommitReads, cache: RowCache, id: int) -> None:
        self.id = id
        self._reads = reads
        self._cache = cache
        self.writes: dict[bytes, bytes | None] = {}
        self._sorted_keys: list[bytes] = []
        self._unsorted: list[bytes] = []

    def get(self, key: bytes) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        cached = self._cache.rows.get(key, UNKNOWN)
        return self._reads.get(key) if cached is UNKNOWN else cached

    def prefetch(self, keys: Iterable[bytes]) -> None:
        known, writes = self._cache.rows, self.writes
        missing = [key for key in keys if key not in known and key not in writes]
        if missing:
            self._reads.fetch(missing)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        insert_sorted(self._sorted_keys, self._unsorted)
        return merged_scan(self._reads.scan, self._sorted_keys, self.writes, lo, hi, limit, reverse)

    def update(self, writes: dict[bytes, bytes | None]) -> None:
        self._unsorted += [key for key in writes if key not in self.writes]
        self.writes.update(writes)
