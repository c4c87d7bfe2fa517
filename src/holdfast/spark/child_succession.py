"""Children whose process ends for the time-out of a call, and those that take over what they held.

A child and its successor have one name at the ledger. The predecessor announces the hand-over, so that
its grants outlive its connection; the successor is given them one by one once that connection is closed
and every report that came by it was taken. Nobody else is given these rows while the lease lasts.
"""

from __future__ import annotations

from holdfast.errors import Invalid
from holdfast.ledger.answers import Grant
from holdfast.ledger.board import Board
from holdfast.ledger.position import Holding
from holdfast.ledger.records import Part
from holdfast.spark.desk import Desk
from holdfast.store.api import Store

WAIT_NS_MAX = 5_000_000_000


class Succession:
    def __init__(self, store: Store, desk: Desk, owners: set[str]) -> None:
        self._store = store
        self._desk = desk
        # The connections that there are, by the names of their owners; the service's own set.
        self._owners = owners
        self._handed: set[str] = set()

    def is_handed_over(self, child: str) -> bool:
        return child in self._handed

    def keep(self, child: str) -> None:
        """Renew what a child holds: its process lives, and is kept from saying so."""
        with self._desk.lock:
            if self._desk.has_board:
                now_ns = self._store.now_ns()
                for grant in list(self._desk.board.grants.values()):
                    if child_of(grant.owner) == child:
                        self._desk.board.heartbeat(grant.epoch, now_ns)

    def hand_over(self, child: str) -> None:
        """Keep what a child holds when its connection closes: its successor comes for it."""
        self.keep(child)
        with self._desk.lock:
            self._handed.add(child)

    def next_grant(self, owner: str, held: list[int]) -> tuple[Grant, int] | None:
        """With the lock held: a grant of the predecessor that is not among `held`, and the number of
        its last report."""
        child = child_of(owner)
        until_ns = self._store.now_ns() + WAIT_NS_MAX
        while any(child_of(one) == child and one != owner for one in self._owners):
            left_ns = until_ns - self._store.now_ns()
            if left_ns <= 0:
                raise Invalid(what="successor", why="its predecessor is connected", owner=child)
            self._desk.changed.wait(left_ns / 1e9)
        self._handed.discard(child)
        board = self._desk.board
        if board.cancelling or board.halted is not None:
            return None
        for grant in board.grants.values():
            if grant.epoch not in held and child_of(grant.owner) == child:
                return regranted(board, grant, self._store.now_ns()), grant.n
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
