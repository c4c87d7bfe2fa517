"""Whether a commit happened whose answer was lost.

Who has the lock knows that no transaction that had it is under way any more. But a commit made at once may
still be on its way to the server, and take the lock later. So its number is given away: then it never
happens.

A server that crashed may show a commit that its standby never got. To say that a commit happened is to say
that it stays, so the record is written once more: that is answered only when the standby has it all.
"""

from __future__ import annotations

from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.engine import Answer
from holdfast.store.pg.server import Unreachable
from holdfast.store.pg.wire import Connection, Counters, ask_all

_ENTER = "SELECT holdfast_enter(%b::bigint)"
_RECORD = "SELECT client FROM holdfast_commit WHERE no = %b"
_LAST = "SELECT no, at_ns FROM holdfast_commit ORDER BY no DESC LIMIT 1"
_AGAIN = "UPDATE holdfast_commit SET at_ns = at_ns WHERE no = %b"
_VOID = "INSERT INTO holdfast_commit VALUES (%b, %b, %b, '{}')"


class InDoubt(Exception):
    """The connection was lost while a commit was under way, or the server was not sure of its standby."""

    def __init__(
        self, commit_no: int, client: bytes, answers: list[Answer], error: HoldfastError
    ) -> None:
        super().__init__(str(error))
        self.commit_no = commit_no
        self.client = client
        self.answers = answers
        self.error = error


def refuse_alone(
    connection: Connection, commit_no: int, client: bytes, answers: list[Answer]
) -> None:
    """A commit that may be on one server only is as much in doubt as one whose answer was lost."""
    if connection.warned.alone:
        error = Unreachable(url=connection.info.host, why="no standby has confirmed the commit")
        raise InDoubt(commit_no, client, answers, error)


def happened(
    connection: Connection, counters: Counters, lost: InDoubt, lock: int, now_ns: int
) -> bool:
    """True if it did; False if it did not, and never will."""
    no = lost.commit_no
    _, _, records, lasts = ask_all(
        connection,
        counters,
        [("BEGIN", ()), (_ENTER, (lock,)), (_RECORD, (no,)), (_LAST, ())],
    )
    [(last, at_ns)] = lasts or [(0, 0)]
    if records and bytes(records[0][0]) == lost.client:
        ask_all(connection, counters, [(_AGAIN, (no,)), ("COMMIT", ())])
        return True
    if not records and last == no - 1:
        void = (no, max(at_ns + 1, now_ns), b"void" + lost.client)
        ask_all(connection, counters, [(_VOID, void), ("COMMIT", ())])
        return False
    ask_all(connection, counters, [("COMMIT", ())])
    if not records and last >= no:
        raise CommitUnknown(why="the record of the commit is gone already", commit_no=no)
    return False
