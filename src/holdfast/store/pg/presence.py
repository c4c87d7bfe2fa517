"""Who has a PostgreSQL store open: a shared lock of each engine's session, an exclusive one to be alone.

It is what the writer's lock is to an embedded store. A session that was cut off is present no longer,
though its process may live: whoever was alone and changed what the store is must also see to it that
nobody commits from memory (`place.close_down`).
"""

from __future__ import annotations

from holdfast.errors import StoreBusy
from holdfast.store.pg.server import Unreachable
from holdfast.store.pg.wire import Connection

SESSIONS_SHOWN = 5
_SPACE = 0x48464F50

_HOLDERS = """
    SELECT a.pid, coalesce(host(a.client_addr), 'this machine'), a.application_name
    FROM pg_locks l JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.classid::bigint = %s AND l.objid::bigint = %s
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.pid <> pg_backend_pid()
    ORDER BY a.backend_start
"""


class BeingCopied(Unreachable):
    code = "store_being_copied"
    hint = "somebody copies this store to another place; wait until that has ended, then look where it is"


def attend(connection: Connection, lock: int) -> None:
    """Be among those who have it open, for as long as the session lasts. `lock` is that of the commit."""
    if not _taken(connection, "SELECT pg_try_advisory_lock_shared(%s::bigint)", lock):
        raise BeingCopied()


def alone(connection: Connection, lock: int) -> None:
    """Be the only one, for as long as the session lasts; StoreBusy says who else is there."""
    if not _taken(connection, "SELECT pg_try_advisory_lock(%s::bigint)", lock):
        found = connection.execute(_HOLDERS, (_SPACE, lock & 0xFFFFFFFF)).fetchall()
        sessions = {pid: f"{name} from {host}" for pid, host, name in found[:SESSIONS_SHOWN]}
        raise StoreBusy(sessions=sessions, more=max(0, len(found) - SESSIONS_SHOWN))


def _taken(connection: Connection, statement: str, lock: int) -> bool:
    row = connection.execute(statement, (_SPACE << 32 | lock & 0xFFFFFFFF,)).fetchone()
    return row is not None and bool(row[0])
