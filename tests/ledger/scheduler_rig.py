"""A run scheduler with a manual clock, automatic report numbers and a log in memory."""

from __future__ import annotations

from typing import Any

from holdfast.clock import S
from holdfast.ledger.events import FinishedRange, LogEntry
from holdfast.ledger.ranges import Range
from holdfast.ledger.replies import ClaimAnswer, ReportAccepted, RowGrant
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import LogEntries, RunScheduler

OK, SKIPPED, FAILED = 3, 4, 5
LEASE_NS = 15 * S


class SchedulerRig:
    def __init__(self, size: int, **policy: Any) -> None:
        self.now_ns = S
        policy.setdefault("backoff_first_ns", 0)
        self.scheduler, entries = RunScheduler.open(size, RunPolicy(**policy), now_ns=self.now_ns)
        self.log: list[LogEntry] = list(entries)
        self._report_numbers: dict[int, int] = {}

    def log_decision(self, decision: tuple[Any, LogEntries]) -> Any:
        """Append the log entries of a decision and return its answer."""
        answer, entries = decision
        self.log += entries
        return answer

    def claim(self, owner: str = "w", rows: int = 10, **options: Any) -> ClaimAnswer:
        answer: ClaimAnswer = self.log_decision(
            self.scheduler.claim(owner, rows, now_ns=self.now_ns, **options)
        )
        return answer

    def grant(self, owner: str = "w", rows: int = 10, **options: Any) -> RowGrant:
        answer = self.claim(owner, rows, **options)
        assert isinstance(answer, RowGrant), answer
        return answer

    def report(
        self,
        grant: RowGrant | int,
        *done: FinishedRange,
        begin: list[Range] | None = None,
        digest: bytes = b"",
    ) -> ReportAccepted:
        epoch = grant if isinstance(grant, int) else grant.epoch
        report_no = self._report_numbers.get(epoch, 0) + 1
        accepted: ReportAccepted = self.log_decision(
            self.scheduler.report(
                epoch,
                report_no,
                digest or b"%d" % report_no,
                done=done,
                begin=begin or [],
                now_ns=self.now_ns,
            )
        )
        self._report_numbers[epoch] = report_no
        return accepted

    def grant_begun(self, owner: str = "w", rows: int = 10, **options: Any) -> RowGrant:
        """A grant with all of its rows begun, isolated or not."""
        grant = self.grant(owner, rows, begin=rows, **options)
        if grant.isolated:
            self.report(grant, begin=[(part.lo, part.hi) for part in grant.ranges])
        return grant

    def finish(self, grant: RowGrant, code: int = OK, error_class: int = 0) -> ReportAccepted:
        return self.report(
            grant, *(FinishedRange(part.lo, part.hi, code, error_class) for part in grant.ranges)
        )

    def expire_leases(self) -> list[int]:
        """Advance the clock past every lease and reclaim the expired grants."""
        self.now_ns += LEASE_NS
        reclaimed: list[int] = self.log_decision(self.scheduler.expire(self.now_ns))
        return reclaimed

    def commit(self) -> int:
        upto = self.scheduler.terminal_prefix()
        self.log_decision(self.scheduler.commit(upto, upto - 1, self.now_ns))
        return upto

    def states(self) -> list[int]:
        return self.scheduler.ledger.state.tolist()


def spans(grant: RowGrant) -> list[Range]:
    return [(part.lo, part.hi) for part in grant.ranges]
