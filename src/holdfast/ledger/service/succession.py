"""A child whose process ends for the time-out of a call, and its successor, which takes over its grants.

A child and its successor have one name at the ledger. The predecessor announces the hand-over, so that
its grants outlive its connection; the successor is given them one by one once that connection is closed
and every report that came by it was taken. No other child is given these rows while the lease lasts.
"""

from __future__ import annotations

from holdfast.ledger.answers import Grant
from holdfast.ledger.board import Board
from holdfast.ledger.position import Holding
from holdfast.ledger.records import Part


class Succession:
    def __init__(self, owners: set[str]) -> None:
        # The connections that there are, by the names of their owners; the service's own set.
        self._owners = owners
        self._handed: set[str] = set()

    def is_handed_over(self, child: str) -> bool:
        return child in self._handed

    def keep(self, board: Board, child: str, now_ns: int) -> None:
        """Renew what a child holds: its process lives, and is kept from saying so."""
        for grant in list(board.grants.values()):
            if child_of(grant.owner) == child:
                board.heartbeat(grant.epoch, now_ns)

    def hand_over(self, child: str) -> None:
        """Keep what a child holds when its connection closes: its successor comes for it."""
        self._handed.add(child)

    def has_predecessor(self, owner: str) -> bool:
        """Whether another connection of this child is open: its last report may still be on the way."""
        child = child_of(owner)
        return any(child_of(one) == child and one != owner for one in self._owners)

    def next_grant(
        self, board: Board, owner: str, held: list[int], now_ns: int
    ) -> tuple[Grant, int] | None:
        """A grant of the predecessor that is not among `held`, and the number of its last report."""
        child = child_of(owner)
        self._handed.discard(child)
        if board.cancelling or board.halted is not None:
            return None
        for grant in board.grants.values():
            if grant.epoch not in held and child_of(grant.owner) == child:
                return regranted(board, grant, now_ns), grant.n
        return None


def granted_before(board: Board, owner: str, held: list[int], now_ns: int) -> Grant | None:
    """A grant of this child that it never heard of: the service died before it could answer."""
    if board.cancelling or board.halted is not None:
        return None
    for grant in board.grants.values():
        if grant.n or grant.epoch in held or child_of(grant.owner) != child_of(owner):
            continue
        return regranted(board, grant, now_ns)
    return None


def regranted(board: Board, grant: Holding, now_ns: int) -> Grant:
    """What is left of a grant, the begun rows first; it lives for a whole lease again."""
    until_ns = board.heartbeat(grant.epoch, now_ns)
    parts = [
        Part(lo, hi, tries + 1)
        for first, last in sorted([*grant.begun, *grant.idle])
        for lo, hi, tries in board.ledger.tries(first, last)
    ]
    return Grant(grant.epoch, grant.owner, parts, grant.begun.rows, grant.alone, until_ns)


def child_of(owner: str) -> str:
    """An owner is a child and the line it came by."""
    return owner.rpartition("#")[0] or owner
