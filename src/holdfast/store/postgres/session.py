"""The committer's session: opening the store, reconnecting after an outage, and store time.

After a reconnect the local state may be invalid: other processes have committed, or the server has lost the last
commits (a lagging standby, a restored backup). The session therefore clears the row cache, verifies that the last
applied commit is unchanged, and otherwise starts a new history.

Store time follows the server's clock, interpolated by the local boot clock (`store_clock`), and is never before the
last commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast import codec
from holdfast.clock import SYSTEM, Clock, ClockAnchor, anchor_at_open
from holdfast.errors import StoreReplaced
from holdfast.store import schema
from holdfast.store.engine import check_schema, decode_meta
from holdfast.store.postgres import pooler, presence, server
from holdfast.store.postgres.local_state import REMOTE_COMMITS, HistoryGap, LocalState, SyncPosition
from holdfast.store.postgres.migrations import migrate
from holdfast.store.postgres.notifications import ALL_TOPICS
from holdfast.store.postgres.rows import read_row
from holdfast.store.postgres.statements import CommitCounters, PostgresConnection, run_statement
from holdfast.store.postgres.store_clock import (
    PERSIST_THRESHOLD_NS,
    SERVER_BOOT_ID,
    StoreClock,
    saved_ahead_ns,
)

SELECT_LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_SELECT_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_SELECT_TIME = "SELECT at_ns FROM holdfast_commit WHERE no = %b"
_PUT_MARKER = """
    INSERT INTO holdfast_row (key, value) VALUES (%b, %b)
    ON CONFLICT (key) DO UPDATE SET value = excluded.value
"""
# Without keys: every process reads the marker and the meta row again.
_RECORD_COMMIT = "INSERT INTO holdfast_commit (no, at_ns, client, keys) VALUES (%b, %b, '', NULL)"


class PostgresSession:
    def __init__(
        self,
        conninfo: str,
        clock: Clock,
        *,
        bootstrap: bool = True,
        notify: Callable[[int, Sequence[str]], None],
        schema_version: tuple[int, int] = schema.SCHEMA_VERSION,
    ) -> None:
        self._conninfo = conninfo
        self._clock = clock
        self._notify_topics = notify
        self._version = schema_version
        self.local_state = LocalState()
        self.counters = CommitCounters()
        self.outage = server.Outage(clock)
        # Incremented when the server has another history: the same commit numbers then mean other commits.
        self.history_no = 0
        self._is_replaced = False
        self._connection: PostgresConnection | None = None
        self._former_backend: server.ServerBackend | None = None
        self._lock = 0
        self._last_ns = 0
        self._store_clock = StoreClock()
        self._anchor: ClockAnchor | None = None
        self._open(bootstrap)

    @property
    def commit_no(self) -> int:
        return self.local_state.commit_no

    # -- time ----------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The local estimate of store time."""
        boot_ns = self._clock.boot_ns()
        if self._anchor is not None:
            return max(self._anchor.now_ns(boot_ns), self._last_ns)
        return max(boot_ns + self._store_clock.offset_ns, self._last_ns, self.local_state.at_ns)

    def _observe_clock(self, micros: int, started_ns: int) -> None:
        """Observe the server's clock, read between `started_ns` of the local clock and now."""
        self._last_ns = max(self._last_ns, self.local_state.at_ns)
        boot_ns = self._clock.boot_ns()
        self._store_clock.observe(micros * 1000, started_ns, boot_ns, floor_ns=self._last_ns)

    def _clock_row_to_write(
        self, writes: Mapping[bytes, bytes | None]
    ) -> dict[bytes, bytes | None]:
        """The meta row to add to a commit if the clock offset changed enough, for later opens of the store."""
        ahead_ns, former = self._store_clock.ahead_ns, self._meta
        near = abs(ahead_ns - saved_ahead_ns(former)) <= PERSIST_THRESHOLD_NS
        if near or self._anchor is not None or schema.META_KEY in writes:
            return {}
        meta = schema.StoreMeta(
            former.store_id, former.generation, SERVER_BOOT_ID, ahead_ns, former.floor_ns
        )
        return {schema.META_KEY: codec.pack(meta)}

    def _on_clock_row_written(self, writes: Mapping[bytes, bytes | None]) -> None:
        packed = writes.get(schema.META_KEY)
        if packed is not None:
            self._meta = codec.unpack_as(schema.StoreMeta, packed)

    def _next_commit_ns(self) -> int:
        """The time of the next commit."""
        self._last_ns = max(self.now_ns(), self._last_ns + 1, self.local_state.at_ns + 1)
        return self._last_ns

    # -- remote commits ------------------------------------------------------------------------

    def refresh(self, connection: PostgresConnection, is_new: bool) -> None:
        """Apply remote commits outside a commit. Any thread may call it.

        A connection that is not new may lead to a former primary: a history gap found there is not trusted.
        """
        position = self.local_state.position()
        rows = run_statement(connection, CommitCounters(), REMOTE_COMMITS, *position.parameters)
        self._apply_remote_commits(connection, position, rows, latest=False, trusted=is_new)

    def _apply_remote_commits(
        self,
        connection: PostgresConnection,
        position: SyncPosition,
        rows: Sequence[Any],
        *,
        latest: bool,
        trusted: bool = True,
    ) -> None:
        try:
            store_changed = self.local_state.apply_remote_commits(position, rows, latest=latest)
        except HistoryGap:
            if not trusted:
                raise
            self._reset_history(connection)
            store_changed = True
        if store_changed:
            self._verify_identity(connection)

    def _reset_history(self, connection: PostgresConnection) -> None:
        """Start a new history: all cached rows and earlier reads are invalid."""
        [(no, at_ns)] = run_statement(connection, self.counters, SELECT_LAST) or [(0, 0)]
        former_no = self.commit_no
        self.history_no += 1
        self.local_state.reset_to(int(no), int(at_ns))
        # Wake waiters whose commit number belongs to the lost history.
        self._notify_topics(max(former_no, self.commit_no) + 1, [ALL_TOPICS])

    def _verify_identity(self, connection: PostgresConnection) -> None:
        """Read the marker and the meta row again: the store may have been restored or moved, or newer code may have
        raised its marker. An older marker is refused too: only an open raises it."""
        check_schema(read_row(connection, schema.MARKER_KEY), self._version, bootstrap=False)
        row = read_row(connection, schema.META_KEY)
        meta = decode_meta(row)
        if meta is None or (meta.store_id, meta.generation) != (self.store_id, self.generation):
            # The local state, above all the leases, belongs to a replaced store.
            self._is_replaced = True
        else:
            self._meta = meta
        self._refuse_replaced()

    def _refuse_replaced(self) -> None:
        if self._is_replaced:
            raise StoreReplaced(store_id=self.store_id, generation=self.generation)

    # -- the connection --------------------------------------------------------------------------

    def _connect(self) -> PostgresConnection:
        if self._connection is None or self._connection.closed:
            self.local_state.clear_rows()
            with self.outage:
                connection = server.connect(self._conninfo, self.outage.shutdown_deadline)
            try:
                with server.translate_errors(self._conninfo):
                    self._former_backend = server.terminate_former_backend(
                        connection, self._former_backend
                    )
                    if pooler.uses_transaction_pooling(connection, self._conninfo):
                        raise server.PoolerUnsupported(
                            url=connection.info.host, why="a pooler shares its sessions"
                        )
                    if self._lock:
                        presence.lock_shared(connection, self._lock)
                        self._resume(connection)
            except BaseException:
                connection.close()
                raise
            if self._lock:
                connection.keep_pipeline()
            connection.answer_timeout_s = server.COMMIT_ANSWER_S
            self._connection = connection
        return self._connection

    def _resume(self, connection: PostgresConnection) -> None:
        position = self.local_state.position()
        if position.no and run_statement(connection, self.counters, _SELECT_TIME, position.no) != [
            (position.at_ns,)
        ]:
            self._reset_history(connection)
        self._verify_identity(connection)

    def _disconnect(self) -> None:
        self.local_state.clear_rows()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def last_commit_no(self, connection: PostgresConnection) -> int:
        row = connection.execute(SELECT_LAST).fetchone()
        return 0 if row is None else int(row[0])

    def close(self) -> None:
        self._disconnect()

    def _open(self, bootstrap: bool) -> None:
        connection = self._connect()
        with server.translate_errors(self._conninfo):
            migrate(connection, bootstrap=bootstrap)
            self._lock = server.commit_lock_key(connection)
            presence.lock_shared(connection, self._lock)
            self.channel = f"holdfast_{self._lock & 0xFFFFFFFF}"
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%b::bigint)", (self._lock,))
                row = connection.execute(SELECT_LAST).fetchone()
                no, at_ns = (0, 0) if row is None else (int(row[0]), int(row[1]))
                marker_current = check_schema(
                    read_row(connection, schema.MARKER_KEY),
                    self._version,
                    bootstrap=bootstrap,
                    allow_upgrade=True,
                )
                meta = decode_meta(read_row(connection, schema.META_KEY))
                self.store_id = self._clock.entropy(16).hex() if meta is None else meta.store_id
                self.generation = 1 if meta is None else meta.generation
                floor_ns = max(at_ns, 0 if meta is None else meta.floor_ns)
                self.local_state.reset_to(no, at_ns)
                self._last_ns = floor_ns
                [(micros,)] = connection.execute(_SELECT_CLOCK).fetchall()
                self._store_clock.start(
                    int(micros) * 1000,
                    self._clock.boot_ns(),
                    floor_ns=floor_ns,
                    ahead_ns=saved_ahead_ns(meta),
                )
                if self._clock is not SYSTEM:
                    # Simulated time comes from the clock, as in every other store.
                    last = None if meta is None else ClockAnchor(meta.boot_id, meta.offset_ns)
                    self._anchor = anchor_at_open(self._clock, last=last, floor_ns=floor_ns)
                if meta is None:
                    meta = self._write_meta(connection, floor_ns)
                elif not marker_current:
                    self._write_marker(connection)
                self._meta = meta
        connection.keep_pipeline()

    def _write_meta(self, connection: PostgresConnection, floor_ns: int) -> schema.StoreMeta:
        anchor_row = self._anchor or ClockAnchor(SERVER_BOOT_ID, 0)
        meta = schema.StoreMeta(
            self.store_id, self.generation, anchor_row.boot_id, anchor_row.offset_ns, floor_ns
        )
        for row in (
            (schema.META_KEY, codec.pack(meta)),
            (schema.MARKER_KEY, schema.encode_marker(*self._version)),
        ):
            connection.execute("INSERT INTO holdfast_row VALUES (%b, %b)", row)
        return meta

    def _write_marker(self, connection: PostgresConnection) -> None:
        """Raise the marker as the next commit. The commit makes processes that have the store open check the marker
        before their next commit, and older code refuses it."""
        no, at_ns = self.commit_no + 1, self._next_commit_ns()
        row = (schema.MARKER_KEY, schema.encode_marker(*self._version))
        connection.execute(_PUT_MARKER, row)
        connection.execute(_RECORD_COMMIT, (no, at_ns))
        self.local_state.reset_to(no, at_ns)
