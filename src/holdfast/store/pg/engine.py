"""The commit on PostgreSQL: many transactions of this process in one, each failing alone.

    lock       one commit at a time in the whole store, and what others committed since
    validate   nothing that a transaction read was written since its snapshot
    apply      writes, appends, counters, operations; what was read before comes from the cache
    commit     rows, the record of the commit, one NOTIFY, all sent at once

The record of a commit (`holdfast_commit`) is what others learn its keys from, and what tells a process
whose connection was cut in mid-commit whether it happened: it takes the lock, so that nothing of it is
under way any more, and looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psycopg

from holdfast import codec
from holdfast.clock import SYSTEM, Anchor, Clock, S, anchor
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, to_wire
from holdfast.store import schema
from holdfast.store.applying import Ring, Written, check_guards, execute
from holdfast.store.engine import Answer, Request, guard_schema
from holdfast.store.pg import server
from holdfast.store.pg.rows import Cache, PgTxn, get
from holdfast.store.pg.server import Connection, Unreachable
from holdfast.store.pg.topics import payload

# Keys that a commit names; of more, it says that all may have changed.
KEYS_NAMED_MAX = 5_000
COMMITS_KEPT = 20_000
PRUNE_EVERY = 1_000
# How long a commit is tried again while the server is away.
AWAY_S = 30.0
PAUSE_S = 0.1

_SINCE = "SELECT no, at_ns, keys, client FROM holdfast_commit WHERE no > %b ORDER BY no LIMIT 5000"
_LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_RECORD = (
    "INSERT INTO holdfast_commit (no, at_ns, client, keys, topics) VALUES (%b, %b, %b, %b, %s)"
)
_PRUNE = "DELETE FROM holdfast_commit WHERE no <= %b"
_keys_of = msgspec.msgpack.Decoder(list[bytes]).decode


class PgEngine:
    """One caller at a time."""

    def __init__(
        self,
        conninfo: str,
        clock: Clock,
        *,
        bootstrap: bool = True,
        ring: Callable[[int, Sequence[str]], None],
        schema_version: tuple[int, int] = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR),
    ) -> None:
        self._conninfo = conninfo
        self._clock = clock
        self._ring_topics = ring
        self._client = clock.entropy(8)
        self._cache = Cache()
        self.commit_no = 0
        self._last_ns = 0
        self.retries = 0
        self._connection: Connection | None = None
        self._open(bootstrap, schema_version)

    # -- time ----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Store time as far as it is known here: the server's, carried on by our own clock."""
        if self._anchor is not None:
            return max(self._anchor.now_ns(self._clock.boot_ns()), self._last_ns)
        told_ns, at_ns = self._told
        return max(told_ns + self._clock.boot_ns() - at_ns, self._last_ns)

    # -- commit --------------------------------------------------------------------------------

    def commit(self, requests: Sequence[Request]) -> list[Answer]:
        """Apply a batch in one durable commit, whatever happens to the connection meanwhile."""
        until_ns = self._clock.mono_ns() + int(AWAY_S * S)
        pending = 0
        while True:
            try:
                connection = self._connect()
                if pending:
                    happened = self._happened(connection, pending)
                    if happened is not None:
                        return happened
                    pending = 0
                answers = self._try(connection, requests)
                if answers is None:
                    # A request broke the batch in a way it should not. One by one, only that one fails.
                    answers = [self._alone(connection, request) for request in requests]
                return answers
            except _InDoubt as doubt:
                pending = doubt.commit_no
                error: HoldfastError = doubt.error
            except Unreachable as away:
                error = away
            self._disconnect()
            self.retries += 1
            if self._clock.mono_ns() >= until_ns:
                if pending:
                    raise CommitUnknown(why=str(error))
                raise error
            self._clock.sleep(PAUSE_S)

    def _alone(self, connection: Connection, request: Request) -> Answer:
        [answer] = self._try(connection, [request]) or [Answer(request.no)]
        return answer

    def _try(self, connection: Connection, requests: Sequence[Request]) -> list[Answer] | None:
        try:
            now_ns = self._begin(connection)
            commit_no = self.commit_no + 1
            txn = PgTxn(connection, self._cache, commit_no)
            written = Written(commit_no)
            topics: set[str] = set()
            answers: list[Answer] = []
            done = 0
            for request in requests:
                try:
                    answer = self._apply(txn, request, written, now_ns, commit_no)
                except HoldfastError as error:
                    answer = Answer(request.no, to_wire(error))
                else:
                    done += 1
                    topics.update(request.topics)
                answers.append(answer)
            topics.update(written.topics)
        except psycopg.Error as error:
            raise self._lost(error) from error
        except Exception as error:
            connection.execute("ROLLBACK")
            if len(requests) > 1:
                return None
            refused = Invalid(what="transaction", why=f"{type(error).__name__}: {error}")
            return [Answer(requests[0].no, to_wire(refused))]
        if not done:
            connection.execute("ROLLBACK")
            return answers
        self._finish(connection, txn, now_ns, commit_no, sorted(topics), answers)
        self.commit_no = commit_no
        self._cache.keep(txn.writes.items())
        self._ring.add(written)
        self._ring_topics(commit_no, sorted(topics))
        return answers

    def _begin(self, connection: Connection) -> int:
        """Take the lock, learn what others have committed, and the time."""
        with connection.pipeline():
            connection.execute("BEGIN")
            connection.execute("SELECT pg_advisory_xact_lock(%b::bigint)", (self._lock,))
            since = connection.execute(_SINCE, (self.commit_no,), binary=True)
            clock = connection.execute(_CLOCK, binary=True)
            commits, [micros] = since.fetchall(), clock.fetchone()  # type: ignore[misc]
        self._catch_up(commits)
        self._told = (int(micros) * 1000, self._clock.boot_ns())
        self._last_ns = max(self.now_ns(), self._last_ns + 1)
        return self._last_ns

    def _catch_up(self, commits: list[Any]) -> None:
        if len(commits) >= 5000 or (commits and commits[0][0] != self.commit_no + 1):
            # More than anybody wants to go through, or forgotten already.
            self._cache.forget(None)
            [(no, at_ns)] = self._connect().execute(_LAST).fetchall()
            self.commit_no = int(no)
            self._ring.forget(self.commit_no)
            self._last_ns = max(self._last_ns, int(at_ns))
            return
        for no, at_ns, packed, _ in commits:
            keys = None if packed is None else _keys_of(packed)
            self._cache.forget(keys)
            if keys is None:
                self._ring.forget(no)
            else:
                written = Written(no)
                written.add(keys)
                self._ring.add(written)
            self.commit_no = no
            self._last_ns = max(self._last_ns, at_ns)

    def _apply(
        self, txn: PgTxn, request: Request, written: Written, now_ns: int, commit_no: int
    ) -> Answer:
        self._ring.check(request, written)
        check_guards(txn, request, now_ns, self.generation)
        apply, seqs, results = execute(txn, request, now_ns, self.generation)
        for key, value in apply.writes.items():
            if value is None:
                txn.delete(key)
            else:
                txn.put_many([(key, value)])
        written.add(apply.writes)
        written.topics.update(apply.topics)
        return Answer(request.no, None, commit_no, seqs, results)

    def _finish(
        self,
        connection: Connection,
        txn: PgTxn,
        now_ns: int,
        commit_no: int,
        topics: list[str],
        answers: list[Answer],
    ) -> None:
        keys = codec.pack(list(txn.writes)) if len(txn.writes) <= KEYS_NAMED_MAX else None
        try:
            with connection.pipeline():
                txn.flush()
                record = (commit_no, now_ns, self._client, keys, "")
                connection.execute(_RECORD, record)
                if commit_no % PRUNE_EVERY == 0:
                    connection.execute(_PRUNE, (commit_no - COMMITS_KEPT,))
                if topics:
                    told = (self.channel, payload(commit_no, topics))
                    connection.execute("SELECT pg_notify(%s, %s)", told)
                connection.execute("COMMIT")
        except psycopg.Error as error:
            self._cache.forget(None)
            refused = server.translated(error, self._conninfo)
            if not isinstance(refused, Unreachable):
                # The server said no to a statement, so it did not commit.
                self._roll_back(connection)
                raise refused from error
            self._answers = answers
            raise _InDoubt(commit_no, refused) from error

    def _happened(self, connection: Connection, commit_no: int) -> list[Answer] | None:
        """The answers of a commit whose own was lost, if it did happen; None if it did not."""
        try:
            # Who has the lock knows that nothing of ours is under way any more.
            self._begin(connection)
            row = connection.execute(
                "SELECT client FROM holdfast_commit WHERE no = %s", (commit_no,)
            ).fetchone()
            connection.execute("ROLLBACK")
        except psycopg.Error as error:
            raise _InDoubt(commit_no, self._lost(error)) from error
        if row is not None and bytes(row[0]) == self._client:
            return self._answers
        return None

    # -- the connection --------------------------------------------------------------------------

    def _connect(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = server.connect(self._conninfo)
        return self._connection

    def _disconnect(self) -> None:
        self._cache.forget(None)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, error: psycopg.Error) -> HoldfastError:
        """An error before the commit was sent: nothing happened."""
        self._cache.forget(None)
        if self._connection is not None and not self._connection.broken:
            self._roll_back(self._connection)
        return server.translated(error, self._conninfo)

    def _roll_back(self, connection: Connection) -> None:
        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            self._disconnect()

    def last(self, connection: Connection) -> int:
        row = connection.execute(_LAST).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        self._disconnect()

    def _open(self, bootstrap: bool, expected: tuple[int, int]) -> None:
        connection = self._connect()
        with server.typed(self._conninfo):
            server.prepare(connection, bootstrap=bootstrap)
            self._lock = server.lock_key(connection)
            self.channel = f"holdfast_{self._lock & 0xFFFFFFFF}"
            self._anchor: Anchor | None = None
            self._told = (0, 0)
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%b::bigint)", (self._lock,))
                row = connection.execute(_LAST).fetchone()
                self.commit_no, self._last_ns = (
                    (0, 0) if row is None else (int(row[0]), int(row[1]))
                )
                self._ring = Ring(self.commit_no)
                guard_schema(get(connection, schema.MARKER_KEY), expected, bootstrap=bootstrap)
                found = get(connection, schema.META_KEY)
                meta = None if found is None else codec.unpack_as(schema.Meta, found)
                self.store_id = self._clock.entropy(16).hex() if meta is None else meta.store_id
                self.generation = 1 if meta is None else meta.generation
                floor_ns = max(self._last_ns, 0 if meta is None else meta.floor_ns)
                self._last_ns = floor_ns
                [micros] = connection.execute(_CLOCK).fetchone()  # type: ignore[misc]
                self._told = (int(micros) * 1000, self._clock.boot_ns())
                if self._clock is not SYSTEM:
                    # Simulated time comes through the clock, as it does in every other store.
                    last = None if meta is None else Anchor(meta.boot_id, meta.offset_ns)
                    self._anchor = anchor(self._clock, last=last, floor_ns=floor_ns)
                if meta is None:
                    at = self._anchor or Anchor("server", 0)
                    fresh = schema.Meta(
                        self.store_id, self.generation, at.boot_id, at.offset_ns, floor_ns
                    )
                    txn = PgTxn(connection, self._cache, 0)
                    txn.put_many(
                        [
                            (schema.META_KEY, codec.pack(fresh)),
                            (schema.MARKER_KEY, schema.marker(*expected)),
                        ]
                    )
                    txn.flush()


class _InDoubt(Exception):
    """The connection was lost while a commit was under way."""

    def __init__(self, commit_no: int, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.commit_no = commit_no
        self.error = error
