"""Statements to the server with counters. Pipelined statements take one round trip.

This module encodes `bytea[]` itself: psycopg takes five times as long, and every commit has such arrays.
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
from holdfast.store.postgres.watchdog import ShutdownDeadline

T = TypeVar("T")
Statement = tuple[str, Sequence[Any]]

# Longer than the statement timeout of the server.
ANSWER_TIMEOUT_S = 65.0


class _SafePipeline(psycopg.Pipeline):
    def _sync_gen(self) -> PQGen[None]:
        self._enqueue_sync()
        yield from self._communicate_gen()
        # psycopg waits for answers here before it has sent everything, which deadlocks with large data.
        yield from send(self.pgconn)
        yield from self._fetch_gen(flush=False)


class ServerNotices:
    """The server notices of a connection: whether a commit may not have reached its standby.

    The server sends only a warning when the wait for the standby is cancelled. The message is localized, so the
    notice is recognized by its source function, if the server sends one.
    """

    def __init__(self) -> None:
        self.standby_unconfirmed = False

    def on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if (
            notice.sqlstate in ("01000", "57P01")
            and notice.source_function in _STANDBY_WAIT_FUNCTIONS
        ):
            self.standby_unconfirmed = True


_STANDBY_WAIT_FUNCTIONS = (None, "SyncRepWaitForLSN")


class PostgresConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that can stay in pipeline mode permanently (`keep_pipeline`).

    psycopg sends a Flush when it leaves pipeline mode. A Flush stops the server's idle-in-transaction timeout, and
    a vanished client would then hold the commit lock forever.

    The connection records its current wait and its answer timeout (`watchdog`).

    A forked child sends nothing, not even a Terminate: the session belongs to the parent.
    """

    kept_pipeline: psycopg.Pipeline | None = None
    waiting_since_ns = 0
    answer_timeout_s = ANSWER_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process = os.getpid()
        self.socket_lock = threading.Lock()
        self.shutdown_deadline = ShutdownDeadline()
        self.notices = ServerNotices()
        self.add_notice_handler(self.notices.on_notice)

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def close(self) -> None:
        if not self.is_forked:
            super().close()

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        if self.is_forked:
            raise StoreForked(server=self.info.host)
        with self.track_wait():
            return super().wait(gen, *args, **kwargs)

    @contextlib.contextmanager
    def track_wait(self) -> Iterator[None]:
        """Record the wait for an answer during the block."""
        self.waiting_since_ns = SYSTEM.mono_ns()
        try:
            yield
        finally:
            with self.socket_lock:
                self.waiting_since_ns = 0

    def keep_pipeline(self) -> None:
        # Not with `pipeline()`: it leaves pipeline mode when it is garbage-collected.
        self._pipeline = self.kept_pipeline = _SafePipeline(self)
        self.kept_pipeline.__enter__()


@dataclass(slots=True)
class CommitCounters:
    """Counters of a process's commits. Round trips and statements of reads outside commits are not counted."""

    commits: int = 0
    transactions: int = 0
    round_trips: int = 0
    statements: int = 0
    # Optimistic commits, and optimistic attempts that lost the race to another process.
    optimistic: int = 0
    lost_races: int = 0
    # Cache misses of operations.
    misses: int = 0
    # Commits retried during an outage.
    retries: int = 0
    # In-doubt commits that were resolved.
    resolved_in_doubt: int = 0


class ByteaArray:
    """A list of bytes in the binary format of `bytea[]`."""

    __slots__ = ("packed",)

    def __init__(self, values: Sequence[bytes]) -> None:
        if not values:
            self.packed = _EMPTY
            return
        # No Python loop: a commit may have thousands of values.
        sized = zip(map(_LENGTH.pack, map(len, values)), values, strict=True)
        head = _HEAD.pack(1, 0, _BYTEA, len(values), 1)
        self.packed = head + b"".join(chain.from_iterable(sized))


class _ArrayDumper(Dumper):
    format = Format.BINARY
    oid = 1001

    def dump(self, obj: ByteaArray) -> bytes:
        return obj.packed


def run_statement(
    connection: PostgresConnection, counters: CommitCounters, statement: str, *values: Any
) -> list[Any]:
    counters.round_trips += 1
    counters.statements += 1
    cursor = connection.execute(statement, _as_int8(values), binary=True)
    if connection.kept_pipeline is not None:
        connection.kept_pipeline.sync()
    return cursor.fetchall()


def run_pipelined(
    connection: PostgresConnection, counters: CommitCounters, statements: Sequence[Statement]
) -> list[list[Any]]:
    """Run several statements in one round trip and return their rows."""
    counters.round_trips += 1
    counters.statements += len(statements)
    if connection.kept_pipeline is not None:
        cursors = [
            connection.execute(statement, _as_int8(values), binary=True)
            for statement, values in statements
        ]
        connection.kept_pipeline.sync()
    else:
        with connection.pipeline():
            cursors = [
                connection.execute(statement, _as_int8(values), binary=True)
                for statement, values in statements
            ]
    return [cursor.fetchall() if cursor.description else [] for cursor in cursors]


def _as_int8(values: Sequence[Any]) -> Sequence[Any]:
    """Send every integer as int8: otherwise each size needs another prepared statement."""
    return [Int8(value) if type(value) is int else value for value in values]


_BYTEA = 17
_HEAD = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_EMPTY = struct.pack("!iiI", 0, 0, _BYTEA)
psycopg.adapters.register_dumper(ByteaArray, _ArrayDumper)
