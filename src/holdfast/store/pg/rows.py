"""Rows of a PostgreSQL store: how they are asked for, and the transaction of a commit.

What a commit writes is sent at its end, in one go; until then `PgTxn` holds it. What it reads comes from
the cache, and only what is not known there from the server. A scan asks for more than is wanted, and
beyond its end: whoever scans a queue up to now scans it again a moment later, up to then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.store import tuples
from holdfast.store.api import Row
from holdfast.store.pg.cache import UNKNOWN, Cache
from holdfast.store.pg.known import Known
from holdfast.store.pg.wire import Arrays, Asked, Connection, Counters, ask, ask_all
from holdfast.store.txn import merged, sort_in

# A scan asks for so many times what is wanted, and some; never for more than the latter beyond it.
AHEAD_TIMES = 4
AHEAD_ROWS = 64
AHEAD_ROWS_MAX = 2_000

GET = "SELECT value FROM holdfast_row WHERE key = %b"
GET_MANY = "SELECT key, value FROM holdfast_row WHERE key = ANY(%b)"
_SCAN = "SELECT key, value FROM holdfast_row WHERE key >= %b AND key < %b ORDER BY key {} LIMIT %b"
SCAN = _SCAN.format("ASC")
SCAN_BACK = _SCAN.format("DESC")

Range = tuple[bytes, bytes, int | None, bool]


def get(connection: Connection, key: bytes) -> bytes | None:
    row = connection.execute(GET, (key,), binary=True).fetchone()
    return None if row is None else row[0]


class Miss(BaseException):
    """Rows that are not known. It passes through operations, which may catch any `Exception`."""

    def __init__(self, keys: Sequence[bytes] = (), ranges: Sequence[Range] = ()) -> None:
        super().__init__()
        self.keys = keys
        self.ranges = ranges


class Reads:
    """Asks the server for what the cache does not know, and tells it to the cache."""

    def __init__(self, connection: Connection, known: Known, counters: Counters) -> None:
        self._connection = connection
        self._known = known
        self._cache = known.cache
        self._counters = counters
        # Whether what is not known is raised as a Miss, so that it is asked for together with others.
        self.gathering = False

    def get(self, key: bytes) -> bytes | None:
        if self.gathering:
            raise Miss([key])
        if self._cache.lost:
            self.fetch([key])
            known = self._cache.rows.get(key, UNKNOWN)
            if known is not UNKNOWN:
                return known
        self._counters.misses += 1
        since = self._known.commit_no
        rows = ask(self._connection, self._counters, GET, key)
        value: bytes | None = rows[0][0] if rows else None
        self._known.teach(since, {key: value})
        return value

    def fetch(self, keys: Sequence[bytes], ranges: Sequence[Range] = ()) -> None:
        """Get to know rows and ranges, in one round trip."""
        if self.gathering:
            raise Miss(keys, ranges)
        self._counters.misses += 1
        since = self._known.commit_no
        keys = self._known.with_lost(keys) if keys else keys
        with self._cache.lock:
            wider = [widened(self._cache, *one) for one in ranges]
        asked: list[Asked] = []
        if keys:
            asked.append((GET_MANY, (Arrays(keys),)))
        asked += [(SCAN_BACK if one[3] else SCAN, one[:3]) for one in wider]
        found = ask_all(self._connection, self._counters, asked)
        if keys:
            rows: dict[bytes, bytes | None] = dict.fromkeys(keys)
            rows.update(found.pop(0))
            self._known.teach(since, rows)
        for one, page in zip(wider, found, strict=True):
            self._known.teach_range(since, *covered(one, page))

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
            # Too large to be kept, or written by others meanwhile.
            statement = SCAN_BACK if reverse else SCAN
            rows = ask(self._connection, self._counters, statement, lo, hi, limit)
        return rows


def size_of(writes: Mapping[bytes, bytes | None]) -> int:
    return sum(map(len, writes)) + sum(len(value) for value in writes.values() if value)


def parts(rows: Mapping[bytes, bytes], size: int) -> list[dict[bytes, bytes]]:
    """Rows in parts of about that many bytes: one part at least, and one row in each if there is any."""
    made: list[dict[bytes, bytes]] = [{}]
    left = size
    for key, value in rows.items():
        left -= len(key) + len(value)
        if left < 0 and made[-1]:
            made.append({})
            left = size - len(key) - len(value)
        made[-1][key] = value
    return made


def covered(asked: Range, page: list[Row]) -> tuple[bytes, bytes, list[Row]]:
    """The range that a page shows in full, and its rows in order."""
    lo, hi, limit, reverse = asked
    if limit is not None and len(page) == limit:
        if reverse:
            lo = page[-1][0]
        else:
            hi = page[-1][0] + b"\x00"
    return lo, hi, page[::-1] if reverse else page


def widened(cache: Cache, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> Range:
    """What to ask for so that the next scan of the kind need not ask."""
    if reverse:
        return lo, hi, limit, reverse
    known = min(cache.known_from(lo), hi)
    if limit is None:
        return known, hi, None, False
    if hi.startswith(lo):
        # Up to a time, mostly: beyond it is what comes next.
        hi = max(hi, tuples.after(lo))
    lo = known
    ahead = min(limit * AHEAD_TIMES + AHEAD_ROWS, AHEAD_ROWS_MAX)
    return lo, hi, limit + ahead, False


class PgTxn:
    """The transaction of a commit: it sees its own writes, which are sent at its end."""

    def __init__(self, reads: Reads, cache: Cache, id: int) -> None:
        self.id = id
        self._reads = reads
        self._cache = cache
        self.writes: dict[bytes, bytes | None] = {}
        self._sorted: list[bytes] = []
        self._fresh: list[bytes] = []

    def get(self, key: bytes) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        known = self._cache.rows.get(key, UNKNOWN)
        return self._reads.get(key) if known is UNKNOWN else known

    def prefetch(self, keys: Iterable[bytes]) -> None:
        known, writes = self._cache.rows, self.writes
        wanted = [key for key in keys if key not in known and key not in writes]
        if wanted:
            self._reads.fetch(wanted)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        sort_in(self._sorted, self._fresh)
        return merged(self._reads.scan, self._sorted, self.writes, lo, hi, limit, reverse)

    def update(self, writes: dict[bytes, bytes | None]) -> None:
        self._fresh += [key for key in writes if key not in self.writes]
        self.writes.update(writes)
