"""Connections to read by: some, shared by all threads of a process, and made again when they are lost.

- `Snapshot` is a transaction of its own: rows as they were after one commit.
- `Asking` reads single rows, or hears of others' commits, for many threads at once: what is asked for while a
  statement is under way goes into the next, together.

A transaction that only read has nothing to wait for at its end: COMMIT is sent, and its answer is taken when
the connection is used next.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.generators import fetch
from psycopg.pq import ExecStatus

from holdfast.errors import StoreClosed, StoreForked
from holdfast.store.api import Row
from holdfast.store.pg import server
from holdfast.store.pg.known import Gap
from holdfast.store.pg.rows import GET_MANY, SCAN, SCAN_BACK
from holdfast.store.pg.server import Unreachable
from holdfast.store.pg.wire import Arrays, Connection

READERS_MAX = 8
READER_S = 20.0

_BEGIN = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_LAST = "SELECT coalesce(max(no), 0) FROM holdfast_commit"
_GET = "SELECT value FROM holdfast_row WHERE key = %b"


class Readers:
    """A bounded number of connections, lent to one thread at a time."""

    def __init__(self, conninfo: str, away: server.Away) -> None:
        self._conninfo = conninfo
        self._away = away
        self._free = threading.BoundedSemaphore(READERS_MAX)
        self._idle: list[Connection] = []
        self._closed = False

    def borrow(self) -> Connection:
        if not self._free.acquire(timeout=READER_S):
            raise Unreachable(why=f"all {READERS_MAX} connections to read by are in use")
        try:
            if self._closed:
                raise StoreClosed(why="closed while it was read")
            while self._idle:
                connection = self._idle.pop()
                if _ended(connection):
                    return connection
                connection.close()
            with self._away:
                connection = server.connect(self._conninfo, self._away.haste)
            connection.patience_s = server.READ_PATIENCE_S
            return connection
        except BaseException:
            self._free.release()
            raise

    @contextlib.contextmanager
    def lent(self) -> Iterator[Connection]:
        connection = self.borrow()
        sound = False
        try:
            yield connection
            sound = True
        finally:
            self.give_back(connection, sound=sound)

    def ask(self, statement: str, values: Sequence[Any]) -> list[Any]:
        with self.lent() as connection:
            return connection.execute(statement, values, binary=True).fetchall()

    def give_back(self, connection: Connection, *, sound: bool) -> None:
        """`sound`: it is outside a transaction, or its end was sent."""
        if sound and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
            if not self._closed:
                # Whatever broke it broke the others, most likely.
                self._drop()
        self._free.release()

    def close(self) -> None:
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Snapshot:
    """Rows as they were after one commit; opened when the first is read.

    The number of that commit is read by the statement that fixes the snapshot of the transaction, and
    commits follow each other: so it is exactly what the rows show.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._connection: Connection | None = None
        # The last commit it has seen; 0 if nothing was read, and so nothing can be out of date.
        self.id = 0
        # What was read, for whoever commits next.
        self.seen: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> bytes | None:
        rows = self._ask(_GET, (key,))
        value: bytes | None = rows[0][0] if rows else None
        self.seen[key] = value
        return value

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Nothing: rows that are read once are not kept."""

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        if lo >= hi:
            return []
        rows = self._ask(SCAN_BACK if reverse else SCAN, (lo, hi, limit))
        if len(rows) <= SEEN_MAX:
            self.seen.update(rows)
        return rows

    def close(self) -> None:
        if self._connection is None or self._connection.forked:
            return
        connection, self._connection = self._connection, None
        sound = False
        try:
            if not connection.closed:
                connection.pgconn.send_query(b"COMMIT")
                connection.pgconn.flush()
                sound = True
        except psycopg.Error:
            pass
        finally:
            self._readers.give_back(connection, sound=sound)

    def _ask(self, statement: str, values: Sequence[object]) -> list[tuple[bytes, bytes]]:
        if self._connection is not None:
            return self._connection.execute(statement, values, binary=True).fetchall()
        connection = self._readers.borrow()
        try:
            with connection.pipeline():
                connection.execute(_BEGIN)
                last = connection.execute(_LAST, binary=True)
                found = connection.execute(statement, values, binary=True)
        except BaseException:
            self._readers.give_back(connection, sound=False)
            raise
        self._connection = connection
        [(self.id,)] = last.fetchall()
        return found.fetchall()


# Of a scan that found more rows none is offered.
SEEN_MAX = 1_000
# Large ranges that are remembered; beyond, they are found out anew.
LARGE_MAX = 1_000


class Asking:
    """Rows as they are, each for itself; for threads that find out otherwise whether they fit together."""

    def __init__(self, readers: Readers, hear: Callable[[Connection, bool], None]) -> None:
        """`hear` takes in what others have committed (`Session.refresh`)."""
        self._readers = readers
        self._hear = hear
        # Ranges that had more rows than are worth keeping when they were last scanned.
        self._large: dict[tuple[bytes, bytes], None] = {}
        self._gets = _Together(self._get_all)
        self._refreshes = _Together(self._refresh)

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
        return self._gets.want(keys)

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        return self._readers.ask(SCAN_BACK if reverse else SCAN, (lo, hi, limit))

    def is_large(self, lo: bytes, hi: bytes) -> bool:
        return (lo, hi) in self._large

    def note_large(self, lo: bytes, hi: bytes) -> None:
        if len(self._large) >= LARGE_MAX:
            self._large.clear()
        self._large[lo, hi] = None

    def refresh(self) -> None:
        """Know of everything that was committed before this was called."""
        self._refreshes.want(())

    def _get_all(self, wishes: list[_Wish]) -> None:
        keys = list(dict.fromkeys(key for wish in wishes for key in wish.keys))
        rows = dict(self._readers.ask(GET_MANY, (Arrays(keys),)))
        for wish in wishes:
            wish.found = {key: rows.get(key) for key in wish.keys}

    def _refresh(self, wishes: list[_Wish]) -> None:
        try:
            with self._readers.lent() as connection:
                self._hear(connection, False)
        except Gap:
            # It is closed now, and all others are.
            with self._readers.lent() as connection:
                self._hear(connection, True)


class _Wish:
    __slots__ = ("done", "error", "found", "gate", "keys", "leads")

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.found: dict[bytes, bytes | None] = {}
        self.error: Exception | None = None
        self.done = False
        # Whether it is this one's turn to serve those that wait.
        self.leads = False
        self.gate = threading.Semaphore(0)


class _Together:
    """One call for all who want something at the same time: it begins after each of them asked."""

    def __init__(self, serve: Callable[[list[_Wish]], None]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._waiting: list[_Wish] = []
        self._busy = False
        self._process = os.getpid()

    def want(self, keys: Sequence[bytes]) -> dict[bytes, bytes | None]:
        if os.getpid() != self._process:
            raise StoreForked(why="the threads that serve this are the parent's")
        wish = _Wish(keys)
        try:
            with self._lock:
                self._waiting.append(wish)
                wish.leads, self._busy = not self._busy, True
            if not wish.leads:
                wish.gate.acquire()
            if not wish.done:
                self._lead()
        finally:
            # An interrupt may come anywhere: nobody else must wait for this one.
            with self._lock:
                if wish in self._waiting:
                    self._waiting.remove(wish)
                if wish.leads:
                    wish.leads = False
                    self._hand_on()
        if wish.error is not None:
            raise wish.error
        return wish.found

    def _lead(self) -> None:
        """Serve all that wait now."""
        with self._lock:
            wishes, self._waiting = self._waiting, []
        served: Exception | None = Unreachable(why="whoever asked for others was interrupted")
        try:
            self._serve(wishes)
            served = None
        except Exception as error:
            served = error
        finally:
            with self._lock:
                for wish in wishes:
                    wish.error = served
                    wish.done = True
                    wish.gate.release()

    def _hand_on(self) -> None:
        """The first of those who came meanwhile leads."""
        if self._waiting:
            self._waiting[0].leads = True
            self._waiting[0].gate.release()
        else:
            self._busy = False


def _ended(connection: Connection) -> bool:
    """Take the answer to the COMMIT that was sent when it was given back, if one was."""
    if connection.closed:
        return False
    try:
        # Not by `get_result`: it would wait without letting go of the interpreter.
        while (result := connection.wait(fetch(connection.pgconn))) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                return False
    except psycopg.Error:
        return False
    return True
