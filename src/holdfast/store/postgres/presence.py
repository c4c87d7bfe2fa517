"""The presence lock of a PostgreSQL store: shared for each open engine, exclusive for copy and move.

It corresponds to the writer lock of an embedded store. A session that was cut off loses its lock although
its process may still run. An exclusive owner that moves the store must therefore also block later commits
of such processes (`PostgresRawStore.mark_moved`).
"""

from __future__ import annotations

from holdfast import failpoints
from holdfast.errors import StoreBusy
from holdfast.store.postgres.server import PostgresUnreachable
from holdfast.store.postgres.statements import PostgresConnection

SESSIONS_SHOWN = 5
_LOCK_SPACE = 0x48464F50

_HOLDERS = """
    SELECT a.pid, coalesce(host(a.client_addr), 'this machine'), a.application_name
    FROM pg_locks l JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.classid::bigint = %s AND l.objid::bigint = %s
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.pid <> pg_backend_pid()
    ORDER BY a.backend_start
"""


class StoreBeingCopied(PostgresUnreachable):
    code = "store_being_copied"
    hint = "this store is being copied or moved; wait until that has ended, then check where the store is"


def lock_shared(connection: PostgresConnection, lock: int) -> None:
    """Take the shared presence lock for the lifetime of the session. `lock` is the key of the commit lock."""
    if not _try_lock(connection, "SELECT pg_try_advisory_lock_shared(%s::bigint)", lock):
        raise StoreBeingCopied()
    if failpoints.armed:
        failpoints.hit("postgres.presence_locked", connection)


def lock_exclusive(connection: PostgresConnection, lock: int) -> None:
    """Take the exclusive presence lock for the lifetime of the session; StoreBusy lists the other sessions."""
    if not _try_lock(connection, "SELECT pg_try_advisory_lock(%s::bigint)", lock):
        holders = connection.execute(_HOLDERS, (_LOCK_SPACE, lock & 0xFFFFFFFF)).fetchall()
        sessions = {pid: f"{name} from {host}" for pid, host, name in holders[:SESSIONS_SHOWN]}
        raise StoreBusy(sessions=sessions, more=max(0, len(holders) - SESSIONS_SHOWN))


def _try_lock(connection: PostgresConnection, statement: str, lock: int) -> bool:
    row = connection.execute(statement, (_LOCK_SPACE << 32 | lock & 0xFFFFFFFF,)).fetchone()
    return row is not None and bool(row[0])
