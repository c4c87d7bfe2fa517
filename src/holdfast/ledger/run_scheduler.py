"""The run scheduler: the only component that decides about the rows of a run.

Each operation reads the run state, builds log entries, applies them with the fold that a replay
uses, and returns `(answer, entries)`. The caller logs the entries before it sends the answer. If
the log refuses them, the scheduler is ahead of the log: discard it and load it again.

- Callers pass the store's time as `now_ns`. Decision time never runs backwards.
- A row belongs to one epoch (fencing token) at a time. A request of a reclaimed epoch raises
  `Fenced`, is counted, and changes nothing.
- An outcome is accepted once per (seq, attempt). A repeated request with the same number and digest
  gets its first reply. Any other illegal transition halts the run, and `halted` is the entry to
  log.
- A retryable failure within its budgets returns to DISPATCHED in the same decision. No reader sees
  a terminal state that is not final.
- The cost of a decision depends on the rows it grants or accepts, not on the size of the run. Only
  `cancel` and `load` read all rows.

A row that was begun and never finished is granted last, because it may crash its worker again. It
is granted first when it blocks the commit, because no other row can advance the commit then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NoReturn

from holdfast import codec
from holdfast.config import NAME_BYTES_MAX
from holdfast.durable.error_text import normalise
from holdfast.errors import Fenced, IllegalTransition, Invalid
from holdfast.ledger import outcome_rules
from holdfast.ledger.assignment import first_batches, next_rows
from holdfast.ledger.events import (
    AdoptedRange,
    CancelCompleted,
    CancelStarted,
    FinishedRange,
    GrantReclaimed,
    LedgerHalted,
    LogEntry,
    PolicyChanged,
    RetriesDue,
    RowsAdopted,
    RowsCommitted,
    RowsGranted,
    RowsReported,
    RunOpened,
    RunResumed,
    StopCountsAdded,
    StopRuleReached,
)
from holdfast.ledger.ranges import Range
from holdfast.ledger.replies import (
    AllRowsFinal,
    ClaimAnswer,
    NoMoreRows,
    NoRowsYet,
    ReportAccepted,
    RowGrant,
)
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.run_state import OpenGrant, RunCheckpoint, RunState, adopting_owner
from holdfast.ledger.seq_ledger import illegal_transition
from holdfast.ledger.states import EVENT_BY_REPORTED_CODE, RowState
from holdfast.ledger.stop_rules import LOST_ROW_ERROR, error_id, reached_rule

LogEntries = list[LogEntry]

CLAIM_ROWS_MAX = 1 << 20


class RunScheduler(RunState):
    def __init__(self, size: int, policy: RunPolicy) -> None:
        super().__init__(size, policy)
        self._epochs_by_owner: dict[str, set[int]] = {}
        self._expires_ns: dict[int, int] = {}
        # (lower bound of the expiry, epoch). A heartbeat updates only the dict.
        self._expiry_heap: list[tuple[int, int]] = []
        # Requests of reclaimed epochs. Not logged, because no decision depends on it.
        self.fenced = 0

    # -- construction --------------------------------------------------------------------------

    @classmethod
    def open(cls, size: int, policy: RunPolicy, *, now_ns: int) -> tuple[RunScheduler, LogEntries]:
        """Create the scheduler of a new run, and the first entry of its log."""
        entry = RunOpened(now_ns, size, policy)
        return cls.replay([entry]), [entry]

    @classmethod
    def replay(cls, entries: Iterable[LogEntry], base: RunScheduler | None = None) -> RunScheduler:
        """Apply entries to a loaded scheduler, or to a new one if they start with the first entry."""
        scheduler = base
        for entry in entries:
            if scheduler is None:
                if not isinstance(entry, RunOpened):
                    raise Invalid(
                        what="log",
                        why="the first entry is not RunOpened",
                        found=type(entry).__name__,
                    )
                scheduler = cls(entry.size, entry.policy)
            scheduler.apply(entry)
        if scheduler is None:
            raise Invalid(what="log", why="it is empty")
        return scheduler

    @classmethod
    def load(cls, dump: bytes) -> RunScheduler:
        """Load a scheduler from a checkpoint. Call `renew_all_grants` before grants may expire."""
        checkpoint = codec.unpack_as(RunCheckpoint, dump)
        scheduler = cls(0, checkpoint.policy)
        scheduler.restore(checkpoint)
        for grant in scheduler.grants.values():
            scheduler._epochs_by_owner.setdefault(grant.owner, set()).add(grant.epoch)
            scheduler._set_expiry(grant.epoch, checkpoint.decided_ns + checkpoint.policy.lease_ns)
        return scheduler

    def renew_all_grants(self, now_ns: int) -> None:
        """Extend every grant by a full lease from now: no heartbeat could arrive while no service
        ran.
        """
        for epoch in self.grants:
            self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)

    # -- adoption ------------------------------------------------------------------------------

    def adopt(
        self, from_run: str, rows: Sequence[AdoptedRange], now_ns: int
    ) -> tuple[int, LogEntries]:
        """Finish rows that were never granted with the outcomes of another run; return the number
        of rows.
        """
        self._check_running()
        now_ns = max(now_ns, self.decided_ns)
        at = 0
        for adopted in rows:
            if not at <= adopted.lo < adopted.hi <= self.size or adopted.from_lo < 0:
                raise Invalid(what="adopted", why="not ascending rows of the run", found=adopted)
            if adopted.code not in EVENT_BY_REPORTED_CODE:
                raise Invalid(what="adopted", why="not the outcome of a call", found=adopted.code)
            at = adopted.hi
            if not self.unseen.contains(adopted.lo, adopted.hi):
                seq = next(s for s in range(adopted.lo, at) if not self.ledger.is_unseen(s))
                prior, attempted = self.ledger.state_of(seq).name, RowState(adopted.code).name
                violation = outcome_rules.IllegalReport(seq, prior, attempted, "adopted twice")
                self._halt(violation, adopting_owner(from_run), now_ns)
        if not rows:
            return 0, []
        entry = RowsAdopted(now_ns, self.epoch + 1, from_run, list(rows))
        return sum(adopted.hi - adopted.lo for adopted in rows), [self._apply_new(entry)]

    # -- grants and reports --------------------------------------------------------------------

    def claim(
        self,
        owner: str,
        rows: int,
        *,
        now_ns: int,
        lo: int = 0,
        hi: int | None = None,
        begin: int = 0,
    ) -> tuple[ClaimAnswer, LogEntries]:
        """Grant rows of one page of [lo, hi). The first `begin` of them begin at once."""
        hi = self.size if hi is None else hi
        _check_claim(owner, rows, begin)
        if not 0 <= lo <= hi <= self.size:
            raise Invalid(what="range", why="not in the run", found=(lo, hi), size=self.size)
        if self.halted is not None:
            return NoMoreRows("halted"), []
        if self.cancelling:
            return NoMoreRows("cancelling"), []
        if self.stopped is not None:
            return NoMoreRows("stopped"), []
        now_ns = max(now_ns, self.decided_ns)
        entries: LogEntries = []
        if self.backoff_heap and self.backoff_heap[0][0] <= now_ns:
            entries.append(self._apply_new(RetriesDue(now_ns)))
        ranges, isolated = next_rows(self, rows, lo, hi)
        if not ranges:
            return self._no_rows_answer(lo, hi), entries
        epoch = self.epoch + 1
        begun = [] if isolated else first_batches(self, ranges, begin)
        entry = RowsGranted(now_ns, epoch, owner, ranges, begun, isolated)
        entries.append(self._apply_new(entry))
        count = sum(last - first for first, last in begun)
        grant = RowGrant(epoch, owner, ranges, count, isolated, self._expires_ns[epoch])
        return grant, entries

    def report(
        self,
        epoch: int,
        report_no: int,
        digest: bytes,
        *,
        done: Sequence[FinishedRange] = (),
        begin: Sequence[Range] = (),
        now_ns: int,
        errors: Mapping[int, str] | None = None,
    ) -> tuple[ReportAccepted, LogEntries]:
        """Accept report number `report_no` of a grant: finished rows and rows that are about to
        begin.

        `errors` maps the seq of a failed row to its error text. It is used only if a stop rule
        counts equal errors.
        """
        self._check_running()
        now_ns = max(now_ns, self.decided_ns)
        grant = self.grants.get(epoch)
        known_grant = grant or self.finished_grants.get(epoch)
        if known_grant is None:
            raise self._fenced_error(epoch)
        for reply in known_grant.replies:
            if reply.report_no == report_no:
                if reply.digest != digest:
                    self._halt(
                        outcome_rules.request_mismatch(self, done, begin), known_grant.owner, now_ns
                    )
                return reply.accepted, []
        if grant is None:
            raise self._fenced_error(epoch)
        if report_no != grant.last_report_no + 1:
            raise Invalid(
                what="n",
                why="out of order",
                epoch=epoch,
                found=report_no,
                expected=grant.last_report_no + 1,
            )
        # Rows that a cancellation ended in the meantime are refused. That is not an error of the
        # owner.
        stop = "cancelling" if self.cancelling else "stopped" if self.stopped else ""
        begun = [] if stop else [(lo, hi) for lo, hi in begin]
        violation = outcome_rules.check_report(self, grant, done, begun)
        if violation is not None:
            self._halt(violation, grant.owner, now_ns)
        final, retried = outcome_rules.decide_outcomes(self, done, now_ns)
        self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)
        why = ""
        if not stop and self.policy.stop_rules.has_bounds:
            why = self._stop_reason(final, errors or {})
        if why:
            # No row of this report begins.
            stop, begun = "stopped", []
        entry = RowsReported(
            decided_ns=now_ns,
            epoch=epoch,
            report_no=report_no,
            digest=digest,
            done=final,
            retried=retried,
            begun=begun,
            stop=stop,
        )
        entries = [self._apply_new(entry)]
        entries += self._count_errors(final, errors or {}, now_ns)
        if why and not self.finished:
            entries.append(self._apply_new(StopRuleReached(now_ns, why)))
        return ReportAccepted(grant.rows, not stop, stop, retried), entries

    def is_report_known(self, epoch: int, report_no: int) -> bool:
        """Return whether a report of this number was accepted before, so that this one is a repeat."""
        known_grant = self.grants.get(epoch) or self.finished_grants.get(epoch)
        return known_grant is not None and any(
            reply.report_no == report_no for reply in known_grant.replies
        )

    def add_cost(self, cost: float, now_ns: int) -> LogEntries:
        """Add the cost of calls, if a stop rule bounds it."""
        if not cost or not self.policy.stop_rules.cost or self.halted is not None:
            return []
        now_ns = max(now_ns, self.decided_ns)
        return [
            self._apply_new(StopCountsAdded(now_ns, cost, [])),
            *self._check_stop_rules([], now_ns),
        ]

    def heartbeat(self, epoch: int, now_ns: int) -> int:
        """Extend a grant by a lease and return its expiry. Not logged."""
        if epoch not in self.grants:
            raise self._fenced_error(epoch)
        self._expires_ns[epoch] = max(self._expires_ns[epoch], now_ns + self.policy.lease_ns)
        return self._expires_ns[epoch]

    # -- reclaim and cancel --------------------------------------------------------------------

    def expire(self, now_ns: int) -> tuple[list[int], LogEntries]:
        """Reclaim the expired grants and return their epochs."""
        due: list[int] = []
        while self._expiry_heap and self._expiry_heap[0][0] <= now_ns:
            _, epoch = heappop(self._expiry_heap)
            until_ns = self._expires_ns.get(epoch)
            if until_ns is None:
                continue
            if until_ns <= now_ns:
                due.append(epoch)
            else:
                heappush(self._expiry_heap, (until_ns, epoch))
        return self._reclaim(due, "expired", now_ns)

    def owners(self) -> list[str]:
        """The owners of open grants."""
        return list(self._epochs_by_owner)

    def reclaim_owner(self, owner: str, now_ns: int) -> tuple[list[int], LogEntries]:
        """Reclaim the grants of an owner whose connection is closed."""
        return self._reclaim(self._epochs_by_owner.get(owner, ()), "closed", now_ns)

    def reclaim_grant(self, epoch: int, now_ns: int) -> tuple[list[int], LogEntries]:
        """Reclaim one grant that its owner returns. Does nothing if the grant has ended."""
        return self._reclaim([epoch] if epoch in self.grants else [], "returned", now_ns)

    def reclaim_all(self, now_ns: int) -> tuple[list[int], LogEntries]:
        """Reclaim every grant: the owners belong to a driver that is gone."""
        return self._reclaim(self.grants, "superseded", now_ns)

    def cancel(self, now_ns: int) -> tuple[bool, LogEntries]:
        """Cancel every row that has not begun. Returns False if the run is cancelled or finished
        already.
        """
        self._check_running()
        if self.cancelling or self.finished:
            return False, []
        now_ns = max(now_ns, self.decided_ns)
        return True, [self._apply_new(CancelStarted(now_ns, now_ns + self.policy.grace_ns))]

    def end_cancel_grace(self, now_ns: int) -> tuple[bool, LogEntries]:
        """Cancel the rows still begun after the grace period. Returns False if none is due."""
        self._check_running()
        if not self.cancelling or now_ns < self.grace_ends_ns or not self.grants:
            return False, []
        return True, [self._apply_new(CancelCompleted(max(now_ns, self.decided_ns)))]

    def resume(self, now_ns: int) -> LogEntries:
        """Grant rows of a stopped run again. The stop counts restart at zero."""
        if self.halted is not None or not (self.stopped or self.policy.stop_rules.has_bounds):
            return []
        return [self._apply_new(RunResumed(max(now_ns, self.decided_ns)))]

    def change_policy(self, policy: RunPolicy, now_ns: int) -> tuple[bool, LogEntries]:
        """Apply changed budgets and times. Returns False if the policy is unchanged."""
        self._check_running()
        if policy == self.policy:
            return False, []
        page_shape = (self.policy.page_rows, self.policy.batch_rows)
        if (policy.page_rows, policy.batch_rows) != page_shape:
            raise Invalid(what="policy", why="pages and batches are fixed when a run is opened")
        return True, [self._apply_new(PolicyChanged(max(now_ns, self.decided_ns), policy))]

    # -- commit --------------------------------------------------------------------------------

    def terminal_prefix(self) -> int:
        """The first seq that is not final. Rows below it may be committed."""
        return self.ledger.final_prefix()

    def commit(self, upto: int, version: int, now_ns: int) -> tuple[bool, LogEntries]:
        """Record that rows up to `upto` are in the sink. Returns False if this was recorded before."""
        self._check_running()
        if not 0 <= upto <= self.size:
            raise Invalid(what="upto", why="not in the run", found=upto, size=self.size)
        now_ns = max(now_ns, self.decided_ns)
        if upto <= self.next_commit:
            return False, []
        head = self.terminal_prefix()
        if upto > head:
            prior = self.ledger.state_of(head).name
            violation = outcome_rules.IllegalReport(
                head, prior, RowState.COMMITTED.name, "not final"
            )
            self._halt(violation, "commit", now_ns)
        return True, [self._apply_new(RowsCommitted(now_ns, upto, version))]

    # -- queries -------------------------------------------------------------------------------

    def next_due_ns(self) -> int | None:
        """The time of the next timed change: a lease expiry, a retry, the end of the grace; None if
        none.
        """
        while self._expiry_heap:
            early_ns, epoch = self._expiry_heap[0]
            until_ns = self._expires_ns.get(epoch)
            if until_ns == early_ns:
                break
            heappop(self._expiry_heap)
            if until_ns is not None:
                heappush(self._expiry_heap, (until_ns, epoch))
        due = [self._expiry_heap[0][0]] if self._expiry_heap else []
        if self.backoff_heap:
            due.append(self.backoff_heap[0][0])
        if self.cancelling and self.grants:
            due.append(self.grace_ends_ns)
        return min(due, default=None)

    def can_answer_claim(self, lo: int, hi: int, now_ns: int) -> bool:
        """Return whether a claim of [lo, hi) would get rows or a final answer. Changes nothing."""
        if self.halted is not None or self.cancelling or self.stopped is not None or self.finished:
            return True
        if self.backoff_heap and self.backoff_heap[0][0] <= now_ns:
            return True
        if next_rows(self, 1, lo, hi)[0]:
            return True
        return (lo, hi) != (0, self.size) and self.ledger.is_final(lo, hi)

    def stats(self) -> dict[str, int]:
        return {
            "fenced": self.fenced,
            "reclaims": self.reclaims,
            "retries": self.retries,
            "suspects": self.suspects.rows,
            "grants": len(self.grants),
        }

    # -- the fold and its indexes --------------------------------------------------------------

    def apply(self, entry: LogEntry) -> None:
        super().apply(entry)
        if isinstance(entry, RowsGranted):
            self._epochs_by_owner.setdefault(entry.owner, set()).add(entry.epoch)
            self._set_expiry(entry.epoch, entry.decided_ns + self.policy.lease_ns)

    def _apply_new(self, entry: LogEntry) -> LogEntry:
        self.apply(entry)
        return entry

    def _remove_grant(self, grant: OpenGrant) -> None:
        super()._remove_grant(grant)
        del self._expires_ns[grant.epoch]
        epochs = self._epochs_by_owner[grant.owner]
        epochs.discard(grant.epoch)
        if not epochs:
            del self._epochs_by_owner[grant.owner]
        # Grants end faster than they expire, so most heap entries may belong to ended grants.
        if len(self._expiry_heap) > 2 * len(self._expires_ns) + 64:
            self._expiry_heap = [(ns, epoch) for epoch, ns in self._expires_ns.items()]
            heapify(self._expiry_heap)

    def _set_expiry(self, epoch: int, until_ns: int) -> None:
        self._expires_ns[epoch] = until_ns
        heappush(self._expiry_heap, (until_ns, epoch))

    # -- internals -----------------------------------------------------------------------------

    def _no_rows_answer(self, lo: int, hi: int) -> ClaimAnswer:
        if self.ledger.is_final(lo, hi):
            return AllRowsFinal()
        if self.unseen.first(lo, hi) is not None:
            return NoRowsYet(self.next_due_ns() or 0, "lag")
        until_ns = self.next_due_ns() or 0
        return NoRowsYet(until_ns, "busy" if self.grants else "backoff")

    def _reclaim(
        self, epochs: Iterable[int], why: str, now_ns: int
    ) -> tuple[list[int], LogEntries]:
        """Reclaim the oldest grants first, so that a retry budget always runs out at the same row."""
        if self.halted is not None:
            return [], []
        now_ns = max(now_ns, self.decided_ns)
        reclaimed = sorted(epochs)
        entries: LogEntries = []
        for epoch in reclaimed:
            entry = outcome_rules.decide_reclaim(self, epoch, why, now_ns)
            entries.append(self._apply_new(entry))
            entries += self._count_reclaimed(entry, now_ns)
        return reclaimed, entries

    # -- stop rules ----------------------------------------------------------------------------

    def _stop_reason(self, final: Sequence[FinishedRange], errors: Mapping[int, str]) -> str:
        """Return the text of the stop rule that these outcomes reach, or ""."""
        failed = [done for done in final if done.code == RowState.TERMINAL_FAIL]
        failed_rows = sum(done.hi - done.lo for done in failed)
        so_far = self.stop_tally()
        tally = so_far._replace(
            failed=so_far.failed + failed_rows,
            ended=so_far.ended + sum(done.hi - done.lo for done in final),
        )
        by_error = _count_by_error(failed, errors) if self.policy.stop_rules.same_error else {}
        return reached_rule(
            self.policy.stop_rules,
            tally,
            [
                (self.stop_counts.errors.get(error, 0) + rows, text)
                for error, (rows, text) in by_error.items()
            ],
        )

    def _count_errors(
        self, final: Sequence[FinishedRange], errors: Mapping[int, str], now_ns: int
    ) -> LogEntries:
        if not self.policy.stop_rules.same_error:
            return []
        by_error = _count_by_error(
            [done for done in final if done.code == RowState.TERMINAL_FAIL], errors
        )
        counted = [(error, rows) for error, (rows, _) in sorted(by_error.items())]
        return [self._apply_new(StopCountsAdded(now_ns, 0.0, counted))] if counted else []

    def _count_reclaimed(self, entry: GrantReclaimed, now_ns: int) -> LogEntries:
        """Count rows that a reclaim failed like reported failures."""
        rows = sum(hi - lo for lo, hi in entry.failed)
        if not rows or not self.policy.stop_rules.has_bounds:
            return []
        error = error_id(ErrorClass.LEASE_EXPIRED, LOST_ROW_ERROR)
        entries: LogEntries = []
        if self.policy.stop_rules.same_error:
            entries.append(self._apply_new(StopCountsAdded(now_ns, 0.0, [(error, rows)])))
        return entries + self._check_stop_rules(
            [(self.stop_counts.errors.get(error, 0), LOST_ROW_ERROR)], now_ns
        )

    def _check_stop_rules(self, error_counts: Sequence[tuple[int, str]], now_ns: int) -> LogEntries:
        if self.stopped is not None or self.cancelling or self.finished:
            return []
        why = reached_rule(self.policy.stop_rules, self.stop_tally(), error_counts)
        return [self._apply_new(StopRuleReached(now_ns, why))] if why else []

    def _fenced_error(self, epoch: int) -> Fenced:
        self.fenced += 1
        return Fenced(resource="grant", held=epoch, current=self.epoch)

    def _halt(self, violation: outcome_rules.IllegalReport, owner: str, now_ns: int) -> NoReturn:
        self._apply_new(
            LedgerHalted(
                now_ns, violation.seq, violation.prior, violation.attempted, owner, violation.why
            )
        )
        raise self._halted_error()

    def _check_running(self) -> None:
        if self.halted is not None:
            raise self._halted_error()

    def _halted_error(self) -> IllegalTransition:
        halted = self.halted
        assert halted is not None
        return illegal_transition(
            halted.seq, halted.prior, halted.attempted, halted.owner, halted.decided_ns,
            why=halted.why,
        )  # fmt: skip


def _count_by_error(
    failed: Sequence[FinishedRange], errors: Mapping[int, str]
) -> dict[int, tuple[int, str]]:
    """Group failed rows by error id: (rows, description)."""
    texts = Counter(
        (done.error_class, errors.get(seq, ""))
        for done in failed
        for seq in range(done.lo, done.hi)
    )
    by_error: dict[int, tuple[int, str]] = {}
    for (error_class, text), rows in texts.items():
        error = error_id(error_class, text)
        description = f"{ErrorClass(error_class).name.lower()}: {normalise(text)}"
        by_error[error] = by_error.get(error, (0, ""))[0] + rows, description
    return by_error


def _check_claim(owner: str, rows: int, begin: int) -> None:
    if not 0 < len(owner) <= NAME_BYTES_MAX:
        raise Invalid(what="owner", why="out of bounds", found=owner[:64], chars_max=NAME_BYTES_MAX)
    if not 0 < rows <= CLAIM_ROWS_MAX:
        raise Invalid(what="rows", why="out of bounds", found=rows, min=1, max=CLAIM_ROWS_MAX)
    if begin < 0:
        raise Invalid(what="begin", why="negative", found=begin)
