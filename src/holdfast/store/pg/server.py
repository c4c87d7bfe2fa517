"""What we ask of a PostgreSQL server: its URL, connections with time-outs, and its errors in our words."""

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
from holdfast.store.pg import patience
from holdfast.store.pg.patience import HASTE_CONNECT_S, Haste
from holdfast.store.pg.wire import Connection
from holdfast.store.urls import HIDDEN, shown

SERVER_MIN = 150000
CONNECT_S = 10
STATEMENT_S = 60
LOCK_S = 15
# How long a commit may take to be answered: longer than it may wait for its lock.
COMMIT_PATIENCE_S = LOCK_S + 5.0
# Reads wait for no lock, and take what one page takes.
READ_PATIENCE_S = 15.0
# A client that vanished in mid-transaction holds the lock of the commit no longer than this.
IDLE_S = 3
# One that only reads holds nobody up, but keeps the server from clearing up behind it.
READER_IDLE_S = 120
# The constraint that no commit fulfils in a store that was moved (`place`).
MOVED = "holdfast_store_has_moved"


class Unreachable(Busy):
    code = "store_unreachable"
    hint = "the PostgreSQL server does not answer; it is tried again by itself"


class Denied(StoreDenied):
    hint = (
        "check user, password and privileges of the URL: the role needs CREATE on the schema once"
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


class Pooled(StoreError):
    code = "store_pooled"
    hint = "connect to the server itself: a pooler in transaction mode loses LISTEN and prepared statements"


def parse(url: str, *, idle_s: int | None = None) -> str:
    """The connection string of a URL, with our settings; a bad one is BadUrl."""
    settings = (
        f"-c statement_timeout={STATEMENT_S * 1000} -c lock_timeout={LOCK_S * 1000} "
        f"-c idle_in_transaction_session_timeout={(idle_s or IDLE_S) * 1000} "
        # By a warning a server says that a commit did not get to its standby (`wire`).
        "-c client_min_messages=warning "
        "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3 "
        "-c tcp_user_timeout=10000"
    )
    try:
        known: dict[str, Any] = dict(conninfo_to_dict(url))
        if "@" in known.get("dbname", "") and shown(url) != url:
            why = "the password holds a / that has to be written as %2F"
            raise BadUrl(url=shown(url), why=why)
        known["options"] = f"{known.get('options', '')} {settings}".strip()
        return make_conninfo(**(_DEFAULTS | known))
    except psycopg.ProgrammingError as error:
        # A password that is not escaped breaks a URL in the middle: what is quoted may be a piece of it.
        why = _QUOTED.sub(f'"{HIDDEN}"', str(error)) if shown(url) != url else str(error)
        raise BadUrl(url=shown(url), why=why.strip()) from None


_QUOTED = re.compile(r'"[^"]*"')

# A peer that is gone without a word is noticed within seconds.
_DEFAULTS: dict[str, Any] = {
    "application_name": "holdfast",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def connect(conninfo: str, haste: Haste | None = None) -> Connection:
    hurried: dict[str, Any] = {}
    if haste is not None and haste.stopping:
        hurried["connect_timeout"] = HASTE_CONNECT_S
    with typed(conninfo):
        connection = Connection.connect(conninfo, autocommit=True, prepare_threshold=0, **hurried)
    if haste is not None:
        connection.haste = haste
    patience.watch(connection)
    if connection.info.server_version < SERVER_MIN:
        found = connection.info.server_version
        connection.close()
        raise ServerTooOld(found=f"{found // 10000}.{found % 10000}")
    return connection


@contextlib.contextmanager
def typed(conninfo: str) -> Iterator[None]:
    """Errors of the server as ours. The URL is told without its password."""
    try:
        yield
    except psycopg.Error as error:
        raise translated(error, conninfo) from error


def translated(error: psycopg.Error, conninfo: str) -> HoldfastError:
    known = conninfo_to_dict(conninfo)
    where = f"{known.get('host', 'localhost')}/{known.get('dbname', '')}"
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    state = error.sqlstate or ""
    if state in ("28P01", "28000", "42501", "3F000"):
        return Denied(url=where, why=why)
    if state == "23514" and error.diag.constraint_name == MOVED:
        return StoreMoved(url=where)
    if state == "3D000":
        return NoDatabase(what="database", url=where, why=why)
    if state in ("25006",):
        return ReadOnlyServer(url=where, why=why)
    if state in ("53100", "53200"):
        return StoreFull(url=where, why=why)
    if state in ("26000", "42P05"):
        return Pooled(url=where, why=why)
    if state in ("57014", "55P03", "25P03"):
        return Busy(url=where, why=why)
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or state[:2] in (
        "08",
        "57",
        "53",
    ):
        text = str(error)
        # What a server says while it lets nobody in has no code, only words.
        for words, kind in _AT_THE_DOOR:
            if words in text:
                return kind(url=where, why=why)
        if 'database "' in text and "does not exist" in text:
            return NoDatabase(what="database", url=where, why=why)
        return Unreachable(url=where, why=why)
    if state[:2] in ("22", "42", "54"):
        return Invalid(what="statement", url=where, why=why)
    return StoreError(url=where, why=why)


class Away:
    """Since when a server is away, by the wall clock: entered around each try to connect to it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.haste = Haste()
        self.since_ns = 0
        self._mono_ns = 0

    def __enter__(self) -> None:
        if self.since_ns and self.haste.over:
            raise Unreachable(why="it was away, and this process stops")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.since_ns = 0
        elif issubclass(kind, Unreachable) and not self.since_ns:
            self._note()

    def _note(self) -> None:
        self.since_ns, self._mono_ns = self._clock.wall_ns(), self._clock.mono_ns()

    def over(self, began_ns: int, seconds: float) -> bool:
        """Whether that many seconds are over since it is away, or else since somebody began; or there is no
        time left to wait."""
        if self.haste.over:
            return True
        since_ns = self._mono_ns if self.since_ns else began_ns
        return self._clock.mono_ns() - since_ns >= int(seconds * S)

    def fields(self) -> dict[str, int]:
        return {"since_ns": self.since_ns} if self.since_ns else {}

    def told(self, error: HoldfastError) -> HoldfastError:
        """The error, with this."""
        if self.haste.over and not self.since_ns and isinstance(error, Unreachable):
            # Nobody tries to connect any more, so nobody else would note it.
            self._note()
        return type(error)(**(error.fields | self.fields()))


_AT_THE_DOOR: tuple[tuple[str, type[HoldfastError]], ...] = (
    ("authentication failed", Denied),
    ("no password supplied", Denied),
    ("no pg_hba.conf entry", Denied),
    ("permission denied for database", Denied),
    ("is not permitted to log in", Denied),
    ('role "', Denied),
    ("unsupported startup parameter", Pooled),
)


class Backend(NamedTuple):
    """The server's process behind a connection. Numbers are given again, so it has its start, too."""

    pid: int
    began: str


def take_over(connection: Connection, former: Backend | None) -> Backend:
    """End what a lost connection has left behind: it may hold the lock of the commit until it is found out.

    A server that takes no writes is refused.
    """
    if former is not None:
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s"
        connection.execute(ended, former)
    own = """
        SELECT pid, backend_start::text, current_setting('transaction_read_only') = 'on'
        FROM pg_stat_activity WHERE pid = pg_backend_pid()
    """
    [(pid, began, read_only)] = connection.execute(own).fetchall()
    if read_only:
        raise ReadOnlyServer(url=connection.info.host, why="the server takes no writes")
    return Backend(pid, began)


def lock_key(connection: Connection) -> int:
    """The number of the commit's lock: one for each schema of a database that holds a store."""
    row = connection.execute("SELECT 'holdfast_row'::regclass::oid::bigint").fetchone()
    assert row is not None
    return (0x48464C44 << 32) | int(row[0])
