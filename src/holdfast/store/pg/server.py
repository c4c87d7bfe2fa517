"""What we ask of a PostgreSQL server: connections, the schema, and its errors in our words.

Three relations in the schema of the connection's search path:

    holdfast_row       key, value: every row of the store, in byte order
    holdfast_commit    one row for each of the last commits: when, by whom, which keys, which topics
    holdfast_lock      nothing; the advisory lock of the commit is named after it

Bytes compare as unsigned in a `bytea` index, which is the order of our keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from holdfast.errors import (
    BadUrl,
    Busy,
    HoldfastError,
    Invalid,
    NotFound,
    StoreError,
    StoreFull,
    StoreReadOnly,
)

SERVER_MIN = 140000
CONNECT_S = 10
STATEMENT_S = 60
LOCK_S = 30
# A client that vanished in mid-transaction holds the lock of the commit no longer than this.
IDLE_S = 15

Connection = psycopg.Connection[tuple[Any, ...]]


class Unreachable(Busy):
    code = "store_unreachable"
    hint = "the PostgreSQL server does not answer; it is tried again by itself"


class Denied(StoreError):
    code = "store_denied"
    hint = (
        "check user, password and privileges of the URL: the role needs CREATE on the schema once"
    )


class ServerTooOld(StoreError):
    code = "server_too_old"
    hint = "use PostgreSQL 14 or newer"


class Pooled(StoreError):
    code = "store_pooled"
    hint = "connect to the server itself: a pooler in transaction mode loses LISTEN and prepared statements"


def parse(url: str) -> str:
    """The connection string of a URL, with our settings; a bad one is BadUrl."""
    settings = (
        f"-c statement_timeout={STATEMENT_S * 1000} -c lock_timeout={LOCK_S * 1000} "
        f"-c idle_in_transaction_session_timeout={IDLE_S * 1000}"
    )
    try:
        known: dict[str, Any] = dict(conninfo_to_dict(url))
        known["options"] = f"{known.get('options', '')} {settings}".strip()
        return make_conninfo(**(_DEFAULTS | known))
    except psycopg.ProgrammingError as error:
        raise BadUrl(url=without_password(url), why=str(error).strip()) from None


# A peer that is gone without a word is noticed within seconds.
_DEFAULTS: dict[str, Any] = {
    "application_name": "holdfast",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:…@{host}"))


def connect(conninfo: str) -> Connection:
    with typed(conninfo):
        connection: Connection = psycopg.connect(conninfo, autocommit=True)
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
    if state == "3D000":
        return NotFound(what="database", url=where, why=why)
    if state in ("25006",):
        return StoreReadOnly(url=where, why=f"{why}; connect to the primary")
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
        for words, kind in (
            ("password authentication failed", Denied),
            ("no password supplied", Denied),
            ("no pg_hba.conf entry", Denied),
            ("does not exist", NotFound),
        ):
            if words in text:
                return kind(url=where, why=why)
        return Unreachable(url=where, why=why)
    if state[:2] in ("22", "42", "54"):
        return Invalid(what="statement", url=where, why=why)
    return StoreError(url=where, why=why)


# -- the schema ------------------------------------------------------------------------------------

CREATE = [
    """
    CREATE TABLE IF NOT EXISTS holdfast_row (key bytea PRIMARY KEY, value bytea NOT NULL)
    WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 20000,
          autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0,
          autovacuum_analyze_scale_factor = 0.2)
    """,
    """
    CREATE TABLE IF NOT EXISTS holdfast_commit (
        no bigint PRIMARY KEY, at_ns bigint NOT NULL, client bytea NOT NULL, keys bytea,
        topics text NOT NULL)
    WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000,
          autovacuum_vacuum_cost_delay = 0)
    """,
]


def prepare(connection: Connection, *, bootstrap: bool) -> None:
    """Make the relations if they are not there; without bootstrap they must be."""
    found = connection.execute("SELECT to_regclass('holdfast_row'), to_regclass('holdfast_commit')")
    there = found.fetchone()
    if there is not None and None not in there:
        return
    if not bootstrap:
        raise NotFound(what="store", why="no store of ours in this database, and bootstrap is off")
    with connection.transaction():
        # Whoever creates it at the same time waits here, and then finds it.
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('holdfast schema'))")
        for statement in CREATE:
            connection.execute(sql.SQL(statement))


def lock_key(connection: Connection) -> int:
    """The number of the commit's lock: one for each schema of a database that holds a store."""
    row = connection.execute("SELECT 'holdfast_row'::regclass::oid::bigint").fetchone()
    assert row is not None
    return (0x48464C44 << 32) | int(row[0])
