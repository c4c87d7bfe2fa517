"""Waiting claims: parked requests for rows, in FIFO order.

A decision that frees rows answers the first claim that waits for such rows, then the next, while
rows are left. The cost of a report does not depend on the number of idle children.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from holdfast.ledger.replies import ClaimAnswer
from holdfast.ledger.service.group_log import DecisionTicket
from holdfast.ledger.service.messages import ClaimRows, GrantReportReply

# The requested rows, [lo, hi).
SeqInterval = tuple[int, int]


class PendingReply:
    """The replies to a child's reports and claim. They are sent after the ticket is settled."""

    __slots__ = ("answer", "report_replies")

    def __init__(self, report_replies: list[GrantReportReply], answer: ClaimAnswer | None) -> None:
        self.report_replies = report_replies
        self.answer = answer


class WaitingClaim:
    """A claim without a reply yet."""

    __slots__ = ("claim", "owner", "reply", "ticket", "until_ns")

    def __init__(
        self,
        owner: str,
        claim: ClaimRows,
        until_ns: int,
        reply: PendingReply,
        ticket: DecisionTicket,
    ) -> None:
        self.owner = owner
        self.claim = claim
        self.until_ns = until_ns
        self.reply = reply
        self.ticket = ticket

    @property
    def rows(self) -> SeqInterval:
        return self.claim.lo, self.claim.hi


class WaitingClaims:
    """One queue per requested interval."""

    def __init__(self) -> None:
        self._queues: dict[SeqInterval, deque[WaitingClaim]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, waiting: WaitingClaim) -> None:
        self._queues.setdefault(waiting.rows, deque()).append(waiting)

    def queue_heads(self) -> list[WaitingClaim]:
        """The first claim of each queue."""
        return [queue[0] for queue in self._queues.values()]

    def next_waiting(self, rows: SeqInterval) -> WaitingClaim | None:
        queue = self._queues.get(rows)
        return queue[0] if queue else None

    def remove(self, waiting: WaitingClaim) -> None:
        queue = self._queues[waiting.rows]
        queue.remove(waiting)
        if not queue:
            del self._queues[waiting.rows]

    def remove_matching(self, predicate: Callable[[WaitingClaim], bool]) -> list[WaitingClaim]:
        """Remove the matching claims and return them in order."""
        matching = [waiting for waiting in self._all() if predicate(waiting)]
        for waiting in matching:
            self.remove(waiting)
        return matching

    def timed_out(self, now_ns: int) -> list[WaitingClaim]:
        """The claims whose timeout has passed."""
        return [waiting for waiting in self._all() if waiting.until_ns <= now_ns]

    def _all(self) -> Iterator[WaitingClaim]:
        for queue in self._queues.values():
            yield from queue
