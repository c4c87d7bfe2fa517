"""A board at work: time that is moved by hand, requests that number themselves, a log that is kept."""

from __future__ import annotations

from typing import Any

from holdfast.clock import S
from holdfast.ledger.answers import Answer, Grant, Taken
from holdfast.ledger.board import Board, Entries
from holdfast.ledger.classes import Policy
from holdfast.ledger.ranges import Range
from holdfast.ledger.records import Done, LogEntry

OK, SKIPPED, FAILED = 3, 4, 5
LEASE_NS = 15 * S


class Table:
    def __init__(self, size: int, **policy: Any) -> None:
        self.now_ns = S
        policy.setdefault("backoff_first_ns", 0)
        self.board, entries = Board.open(size, Policy(**policy), now_ns=self.now_ns)
        self.log: list[LogEntry] = list(entries)
        self._numbers: dict[int, int] = {}

    def take(self, decided: tuple[Any, Entries]) -> Any:
        """Log what was decided, and give the answer."""
        answer, entries = decided
        self.log += entries
        return answer

    def ask(self, owner: str = "w", rows: int = 10, **options: Any) -> Answer:
        answer: Answer = self.take(self.board.claim(owner, rows, now_ns=self.now_ns, **options))
        return answer

    def grant(self, owner: str = "w", rows: int = 10, **options: Any) -> Grant:
        answer = self.ask(owner, rows, **options)
        assert isinstance(answer, Grant), answer
        return answer

    def report(
        self, grant: Grant | int, *done: Done, begin: list[Range] | None = None, digest: bytes = b""
    ) -> Taken:
        epoch = grant if isinstance(grant, int) else grant.epoch
        n = self._numbers.get(epoch, 0) + 1
        taken: Taken = self.take(
            self.board.advance(
                epoch, n, digest or b"%d" % n, done=done, begin=begin or [], now_ns=self.now_ns
            )
        )
        self._numbers[epoch] = n
        return taken

    def begun(self, owner: str = "w", rows: int = 10, **options: Any) -> Grant:
        """A grant with all of its rows begun, alone or not."""
        grant = self.grant(owner, rows, begin=rows, **options)
        if grant.alone:
            self.report(grant, begin=[(part.lo, part.hi) for part in grant.parts])
        return grant

    def finish(self, grant: Grant, code: int = OK, error_class: int = 0) -> Taken:
        return self.report(
            grant, *(Done(part.lo, part.hi, code, error_class) for part in grant.parts)
        )

    def expire(self) -> list[int]:
        """Let every lease run out."""
        self.now_ns += LEASE_NS
        gone: list[int] = self.take(self.board.expire(self.now_ns))
        return gone

    def commit(self) -> int:
        upto = self.board.terminal_prefix()
        self.take(self.board.commit(upto, upto - 1, self.now_ns))
        return upto

    def states(self) -> list[int]:
        return self.board.ledger.state.tolist()


def spans(grant: Grant) -> list[Range]:
    return [(part.lo, part.hi) for part in grant.parts]
