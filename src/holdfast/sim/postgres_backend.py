"""PostgreSQL backend of the simulator: rows and the commit engine on a PostgreSQL server.

The engine is the production one, on simulated time. Each set of rows is a schema of the given
database, dropped at the end of the run. This module compensates only for the differences from other
backends:

- Embedded stores keep commit outcomes as rows, for clients that lost an answer. The PostgreSQL engine runs in its
  client's process, so the outcomes are kept beside it, as many as in an embedded store.
- In an embedded store, a write that bypasses the writer invalidates older snapshots. Here each such write starts a new
  age, and snapshots of former ages are too old.
- An open that writes a missing or older schema marker is a numbered commit here. Embedded stores do not number it, so
  its row is deleted.
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
from holdfast.sim.commit_outcomes import CommitOutcomes, RequestId
from holdfast.sim.sim_store import URL
from holdfast.store import schema
from holdfast.store.api import Row
from holdfast.store.engine import outcome_to_keep
from holdfast.store.postgres import server
from holdfast.store.postgres.engine import PgEngine
from holdfast.store.requests import CommitAnswer, CommitRequest

# A snapshot id combines the age of its engine and the number of its last commit.
AGE_FACTOR = 1 << 48

_GET = "SELECT value FROM holdfast_row WHERE key = %b"
_SCAN = "SELECT key, value FROM holdfast_row WHERE key >= %b AND key < %b ORDER BY key LIMIT %b"
_SCAN_BACK = _SCAN.replace("ORDER BY key", "ORDER BY key DESC")
_DELETE_MARKER_COMMIT = "DELETE FROM holdfast_commit WHERE client = ''"

_numbers = itertools.count(1)


class PgSimBackend:
    """The rows of one store, in their own schema."""

    def __init__(self, url: str) -> None:
        self._name = f"sim_{os.getpid()}_{next(_numbers)}"
        options = f"{conninfo_to_dict(url).get('options') or ''} -c search_path={self._name}"
        self._conninfo = server.build_conninfo(make_conninfo(url, options=options.strip()))
        self._connection = psycopg.connect(self._conninfo, autocommit=True)
        self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._name)))
        self._readers: list[psycopg.Connection[Any]] = []
        self._engines: list[PgSimEngine] = []
        self._bootstrapped = False
        self.outcomes = CommitOutcomes()
        # Time of the last commit. Embedded stores keep it in the outcome.
        self.committed_ns = 0
        self.age = 0

    def engine(self, clock: Clock, disk: Any, *, bootstrap: bool) -> PgSimEngine:
        """Open the rows, as a process does. `disk.is_full` reports whether the disk is full."""
        made = PgSimEngine(self, self._conninfo, clock, disk, bootstrap=bootstrap)
        self._connection.execute(_DELETE_MARKER_COMMIT)
        self._engines.append(made)
        self._bootstrapped = True
        self.outcomes.on_takeover()
        self._store_anchor(made.inner)
        return made

    def snapshot(self) -> PgSimSnapshot:
        reader = (
            self._readers.pop()
            if self._readers
            else psycopg.connect(self._conninfo, autocommit=True)
        )
        return PgSimSnapshot(reader, self.age, self._readers.append)

    def begin(self) -> _DirectWriteTxn:
        if not self._bootstrapped:
            # Rows restored from a backup need the relations first.
            PgEngine(self._conninfo, SimClock(), notify=lambda no, topics: None).close()
            self._connection.execute("DELETE FROM holdfast_row")
            self._bootstrapped = True
        return self._direct_write()

    def last_id(self) -> int:
        return 0

    def to_store_error(self, error: Exception) -> HoldfastError | None:
        return (
            server.to_store_error(error, self._conninfo)
            if isinstance(error, psycopg.Error)
            else None
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

    def _store_anchor(self, engine: PgEngine) -> None:
        """Store the clock anchor, so that simulated time continues unchanged after a takeover."""
        row = self._connection.execute(
            "SELECT value FROM holdfast_row WHERE key = %b", (schema.META_KEY,)
        ).fetchone()
        assert row is not None
        assert engine._anchor is not None
        meta = codec.unpack_as(schema.StoreMeta, row[0])
        boot_id, offset_ns = engine._anchor
        fresh = schema.StoreMeta(
            meta.store_id, meta.generation, boot_id, offset_ns, engine._last_ns
        )
        if fresh != meta:
            outside = self._direct_write()
            outside.put_many([(schema.META_KEY, codec.pack(fresh))])
            outside.commit()

    def _direct_write(self) -> _DirectWriteTxn:
        return _DirectWriteTxn(self._connection, self._start_new_age)

    def _start_new_age(self) -> None:
        self.age += 1


class PgSimSnapshot:
    """Rows as of one commit. Several snapshots may be open, each with its own connection."""

    def __init__(
        self,
        reader: psycopg.Connection[Any],
        age: int,
        release_connection: Callable[[psycopg.Connection[Any]], None],
    ) -> None:
        self._reader = reader
        self._release_connection = release_connection
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = reader.execute("SELECT coalesce(max(no), 0) FROM holdfast_commit").fetchone()
        assert row is not None
        self.id = age * AGE_FACTOR + int(row[0])

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
        self._release_connection(self._reader)


class PgSimEngine:
    def __init__(
        self, rows: PgSimBackend, conninfo: str, clock: Clock, disk: Any, *, bootstrap: bool
    ) -> None:
        self._rows = rows
        self.topics: dict[str, int] = {}
        self.inner = _DiskFullPgEngine(
            disk, conninfo, _PgEngineClock(clock), bootstrap=bootstrap, notify=self._on_notify
        )

    @property
    def generation(self) -> int:
        return self.inner.generation

    def now_ns(self) -> int:
        return self.inner.now_ns()

    def commit(self, requests: Sequence[CommitRequest]) -> list[CommitAnswer]:
        """Return kept answers of resent requests, and commit all others in one batch."""
        kept: dict[RequestId, CommitAnswer] = {}
        new: dict[RequestId, CommitRequest] = {}
        for request in requests:
            name = (request.client, request.no)
            known = self._rows.outcomes.lookup(request)
            if known is not None:
                kept[name] = known
            elif not (request.resent and name in new):
                new[name] = request
        answers = (
            self.inner.commit([self._with_valid_snapshot(one) for one in new.values()])
            if new
            else []
        )
        committed = dict(zip(new, answers, strict=True))
        self._keep_outcomes(
            {name: outcome_to_keep(one) for name, one in committed.items() if one.error is None}
        )
        names = [(request.client, request.no) for request in requests]
        return [committed[name] if name in committed else kept[name] for name in names]

    def _keep_outcomes(self, done: dict[RequestId, CommitAnswer]) -> None:
        """Keep the outcomes per commit. A batch that was split has several commits."""
        for number in sorted({one.commit_no for one in done.values()}):
            outcomes = {name: one for name, one in done.items() if one.commit_no == number}
            self._rows.outcomes.add(self._rows.age * AGE_FACTOR + number, outcomes)
            self._rows.committed_ns = self.inner.now_ns()

    def _with_valid_snapshot(self, request: CommitRequest) -> CommitRequest:
        age, number = divmod(request.snapshot, AGE_FACTOR)
        stale = age != self._rows.age
        return msgspec.structs.replace(request, snapshot=-1 if stale else number)

    def _on_notify(self, commit_no: int, topics: Sequence[str]) -> None:
        self.topics.update(dict.fromkeys(topics, commit_no))


class _DiskFullPgEngine(PgEngine):
    """Fails at the end of a commit if the disk is full."""

    def __init__(self, disk: Any, *args: Any, **options: Any) -> None:
        self._disk = disk
        super().__init__(*args, **options)

    def _send_commit(self, connection: Any, *rest: Any, **more: Any) -> Any:
        if self._disk.is_full:
            self._disconnect()
            raise StoreFull(path=URL, why="injected")
        return super()._send_commit(connection, *rest, **more)


class _PgEngineClock:
    """Simulated time. Identifiers that only this engine needs come from a separate generator, so
    that a run draws the same entropy on all backends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._names = Random(0)
        self.wall_ns = clock.wall_ns
        self.boot_ns = clock.boot_ns
        self.mono_ns = clock.mono_ns
        self.boot_id = clock.boot_id
        self.sleep = clock.sleep

    def entropy(self, count: int) -> bytes:
        return (
            self._clock.entropy(count) if count == STORE_ID_BYTES else self._names.randbytes(count)
        )


STORE_ID_BYTES = 16


class _DirectWriteTxn:
    """Writes that bypass the engine, which is reopened afterwards."""

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
