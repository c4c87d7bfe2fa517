"""Exclusive raw access to a store in PostgreSQL (see `store.admin.raw_access`).

The commit lock and the presence lock belong to the session of one connection. If the connection is
lost, the locks are lost and every further step fails: it never reconnects.

A moved store is closed in two ways: its marker refuses a new open, and a constraint on commit records
refuses commits of processes that already had it open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import psycopg
from psycopg import sql

from holdfast import codec
from holdfast.clock import SYSTEM, S
from holdfast.errors import NotFound, StoreBusy
from holdfast.store import schema
from holdfast.store.admin.raw_access import (
    END_KEY,
    FIRST_KEY,
    LOCK_POLL_S,
    LOCK_POLL_S_MAX,
    PAGE_BYTES,
    PAGE_ROWS,
    LastCommit,
    is_backend_row,
)
from holdfast.store.api import Row
from holdfast.store.postgres import presence, server
from holdfast.store.postgres.migrations import migrate
from holdfast.store.postgres.statements import PostgresConnection
from holdfast.store.postgres.store_clock import saved_ahead_ns
from holdfast.store.txn import BaseRows
from holdfast.store.urls import redact

# Fetches only the values of one page: the sizes are known without reading the values.
_PAGE = """
    SELECT key, value FROM (
        SELECT key, value, sum(octet_length(value)) OVER (ORDER BY key) - octet_length(value) AS ahead
        FROM (SELECT key, value FROM holdfast_row WHERE key > %b ORDER BY key LIMIT %b) AS next
    ) AS sized WHERE ahead < %b ORDER BY key
"""
_GET = "SELECT value FROM holdfast_row WHERE key = %b"
_SCAN = "SELECT key, value FROM holdfast_row WHERE key >= %b AND key < %b ORDER BY key {} LIMIT %b"
_PUT = """
    INSERT INTO holdfast_row (key, value) VALUES (%b, %b)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
_LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_ESTIMATE = "SELECT reltuples::bigint FROM pg_class WHERE oid = 'holdfast_row'::regclass"
_RECORD = "INSERT INTO holdfast_commit (no, at_ns, client, keys) VALUES (%s, %s, '', NULL)"
_REFUSE_COMMITS = "ALTER TABLE holdfast_commit ADD CONSTRAINT {} CHECK (no < 0) NOT VALID"


class PostgresRawStore:
    def __init__(self, url: str, *, create: bool, lock_wait_s: float) -> None:
        self.url = redact(url)
        self._conninfo = server.build_conninfo(url)
        self._connection = server.connect(self._conninfo)
        # Identifies this session in StoreBusy errors.
        self.session = self._connection.info.backend_pid
        try:
            with self._translate_errors():
                row = self._connection.execute("SELECT to_regclass('holdfast_row')").fetchone()
                # Whether the relations exist. They are created together with the marker of a copy.
                self._has_relations = row is not None and row[0] is not None
                if not self._has_relations and not create:
                    raise NotFound(what="store", url=self.url)
                if self._has_relations:
                    migrate(self._connection, bootstrap=False)
                    self._lock_exclusively(lock_wait_s)
        except BaseException:
            self._connection.close()
            raise

    def marker(self) -> bytes | None:
        return self._get(schema.MARKER_KEY)

    def meta(self) -> schema.StoreMeta | None:
        found = self._get(schema.META_KEY)
        return None if found is None else codec.unpack_as(schema.StoreMeta, found)

    def last_commit(self) -> LastCommit:
        meta = self.meta()
        floor_ns = 0 if meta is None else meta.floor_ns
        with self._translate_errors():
            row = self._connection.execute(_LAST).fetchone() if self._has_relations else None
        return (
            LastCommit(0, floor_ns)
            if row is None
            else LastCommit(int(row[0]), max(int(row[1]), floor_ns))
        )

    def now_ns(self) -> int:
        with self._translate_errors():
            row = self._connection.execute(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
            ).fetchone()
        assert row is not None
        return max(int(row[0]) * 1000 - saved_ahead_ns(self.meta()), self.last_commit().at_ns)

    def estimate_rows(self) -> int | None:
        with self._translate_errors():
            row = self._connection.execute(_ESTIMATE).fetchone() if self._has_relations else None
        return None if row is None or row[0] < 0 else int(row[0])

    def last_key(self) -> bytes:
        if not self._has_relations:
            return b""
        with self.open_rows() as base:
            found = base.scan(FIRST_KEY, END_KEY, 4, True)
        return next((key for key, _ in found if not is_backend_row(key)), b"")

    @contextmanager
    def open_rows(self) -> Iterator[BaseRows]:
        # No other process commits, so consecutive statements see one state.
        with self._translate_errors():
            yield _ConnectionRows(self._connection)

    def pages(self, after: bytes) -> Iterator[list[Row]]:
        while True:
            with self._translate_errors():
                found = self._connection.execute(
                    _PAGE, (after, PAGE_ROWS, PAGE_BYTES), binary=True
                ).fetchall()
            if not found:
                return
            after = found[-1][0]
            page = [(key, value) for key, value in found if not is_backend_row(key)]
            if page:
                yield page

    def put(self, rows: list[Row]) -> None:
        with (
            self._translate_errors(),
            self._connection.cursor() as cursor,
            cursor.copy("COPY holdfast_row (key, value) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(["bytea", "bytea"])
            for row in rows:
                copy.write_row(row)

    def apply_changes(self, rows: Mapping[bytes, bytes | None]) -> None:
        deletes = [(key,) for key, value in rows.items() if value is None]
        with (
            self._translate_errors(),
            self._connection.transaction(),
            self._connection.cursor() as cursor,
        ):
            self._upsert([(key, value) for key, value in rows.items() if value is not None])
            if deletes:
                cursor.executemany("DELETE FROM holdfast_row WHERE key = %s", deletes)

    def clear(self, marker: bytes) -> None:
        with self._translate_errors(), self._connection.transaction():
            migrate(self._connection, bootstrap=True)
            if not self._has_relations:
                self._lock_exclusively(0.0)
                self._require_no_rows()
            self._connection.execute("TRUNCATE holdfast_row, holdfast_commit")
            self._upsert([(schema.MARKER_KEY, marker)])
        self._has_relations = True

    def finish(self, marker: bytes, meta: schema.StoreMeta, last: LastCommit) -> None:
        rows = [(schema.META_KEY, codec.pack(meta)), (schema.MARKER_KEY, marker)]
        with self._translate_errors(), self._connection.transaction():
            self._upsert(rows)
            self._connection.execute("TRUNCATE holdfast_commit")
            # Commit numbers continue after this record. It needs no keys: no client has cached rows.
            self._connection.execute(_RECORD, (last.commit_no, last.at_ns))
            # The planner has no statistics of these rows yet.
            self._connection.execute("ANALYZE holdfast_row")

    def write_marker(self, marker: bytes) -> None:
        with self._translate_errors():
            self._upsert([(schema.MARKER_KEY, marker)])

    def mark_moved(self, marker: bytes) -> None:
        with self._translate_errors(), self._connection.transaction():
            self._upsert([(schema.MARKER_KEY, marker)])
            statement = sql.SQL(_REFUSE_COMMITS).format(sql.Identifier(server.MOVED_CONSTRAINT))
            self._connection.execute(statement)

    def close(self) -> None:
        # The server may detect the end of the session late. Unlock now, so that the next open succeeds.
        with contextlib.suppress(psycopg.Error):
            self._connection.execute("SELECT pg_advisory_unlock_all()")
        self._connection.close()

    # -- inside ----------------------------------------------------------------------------------

    def _translate_errors(self) -> AbstractContextManager[None]:
        return server.translate_errors(self._conninfo)

    def _lock_exclusively(self, lock_wait_s: float) -> None:
        """Take the exclusive locks, waiting for the sessions of exited processes to end."""
        lock = server.commit_lock_key(self._connection)
        deadline_ns = SYSTEM.mono_ns() + int(lock_wait_s * S)
        poll_s = LOCK_POLL_S
        while True:
            try:
                presence.lock_exclusive(self._connection, lock)
                break
            except StoreBusy as busy:
                if SYSTEM.mono_ns() >= deadline_ns:
                    raise StoreBusy(url=self.url, **busy.fields) from None
                SYSTEM.sleep(poll_s)
                poll_s = min(poll_s * 1.5, LOCK_POLL_S_MAX)
        # Wait for a running commit whose session was cut off.
        self._connection.execute("SELECT pg_advisory_lock(%s::bigint)", (lock,))

    def _require_no_rows(self) -> None:
        row = self._connection.execute("SELECT EXISTS (SELECT FROM holdfast_row)").fetchone()
        if row is not None and row[0]:
            raise StoreBusy(url=self.url, why="another process has just created a store here")

    def _get(self, key: bytes) -> bytes | None:
        if not self._has_relations:
            return None
        with self.open_rows() as base:
            return base.get(key)

    def _upsert(self, rows: list[Row]) -> None:
        for row in rows:
            self._connection.execute(_PUT, row)


class _ConnectionRows:
    def __init__(self, connection: PostgresConnection) -> None:
        self._connection = connection

    def get(self, key: bytes) -> bytes | None:
        row = self._connection.execute(_GET, (key,), binary=True).fetchone()
        return None if row is None else row[0]

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        statement = _SCAN.format("DESC" if reverse else "ASC")
        return self._connection.execute(statement, (lo, hi, limit), binary=True).fetchall()
