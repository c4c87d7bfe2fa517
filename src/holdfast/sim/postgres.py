"""Rows and the commit engine on a PostgreSQL server, in the shape in which the simulator holds others.

The engine is the one of production, on simulated time. Each set of rows is a schema of the given database;
it goes when the run ends. What differs from a run on other rows, and only that, is made up for here:

- Elsewhere the outcomes of commits lie among the rows, for clients whose answer was lost. This engine runs
  in the process of its client, so they are kept beside it: as many as elsewhere, and what is older than
  these is forgotten here, too.
- What is written past a writer, by the one that takes over or by somebody else, makes older snapshots too
  old elsewhere. Here they are given an age of their own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import msgspec
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast import codec
from holdfast.clock import Clock, SimClock
from holdfast.errors import HoldfastError, StoreFull
from holdfast.sim.machine import URL
from holdfast.sim.outcomes import Name, Outcomes
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.engine import Answer, Request, keepable
from holdfast.store.pg import server
from holdfast.store.pg.engine import PgEngine

# A snapshot's id is the age of its engine, and the number of its last commit.
AGE = 1 << 48

_GET = "SELECT value FROM holdfast_row WHERE key = %b"
_SCAN = "SELECT key, value FROM holdfast_row WHERE key >= %b AND key < %b ORDER BY key LIMIT %b"
_SCAN_BACK = _SCAN.replace("ORDER BY key", "ORDER BY key DESC")

_numbers = itertools.count(1)


class PgRows:
    """The rows of one store: a schema of its own."""

    def __init__(self, url: str) -> None:
        self._name = f"sim_{os.getpid()}_{next(_numbers)}"
        options = f"{conninfo_to_dict(url).get('options') or ''} -c search_path={self._name}"
        self._conninfo = server.parse(make_conninfo(url, options=options.strip()))
        self._connection = psycopg.connect(self._conninfo, autocommit=True)
        self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._name)))
        self._readers: list[psycopg.Connection[Any]] = []
        self._engines: list[PgSimEngine] = []
        self._bootstrapped = False
        self.outcomes = Outcomes()
        # When the last commit was: elsewhere its outcome says so.
        self.committed_ns = 0
        self.age = 0

    def engine(self, clock: Clock, disk: Any, *, bootstrap: bool) -> PgSimEngine:
        """Open the rows, as a process does. `disk.is_full` says whether there is room."""
        made = PgSimEngine(self, self._conninfo, clock, disk, bootstrap=bootstrap)
        self._engines.append(made)
        self._bootstrapped = True
        self.outcomes.take_over()
        self._keep_anchor(made.inner)
        return made

    def snapshot(self) -> PgSimSnapshot:
        reader = (
            self._readers.pop()
            if self._readers
            else psycopg.connect(self._conninfo, autocommit=True)
        )
        return PgSimSnapshot(reader, self.age, self._readers.append)

    def begin(self) -> _Outside:
        if not self._bootstrapped:
            # Rows that come from a backup: the relations first.
            PgEngine(self._conninfo, SimClock(), ring=lambda no, topics: None).close()
            self._connection.execute("DELETE FROM holdfast_row")
            self._bootstrapped = True
        return self._outside()

    def last_id(self) -> int:
        return 0

    def typed(self, error: Exception) -> HoldfastError | None:
        return (
            server.translated(error, self._conninfo) if isinstance(error, psycopg.Error) else None
        )

    def close(self) -> None:
        for engine in self._engines:
            engine.inner.close()
        for reader in self._readers:
            reader.close()
        self._connection.execute(
            sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(self._name))
        )
        self._connection.close()

    def _keep_anchor(self, engine: PgEngine) -> None:
        """Simulated time goes on after a take-over as it went before: the anchor is written down."""
        row = self._connection.execute(
            "SELECT value FROM holdfast_row WHERE key = %b", (schema.META_KEY,)
        ).fetchone()
        assert row is not None
        assert engine._anchor is not None
        meta = codec.unpack_as(schema.Meta, row[0])
        boot_id, offset_ns = engine._anchor
        fresh = schema.Meta(meta.store_id, meta.generation, boot_id, offset_ns, engine._last_ns)
        if fresh != meta:
            outside = self._outside()
            outside.put_many([(schema.META_KEY, codec.pack(fresh))])
            outside.commit()

    def _outside(self) -> _Outside:
        return _Outside(self._connection, self._grow_older)

    def _grow_older(self) -> None:
        self.age += 1


class PgSimSnapshot:
    """Rows as they are after one commit. Several may be open at a time, each with a connection."""

    def __init__(
        self,
        reader: psycopg.Connection[Any],
        age: int,
        give_back: Callable[[psycopg.Connection[Any]], None],
    ) -> None:
        self._reader = reader
        self._give_back = give_back
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = reader.execute("SELECT coalesce(max(no), 0) FROM holdfast_commit").fetchone()
        assert row is not None
        self.id = age * AGE + int(row[0])

    def get(self, key: bytes) -> bytes | None:
        row = self._reader.execute(_GET, (key,), binary=True).fetchone()
        return None if row is None else bytes(row[0])

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        statement = _SCAN_BACK if reverse else _SCAN
        return self._reader.execute(statement, (lo, hi, limit), binary=True).fetchall()

    def prefetch(self, keys: Iterable[bytes]) -> None:
        return

    def close(self) -> None:
        self._reader.execute("COMMIT")
        self._give_back(self._reader)


class PgSimEngine:
    def __init__(
        self, rows: PgRows, conninfo: str, clock: Clock, disk: Any, *, bootstrap: bool
    ) -> None:
        self._rows = rows
        self.topics: dict[str, int] = {}
        self.inner = _Engine(
            disk, conninfo, _EngineClock(clock), bootstrap=bootstrap, ring=self._rang
        )

    @property
    def generation(self) -> int:
        return self.inner.generation

    def now_ns(self) -> int:
        return self.inner.now_ns()

    def commit(self, requests: Sequence[Request]) -> list[Answer]:
        """Those that were answered before get that answer; the others are one commit."""
        told: dict[Name, Answer] = {}
        fresh: dict[Name, Request] = {}
        for request in requests:
            name = (request.client, request.no)
            known = self._rows.outcomes.of(request)
            if known is not None:
                told[name] = known
            elif not (request.resent and name in fresh):
                fresh[name] = request
        answers = self.inner.commit([self._aged(one) for one in fresh.values()]) if fresh else []
        made = dict(zip(fresh, answers, strict=True))
        self._keep({name: keepable(one) for name, one in made.items() if one.error is None})
        names = [(request.client, request.no) for request in requests]
        return [made[name] if name in made else told[name] for name in names]

    def _keep(self, done: dict[Name, Answer]) -> None:
        """Each commit with its own: those of a batch that broke are several."""
        for number in sorted({one.commit_no for one in done.values()}):
            there = {name: one for name, one in done.items() if one.commit_no == number}
            self._rows.outcomes.keep(self._rows.age * AGE + number, there)
            self._rows.committed_ns = self.inner.now_ns()

    def _aged(self, request: Request) -> Request:
        age, number = divmod(request.snapshot, AGE)
        stale = age != self._rows.age
        return msgspec.structs.replace(request, snapshot=-1 if stale else number)

    def _rang(self, commit_no: int, topics: Sequence[str]) -> None:
        self.topics.update(dict.fromkeys(topics, commit_no))


class _Engine(PgEngine):
    """Finds at the end of a commit that there is no room for it, if the disk says so."""

    def __init__(self, disk: Any, *args: Any, **options: Any) -> None:
        self._disk = disk
        super().__init__(*args, **options)

    def _finish(self, connection: Any, *rest: Any, **more: Any) -> Any:
        if self._disk.is_full:
            self._disconnect()
            raise StoreFull(path=URL, why="injected")
        return super()._finish(connection, *rest, **more)


class _EngineClock:
    """Simulated time. Names that other engines do not need come from elsewhere, so that a run draws the
    same entropy on all rows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._names = Random(0)
        self.wall_ns = clock.wall_ns
        self.boot_ns = clock.boot_ns
        self.mono_ns = clock.mono_ns
        self.boot_id = clock.boot_id
        self.sleep = clock.sleep

    def entropy(self, count: int) -> bytes:
        return self._clock.entropy(count) if count == STORE_ID else self._names.randbytes(count)


STORE_ID = 16


class _Outside:
    """Writes past the engine, which is opened again afterwards."""

    def __init__(self, connection: psycopg.Connection[Any], done: Callable[[], None]) -> None:
        self._connection = connection
        self._done = done
        self._puts: list[Row] = []
        self._deletes: list[bytes] = []

    @property
    def id(self) -> int:
        return 0

    def get(self, key: bytes) -> bytes | None:
        raise AssertionError("nothing is read from outside")

    def scan(self, lo: bytes, hi: bytes, limit: int | None, reverse: bool) -> list[Row]:
        raise AssertionError("nothing is read from outside")

    def put_many(self, rows: Iterable[Row]) -> None:
        self._puts += rows

    def delete(self, key: bytes) -> None:
        self._deletes.append(key)

    def commit(self) -> None:
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.execute("DELETE FROM holdfast_row WHERE key = ANY(%b)", (self._deletes,))
            cursor.executemany(
                "INSERT INTO holdfast_row (key, value) VALUES (%b, %b) "
                "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                self._puts,
            )
        self._done()

    def abort(self) -> None:
        self._puts, self._deletes = [], []
