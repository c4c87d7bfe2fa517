"""Detection of transaction pooling between the client and the server.

A pooler in session mode works like a direct connection. In transaction or statement mode it runs each
transaction in any free session: LISTEN, prepared statements, session locks and settings are then lost or leak
to other clients. That would fail later and unpredictably, so every new connection is checked.

The backend pid is known from the connection start and from a query. Behind a pooler the two differ. Only then
the check sets a mark in the session and probes whether it is lost, or visible from another connection.
"""

from __future__ import annotations

import psycopg

from holdfast.store.postgres.statements import PostgresConnection

_MARK_SETTING = "holdfast.probe"
_SET_MARK = f"SELECT set_config('{_MARK_SETTING}', %s, false)"
_GET_MARK = f"SELECT current_setting('{_MARK_SETTING}', true)"


def uses_transaction_pooling(connection: PostgresConnection, conninfo: str) -> bool:
    """Whether a pooler changes the session between two transactions of the connection. The connection is idle and
    in autocommit mode."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    if row == (connection.info.backend_pid,):
        return False
    try:
        return _probe_sessions(connection, conninfo)
    except psycopg.errors.ProtocolViolation:
        return True  # statement mode refuses transactions


def _probe_sessions(connection: PostgresConnection, conninfo: str) -> bool:
    mark = f"{connection.info.backend_pid}:{id(connection)}"
    connection.execute(_SET_MARK, (mark,), prepare=False)
    if _read_mark(connection) != mark:
        return True
    with PostgresConnection.connect(conninfo, autocommit=True, prepare_threshold=None) as other:
        # A transaction keeps its session.
        with other.transaction():
            if _read_mark(other) == mark:
                return True
        for _ in range(2):
            if _read_mark(other) == mark or _read_mark(connection) != mark:
                return True
    return False


def _read_mark(connection: PostgresConnection) -> str | None:
    row = connection.execute(_GET_MARK, prepare=False).fetchone()
    return None if row is None else row[0]
