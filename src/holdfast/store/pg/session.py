"""The committer's connection: opening a store, coming back after the server was away, and store time.

What a process knew may not hold when it comes back: others have committed, or the server is another one
that lost the last commits (a standby that lagged, a restored backup). So nothing is taken from before: rows
are forgotten, and the last commit must be the one that it was.

Store time is the server's clock, carried on by our own (`timing`), never before the last commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast import codec
from holdfast.clock import SYSTEM, Anchor, Clock, anchor
from holdfast.errors import StoreReplaced
from holdfast.store import schema
from holdfast.store.engine import guard_schema, meta_of
from holdfast.store.pg import pooler, presence, server
from holdfast.store.pg.known import NEWS, Asked, Gap, Known
from holdfast.store.pg.migrations import migrate
from holdfast.store.pg.rows import get
from holdfast.store.pg.timing import SERVER, WORTH_NS, Timing, ahead_of
from holdfast.store.pg.topics import ALL
from holdfast.store.pg.wire import Connection, Counters, ask

LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_AT = "SELECT at_ns FROM holdfast_commit WHERE no = %b"


class Session:
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
        self._version = schema_version
        self.known = Known()
        self.counters = Counters()
        self.away = server.Away(clock)
        # Grows when the server turns out to have another history: numbers of commits mean others then.
        self.history = 0
        self._replaced = False
        self._connection: Connection | None = None
        self._former: server.Backend | None = None
        self._lock = 0
        self._last_ns = 0
        self._timing = Timing()
        self._anchor: Anchor | None = None
        self._open(bootstrap)

    @property
    def commit_no(self) -> int:
        return self.known.commit_no

    # -- time ----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Store time as far as it is known here."""
        boot_ns = self._clock.boot_ns()
        if self._anchor is not None:
            return max(self._anchor.now_ns(boot_ns), self._last_ns)
        return max(boot_ns + self._timing.offset_ns, self._last_ns, self.known.at_ns)

    def _hear(self, micros: int, asked_ns: int) -> None:
        """What the server's clock said, after it was asked at `asked_ns` of ours and before now."""
        self._last_ns = max(self._last_ns, self.known.at_ns)
        boot_ns = self._clock.boot_ns()
        self._timing.hear(micros * 1000, asked_ns, boot_ns, floor_ns=self._last_ns)

    def _time_to_keep(self, writes: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        """What a commit is to write beside this, for those who open the store later."""
        ahead_ns, was = self._timing.ahead_ns, self._meta
        near = abs(ahead_ns - ahead_of(was)) <= WORTH_NS
        if near or self._anchor is not None or schema.META_KEY in writes:
            return {}
        meta = schema.Meta(was.store_id, was.generation, SERVER, ahead_ns, was.floor_ns)
        return {schema.META_KEY: codec.pack(meta)}

    def _time_kept(self, writes: Mapping[bytes, bytes | None]) -> None:
        packed = writes.get(schema.META_KEY)
        if packed is not None:
            self._meta = codec.unpack_as(schema.Meta, packed)

    def _tick(self) -> int:
        """The time of the next commit."""
        self._last_ns = max(self.now_ns(), self._last_ns + 1, self.known.at_ns + 1)
        return self._last_ns

    # -- others --------------------------------------------------------------------------------

    def refresh(self, connection: Connection, fresh: bool) -> None:
        """Hear of what others have committed, outside of a commit. For any thread.

        A connection that is not `fresh` may be to a server that is the primary no more: it is not believed
        that what is known never was.
        """
        at = self.known.asking()
        news = ask(connection, Counters(), NEWS, *at.values)
        self._catch_up(connection, at, news, latest=False, believed=fresh)

    def _catch_up(
        self,
        connection: Connection,
        at: Asked,
        news: Sequence[Any],
        *,
        latest: bool,
        believed: bool = True,
    ) -> None:
        try:
            again = self.known.catch_up(at, news, latest=latest)
        except Gap:
            if not believed:
                raise
            self._start_anew(connection)
            again = True
        if again:
            self._look_again(connection)

    def _start_anew(self, connection: Connection) -> None:
        """Nothing that was known, or read, holds any more."""
        [(no, at_ns)] = ask(connection, self.counters, LAST) or [(0, 0)]
        was = self.commit_no
        self.history += 1
        self.known.start_from(int(no), int(at_ns))
        # Whoever waits for numbers after those that are lost must not wait for ever.
        self._ring_topics(max(was, self.commit_no) + 1, [ALL])

    def _look_again(self, connection: Connection) -> None:
        """The rows about the store itself: it may have been restored, or moved away."""
        guard_schema(get(connection, schema.MARKER_KEY), self._version, bootstrap=False)
        found = get(connection, schema.META_KEY)
        meta = meta_of(found)
        if meta is None or (meta.store_id, meta.generation) != (self.store_id, self.generation):
            # What is known here, leases above all, is of a store that is no more.
            self._replaced = True
        else:
            self._meta = meta
        self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        if self._replaced:
            raise StoreReplaced(store_id=self.store_id, generation=self.generation)

    # -- the connection --------------------------------------------------------------------------

    def _connect(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self.known.forget()
            with self.away:
                connection = server.connect(self._conninfo, self.away.haste)
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
            if self._lock:
                connection.keep_line()
            connection.patience_s = server.COMMIT_PATIENCE_S
            self._connection = connection
        return self._connection

    def _rejoin(self, connection: Connection) -> None:
        at = self.known.asking()
        if at.no and ask(connection, self.counters, _AT, at.no) != [(at.at_ns,)]:
            self._start_anew(connection)
        self._look_again(connection)

    def _disconnect(self) -> None:
        self.known.forget()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def last(self, connection: Connection) -> int:
        row = connection.execute(LAST).fetchone()
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
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%b::bigint)", (self._lock,))
                row = connection.execute(LAST).fetchone()
                no, at_ns = (0, 0) if row is None else (int(row[0]), int(row[1]))
                guard_schema(get(connection, schema.MARKER_KEY), self._version, bootstrap=bootstrap)
                meta = meta_of(get(connection, schema.META_KEY))
                self.store_id = self._clock.entropy(16).hex() if meta is None else meta.store_id
                self.generation = 1 if meta is None else meta.generation
                floor_ns = max(at_ns, 0 if meta is None else meta.floor_ns)
                self.known.start_from(no, at_ns)
                self._last_ns = floor_ns
                [(micros,)] = connection.execute(_CLOCK).fetchall()
                self._timing.start(
                    int(micros) * 1000,
                    self._clock.boot_ns(),
                    floor_ns=floor_ns,
                    ahead_ns=ahead_of(meta),
                )
                if self._clock is not SYSTEM:
                    # Simulated time comes through the clock, as it does in every other store.
                    last = None if meta is None else Anchor(meta.boot_id, meta.offset_ns)
                    self._anchor = anchor(self._clock, last=last, floor_ns=floor_ns)
                if meta is None:
                    meta = self._write_first(connection, floor_ns)
                self._meta = meta
        connection.keep_line()

    def _write_first(self, connection: Connection, floor_ns: int) -> schema.Meta:
        at = self._anchor or Anchor(SERVER, 0)
        meta = schema.Meta(self.store_id, self.generation, at.boot_id, at.offset_ns, floor_ns)
        for row in (
            (schema.META_KEY, codec.pack(meta)),
            (schema.MARKER_KEY, schema.marker(*self._version)),
        ):
            connection.execute("INSERT INTO holdfast_row VALUES (%b, %b)", row)
        return meta
