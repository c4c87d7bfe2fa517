"""Rows of a PostgreSQL store: a snapshot to read from, and the transaction of a commit.

A commit holds an advisory lock from its first statement to its end, so commits of all processes
follow each other, as they do in the embedded store. That makes a cache possible: a row that this
process has read or written is what it was unless another process has committed since, and each
commit says which keys it wrote. What a commit writes is sent at its end, in one go.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from holdfast.store.api import Row
from holdfast.store.pg.server import Connection

CACHE_ROWS_MAX = 200_000
CACHE_VALUE_BYTES_MAX = 64 * 1024

GET = "SELECT value FROM holdfast_row WHERE key = %b"
GET_MANY = "SELECT key, value FROM holdfast_row WHERE key = ANY(%b::bytea[])"
_SCAN = "SELECT key, value FROM holdfast_row WHERE key >= %b AND key < %b ORDER BY key {} LIMIT %b"
SCAN = _SCAN.format("ASC")
SCAN_BACK = _SCAN.format("DESC")
UPSERT = """
    INSERT INTO holdfast_row (key, value) SELECT * FROM unnest(%b::bytea[], %b::bytea[])
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
DELETE = "DELETE FROM holdfast_row WHERE key = ANY(%b::bytea[])"


def get(connection: Connection, key: bytes) -> bytes | None:
    row = connection.execute(GET, (key,), binary=True).fetchone()
    return None if row is None else row[0]


def get_many(connection: Connection, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
    found: dict[bytes, bytes | None] = dict.fromkeys(keys)
    found.update(connection.execute(GET_MANY, (list(keys),), binary=True).fetchall())
    return found


def scan(
    connection: Connection, lo: bytes, hi: bytes, limit: int | None, reverse: bool
) -> list[Row]:
    if lo >= hi:
        return []
    statement = SCAN_BACK if reverse else SCAN
    return connection.execute(statement, (lo, hi, limit), binary=True).fetchall()


class Cache:
    """Rows as they are after the last commit that this process knows of. None: there is no such row."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}

    def keep(self, rows: Iterable[tuple[bytes, bytes | None]]) -> None:
        held = self.rows
        for key, value in rows:
            if value is None or len(value) <= CACHE_VALUE_BYTES_MAX:
                held[key] = value
            else:
                held.pop(key, None)
        if len(held) > CACHE_ROWS_MAX:
            # The oldest half: a dict keeps the order in which keys came.
            for key in list(held)[: len(held) // 2]:
                del held[key]

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Somebody else wrote these; None: who knows which."""
        if keys is None:
            self.rows.clear()
            return
        for key in keys:
            self.rows.pop(key, None)


class PgTxn:
    """The transaction of a commit: it sees its own writes, which are sent by `flush`."""

    def __init__(self, connection: Connection, cache: Cache, id: int) -> None:
        self.id = id
        self._connection = connection
        self._cache = cache
        self.writes: dict[bytes, bytes | None] = {}
        self._sorted: list[bytes] = []

    def get(self, key: bytes) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        held = self._cache.rows
        if key in held:
            return held[key]
        value = get(self._connection, key)
        self._cache.keep([(key, value)])
        return value

    def prefetch(self, keys: Iterable[bytes]) -> None:
        held = self._cache.rows
        wanted = [key for key in keys if key not in held and key not in self.writes]
        if wanted:
            self._cache.keep(get_many(self._connection, wanted).items())

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        own = self._sorted[bisect_left(self._sorted, lo) : bisect_left(self._sorted, hi)]
        if not own:
            return scan(self._connection, lo, hi, limit, reverse)
        # Deletions may hide that many rows below, so as many more are fetched.
        hidden = sum(1 for key in own if self.writes[key] is None)
        more = None if limit is None else limit + hidden
        rows: dict[bytes, bytes] = dict(scan(self._connection, lo, hi, more, reverse))
        for key in own:
            value = self.writes[key]
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        merged = sorted(rows.items(), reverse=reverse)
        return merged if limit is None else merged[:limit]

    def put_many(self, rows: Iterable[Row]) -> None:
        for key, value in rows:
            self._set(key, value)

    def delete(self, key: bytes) -> None:
        self._set(key, None)

    def _set(self, key: bytes, value: bytes | None) -> None:
        if key not in self.writes:
            insort(self._sorted, key)
        self.writes[key] = value

    def flush(self) -> None:
        """Send what was written. Inside a pipeline nothing is waited for."""
        puts = [(key, value) for key, value in self.writes.items() if value is not None]
        deletes = [key for key, value in self.writes.items() if value is None]
        if puts:
            keys, values = zip(*puts, strict=True)
            self._connection.execute(UPSERT, (list(keys), list(values)), binary=True)
        if deletes:
            self._connection.execute(DELETE, (deletes,), binary=True)

    def commit(self) -> None:
        raise AssertionError("the commit is the engine's")

    def abort(self) -> None:
        raise AssertionError("the commit is the engine's")


class Snapshot:
    """Rows as they were after one commit; opened when the first is read."""

    def __init__(self, borrow: Any) -> None:
        self._borrow = borrow
        self._lent: Any = None
        self._connection: Connection | None = None
        self._id = 0

    @property
    def id(self) -> int:
        """The last commit it has seen; 0 if nothing was read, and so nothing can be out of date."""
        return self._id

    def get(self, key: bytes) -> bytes | None:
        return get(self._open(), key)

    def prefetch(self, keys: Iterable[bytes]) -> None:
        return

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        return scan(self._open(), lo, hi, limit, reverse)

    def _open(self) -> Connection:
        if self._connection is None:
            self._lent = self._borrow()
            connection: Connection = self._lent.__enter__()
            try:
                with connection.pipeline():
                    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                    found = connection.execute("SELECT coalesce(max(no), 0) FROM holdfast_commit")
                    row = found.fetchone()
            except BaseException as error:
                self._lent.__exit__(type(error), error, error.__traceback__)
                raise
            assert row is not None
            self._id = int(row[0])
            self._connection = connection
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                connection.execute("COMMIT")
            except psycopg.Error as error:
                self._lent.__exit__(type(error), error, error.__traceback__)
            else:
                self._lent.__exit__(None, None, None)
