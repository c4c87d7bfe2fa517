"""Statements to the server, counted: what is asked together takes one round trip.

Arrays of bytes are packed here: by the library it takes five times as long, and every commit has some.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types.numeric import Int8

Asked = tuple[str, Sequence[Any]]


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """One that may be in pipeline mode for good (`keep_line`).

    The library sends a Flush when it leaves pipeline mode. A server that gets one stops counting how long its
    client is idle in a transaction: the lock of a client that vanished would then be held for ever.
    """

    line: psycopg.Pipeline | None = None
    _entered: Any = None

    def keep_line(self) -> None:
        self._entered = self.pipeline()
        self.line = self._entered.__enter__()


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
        parts = [_HEAD.pack(1, 0, _BYTEA, len(values), 1)]
        for value in values:
            parts.append(_LENGTH.pack(len(value)))
            parts.append(value)
        self.packed = b"".join(parts)


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
