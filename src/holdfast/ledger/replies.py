"""Replies of the run scheduler. They are tagged records and are sent over the wire unchanged."""

from __future__ import annotations

from holdfast.codec import Record
from holdfast.ledger.events import RetriedRange, RowRange


class RowGrant(Record, frozen=True, tag="grant"):
    """Rows leased under an epoch. The first `begun` of them, in the order of ranges, have begun.

    `isolated`: suspects. The worker runs them in a process where a crash affects no other row. The
    claim never begins them.
    """

    epoch: int
    owner: str
    ranges: list[RowRange]
    begun: int
    isolated: bool
    expires_ns: int

    @property
    def rows(self) -> int:
        return sum(part.hi - part.lo for part in self.ranges)


class NoRowsYet(Record, frozen=True, tag="wait"):
    """No rows to grant now. `why`: busy, backoff or lag. `until_ns` 0: until the state changes."""

    until_ns: int
    why: str


class AllRowsFinal(Record, frozen=True, tag="finished"):
    """Every requested row is final."""


class NoMoreRows(Record, frozen=True, tag="stop"):
    """No rows will be granted. `why`: cancelling, halted, stopped or leaving."""

    why: str


class ReportAccepted(Record, frozen=True, tag="taken"):
    """The acceptance of a report. `begun` is False if the requested rows must not start; `stop` is
    the reason.

    `retried` are the reported failures that are not final. The worker does not keep their outcome.
    """

    rows_held: int
    begun: bool
    stop: str
    retried: list[RetriedRange]


ClaimAnswer = RowGrant | NoRowsYet | AllRowsFinal | NoMoreRows
