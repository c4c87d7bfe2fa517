"""The outcomes of the last commits, for an engine that keeps none among its rows.

They are kept for as long as an embedded store keeps its own, and no longer: whoever asks again is answered
alike on both. The row of an outcome there stays until its slot is needed, one commit longer than its writer
remembers it: so whoever takes over knows one more, until it commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.errors import CommitUnknown, to_wire
from holdfast.store import engine as embedded
from holdfast.store.engine import Answer, Request

Name = tuple[bytes, int]


class Outcomes:
    """What became of the last commits, by client and number."""

    def __init__(self) -> None:
        self._commits = 0
        # Each with the snapshot that sees it.
        self._rows: deque[tuple[int, dict[Name, Answer]]] = deque()
        self._known: dict[Name, Answer] = {}
        self._forgotten = 0

    def of(self, request: Request) -> Answer | None:
        """What one that was sent before is answered; None if it is new."""
        if not request.resent:
            return None
        known = self._known.get((request.client, request.no))
        if known is None and request.snapshot < self._forgotten:
            return Answer(request.no, to_wire(CommitUnknown(txn_no=request.no)))
        return known

    def keep(self, snapshot: int, made: dict[Name, Answer]) -> None:
        """One commit more, and who was in it."""
        self._commits += 1
        self._rows.append((snapshot, made))
        # Looked up there, where runs with a short memory shorten it.
        kept: int = vars(embedded)["OUTCOMES_KEPT"]
        while len(self._rows) > kept:
            self._rows.popleft()
        forgotten = self._commits >= kept
        self._forgotten = self._rows[0][0] if forgotten else self._forgotten
        self._recall(list(self._rows)[forgotten:])

    def take_over(self) -> None:
        forgotten = self._commits > len(self._rows)
        self._forgotten = self._rows[0][0] - 1 if forgotten else 0
        self._recall(self._rows)

    def _recall(self, rows: Iterable[tuple[int, dict[Name, Answer]]]) -> None:
        self._known = {name: answer for _, made in rows for name, answer in made.items()}
