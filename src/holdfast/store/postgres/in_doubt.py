"""Resolution of in-doubt commits: whether a commit with a lost answer happened.

Holding the commit lock rules out a running transaction. But an optimistic single-statement commit may still
arrive at the server and take the lock later. The resolution therefore inserts a void record with its commit
number, so that the late commit fails.

A server that crashed may show a commit that its standby never received. A commit may be reported only if it
is permanent. The resolution therefore rewrites its record, which the server confirms only after the standby
has everything up to it.
"""

from __future__ import annotations

from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.postgres.server import PostgresUnreachable
from holdfast.store.postgres.statements import CommitCounters, PostgresConnection, run_pipelined
from holdfast.store.requests import CommitAnswer

_LOCK_COMMIT = "SELECT holdfast_enter(%b::bigint)"
_SELECT_CLIENT = "SELECT client FROM holdfast_commit WHERE no = %b"
_SELECT_LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_REWRITE = "UPDATE holdfast_commit SET at_ns = at_ns WHERE no = %b"
_INSERT_VOID = "INSERT INTO holdfast_commit VALUES (%b, %b, %b, '{}')"


class InDoubt(Exception):
    """A commit with an unknown outcome: the connection was lost, or the standby did not confirm."""

    def __init__(
        self, commit_no: int, client: bytes, answers: list[CommitAnswer], error: HoldfastError
    ) -> None:
        super().__init__(str(error))
        self.commit_no = commit_no
        self.client = client
        self.answers = answers
        self.error = error


def require_standby(
    connection: PostgresConnection, commit_no: int, client: bytes, answers: list[CommitAnswer]
) -> None:
    """Raise InDoubt if the standby did not confirm the commit, as for a lost answer."""
    if connection.notices.standby_unconfirmed:
        error = PostgresUnreachable(
            url=connection.info.host, why="no standby has confirmed the commit"
        )
        raise InDoubt(commit_no, client, answers, error)


def resolve_in_doubt(
    connection: PostgresConnection,
    counters: CommitCounters,
    in_doubt: InDoubt,
    lock: int,
    now_ns: int,
) -> bool:
    """Whether the commit happened. False also guarantees that it never will."""
    no = in_doubt.commit_no
    _, _, records, lasts = run_pipelined(
        connection,
        counters,
        [("BEGIN", ()), (_LOCK_COMMIT, (lock,)), (_SELECT_CLIENT, (no,)), (_SELECT_LAST, ())],
    )
    [(last, at_ns)] = lasts or [(0, 0)]
    if records and bytes(records[0][0]) == in_doubt.client:
        run_pipelined(connection, counters, [(_REWRITE, (no,)), ("COMMIT", ())])
        return True
    if not records and last == no - 1:
        void = (no, max(at_ns + 1, now_ns), b"void" + in_doubt.client)
        run_pipelined(connection, counters, [(_INSERT_VOID, void), ("COMMIT", ())])
        return False
    run_pipelined(connection, counters, [("COMMIT", ())])
    if not records and last >= no:
        raise CommitUnknown(why="the record of the commit was already pruned", commit_no=no)
    return False
