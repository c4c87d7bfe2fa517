"""The place of a store in PostgreSQL, held by one process alone (see `store.places`).

The lock of the commit and that of being present belong to the session of one connection. If that is
lost, so are they, and with it every further step: it is never connected again.

A store that has moved is closed down twice over: by its marker, for those who open it, and by a
constraint that no further record of a commit fulfils, for those who have had it open.
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
from holdfast.store.api import Row
from holdfast.store.pg import presence, server
from holdfast.store.pg.migrations import migrate
from holdfast.store.pg.timing import ahead_of
from holdfast.store.pg.wire import Connection
from holdfast.store.places import END, FIRST, LOOK_S, PAGE_BYTES, PAGE_ROWS, Last, own
from holdfast.store.txn import Base
from holdfast.store.urls import shown

# Values are fetched for a page only: their sizes are known without reading them.
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
_ABOUT = "SELECT reltuples::bigint FROM pg_class WHERE oid = 'holdfast_row'::regclass"
_RECORD = "INSERT INTO holdfast_commit (no, at_ns, client, keys) VALUES (%s, %s, '', NULL)"
_CLOSE = "ALTER TABLE holdfast_commit ADD CONSTRAINT {} CHECK (no < 0) NOT VALID"


class PgPlace:
    def __init__(self, url: str, *, create: bool, patience_s: float) -> None:
        self.url = shown(url)
        self._conninfo = server.parse(url)
        self._connection = server.connect(self._conninfo)
        # By which others are told who has it.
        self.session = self._connection.info.backend_pid
        try:
            with self._typed():
                row = self._connection.execute("SELECT to_regclass('holdfast_row')").fetchone()
                # Whether the relations are there. They are made together with the marker of a copy.
                self._there = row is not None and row[0] is not None
                if not self._there and not create:
                    raise NotFound(what="store", url=self.url)
                if self._there:
                    migrate(self._connection, bootstrap=False)
                    self._be_alone(patience_s)
        except BaseException:
            self._connection.close()
            raise

    def marker(self) -> bytes | None:
        return self._get(schema.MARKER_KEY)

    def meta(self) -> schema.Meta | None:
        found = self._get(schema.META_KEY)
        return None if found is None else codec.unpack_as(schema.Meta, found)

    def last(self) -> Last:
        meta = self.meta()
        floor_ns = 0 if meta is None else meta.floor_ns
        with self._typed():
            row = self._connection.execute(_LAST).fetchone() if self._there else None
        return Last(0, floor_ns) if row is None else Last(int(row[0]), max(int(row[1]), floor_ns))

    def now_ns(self) -> int:
        with self._typed():
            row = self._connection.execute(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
            ).fetchone()
        assert row is not None
        return max(int(row[0]) * 1000 - ahead_of(self.meta()), self.last().at_ns)

    def about(self) -> int | None:
        with self._typed():
            row = self._connection.execute(_ABOUT).fetchone() if self._there else None
        return None if row is None or row[0] < 0 else int(row[0])

    def last_key(self) -> bytes:
        if not self._there:
            return b""
        with self.reading() as base:
            found = base.scan(FIRST, END, 4, True)
        return next((key for key, _ in found if not own(key)), b"")

    @contextmanager
    def reading(self) -> Iterator[Base]:
        # Nobody else commits, so statements one after the other see one state.
        with self._typed():
            yield _Rows(self._connection)

    def pages(self, after: bytes) -> Iterator[list[Row]]:
        while True:
            with self._typed():
                found = self._connection.execute(
                    _PAGE, (after, PAGE_ROWS, PAGE_BYTES), binary=True
                ).fetchall()
            if not found:
                return
            after = found[-1][0]
            page = [(key, value) for key, value in found if not own(key)]
            if page:
                yield page

    def put(self, rows: list[Row]) -> None:
        with (
            self._typed(),
            self._connection.cursor() as cursor,
            cursor.copy("COPY holdfast_row (key, value) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(["bytea", "bytea"])
            for row in rows:
                copy.write_row(row)

    def change(self, rows: Mapping[bytes, bytes | None]) -> None:
        gone = [(key,) for key, value in rows.items() if value is None]
        with self._typed(), self._connection.transaction(), self._connection.cursor() as cursor:
            self._upsert([(key, value) for key, value in rows.items() if value is not None])
            if gone:
                cursor.executemany("DELETE FROM holdfast_row WHERE key = %s", gone)

    def empty(self, marker: bytes) -> None:
        with self._typed(), self._connection.transaction():
            migrate(self._connection, bootstrap=True)
            if not self._there:
                self._be_alone(0.0)
                self._refuse_rows()
            self._connection.execute("TRUNCATE holdfast_row, holdfast_commit")
            self._upsert([(schema.MARKER_KEY, marker)])
        self._there = True

    def settle(self, marker: bytes, meta: schema.Meta, last: Last) -> None:
        rows = [(schema.META_KEY, codec.pack(meta)), (schema.MARKER_KEY, marker)]
        with self._typed(), self._connection.transaction():
            self._upsert(rows)
            self._connection.execute("TRUNCATE holdfast_commit")
            # Numbers go on after this one, which names no keys: whoever comes has read none.
            self._connection.execute(_RECORD, (last.commit_no, last.at_ns))
            # Nobody has told the planner of these rows yet.
            self._connection.execute("ANALYZE holdfast_row")

    def mark(self, marker: bytes) -> None:
        with self._typed():
            self._upsert([(schema.MARKER_KEY, marker)])

    def close_down(self, marker: bytes) -> None:
        with self._typed(), self._connection.transaction():
            self._upsert([(schema.MARKER_KEY, marker)])
            statement = sql.SQL(_CLOSE).format(sql.Identifier(server.MOVED))
            self._connection.execute(statement)

    def close(self) -> None:
        # The server notices the end of a session when it gets to it; whoever opens the store now should
        # not find it held.
        with contextlib.suppress(psycopg.Error):
            self._connection.execute("SELECT pg_advisory_unlock_all()")
        self._connection.close()

    # -- inside ----------------------------------------------------------------------------------

    def _typed(self) -> AbstractContextManager[None]:
        return server.typed(self._conninfo)

    def _be_alone(self, patience_s: float) -> None:
        """Sessions of processes that have just ended leave within moments."""
        lock = server.lock_key(self._connection)
        deadline_ns = SYSTEM.mono_ns() + int(patience_s * S)
        while True:
            try:
                presence.alone(self._connection, lock)
                break
            except StoreBusy as busy:
                if SYSTEM.mono_ns() >= deadline_ns:
                    raise StoreBusy(url=self.url, **busy.fields) from None
                SYSTEM.sleep(LOOK_S)
        # A commit that was under way when its session was cut off ends first.
        self._connection.execute("SELECT pg_advisory_lock(%s::bigint)", (lock,))

    def _refuse_rows(self) -> None:
        row = self._connection.execute("SELECT EXISTS (SELECT FROM holdfast_row)").fetchone()
        if row is not None and row[0]:
            raise StoreBusy(url=self.url, why="somebody made a store here just now")

    def _get(self, key: bytes) -> bytes | None:
        if not self._there:
            return None
        with self.reading() as base:
            return base.get(key)

    def _upsert(self, rows: list[Row]) -> None:
        for row in rows:
            self._connection.execute(_PUT, row)


class _Rows:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, key: bytes) -> bytes | None:
        row = self._connection.execute(_GET, (key,), binary=True).fetchone()
        return None if row is None else row[0]

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        statement = _SCAN.format("DESC" if reverse else "ASC")
        return self._connection.execute(statement, (lo, hi, limit), binary=True).fetchall()
