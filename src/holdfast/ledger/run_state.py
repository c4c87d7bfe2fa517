"""The run state: the fold of a run's log.

`apply` is the only way to change the state, live and in a replay. It depends on the entry and the
current state, never on a clock. Equal logs therefore yield equal states, and `dump` returns equal
bytes.

    unseen         never granted
    free           DISPATCHED without owner: returned before they began, or a retry that is due
    backoff_heap   DISPATCHED without owner: retries that wait, by time
    suspects       DISPATCHED without owner: begun once and never finished
    grants         all other rows that are not final, each in exactly one grant

The expiry of grants is not part of the state, because heartbeats are not logged. After a load every
grant gets a full lease period.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush

from msgspec import field

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import Invalid, StoreCorrupt
from holdfast.ledger.events import (
    CancelCompleted,
    CancelStarted,
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
from holdfast.ledger.pages import LedgerPage
from holdfast.ledger.ranges import PagedRanges, Range, RowRanges
from holdfast.ledger.replies import ReportAccepted
from holdfast.ledger.run_policy import ErrorClass, RunPolicy
from holdfast.ledger.seq_ledger import SeqLedger
from holdfast.ledger.states import EVENT_BY_REPORTED_CODE, RowEvent
from holdfast.ledger.stop_rules import StopCounts, StopTally

# Replies kept for repeated requests: per grant, and for finished grants.
REPLIES_KEPT = 16
FINISHED_GRANTS_KEPT = 256
# Maximum retried ranges in the kept replies of finished grants.
FINISHED_RETRIED_MAX = 10_000
# Maximum retry ranges that one entry frees. The next claim frees more.
RETRIES_DUE_MAX = 1024


class ReportReply(Record, frozen=True):
    report_no: int
    digest: bytes
    accepted: ReportAccepted


class OpenGrant:
    """An open grant: its rows that have not begun and its begun rows."""

    __slots__ = ("begun", "epoch", "idle", "isolated", "last_report_no", "owner", "replies")

    def __init__(self, epoch: int, owner: str, alone: bool) -> None:
        self.epoch = epoch
        self.owner = owner
        self.isolated = alone
        self.idle = RowRanges()
        self.begun = RowRanges()
        # The number of the last accepted report.
        self.last_report_no = 0
        self.replies: deque[ReportReply] = deque(maxlen=REPLIES_KEPT)

    @property
    def rows(self) -> int:
        return self.idle.rows + self.begun.rows


class GrantSnapshot(Record, frozen=True):
    epoch: int
    owner: str
    isolated: bool
    idle: list[Range]
    begun: list[Range]
    last_report_no: int
    replies: list[ReportReply]


class FinishedGrant(Record, frozen=True):
    """A completed grant with its last replies, for repeated requests."""

    epoch: int
    owner: str
    replies: list[ReportReply]

    @property
    def retried(self) -> int:
        return sum(len(reply.accepted.retried) for reply in self.replies)


class RunCheckpoint(Record, frozen=True):
    size: int
    policy: RunPolicy
    decided_ns: int
    epoch: int
    retries: int
    reclaims: int
    next_commit: int
    version: int
    grace_ends_ns: int
    cancelling: bool
    halted: LedgerHalted | None
    backoff: list[tuple[int, int, int]]
    suspects: list[Range]
    grants: list[GrantSnapshot]
    finished_grants: list[FinishedGrant]
    pages: list[LedgerPage]
    ended: list[int]
    # Stop rules: the rule reached; rows failed and finished when counting started; cost and error
    # counts since then.
    stopped: StopRuleReached | None = None
    stop_base: tuple[int, int] = (0, 0)
    stop_cost: float = 0.0
    stop_errors: list[tuple[int, int]] = field(default_factory=list)


def adopting_owner(from_run: str) -> str:
    """The owner name of adopted rows in errors."""
    return f"run/{from_run}"


class RunState:
    def __init__(self, size: int, policy: RunPolicy) -> None:
        self.policy = policy
        self.ledger = SeqLedger(size, page_rows=policy.page_rows)
        self.unseen = PagedRanges(policy.page_rows)
        self.unseen.add(0, size)
        self._reset(policy)

    def _reset(self, policy: RunPolicy) -> None:
        self.free = PagedRanges(policy.page_rows)
        self.suspects = PagedRanges(policy.page_rows)
        # (not_before_ns, lo, hi), a heap.
        self.backoff_heap: list[tuple[int, int, int]] = []
        self.grants: dict[int, OpenGrant] = {}
        self.finished_grants: dict[int, FinishedGrant] = {}
        self._finished_retried = 0
        # The last epoch assigned.
        self.epoch = 0
        self.retries = 0
        self.reclaims = 0
        self.next_commit = 0
        self.version = -1
        self.cancelling = False
        self.grace_ends_ns = 0
        self.halted: LedgerHalted | None = None
        self.stopped: StopRuleReached | None = None
        self.stop_counts = StopCounts()
        # The time of the last entry. Time never runs backwards in a log.
        self.decided_ns = 0

    @property
    def size(self) -> int:
        return self.ledger.size

    @property
    def ended(self) -> list[int]:
        """Rows that succeeded, were skipped, failed, were cancelled; committed or not."""
        return list(self.ledger.ended)

    @property
    def finished(self) -> bool:
        """Whether every row is final."""
        return self.ledger.final_count == self.size

    def stop_tally(self) -> StopTally:
        """The current inputs of the stop rules."""
        return self.stop_counts.tally(self.ledger.ended[2], sum(self.ledger.ended))

    # -- the fold ------------------------------------------------------------------------------

    def apply(self, entry: LogEntry) -> None:
        self.decided_ns = entry.decided_ns
        match entry:
            case RowsReported():
                self._apply_reported(entry)
            case RowsGranted():
                self._apply_granted(entry)
            case RowsCommitted():
                self._move(self.next_commit, entry.upto, RowEvent.COMMIT)
                self.next_commit, self.version = entry.upto, entry.version
            case RetriesDue():
                for _ in range(RETRIES_DUE_MAX):
                    if not self.backoff_heap or self.backoff_heap[0][0] > entry.decided_ns:
                        break
                    _, lo, hi = heappop(self.backoff_heap)
                    self.free.add(lo, hi)
            case GrantReclaimed():
                self._apply_reclaimed(entry)
            case CancelStarted():
                self._apply_cancel_started(entry)
            case CancelCompleted():
                for grant in list(self.grants.values()):
                    for lo, hi in grant.begun:
                        self._move(lo, hi, RowEvent.CANCEL, grant, reason=ErrorClass.CANCELLATION)
                    self._remove_grant(grant)
            case RowsAdopted():
                self._apply_adopted(entry)
            case PolicyChanged():
                self.policy = entry.policy
            case StopCountsAdded():
                self.stop_counts.add(entry.cost, entry.errors)
            case StopRuleReached():
                self.stopped = entry
            case RunResumed():
                self.stopped = None
                self.stop_counts.restart(self.ledger.ended[2], sum(self.ledger.ended))
            case LedgerHalted():
                self.halted = entry
            case RunOpened():
                pass

    def _apply_adopted(self, entry: RowsAdopted) -> None:
        """Apply the transitions of a called row, each checked by the table. The grant is never
        opened.
        """
        self.epoch = entry.epoch
        failed, ended = self.ledger.ended[2], sum(self.ledger.ended)
        grant = OpenGrant(entry.epoch, adopting_owner(entry.from_run), False)
        for adopted in entry.rows:
            self.unseen.remove(adopted.lo, adopted.hi)
            self._move(adopted.lo, adopted.hi, RowEvent.DISPATCH, grant)
            self.ledger.assign(adopted.lo, adopted.hi, entry.epoch)
            self._move(adopted.lo, adopted.hi, RowEvent.BEGIN, grant, epoch=entry.epoch)
            self._move(
                adopted.lo, adopted.hi, EVENT_BY_REPORTED_CODE[adopted.code], grant, epoch=entry.epoch,
                reason=adopted.error_class,
            )  # fmt: skip
        self.stop_counts.exclude(self.ledger.ended[2] - failed, sum(self.ledger.ended) - ended)

    def _apply_granted(self, entry: RowsGranted) -> None:
        grant = self.grants[entry.epoch] = OpenGrant(entry.epoch, entry.owner, entry.isolated)
        self.epoch = entry.epoch
        for granted in entry.ranges:
            lo, hi = granted.lo, granted.hi
            if entry.isolated:
                self.suspects.remove(lo, hi)
            elif self.ledger.is_unseen(lo):
                self.unseen.remove(lo, hi)
                self._move(lo, hi, RowEvent.DISPATCH, grant)
            else:
                self.free.remove(lo, hi)
            self.ledger.assign(lo, hi, entry.epoch)
            grant.idle.add(lo, hi)
        self._begin(grant, entry.begun)

    def _apply_reported(self, entry: RowsReported) -> None:
        grant = self.grants[entry.epoch]
        for done in entry.done:
            self._move(
                done.lo, done.hi, EVENT_BY_REPORTED_CODE[done.code], grant, epoch=grant.epoch,
                reason=done.error_class,
            )  # fmt: skip
            grant.begun.remove(done.lo, done.hi)
        for retry in entry.retried:
            self._fail(grant, retry.lo, retry.hi, retry.error_class, epoch=grant.epoch)
            self._move(retry.lo, retry.hi, RowEvent.RETRY, grant)
            self.retries += retry.hi - retry.lo
            if retry.not_before_ns > entry.decided_ns:
                heappush(self.backoff_heap, (retry.not_before_ns, retry.lo, retry.hi))
            else:
                self.free.add(retry.lo, retry.hi)
        self._begin(grant, entry.begun)
        grant.last_report_no = entry.report_no
        accepted = ReportAccepted(grant.rows, not entry.stop, entry.stop, entry.retried)
        grant.replies.append(ReportReply(entry.report_no, entry.digest, accepted))
        if not grant.rows:
            self._remove_grant(grant)
            self._keep_finished(FinishedGrant(grant.epoch, grant.owner, list(grant.replies)))

    def _apply_reclaimed(self, entry: GrantReclaimed) -> None:
        grant = self.grants[entry.epoch]
        # A returned grant does not count as a reclaim.
        self.reclaims += entry.why != "returned"
        for lo, hi in grant.idle:
            self.ledger.assign(lo, hi, 0)
            self.free.add(lo, hi)
        for lo, hi in entry.suspects:
            self._fail(grant, lo, hi, ErrorClass.LEASE_EXPIRED)
            self._move(lo, hi, RowEvent.RETRY, grant)
            self.retries += hi - lo
            self.suspects.add(lo, hi)
        for lo, hi in entry.failed:
            self._fail(grant, lo, hi, ErrorClass.LEASE_EXPIRED)
        for lo, hi in entry.cancelled:
            self._move(lo, hi, RowEvent.CANCEL, grant, reason=ErrorClass.CANCELLATION)
        self._remove_grant(grant)

    def _apply_cancel_started(self, entry: CancelStarted) -> None:
        self.cancelling, self.grace_ends_ns = True, entry.grace_ends_ns
        for lo, hi in self.unseen:
            self._move(lo, hi, RowEvent.DISPATCH)
        waiting = [(lo, hi) for _, lo, hi in self.backoff_heap]
        for lo, hi in (*self.unseen, *self.free, *self.suspects, *waiting):
            self._move(lo, hi, RowEvent.CANCEL, reason=ErrorClass.CANCELLATION)
        for pool in (self.unseen, self.free, self.suspects):
            pool.clear()
        self.backoff_heap.clear()
        for grant in list(self.grants.values()):
            for lo, hi in grant.idle:
                self._move(lo, hi, RowEvent.CANCEL, grant, reason=ErrorClass.CANCELLATION)
            grant.idle = RowRanges()
            if not grant.rows:
                self._remove_grant(grant)

    def _begin(self, grant: OpenGrant, begun: Iterable[Range]) -> None:
        for lo, hi in begun:
            self._move(lo, hi, RowEvent.BEGIN, grant, epoch=grant.epoch)
            grant.idle.remove(lo, hi)
            grant.begun.add(lo, hi)

    def _fail(
        self, grant: OpenGrant, lo: int, hi: int, error_class: int, *, epoch: int = 0
    ) -> None:
        self._move(lo, hi, RowEvent.FAIL, grant, epoch=epoch, reason=error_class)
        if epoch:
            grant.begun.remove(lo, hi)

    def _move(
        self,
        lo: int,
        hi: int,
        event: RowEvent,
        grant: OpenGrant | None = None,
        *,
        epoch: int = 0,
        reason: int = 0,
    ) -> None:
        owner = grant.owner if grant else ""
        self.ledger.move(
            lo, hi, event, epoch=epoch, reason=reason, owner=owner, wall_ns=self.decided_ns
        )

    def _remove_grant(self, grant: OpenGrant) -> None:
        del self.grants[grant.epoch]

    def _keep_finished(self, finished: FinishedGrant) -> None:
        self.finished_grants[finished.epoch] = finished
        self._finished_retried += finished.retried
        while len(self.finished_grants) > FINISHED_GRANTS_KEPT or (
            len(self.finished_grants) > 1 and self._finished_retried > FINISHED_RETRIED_MAX
        ):
            self._finished_retried -= self.finished_grants.pop(
                next(iter(self.finished_grants))
            ).retried

    # -- checkpoints ---------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Encode the whole state as range records. Equal states have equal bytes."""
        return codec.pack(
            RunCheckpoint(
                size=self.size,
                policy=self.policy,
                decided_ns=self.decided_ns,
                epoch=self.epoch,
                retries=self.retries,
                reclaims=self.reclaims,
                next_commit=self.next_commit,
                version=self.version,
                grace_ends_ns=self.grace_ends_ns,
                cancelling=self.cancelling,
                halted=self.halted,
                backoff=sorted(self.backoff_heap),
                suspects=list(self.suspects),
                grants=[
                    GrantSnapshot(
                        grant.epoch,
                        grant.owner,
                        grant.isolated,
                        list(grant.idle),
                        list(grant.begun),
                        grant.last_report_no,
                        list(grant.replies),
                    )
                    for grant in self.grants.values()
                ],
                finished_grants=list(self.finished_grants.values()),
                pages=self.ledger.encode_pages(),
                ended=self.ledger.ended,
                stopped=self.stopped,
                stop_base=self.stop_counts.base,
                stop_cost=self.stop_counts.cost,
                stop_errors=sorted(self.stop_counts.errors.items()),
            )
        )

    def restore(self, checkpoint: RunCheckpoint) -> None:
        """Restore the state from a checkpoint. Free rows are the DISPATCHED rows that nothing else
        owns.
        """
        self._reset(checkpoint.policy)
        policy = self.policy = checkpoint.policy
        self.ledger = SeqLedger.from_pages(
            checkpoint.size, checkpoint.pages, checkpoint.ended, page_rows=policy.page_rows
        )
        self.decided_ns = checkpoint.decided_ns
        self.epoch = checkpoint.epoch
        self.retries = checkpoint.retries
        self.reclaims = checkpoint.reclaims
        self.next_commit = checkpoint.next_commit
        self.version = checkpoint.version
        self.grace_ends_ns = checkpoint.grace_ends_ns
        self.cancelling = checkpoint.cancelling
        self.halted = checkpoint.halted
        self.stopped = checkpoint.stopped
        self.stop_counts.base = checkpoint.stop_base
        self.stop_counts.cost = checkpoint.stop_cost
        self.stop_counts.errors = dict(checkpoint.stop_errors)
        # A sorted list is a valid heap.
        self.backoff_heap = list(checkpoint.backoff)
        for finished in checkpoint.finished_grants:
            self._keep_finished(finished)
        self.unseen = PagedRanges(policy.page_rows)
        for lo, hi in self.ledger.ranges_in_state(0):
            self.unseen.add(lo, hi)
        for lo, hi in self.ledger.ranges_in_state(1):
            self.free.add(lo, hi)
        try:
            for lo, hi in checkpoint.suspects:
                self.free.remove(lo, hi)
                self.suspects.add(lo, hi)
            for _, lo, hi in checkpoint.backoff:
                self.free.remove(lo, hi)
            for grant in checkpoint.grants:
                self._restore_grant(grant)
        except Invalid:
            raise StoreCorrupt(what="checkpoint", why="its parts are inconsistent") from None

    def _restore_grant(self, snapshot: GrantSnapshot) -> None:
        grant = self.grants[snapshot.epoch] = OpenGrant(
            snapshot.epoch, snapshot.owner, snapshot.isolated
        )
        grant.last_report_no = snapshot.last_report_no
        grant.replies.extend(snapshot.replies)
        for lo, hi in snapshot.idle:
            self.free.remove(lo, hi)
            grant.idle.add(lo, hi)
            self.ledger.owner_epochs[lo:hi] = snapshot.epoch
        for lo, hi in snapshot.begun:
            grant.begun.add(lo, hi)
            self.ledger.owner_epochs[lo:hi] = snapshot.epoch
