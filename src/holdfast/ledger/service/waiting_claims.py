"""Claims that wait for rows, first come, first served.

A decision that frees rows answers the first claim that waits for such rows, then the next, as long as rows are
left. So a report costs the same however many children have nothing to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from holdfast.ledger.answers import Answer
from holdfast.ledger.service.group_log import Ticket
from holdfast.ledger.service.messages import Claim, Moved

# The rows that a child asks for, [lo, hi).
Rows = tuple[int, int]


class Reply:
    """The answers to a child's reports and to its claim. They are sent once the log has the ticket's entries."""

    __slots__ = ("answer", "moved")

    def __init__(self, moved: list[Moved], answer: Answer | None) -> None:
        self.moved = moved
        self.answer = answer


class WaitingClaim:
    """A claim whose reply is not sent yet."""

    __slots__ = ("claim", "owner", "reply", "ticket", "until_ns")

    def __init__(
        self, owner: str, claim: Claim, until_ns: int, reply: Reply, ticket: Ticket
    ) -> None:
        self.owner = owner
        self.claim = claim
        self.until_ns = until_ns
        self.reply = reply
        self.ticket = ticket

    @property
    def rows(self) -> Rows:
        return self.claim.lo, self.claim.hi


class WaitingClaims:
    """One queue for each interval that is asked for."""

    def __init__(self) -> None:
        self._queues: dict[Rows, deque[WaitingClaim]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, waiting: WaitingClaim) -> None:
        self._queues.setdefault(waiting.rows, deque()).append(waiting)

    def first(self) -> list[WaitingClaim]:
        """The first of each queue."""
        return [queue[0] for queue in self._queues.values()]

    def next(self, rows: Rows) -> WaitingClaim | None:
        queue = self._queues.get(rows)
        return queue[0] if queue else None

    def remove(self, waiting: WaitingClaim) -> None:
        queue = self._queues[waiting.rows]
        queue.remove(waiting)
        if not queue:
            del self._queues[waiting.rows]

    def taken(self, wanted: Callable[[WaitingClaim], bool]) -> list[WaitingClaim]:
        """Remove those that are wanted, in order."""
        found = [waiting for waiting in self._all() if wanted(waiting)]
        for waiting in found:
            self.remove(waiting)
        return found

    def late(self, now_ns: int) -> list[WaitingClaim]:
        """Those whose time is up."""
        return [waiting for waiting in self._all() if waiting.until_ns <= now_ns]

    def _all(self) -> Iterator[WaitingClaim]:
        for queue in self._queues.values():
            yield from queue
