"""Statements to the server, counted: what is asked together takes one round trip.

Arrays of bytes are packed here: by the library it takes five times as long, and every commit has some.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format
from psycopg.types.numeric import Int8

Connection = psycopg.Connection[tuple[Any, ...]]
Asked = tuple[str, Sequence[Any]]


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
    return connection.execute(statement, _typed(values), binary=True).fetchall()


def ask_all(connection: Connection, counters: Counters, asked: Iterable[Asked]) -> list[list[Any]]:
    """The answers of several statements, in one round trip."""
    counters.round_trips += 1
    with connection.pipeline():
        cursors = [connection.execute(one, _typed(values), binary=True) for one, values in asked]
    counters.statements += len(cursors)
    return [cursor.fetchall() if cursor.description else [] for cursor in cursors]


def _typed(values: Sequence[Any]) -> Sequence[Any]:
    """Integers of one size: else each size is another statement to prepare."""
    return [Int8(value) if type(value) is int else value for value in values]


_BYTEA = 17
_HEAD = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_EMPTY = struct.pack("!iiI", 0, 0, _BYTEA)
psycopg.adapters.register_dumper(Arrays, _ArrayDumper)
