"""The PostgreSQL server: connection strings, connections with timeouts, and error translation."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.clock import Clock, S
from holdfast.errors import (
    BadUrl,
    Busy,
    HoldfastError,
    Invalid,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
)
from holdfast.store.postgres import watchdog
from holdfast.store.postgres.statements import PostgresConnection
from holdfast.store.postgres.watchdog import SHUTDOWN_CONNECT_S, ShutdownDeadline
from holdfast.store.urls import REDACTED, redact

SERVER_MIN = 150000
CONNECT_S = 10
STATEMENT_S = 60
LOCK_S = 15
# The answer timeout of a commit: longer than its lock timeout.
COMMIT_ANSWER_S = LOCK_S + 5.0
# The answer timeout of a read, which waits for no lock.
READ_ANSWER_S = 15.0
# A client that vanished inside a transaction holds the commit lock no longer than this.
IDLE_S = 3
# A vanished reader blocks no commit but keeps VACUUM from removing dead rows.
READER_IDLE_S = 120
# The constraint that refuses every commit in a moved store (`raw_store`).
MOVED_CONSTRAINT = "holdfast_store_has_moved"


class PostgresUnreachable(Busy):
    code = "store_unreachable"
    hint = "the PostgreSQL server does not answer; holdfast retries automatically"


class ServerDenied(StoreDenied):
    hint = (
        "check user, password and privileges of the URL: the role needs CREATE on the schema once"
    )


class LoginRefused(PostgresUnreachable):
    hint = (
        "the server refuses the login of a process that was connected: put the new password into PGPASSFILE, which is "
        "read at each attempt, or restart the process with it; holdfast retries automatically"
    )


class NoDatabase(NotFound):
    code = "no_database"
    hint = "create it, for the role of the URL: createdb --owner ROLE NAME"


class ReadOnlyServer(StoreReadOnly):
    code = "server_read_only"
    hint = (
        "connect to the primary; with several hosts in the URL, target_session_attrs=read-write "
        "finds it"
    )


class ServerTooOld(StoreError):
    code = "server_too_old"
    hint = "use PostgreSQL 15 or newer"


class PoolerUnsupported(StoreError):
    code = "store_pooled"
    hint = "connect to the server itself: a pooler in transaction mode loses LISTEN and prepared statements"


def build_conninfo(url: str, *, idle_s: int | None = None) -> str:
    """Build the connection string of a URL with the store's settings; BadUrl if the URL is invalid."""
    settings = (
        f"-c statement_timeout={STATEMENT_S * 1000} -c lock_timeout={LOCK_S * 1000} "
        f"-c idle_in_transaction_session_timeout={(idle_s or IDLE_S) * 1000} "
        # A server reports with a warning that the standby did not confirm a commit (`statements`).
        "-c client_min_messages=warning "
        "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3 "
        "-c tcp_user_timeout=10000"
    )
    try:
        settings_by_name: dict[str, Any] = dict(conninfo_to_dict(url))
        if "@" in settings_by_name.get("dbname", "") and redact(url) != url:
            why = "the password contains a / that must be written as %2F"
            raise BadUrl(url=redact(url), why=why)
        if "@" in settings_by_name.get("host", "") and redact(url) != url:
            why = "the password contains an @ that must be written as %40"
            raise BadUrl(url=redact(url), why=why)
        settings_by_name["options"] = f"{settings_by_name.get('options', '')} {settings}".strip()
        return make_conninfo(**(_DEFAULTS | settings_by_name))
    except psycopg.ProgrammingError as error:
        # An unescaped password splits the URL, so a quoted part of the message may belong to the password.
        why = _QUOTED.sub(f'"{REDACTED}"', str(error)) if redact(url) != url else str(error)
        raise BadUrl(url=redact(url), why=why.strip()) from None


_QUOTED = re.compile(r'"[^"]*"')

# Detect a vanished peer within seconds.
_DEFAULTS: dict[str, Any] = {
    "application_name": "holdfast",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def connect(conninfo: str, shutdown_deadline: ShutdownDeadline | None = None) -> PostgresConnection:
    options: dict[str, Any] = {}
    if shutdown_deadline is not None and shutdown_deadline.is_stopping:
        options["connect_timeout"] = SHUTDOWN_CONNECT_S
    with translate_errors(conninfo):
        connection = PostgresConnection.connect(
            conninfo, autocommit=True, prepare_threshold=0, **options
        )
    if shutdown_deadline is not None:
        connection.shutdown_deadline = shutdown_deadline
    watchdog.watch(connection)
    if connection.info.server_version < SERVER_MIN:
        found = connection.info.server_version
        connection.close()
        raise ServerTooOld(found=f"{found // 10000}.{found % 10000}")
    return connection


@contextlib.contextmanager
def translate_errors(conninfo: str) -> Iterator[None]:
    """Translate errors of the server. The URL in the error has no password."""
    try:
        yield
    except psycopg.Error as error:
        raise to_store_error(error, conninfo) from error


def to_store_error(error: psycopg.Error, conninfo: str) -> HoldfastError:
    parameters = conninfo_to_dict(conninfo)
    where = f"{parameters.get('host', 'localhost')}/{parameters.get('dbname', '')}"
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    sqlstate = error.sqlstate or ""
    if sqlstate in ("28P01", "28000", "42501", "3F000"):
        return ServerDenied(url=where, why=why)
    if sqlstate == "23514" and error.diag.constraint_name == MOVED_CONSTRAINT:
        return StoreMoved(url=where)
    if sqlstate == "3D000":
        return NoDatabase(what="database", url=where, why=why)
    if sqlstate in ("25006",):
        return ReadOnlyServer(url=where, why=why)
    if sqlstate in ("53100", "53200"):
        return StoreFull(url=where, why=why)
    if sqlstate in ("26000", "42P05"):
        return PoolerUnsupported(url=where, why=why)
    if sqlstate in ("57014", "55P03", "25P03"):
        return Busy(url=where, why=why)
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or sqlstate[:2] in (
        "08",
        "57",
        "53",
    ):
        text = str(error)
        # Errors during connection start have no SQLSTATE, only a message.
        for message, kind in _STARTUP_ERRORS:
            if message in text:
                return kind(url=where, why=why)
        if 'database "' in text and "does not exist" in text:
            return NoDatabase(what="database", url=where, why=why)
        return PostgresUnreachable(url=where, why=why)
    if sqlstate[:2] in ("22", "42", "54"):
        return Invalid(what="statement", url=where, why=why)
    return StoreError(url=where, why=why)


class Outage:
    """The outage of a server: its start by the wall clock. Used as a context around each connection attempt.

    A login that is refused after a successful one is an outage too: the password is being changed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.shutdown_deadline = ShutdownDeadline()
        self.since_ns = 0
        self._mono_ns = 0
        self._was_connected = False

    def __enter__(self) -> None:
        if self.since_ns and self.shutdown_deadline.is_expired:
            raise PostgresUnreachable(
                why="the server was unreachable, and this process is stopping"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self.since_ns = 0
            self._was_connected = True
            return
        refused = error if isinstance(error, ServerDenied) and self._was_connected else None
        if (refused or issubclass(kind, PostgresUnreachable)) and not self.since_ns:
            self._start()
        if refused is not None:
            raise LoginRefused(**refused.fields) from refused

    def _start(self) -> None:
        self.since_ns, self._mono_ns = self._clock.wall_ns(), self._clock.mono_ns()

    def is_over(self, started_ns: int, seconds: float) -> bool:
        """Whether to stop retrying: the shutdown deadline passed, or `seconds` passed since the start of the outage,
        or since `started_ns` without one."""
        if self.shutdown_deadline.is_expired:
            return True
        since_ns = self._mono_ns if self.since_ns else started_ns
        return self._clock.mono_ns() - since_ns >= int(seconds * S)

    def fields(self) -> dict[str, int]:
        return {"since_ns": self.since_ns} if self.since_ns else {}

    def with_outage(self, error: HoldfastError) -> HoldfastError:
        """The error with the start of the outage as a field."""
        if (
            self.shutdown_deadline.is_expired
            and not self.since_ns
            and isinstance(error, PostgresUnreachable)
        ):
            # No further connection attempt would record the outage.
            self._start()
        return type(error)(**(error.fields | self.fields()))


_STARTUP_ERRORS: tuple[tuple[str, type[HoldfastError]], ...] = (
    ("authentication failed", ServerDenied),
    ("no password supplied", ServerDenied),
    ("no pg_hba.conf entry", ServerDenied),
    ("permission denied for database", ServerDenied),
    ("is not permitted to log in", ServerDenied),
    ('role "', ServerDenied),
    ("unsupported startup parameter", PoolerUnsupported),
)


class ServerBackend(NamedTuple):
    """The server process of a connection. A pid can be reused, so the start time is part of the identity."""

    pid: int
    started: str


def terminate_former_backend(
    connection: PostgresConnection, former: ServerBackend | None
) -> ServerBackend:
    """Terminate the backend of a lost connection, which may still hold the commit lock. Return the own backend.

    Raise ReadOnlyServer for a server that accepts no writes.
    """
    if former is not None:
        terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
        connection.execute(terminate, former)
    select_own = """
        SELECT pid, backend_start::text, current_setting('transaction_read_only') = 'on'
        FROM pg_stat_activity WHERE pid = pg_backend_pid()
    """
    [(pid, began, read_only)] = connection.execute(select_own).fetchall()
    if read_only:
        raise ReadOnlyServer(url=connection.info.host, why="the server accepts no writes")
    return ServerBackend(pid, began)


def commit_lock_key(connection: PostgresConnection) -> int:
    """The advisory lock key of the commit lock: one for each schema with a store."""
    row = connection.execute("SELECT 'holdfast_row'::regclass::oid::bigint").fetchone()
    assert row is not None
    return (0x48464C44 << 32) | int(row[0])
