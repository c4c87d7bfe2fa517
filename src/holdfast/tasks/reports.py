"""Task reports of workers: `TaskCompleted`, `TaskFailed`, and `TaskCancelled` for a report under a
lost lease.

The answer to a report is COMMITTED, CANCELLED (the lease was lost and the worker discards the
result; logged) or REJECTED (unknown task, or a lease that was never granted, which is a worker bug;
not logged). Reports are idempotent: a repeated report under the lease that completed the task gets
the first answer.
"""

from __future__ import annotations

from enum import Enum, IntEnum, auto

from holdfast.codec import Record
from holdfast.config import (
    BLOB_THRESHOLD_BYTES,
    ERROR_CODE_CHARS_MAX,
    ERROR_TEXT_CHARS_MAX,
    MESSAGE_BYTES_MAX,
)
from holdfast.durable.validation import check_limit, check_name
from holdfast.retry import Backoff, jitter
from holdfast.store import blobs
from holdfast.store.api import Txn, operation
from holdfast.tasks import dependents, status_fold
from holdfast.tasks.events import AttemptFailed, StaleReport, TasksCompleted, digest_rows
from holdfast.tasks.leases import (
    EXPIRIES_EXHAUSTED,
    GrantRequest,
    LeaseResult,
    grant_tasks,
    is_live,
    mark_dead,
)
from holdfast.tasks.model import (
    NEW_STATUS,
    TaskBodyRow,
    TaskSpec,
    TaskStatusRow,
    get_spec,
    pack,
    pack_int,
)
from holdfast.tasks.row_ranges import OpenRangeLease
from holdfast.tasks.states import TaskState
from holdfast.tasks.unit_of_work import UnitOfWork


class AttemptOutcome(IntEnum):
    """The outcome of an attempt as reported by its worker."""

    OK = 0
    FAILED = 1
    # The task raised a non-retryable error.
    REFUSED = 2
    # The process of the task died.
    EXITED = 3
    # The worker released the task unstarted. No counter changes.
    RELEASED = 4


class ReportAnswer(IntEnum):
    COMMITTED = 0
    CANCELLED = 1
    REJECTED = 2


_OUTCOMES = frozenset(AttemptOutcome)
_COUNTED_AS = {
    AttemptOutcome.FAILED: "failure",
    AttemptOutcome.REFUSED: "failure",
    AttemptOutcome.EXITED: "expiry",
    AttemptOutcome.RELEASED: "",
}


class TaskReport(Record, frozen=True):
    seq: int
    lease: int
    end: int = AttemptOutcome.OK
    result: bytes = b""
    reason: str = ""
    error: str = ""


@operation("tasks.apply_reports")
def apply_reports(
    txn: Txn, universe: str, worker: str, generation: int, reports: list[TaskReport]
) -> list[int]:
    """Apply the reports of a worker. Returns a `ReportAnswer` for each."""
    unit = UnitOfWork(txn, universe)
    answers = _apply_reports(unit, worker, generation, reports)
    dependents.release(unit)
    unit.close()
    return answers


class ReportAndLeaseResult(Record, frozen=True):
    answers: list[int]
    leased: LeaseResult


@operation("tasks.report_and_lease")
def report_and_lease(
    txn: Txn, universe: str, generation: int, reports: list[TaskReport], request: GrantRequest
) -> ReportAndLeaseResult:
    """Apply the reports of the requesting worker and lease tasks in one commit."""
    unit = UnitOfWork(txn, universe)
    answers = _apply_reports(unit, request.worker, generation, reports)
    granted = grant_tasks(unit, request)
    unit.close()
    return ReportAndLeaseResult(answers, granted)


def complete_within(unit: UnitOfWork, reports: list[TaskReport]) -> None:
    """Complete tasks within a unit of work that has checked their leases. The caller closes it."""
    _apply_batch(_ReportBatch(unit, "", current=True), unit, reports)


def _apply_reports(
    unit: UnitOfWork, worker: str, generation: int, reports: list[TaskReport]
) -> list[int]:
    check_limit(len(reports), "reports")
    check_name("worker", worker)
    if generation > unit.txn.generation:
        return [ReportAnswer.REJECTED] * len(reports)  # no lease of a later generation exists
    batch = _ReportBatch(unit, worker, current=generation == unit.txn.generation)
    return _apply_batch(batch, unit, reports)


def _apply_batch(batch: _ReportBatch, unit: UnitOfWork, reports: list[TaskReport]) -> list[int]:
    answers: list[int] = []
    fetched = False
    for index, report in enumerate(reports):
        if batch.complete_in_range(report):
            answers.append(ReportAnswer.COMMITTED)
            continue
        if not fetched:
            _prefetch_rows(unit, reports[index:])
            fetched = True
        answers.append(batch.apply_single(report))
    batch.save()
    return answers


class _Verdict(Enum):
    """The judgement of one report, before anything is written."""

    # Never granted, or removed after retention: the lease is unknown.
    UNKNOWN = auto()
    # The same of a lease of an earlier generation, whose task exists.
    OUTDATED = auto()
    # The lease was lost.
    STALE = auto()
    # The completion was committed before.
    REPEATED = auto()
    MALFORMED = auto()
    COMPLETED = auto()
    FAILED = auto()


_ANSWERS = {
    _Verdict.UNKNOWN: ReportAnswer.REJECTED,
    _Verdict.OUTDATED: ReportAnswer.CANCELLED,
    _Verdict.STALE: ReportAnswer.CANCELLED,
    _Verdict.REPEATED: ReportAnswer.COMMITTED,
    _Verdict.MALFORMED: ReportAnswer.REJECTED,
    _Verdict.COMPLETED: ReportAnswer.COMMITTED,
    _Verdict.FAILED: ReportAnswer.COMMITTED,
}


class _ReportBatch:
    """Applies the reports of one operation and collects the completions for the log."""

    __slots__ = (
        "_completed", "_completed_row", "_current", "_finished", "_lease", "_leases", "_leases_given",
        "_put", "_range_lease", "_results", "_statuses", "_tasks", "_unit", "_worker",
    )  # fmt: skip

    def __init__(self, unit: UnitOfWork, worker: str, *, current: bool) -> None:
        """`current` means that the reports are of the store's present generation."""
        self._unit = unit
        self._worker = worker
        self._current = current
        self._leases_given = unit.txn.count(unit.keys.lease_counter)
        self._put, self._statuses = unit.txn.put, unit.keys.statuses
        self._tasks: list[int] = []
        self._leases: list[int] = []
        self._results: list[bytes] = []
        # Tasks completed under range leases, by spec hash. They have no status row to read.
        self._finished: dict[bytes, list[int]] = {}
        # The lease of the last report, its range lease if it is live, and its last status row.
        self._lease = 0
        self._range_lease: OpenRangeLease | None = None
        self._completed: bytes | None = None
        self._completed_row = b""

    def complete_in_range(self, report: TaskReport) -> bool:
        """Complete a task of a live range lease. Returns False for every other report."""
        lease, result = report.lease, report.result
        if lease != self._lease:
            self._open_lease(lease)
        range_lease = self._range_lease
        if (
            range_lease is None
            or report.end != AttemptOutcome.OK
            or len(result) > BLOB_THRESHOLD_BYTES
        ):
            return False
        spec_hash = range_lease.remove(report.seq)
        if spec_hash is None:
            return False
        if result != self._completed:
            now_ns = self._unit.now_ns
            completed = status_fold.apply_completion(range_lease.status, now_ns, result)
            self._completed, self._completed_row = result, pack(completed)
        self._put(self._statuses + pack_int(report.seq), self._completed_row)
        self._finished.setdefault(spec_hash, []).append(report.seq)
        self._tasks.append(report.seq)
        self._leases.append(lease)
        self._results.append(result)
        return True

    def _open_lease(self, lease: int) -> None:
        self._lease, self._completed = lease, None
        found = self._unit.leases.get(lease) if self._current else None
        is_live = found is not None and self._unit.now_ns < found.stored.expires_ns
        self._range_lease = found if is_live else None

    def apply_single(self, report: TaskReport) -> ReportAnswer:
        """Judge a report by the task's status row and apply it."""
        unit = self._unit
        packed_seq = pack_int(report.seq)
        prior = unit.status(packed_seq)
        verdict = self._judge(report, packed_seq, prior)
        if verdict is _Verdict.STALE:
            unit.log.append(StaleReport(report.seq, report.lease, self._worker))
        elif verdict is _Verdict.COMPLETED:
            self._complete(report, packed_seq, prior)
        elif verdict is _Verdict.FAILED:
            body, spec = unit.body_and_spec(packed_seq)
            unit.on_lease_end(spec, body.limit)
            _apply_failure(unit, report, packed_seq, body, spec, prior)
        return _ANSWERS[verdict]

    def _judge(self, report: TaskReport, packed_seq: bytes, prior: TaskStatusRow) -> _Verdict:
        unit, current = self._unit, self._current
        if prior is NEW_STATUS or (not 0 < report.lease <= self._leases_given and current):
            exists = (
                prior is not NEW_STATUS or unit.txn.get(unit.keys.bodies + packed_seq) is not None
            )
            return _Verdict.UNKNOWN if current or not exists else _Verdict.OUTDATED
        if not current or not is_live(prior, report.lease, unit.now_ns):
            is_repeat = (
                report.end == AttemptOutcome.OK
                and prior.state == TaskState.COMPLETED
                and prior.lease == report.lease
                and current
            )
            return _Verdict.REPEATED if is_repeat else _Verdict.STALE
        if len(report.result) > MESSAGE_BYTES_MAX or report.end not in _OUTCOMES:
            return _Verdict.MALFORMED
        return _Verdict.COMPLETED if report.end == AttemptOutcome.OK else _Verdict.FAILED

    def _complete(self, report: TaskReport, packed_seq: bytes, prior: TaskStatusRow) -> None:
        unit = self._unit
        body, spec = unit.body_and_spec(packed_seq)
        unit.on_lease_end(spec, body.limit)
        result, blob = report.result, b""
        if len(result) > BLOB_THRESHOLD_BYTES:
            result, blob = b"", blobs.put(unit.txn, result)
        completed = status_fold.apply_completion(prior, unit.now_ns, result, blob)
        unit.write_status(packed_seq, completed)
        unit.finish(report.seq, spec, "completed", awaited=prior.awaited)
        self._tasks.append(report.seq)
        self._leases.append(report.lease)
        self._results.append(report.result)

    def save(self) -> None:
        """Write the counters of the completed ranges and the log record."""
        unit = self._unit
        for spec_hash, seqs in self._finished.items():
            spec = get_spec(unit.txn, unit.keys, spec_hash)
            unit.on_lease_end(spec, count=len(seqs))
            unit.finish_many(seqs, spec, "completed")
        if self._tasks:
            digest = digest_rows(self._results)
            unit.log.append(TasksCompleted(self._tasks, self._leases, digest))


def _prefetch_rows(unit: UnitOfWork, reports: list[TaskReport]) -> None:
    """Prefetch the rows of tasks outside ranges with one read."""
    keys, leases = unit.keys, unit.leases
    single, in_range = (keys.statuses, keys.bodies), (keys.bodies,)
    unit.txn.prefetch(
        prefix + pack_int(report.seq)
        for report in reports
        for prefix in (
            single if leases.get(report.lease) is None else in_range if report.end else ()
        )
    )


def _apply_failure(
    unit: UnitOfWork,
    report: TaskReport,
    packed_seq: bytes,
    body: TaskBodyRow,
    spec: TaskSpec,
    prior: TaskStatusRow,
) -> None:
    now_ns = unit.now_ns
    outcome = AttemptOutcome(report.end)
    counts = _COUNTED_AS[outcome]
    reason = (report.reason or outcome.name.lower())[:ERROR_CODE_CHARS_MAX]
    error = report.error[:ERROR_TEXT_CHARS_MAX]
    failures = prior.failures + (counts == "failure")
    final = outcome == AttemptOutcome.REFUSED or (counts == "failure" and failures >= spec.attempts)
    not_before_ns = 0
    if counts and not final:
        tries = failures if counts == "failure" else prior.expiries + 1
        backoff = Backoff(spec.backoff_ns, 2.0, spec.backoff_ns_max)
        not_before_ns = now_ns + max(backoff.delay_ns(tries, jitter(report.seq, tries)), 1)
    unit.log.append(
        AttemptFailed(report.seq, report.lease, reason, error, counts, final, not_before_ns)
    )
    after = status_fold.apply_failure(
        prior,
        reason=reason,
        error=error,
        counts=counts,
        final=final,
        not_before_ns=not_before_ns,
        at_ns=now_ns,
    )
    if final:
        unit.write_status(packed_seq, after)
        unit.finish(report.seq, spec, "failed", awaited=prior.awaited)
    elif counts == "expiry" and after.expiries >= spec.expiries_max:
        mark_dead(unit, report.seq, packed_seq, spec, after, EXPIRIES_EXHAUSTED)
    else:
        unit.write_status(packed_seq, after)
        unit.enqueue(packed_seq, body, spec, after)
