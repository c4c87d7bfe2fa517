"""Recent commit outcomes, for an engine that does not store them as rows.

They are kept exactly as long as an embedded store keeps its own, so that a resend gets the same
answer on both. In an embedded store the row of an outcome stays until its slot is reused, one
commit longer than the writer keeps it in memory. After a takeover one more outcome is therefore
known, until the next commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.errors import CommitUnknown, to_wire
from holdfast.store import engine as embedded
from holdfast.store.requests import CommitAnswer, CommitRequest

RequestId = tuple[bytes, int]


class CommitOutcomes:
    """Outcomes of the last commits, by client and transaction number."""

    def __init__(self) -> None:
        self._commits = 0
        # Outcomes per commit, with the first snapshot id that sees the commit.
        self._rows: deque[tuple[int, dict[RequestId, CommitAnswer]]] = deque()
        self._by_request: dict[RequestId, CommitAnswer] = {}
        self._oldest_snapshot = 0

    def lookup(self, request: CommitRequest) -> CommitAnswer | None:
        """Return the kept answer of a resent request. None if the request is new."""
        if not request.resent:
            return None
        known = self._by_request.get((request.client, request.no))
        if known is None and request.snapshot < self._oldest_snapshot:
            return CommitAnswer(request.no, to_wire(CommitUnknown(txn_no=request.no)))
        return known

    def add(self, snapshot: int, made: dict[RequestId, CommitAnswer]) -> None:
        """Keep the outcomes of one commit."""
        self._commits += 1
        self._rows.append((snapshot, made))
        # Read from the module at run time, because runs with short memory patch it.
        kept: int = vars(embedded)["OUTCOMES_KEPT"]
        while len(self._rows) > kept:
            self._rows.popleft()
        forgotten = self._commits >= kept
        self._oldest_snapshot = self._rows[0][0] if forgotten else self._oldest_snapshot
        self._rebuild(list(self._rows)[forgotten:])

    def on_takeover(self) -> None:
        forgotten = self._commits > len(self._rows)
        self._oldest_snapshot = self._rows[0][0] - 1 if forgotten else 0
        self._rebuild(self._rows)

    def _rebuild(self, rows: Iterable[tuple[int, dict[RequestId, CommitAnswer]]]) -> None:
        self._by_request = {name: answer for _, made in rows for name, answer in made.items()}
