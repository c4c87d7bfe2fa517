"""The read pool: a bounded number of connections for reads, shared by all threads and replaced when lost.

- `ServerSnapshot` is a read-only transaction: rows as of one commit.
- `CoalescedReads` combines concurrent requests of many threads into one statement: it reads rows, or refreshes the
  local state with remote commits. Requests that arrive during a statement share the next one.

The end of a read-only transaction needs no wait: the pool sends COMMIT and reads its answer when the connection
is used next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.generators import fetch
from psycopg.pq import ExecStatus

from holdfast import failpoints
from holdfast.errors import StoreClosed
from holdfast.store.api import Row
from holdfast.store.coalescer import CoalescedCall, Coalescer
from holdfast.store.postgres import server
from holdfast.store.postgres.local_state import HistoryGap
from holdfast.store.postgres.rows import GET_MANY, SCAN, SCAN_BACK
from holdfast.store.postgres.server import PostgresUnreachable
from holdfast.store.postgres.statements import ByteaArray, PostgresConnection

READ_CONNECTIONS_MAX = 8
BORROW_WAIT_S = 20.0

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LAST = "SELECT coalesce(max(no), 0) FROM holdfast_commit"
_GET = "SELECT value FROM holdfast_row WHERE key = %b"


class ReadPool:
    """A pool of a bounded number of connections. One thread at a time borrows a connection."""

    def __init__(self, conninfo: str, outage: server.Outage) -> None:
        self._conninfo = conninfo
        self._outage = outage
        self._free = threading.BoundedSemaphore(READ_CONNECTIONS_MAX)
        self._idle: list[PostgresConnection] = []
        self._closed = False

    def borrow(self) -> PostgresConnection:
        if not self._free.acquire(timeout=BORROW_WAIT_S):
            raise PostgresUnreachable(why=f"all {READ_CONNECTIONS_MAX} read connections are in use")
        try:
            if self._closed:
                raise StoreClosed(why="closed during a read")
            while self._idle:
                connection = self._idle.pop()
                if _finish_commit(connection):
                    return connection
                connection.close()
            with self._outage:
                connection = server.connect(self._conninfo, self._outage.shutdown_deadline)
            connection.answer_timeout_s = server.READ_ANSWER_S
            return connection
        except BaseException:
            self._free.release()
            raise

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[PostgresConnection]:
        connection = self.borrow()
        reusable = False
        try:
            yield connection
            reusable = True
        finally:
            self.release(connection, reusable=reusable)

    def fetch_all(self, statement: str, values: Sequence[Any]) -> list[Any]:
        if failpoints.armed:
            failpoints.hit("postgres.fetch", self, statement)
        with self.borrowed() as connection:
            return connection.execute(statement, values, binary=True).fetchall()

    def release(self, connection: PostgresConnection, *, reusable: bool) -> None:
        """Return a connection. `reusable`: it is outside a transaction, or COMMIT was sent."""
        if reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
            if not self._closed:
                # The cause probably affects the idle connections too.
                self._close_idle()
        self._free.release()

    def close(self) -> None:
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


class ServerSnapshot:
    """Rows as of one commit. The first read opens the transaction.

    The statement that fixes the snapshot also reads the number of the last commit. Commits are serial, so
    the rows show exactly the state of that commit.
    """

    def __init__(self, pool: ReadPool) -> None:
        self._pool = pool
        self._connection: PostgresConnection | None = None
        # The commit of the snapshot; 0 before the first read, when nothing can be stale.
        self.id = 0
        # The rows read, to be added to the row cache.
        self.rows_read: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> bytes | None:
        rows = self._fetch(_GET, (key,))
        value: bytes | None = rows[0][0] if rows else None
        self.rows_read[key] = value
        return value

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: a snapshot has no row cache."""

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        if lo >= hi:
            return []
        rows = self._fetch(SCAN_BACK if reverse else SCAN, (lo, hi, limit))
        if len(rows) <= ROWS_KEPT_MAX:
            self.rows_read.update(rows)
        return rows

    def close(self) -> None:
        if self._connection is None or self._connection.is_forked:
            return
        connection, self._connection = self._connection, None
        reusable = False
        try:
            if not connection.closed:
                connection.pgconn.send_query(b"COMMIT")
                connection.pgconn.flush()
                reusable = True
        except psycopg.Error:
            pass
        finally:
            self._pool.release(connection, reusable=reusable)

    def _fetch(self, statement: str, values: Sequence[object]) -> list[tuple[bytes, bytes]]:
        if self._connection is not None:
            return self._connection.execute(statement, values, binary=True).fetchall()
        connection = self._pool.borrow()
        try:
            with connection.pipeline():
                connection.execute(_BEGIN)
                last = connection.execute(_LAST, binary=True)
                found = connection.execute(statement, values, binary=True)
        except BaseException:
            self._pool.release(connection, reusable=False)
            raise
        self._connection = connection
        [(self.id,)] = last.fetchall()
        return found.fetchall()


# Scans with more rows are not added to the row cache.
ROWS_KEPT_MAX = 1_000
# Bound of the remembered large ranges.
LARGE_RANGES_MAX = 1_000


class CoalescedReads:
    """Coalesced reads of latest rows without a common snapshot. Callers validate the rows themselves."""

    def __init__(
        self, pool: ReadPool, apply_remote_commits: Callable[[PostgresConnection, bool], None]
    ) -> None:
        """`apply_remote_commits` syncs the local state (`PostgresSession.refresh`)."""
        self._pool = pool
        self._apply_remote_commits = apply_remote_commits
        # Ranges that had too many rows to cache in their last scan.
        self._large_ranges: dict[tuple[bytes, bytes], None] = {}
        self._gets = Coalescer(self._get_all, _to_read_error)
        self._refreshes = Coalescer(self._refresh, _to_read_error)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
        request = _RowsRequest(keys)
        self._gets.run(request)
        return request.rows

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        return self._pool.fetch_all(SCAN_BACK if reverse else SCAN, (lo, hi, limit))

    def is_large(self, lo: bytes, hi: bytes) -> bool:
        return (lo, hi) in self._large_ranges

    def note_large(self, lo: bytes, hi: bytes) -> None:
        if len(self._large_ranges) >= LARGE_RANGES_MAX:
            self._large_ranges.clear()
        self._large_ranges[lo, hi] = None

    def refresh(self) -> None:
        """Apply every commit made before this call."""
        if failpoints.armed:
            failpoints.hit("postgres.refresh", self)
        self._refreshes.run(CoalescedCall())

    def _get_all(self, requests: Sequence[_RowsRequest]) -> None:
        keys = list(dict.fromkeys(key for request in requests for key in request.keys))
        rows = dict(self._pool.fetch_all(GET_MANY, (ByteaArray(keys),)))
        for request in requests:
            request.rows = {key: rows.get(key) for key in request.keys}

    def _refresh(self, requests: Sequence[CoalescedCall]) -> None:
        try:
            with self._pool.borrowed() as connection:
                self._apply_remote_commits(connection, False)
        except HistoryGap:
            # The pool has closed all connections, so the next one is new and trusted.
            with self._pool.borrowed() as connection:
                self._apply_remote_commits(connection, True)


class _RowsRequest(CoalescedCall):
    __slots__ = ("keys", "rows")

    def __init__(self, keys: Sequence[bytes]) -> None:
        super().__init__()
        self.keys = keys
        self.rows: dict[bytes, bytes | None] = {}


def _to_read_error(error: BaseException) -> Exception:
    """The error of the threads whose leader failed or was interrupted."""
    if isinstance(error, Exception):
        return error
    return PostgresUnreachable(why="the thread that read for this one was interrupted")


def _finish_commit(connection: PostgresConnection) -> bool:
    """Read the answer of the COMMIT that was sent on release, if any. False if the connection is unusable."""
    if connection.closed:
        return False
    try:
        # Not with `get_result`: it would wait without releasing the GIL.
        while (result := connection.wait(fetch(connection.pgconn))) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                return False
    except psycopg.Error:
        return False
    return True
