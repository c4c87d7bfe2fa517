"""The commit on PostgreSQL: many transactions of this process in one, each failing alone.

Commits of all processes follow each other: each has a number, and the lock of the store while it is made.
A process that has lately been the only one to commit makes its commits *at once*: it applies a batch to
what it knows, and sends the rows, the record and the NOTIFY as one statement. If others have committed
meanwhile the number is taken, nothing happened, and the batch is applied again, the other way:

    enter      the lock, what others have committed since, the time: one round trip
    validate   nothing that a transaction read was written since its snapshot
    apply      writes, appends, counters, operations; what is not known is asked for
    finish     rows, record, NOTIFY, commit: one round trip

The record of a commit (`holdfast_commit`) is also what tells a process whose connection was cut in
mid-commit whether it happened (see `doubt`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from holdfast import codec
from holdfast.clock import SYSTEM, Anchor, Clock, S, anchor
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    Invalid,
    StoreReadOnly,
    StoreReplaced,
    to_wire,
)
from holdfast.store import schema
from holdfast.store.applying import Ring, Written
from holdfast.store.engine import Answer, Request, guard_schema
from holdfast.store.pg import doubt, pooler, presence, server
from holdfast.store.pg.batch import Batch
from holdfast.store.pg.cache import LARGE, VALUE_BYTES_MAX, Cache
from holdfast.store.pg.doubt import InDoubt
from holdfast.store.pg.migrations import LATE, migrate
from holdfast.store.pg.rows import PgTxn, Reads, get
from holdfast.store.pg.server import Unreachable
from holdfast.store.pg.topics import ALL, payload
from holdfast.store.pg.wire import Arrays, Connection, Counters, ask, ask_all

# Keys that a commit names; of more, it says that all may have changed.
KEYS_NAMED_MAX = 50_000
# Others' commits that are gone through, and those of them whose rows are asked for anew.
SINCE_MAX = 2_000
REFRESHED_MAX = 200
REFRESHED_KEYS_MAX = 2_000
COMMITS_KEPT = 20_000
PRUNE_EVERY = 1_000
# A process commits at once after so many commits in a row between which nobody else made one.
ALONE_AFTER = 3
# A commit made at once carries the time at which it was applied; it must come this soon after.
LATE_US = 250_000
# A server whose clock is behind the last commit by more than this has been set back, or is another one.
STEP_NS = 50_000_000
OFFERS_MAX = 256
# How long a commit is tried again while the server is away.
AWAY_S = 30.0
PAUSE_S = 0.1

_ENTER = "SELECT holdfast_enter(%b::bigint)"
_APPLY = (
    "SELECT holdfast_apply(%b::bigint, %b::bigint, %b::bigint, %b, %b, %b, %b, %b, %b::text, "
    "%b::text, %b::bigint, %b::bigint)"
)
_SINCE = f"SELECT no, at_ns, keys FROM holdfast_commit WHERE no > %b ORDER BY no LIMIT {SINCE_MAX}"
# One lookup for each key: no plan goes through all rows.
_CHANGED = f"""
    SELECT k, CASE WHEN octet_length(v) <= {VALUE_BYTES_MAX} THEN v END, v IS NOT NULL FROM (
        SELECT k, (SELECT value FROM holdfast_row WHERE key = k) AS v FROM (
            SELECT DISTINCT unnest(keys) AS k FROM holdfast_commit
            WHERE no > %b AND no <= %b AND cardinality(keys) <= {REFRESHED_KEYS_MAX}) AS keys
        OFFSET 0) AS rows
"""
_LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"


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
        self._attempts = 0
        self._version = schema_version
        self.cache = Cache()
        self.counters = Counters()
        self.commit_no = 0
        self._last_ns = 0
        self._lead_ns = 0
        self._alone = 0
        # Rows that were read elsewhere in this process, with the commit that they are not older than.
        self.offers: deque[tuple[int, dict[bytes, bytes | None]]] = deque(maxlen=OFFERS_MAX)
        # Grows when the server turns out to have another history: numbers of commits mean others then.
        self.history = 0
        self.away = server.Away(clock)
        self._replaced = False
        self._connection: Connection | None = None
        self._lock = 0
        self._former: server.Backend | None = None
        self._open(bootstrap)

    # -- time ----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Store time as far as it is known here: the server's, carried on by our own clock."""
        if self._anchor is not None:
            return max(self._anchor.now_ns(self._clock.boot_ns()), self._last_ns)
        told_ns, at_ns = self._told
        return max(told_ns + self._clock.boot_ns() - at_ns, self._last_ns)

    def _hear(self, micros: int) -> None:
        """What the server's clock says. Set back, it runs on from the last commit: nothing freezes."""
        server_ns = micros * 1000 + self._lead_ns
        if server_ns < self._last_ns - STEP_NS:
            self._lead_ns += self._last_ns - server_ns
        self._told = (micros * 1000 + self._lead_ns, self._clock.boot_ns())

    def _tick(self) -> int:
        self._last_ns = max(self.now_ns(), self._last_ns + 1)
        return self._last_ns

    # -- commit --------------------------------------------------------------------------------

    def commit(self, requests: Sequence[Request]) -> list[Answer]:
        """Apply a batch in one durable commit, whatever happens to the connection meanwhile."""
        if self._replaced:
            raise StoreReplaced(store_id=self.store_id, generation=self.generation)
        until_ns = self._clock.mono_ns() + int(AWAY_S * S)
        doubted: InDoubt | None = None
        while True:
            try:
                connection = self._connect()
                if doubted is not None:
                    answers = self._settle(connection, doubted)
                    if answers is not None:
                        return answers
                    doubted = None
                return self._try(connection, requests)
            except _Broken:
                # A request broke the batch in a way it should not. One by one, only that one fails.
                return [self._by_itself(request) for request in requests]
            except _Forestalled:
                self.counters.forestalled += 1
                self._alone = 0
                continue
            except InDoubt as raised:
                doubted, error = raised, raised.error
            except (Unreachable, StoreReadOnly) as away:
                error = away
            self._disconnect()
            self.counters.retries += 1
            if self._clock.mono_ns() >= until_ns:
                if doubted is not None:
                    raise CommitUnknown(why=str(error), **self.away.fields())
                raise self.away.told(error)
            self._clock.sleep(PAUSE_S)

    def _by_itself(self, request: Request) -> Answer:
        """One of a broken batch. Those before it are durable, so its failure is its own."""
        try:
            [answer] = self.commit([request])
        except HoldfastError as error:
            answer = Answer(request.no, to_wire(error))
        return answer

    def _try(self, connection: Connection, requests: Sequence[Request]) -> list[Answer]:
        at_once = self._alone >= ALONE_AFTER
        try:
            if not at_once:
                self._enter(connection)
            self._accept()
            now_ns, commit_no = self._tick(), self.commit_no + 1
            reads = Reads(connection, self.cache, self.counters)
            batch = Batch(
                PgTxn(reads, self.cache, commit_no), reads, self._ring, now_ns, self.generation
            )
            answers = batch.apply(requests)
            if not (batch.changing or (batch.done and self._anchor is not None)):
                # Nothing to keep (simulated, it is a commit, as in every other store). But the answers must not be out of date.
                self._leave(connection, at_once)
                return answers
        except psycopg.Error as error:
            raise self._lost(error) from error
        except _Forestalled:
            raise
        except HoldfastError:
            self._disconnect()
            raise
        except Exception as error:
            # Rare, and a transaction ends with its connection for sure.
            self._disconnect()
            if len(requests) > 1:
                raise _Broken from error
            refused = Invalid(what="transaction", why=f"{type(error).__name__}: {error}")
            return [Answer(requests[0].no, to_wire(refused))]
        topics = sorted(batch.topics)
        self._finish(connection, batch.txn, now_ns, commit_no, topics, answers, at_once)
        self._done(batch.txn, batch.written, commit_no)
        self.counters.transactions += batch.done
        self.counters.at_once += at_once
        self._ring_topics(commit_no, topics)
        return answers

    def _enter(self, connection: Connection) -> None:
        """Take the lock, learn what others have committed, and the time."""
        since = self.commit_no
        _, [(micros,)], commits, changed = ask_all(
            connection,
            self.counters,
            [
                ("BEGIN", ()),
                (_ENTER, (self._lock,)),
                (_SINCE, (since,)),
                (_CHANGED, (since, since + REFRESHED_MAX)),
            ],
        )
        self._alone = 0 if commits else self._alone + 1
        with self.cache.lock:
            self._catch_up(connection, commits, changed)
        self._hear(int(micros))

    def _catch_up(self, connection: Connection, commits: list[Any], changed: list[Any]) -> None:
        if not commits:
            return
        if len(commits) >= SINCE_MAX or commits[0][0] != self.commit_no + 1:
            # More than anybody wants to go through, or forgotten already.
            [(no, at_ns)] = ask(connection, self.counters, _LAST)
            self._start_from(int(no), int(at_ns))
            self._look_again(connection)
            return
        again = False
        refreshed = self.commit_no + REFRESHED_MAX
        for no, _, keys in commits:
            if keys is None:
                self.cache.clear()
                self._ring.forget(no)
            else:
                if no > refreshed or len(keys) > REFRESHED_KEYS_MAX:
                    self.cache.forget(keys)
                written = Written(no)
                written.add(keys)
                self._ring.add(written)
            again = again or keys is None or schema.META_KEY in keys or schema.MARKER_KEY in keys
        # What others have written just now is what is needed next, more often than not.
        self.cache.keep(
            (key, value if value is not None or not there else LARGE)
            for key, value, there in changed
        )
        # Last of all: whoever reads the number reads rows that are not older (see `view`).
        self.commit_no, self._at_ns = commits[-1][:2]
        self._last_ns = max(self._last_ns, self._at_ns)
        if again:
            self._look_again(connection)

    def _accept(self) -> None:
        """Get to know what others of this process have read, as far as it is still so."""
        while self.offers:
            since, rows = self.offers.popleft()
            with self.cache.lock:
                unchanged = self._ring.unchanged(rows, since)
                self.cache.keep([(key, rows[key]) for key in unchanged])

    def _start_from(self, no: int, at_ns: int) -> None:
        """Of what was committed up to here nothing is known."""
        self.cache.clear()
        self._ring.forget(no)
        self.commit_no, self._at_ns = no, at_ns
        self._last_ns = max(self._last_ns, at_ns)

    def _leave(self, connection: Connection, at_once: bool) -> None:
        if not at_once:
            # No ROLLBACK: the library forgets what it has prepared when it sees one.
            ask_all(connection, self.counters, [("COMMIT", ())])
            return
        [(no, _)] = ask(connection, self.counters, _LAST) or [(0, 0)]
        if no != self.commit_no:
            raise _Forestalled

    def _finish(
        self,
        connection: Connection,
        txn: PgTxn,
        now_ns: int,
        commit_no: int,
        topics: list[str],
        answers: list[Answer],
        at_once: bool,
    ) -> None:
        """Send what the commit is made of, and commit."""
        puts = {key: value for key, value in txn.writes.items() if value is not None}
        gone = [key for key, value in txn.writes.items() if value is None]
        said = payload(commit_no, topics) if topics else ""
        timed = at_once and self._anchor is None
        until_us = (now_ns - self._lead_ns) // 1000 + LATE_US if timed else 0
        forget = commit_no - COMMITS_KEPT if commit_no % PRUNE_EVERY == 0 else 0
        self._attempts += 1
        client = self._client + self._attempts.to_bytes(8, "big")
        named = len(txn.writes) <= KEYS_NAMED_MAX
        values = (
            self._lock, commit_no, now_ns, client, named, Arrays(list(puts)), Arrays(list(puts.values())),
            Arrays(gone), self.channel, said, until_us, max(forget, 0),
        )  # fmt: skip
        try:
            if at_once:
                [(micros,)] = ask(connection, self.counters, _APPLY, *values)
            else:
                apply = [(_APPLY, values), ("COMMIT", ())]
                [(micros,)], _ = ask_all(connection, self.counters, apply)
        except psycopg.Error as error:
            if at_once and error.sqlstate in (LATE, "23505"):
                raise _Forestalled from None
            refused = self._lost(error)
            if not isinstance(refused, Unreachable):
                # The server said no to a statement, so it did not commit.
                raise refused from error
            raise InDoubt(commit_no, client, answers, refused) from error
        self._hear(int(micros))

    def _done(self, txn: PgTxn, written: Written, commit_no: int) -> None:
        self.counters.commits += 1
        with self.cache.lock:
            self.cache.keep(txn.writes.items())
            self._ring.add(written)
            self.commit_no, self._at_ns = commit_no, self._last_ns

    def _settle(self, connection: Connection, doubted: InDoubt) -> list[Answer] | None:
        """The answers of a commit whose own was lost, if it did happen; None if it never will."""
        self._alone = 0
        self.counters.doubts += 1
        try:
            happened = doubt.happened(connection, self.counters, doubted, self._lock, self._tick())
        except psycopg.Error as error:
            raise InDoubt(
                doubted.commit_no, doubted.client, doubted.answers, self._lost(error)
            ) from error
        if not happened:
            return None
        self._ring_topics(doubted.commit_no, [ALL])
        return doubted.answers

    # -- the connection --------------------------------------------------------------------------

    def _connect(self) -> Connection:
        if self._connection is None or self._connection.closed:
            with self.cache.lock:
                self.cache.clear()
            with self.away:
                connection = server.connect(self._conninfo)
            try:
                with server.typed(self._conninfo):
                    self._former = server.take_over(connection, self._former)
                    if pooler.hands_sessions_round(connection, self._conninfo):
                        raise server.Pooled(url=connection.info.host, why="it shares sessions out")
                    if self._lock:
                        presence.attend(connection, self._lock)
                    self._rejoin(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _rejoin(self, connection: Connection) -> None:
        """What was known may be of another server, or of another history: one that lost commits."""
        self._alone = 0
        if not self.commit_no:
            return
        of_ours = "SELECT at_ns FROM holdfast_commit WHERE no = %b"
        found = ask(connection, self.counters, of_ours, self.commit_no)
        [(no, at_ns)] = ask(connection, self.counters, _LAST) or [(0, 0)]
        if found != [(self._at_ns,)]:
            was = self.commit_no
            self.history += 1
            self.offers.clear()
            with self.cache.lock:
                self._start_from(int(no), int(at_ns))
            # Whoever waits for numbers after those that are lost must not wait for ever.
            self._ring_topics(max(was, self.commit_no) + 1, [ALL])
        self._look_again(connection)

    def _look_again(self, connection: Connection) -> None:
        """The rows about the store itself: it may have been restored, or moved away."""
        guard_schema(get(connection, schema.MARKER_KEY), self._version, bootstrap=False)
        found = get(connection, schema.META_KEY)
        meta = None if found is None else codec.unpack_as(schema.Meta, found)
        if meta is None or (meta.store_id, meta.generation) != (self.store_id, self.generation):
            # What is known here, leases above all, is of a store that is no more.
            self._replaced = True
            raise StoreReplaced(store_id=self.store_id, generation=self.generation)

    def _disconnect(self) -> None:
        with self.cache.lock:
            self.cache.clear()
        self._alone = 0
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, error: psycopg.Error) -> HoldfastError:
        """An error before the commit was sent: nothing happened."""
        self._disconnect()
        return server.translated(error, self._conninfo)

    def last(self, connection: Connection) -> int:
        row = connection.execute(_LAST).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        self._disconnect()

    def _open(self, bootstrap: bool) -> None:
        connection = self._connect()
        with server.typed(self._conninfo):
            migrate(connection, bootstrap=bootstrap)
            self._lock = server.lock_key(connection)
            presence.attend(connection, self._lock)
            self.channel = f"holdfast_{self._lock & 0xFFFFFFFF}"
            self._anchor: Anchor | None = None
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%b::bigint)", (self._lock,))
                row = connection.execute(_LAST).fetchone()
                no, at_ns = (0, 0) if row is None else (int(row[0]), int(row[1]))
                self._ring = Ring(no)
                guard_schema(get(connection, schema.MARKER_KEY), self._version, bootstrap=bootstrap)
                found = get(connection, schema.META_KEY)
                meta = None if found is None else codec.unpack_as(schema.Meta, found)
                self.store_id = self._clock.entropy(16).hex() if meta is None else meta.store_id
                self.generation = 1 if meta is None else meta.generation
                floor_ns = max(at_ns, 0 if meta is None else meta.floor_ns)
                self._start_from(no, floor_ns)
                self._at_ns = at_ns
                [(micros,)] = connection.execute(_CLOCK).fetchall()
                self._hear(int(micros))
                if self._clock is not SYSTEM:
                    # Simulated time comes through the clock, as it does in every other store.
                    last = None if meta is None else Anchor(meta.boot_id, meta.offset_ns)
                    self._anchor = anchor(self._clock, last=last, floor_ns=floor_ns)
                if meta is None:
                    at = self._anchor or Anchor("server", 0)
                    fresh = schema.Meta(
                        self.store_id, self.generation, at.boot_id, at.offset_ns, floor_ns
                    )
                    first = [
                        (schema.META_KEY, codec.pack(fresh)),
                        (schema.MARKER_KEY, schema.marker(*self._version)),
                    ]
                    for row in first:
                        connection.execute("INSERT INTO holdfast_row VALUES (%b, %b)", row)


class _Broken(Exception):
    """One request of several broke the batch."""


class _Forestalled(Exception):
    """Others have committed since: what was applied to what is known is void."""
