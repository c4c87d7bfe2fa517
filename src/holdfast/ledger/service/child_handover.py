"""Child hand-over: a successor process takes over the grants of a child that exits after a call
timeout.

A child and its successor share one name. The predecessor announces the hand-over, so that its
grants outlive its connection. The successor gets the grants one by one after that connection is
closed and all its reports are processed. No other child gets these rows while the lease lasts.
"""

from __future__ import annotations

from holdfast.ledger.events import RowRange
from holdfast.ledger.replies import RowGrant
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.run_state import OpenGrant


class ChildHandover:
    def __init__(self, owners: set[str]) -> None:
        # Names of the connected owners; the service's own set.
        self._connected_owners = owners
        self._handed_over: set[str] = set()

    def is_handed_over(self, child: str) -> bool:
        return child in self._handed_over

    def renew_grants(self, board: RunScheduler, child: str, now_ns: int) -> None:
        """Renew the grants of a child whose process is alive but cannot send heartbeats."""
        for grant in list(board.grants.values()):
            if child_of(grant.owner) == child:
                board.heartbeat(grant.epoch, now_ns)

    def announce(self, child: str) -> None:
        """Keep the grants of a child when its connection closes."""
        self._handed_over.add(child)

    def is_predecessor_connected(self, owner: str) -> bool:
        """Return whether another connection of this child is open. Its last report may be in
        transit.
        """
        child = child_of(owner)
        return any(child_of(one) == child and one != owner for one in self._connected_owners)

    def next_grant(
        self, board: RunScheduler, owner: str, known_epochs: list[int], now_ns: int
    ) -> tuple[RowGrant, int] | None:
        """Return a predecessor's grant that is not in `known_epochs`, and the number of its last
        report.
        """
        child = child_of(owner)
        self._handed_over.discard(child)
        if board.cancelling or board.halted is not None:
            return None
        for grant in board.grants.values():
            if grant.epoch not in known_epochs and child_of(grant.owner) == child:
                return resend_grant(board, grant, now_ns), grant.last_report_no
        return None


def unacknowledged_grant(
    board: RunScheduler, owner: str, known_epochs: list[int], now_ns: int
) -> RowGrant | None:
    """Return a grant of this child whose reply was lost when a former service died."""
    if board.cancelling or board.halted is not None:
        return None
    for grant in board.grants.values():
        if (
            grant.last_report_no
            or grant.epoch in known_epochs
            or child_of(grant.owner) != child_of(owner)
        ):
            continue
        return resend_grant(board, grant, now_ns)
    return None


def resend_grant(board: RunScheduler, grant: OpenGrant, now_ns: int) -> RowGrant:
    """Build the grant of the remaining rows, begun rows first, with a full lease."""
    until_ns = board.heartbeat(grant.epoch, now_ns)
    ranges = [
        RowRange(lo, hi, tries + 1)
        for first, last in sorted([*grant.begun, *grant.idle])
        for lo, hi, tries in board.ledger.attempts_by_range(first, last)
    ]
    return RowGrant(grant.epoch, grant.owner, ranges, grant.begun.rows, grant.isolated, until_ns)


def child_of(owner: str) -> str:
    """Return the child of an owner name `child#connection`."""
    return owner.rpartition("#")[0] or owner
