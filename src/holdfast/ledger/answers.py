"""What callers of the board are told. Plain records, tagged, so that they travel as they are."""

from __future__ import annotations

from holdfast.codec import Record
from holdfast.ledger.records import Part, Retried


class Grant(Record, frozen=True, tag="grant"):
    """Rows to work on, under an epoch; the first `begun` of them, in the order of parts, are begun.

    `alone`: suspects, to be run where a crash costs nothing else. They are never begun by the claim.
    """

    epoch: int
    owner: str
    parts: list[Part]
    begun: int
    alone: bool
    expires_ns: int

    @property
    def rows(self) -> int:
        return sum(part.hi - part.lo for part in self.parts)


class Wait(Record, frozen=True, tag="wait"):
    """Nothing to hand out now. `why`: busy, backoff or lag; `until_ns` 0: until something happens."""

    until_ns: int
    why: str


class Finished(Record, frozen=True, tag="finished"):
    """Every row that was asked about is terminal for good."""


class Stop(Record, frozen=True, tag="stop"):
    """Nothing will be handed out again. `why`: cancelling or halted."""

    why: str


class Taken(Record, frozen=True, tag="taken"):
    """A report was taken. `begun` is False when the rows must not be started: see `stop`.

    `retried` are the reported failures that are not final: their outcome is nobody's to keep.
    """

    held: int
    begun: bool
    stop: str
    retried: list[Retried]


Answer = Grant | Wait | Finished | Stop
