"""Is there a pooler between us and the server, and does it hand the server's sessions round?

A pooler in session mode is as good as the server. One in transaction or statement mode gives each
transaction whatever session is free: LISTEN, prepared statements, session locks and settings are then left
with strangers. That would fail later, and differently each time, so it is found out when a store is opened.

The server's own process tells its number in two ways: when a connection is made, and when it is asked. Behind
a pooler these differ, and only then are there probes: a mark that is set in one session is gone, or is seen
from another connection.
"""

from __future__ import annotations

import psycopg

from holdfast.store.pg.wire import Connection

_MARK = "holdfast.probe"
_SET = f"SELECT set_config('{_MARK}', %s, false)"
_SEEN = f"SELECT current_setting('{_MARK}', true)"


def hands_sessions_round(connection: Connection, conninfo: str) -> bool:
    """Whether what one transaction of the connection leaves in its session is lost to the next, or found by
    others. The connection is in autocommit, and idle."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    if row == (connection.info.backend_pid,):
        return False
    try:
        return _probed(connection, conninfo)
    except psycopg.errors.ProtocolViolation:
        return True  # in statement mode there are no transactions


def _probed(connection: Connection, conninfo: str) -> bool:
    mark = f"{connection.info.backend_pid}:{id(connection)}"
    connection.execute(_SET, (mark,), prepare=False)
    if _seen(connection) != mark:
        return True
    with Connection.connect(conninfo, autocommit=True, prepare_threshold=None) as other:
        # Inside a transaction it keeps the session that it got.
        with other.transaction():
            if _seen(other) == mark:
                return True
        for _ in range(2):
            if _seen(other) == mark or _seen(connection) != mark:
                return True
    return False


def _seen(connection: Connection) -> str | None:
    row = connection.execute(_SEEN, prepare=False).fetchone()
    return None if row is None else row[0]
