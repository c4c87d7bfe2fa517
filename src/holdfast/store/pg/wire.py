"""Statements to the server, counted: what is asked together takes one round trip.

Arrays of bytes are packed here: by the library it takes five times as long, and every commit has some.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.adapt import Dumper
from psycopg.generators import send
from psycopg.pq import Format
from psycopg.types.numeric import Int8

from holdfast.clock import SYSTEM
from holdfast.errors import StoreForked
from holdfast.store.pg.patience import Haste

T = TypeVar("T")
Asked = tuple[str, Sequence[Any]]

# Longer than any statement may take at the server.
PATIENCE_S = 65.0


class _Line(psycopg.Pipeline):
    def _sync_gen(self) -> PQGen[None]:
        self._enqueue_sync()
        yield from self._communicate_gen()
        # The library waits for answers here though it may not have sent all: of much data, for ever.
        yield from send(self.pgconn)
        yield from self._fetch_gen(flush=False)


class Warned:
    """Whether a server has said that a commit, though made, may not have got to its standby.

    It says so by no more than a warning, when somebody has cancelled the statement while it waited. The words
    are in the server's language, so it is known by the place in the server that it comes from, if told.
    """

    def __init__(self) -> None:
        self.alone = False

    def hear(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.sqlstate in ("01000", "57P01") and notice.source_function in _WAITING:
            self.alone = True


_WAITING = (None, "SyncRepWaitForLSN")


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """One that may be in pipeline mode for good (`keep_line`).

    The library sends a Flush when it leaves pipeline mode. A server that gets one stops counting how long its
    client is idle in a transaction: the lock of a client that vanished would then be held for ever.

    It says since when it is waited for, and how long it may be (`patience`).

    A forked child sends nothing, not even a goodbye: the session is its parent's.
    """

    line: psycopg.Pipeline | None = None
    asked_ns = 0
    patience_s = PATIENCE_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process = os.getpid()
        self.ending = threading.Lock()
        self.haste = Haste()
        self.warned = Warned()
        self.add_notice_handler(self.warned.hear)

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def close(self) -> None:
        if not self.forked:
            super().close()

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        if self.forked:
            raise StoreForked(server=self.info.host)
        with self.awaited():
            return super().wait(gen, *args, **kwargs)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Around whatever waits for an answer."""
        self.asked_ns = SYSTEM.mono_ns()
        try:
            yield
        finally:
            with self.ending:
                self.asked_ns = 0

    def keep_line(self) -> None:
        # Not by `pipeline()`: that leaves it when it is forgotten.
        self._pipeline = self.line = _Line(self)
        self.line.__enter__()


@dataclass(slots=True)
class Counters:
    """What the commits of a process took. Round trips and statements of reads outside them are not counted."""

    commits: int = 0
    transactions: int = 0
    round_trips: int = 0
    statements: int = 0
    # Commits made in one round trip, and those tried that way in vain because others came first.
    at_once: int = 0
    forestalled: int = 0
    # Rows or ranges that an operation needed and that were not known.
    misses: int = 0
    # Commits tried again because the server was away.
    retries: int = 0
    # Lost answers that were looked up: whether the commit had happened or not.
    doubts: int = 0


class Arrays:
    """Bytes as the server's `bytea[]`, packed."""

    __slots__ = ("packed",)

    def __init__(self, values: Sequence[bytes]) -> None:
        if not values:
            self.packed = _EMPTY
            return
        # Without a loop of ours: a commit may have thousands.
        sized = zip(map(_LENGTH.pack, map(len, values)), values, strict=True)
        head = _HEAD.pack(1, 0, _BYTEA, len(values), 1)
        self.packed = head + b"".join(chain.from_iterable(sized))


class _ArrayDumper(Dumper):
    format = Format.BINARY
    oid = 1001

    def dump(self, obj: Arrays) -> bytes:
        return obj.packed


def ask(connection: Connection, counters: Counters, statement: str, *values: Any) -> list[Any]:
    counters.round_trips += 1
    counters.statements += 1
    cursor = connection.execute(statement, _typed(values), binary=True)
    if connection.line is not None:
        connection.line.sync()
    return cursor.fetchall()


def ask_all(connection: Connection, counters: Counters, asked: Sequence[Asked]) -> list[list[Any]]:
    """The answers of several statements, in one round trip."""
    counters.round_trips += 1
    counters.statements += len(asked)
    if connection.line is not None:
        cursors = [connection.execute(one, _typed(values), binary=True) for one, values in asked]
        connection.line.sync()
    else:
        with connection.pipeline():
            cursors = [
                connection.execute(one, _typed(values), binary=True) for one, values in asked
            ]
    return [cursor.fetchall() if cursor.description else [] for cursor in cursors]


def _typed(values: Sequence[Any]) -> Sequence[Any]:
    """Integers of one size: else each size is another statement to prepare."""
    return [Int8(value) if type(value) is int else value for value in values]


_BYTEA = 17
_HEAD = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_EMPTY = struct.pack("!iiI", 0, 0, _BYTEA)
psycopg.adapters.register_dumper(Arrays, _ArrayDumper)
