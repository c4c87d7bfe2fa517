"""Task reports of workers: `TaskCompleted`, `TaskFailed`, and `TaskCancelled` for a report under a
lost lease.

The answer to a report is COMMITTED, CANCELLED (the lease was lost and the worker discards the
result; logged) or REJECTED (unknown task, or a lease that was never granted, which is a worker bug;
not logged). Reports are idempotent: a repeated report under the lease that completed the task gets
the first answer.
"""

from __future__ import annotations

from enum import IntEnum

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
from holdfast.tasks.leases import EXPIRIES_EXHAUSTED, LeaseResult, grant_tasks, is_live, mark_dead
from holdfast.tasks.model import (
    NEW_STATUS,
    TaskBodyRow,
    TaskSpec,
    TaskStatusRow,
    get_spec,
    pack,
    pack_int,
)
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
    txn: Txn,
    universe: str,
    worker: str,
    generation: int,
    reports: list[TaskReport],
    queues: list[str],
    limit: int,
    alone: bool = False,
    free_slots: tuple[int, ...] = (),
    names: tuple[str, ...] = (),
) -> ReportAndLeaseResult:
    """Apply reports and lease tasks in one commit."""
    unit = UnitOfWork(txn, universe)
    answers = _apply_reports(unit, worker, generation, reports)
    granted = grant_tasks(unit, worker, queues, limit, alone, free_slots, frozenset(names))
    unit.close()
    return ReportAndLeaseResult(answers, granted)


def _apply_reports(
    unit: UnitOfWork, worker: str, generation: int, reports: list[TaskReport]
) -> list[int]:
    check_limit(len(reports), "reports")
    check_name("worker", worker)
    txn, keys, now_ns = unit.txn, unit.keys, unit.now_ns
    get, put, statuses = txn.get, txn.put, keys.statuses
    if generation > txn.generation:
        return [ReportAnswer.REJECTED] * len(reports)  # no lease of a later generation exists
    leases_given = txn.count(keys.lease_counter)
    current = generation == txn.generation
    answers: list[int] = []
    tasks: list[int] = []
    leases: list[int] = []
    results: list[bytes] = []
    # Tasks completed under range leases, by spec hash. They have no status row to read.
    finished: dict[bytes, list[int]] = {}
    lease, range_lease, range_is_live = 0, None, False
    last, row = None, b""
    fetched = False
    for index, report in enumerate(reports):
        if report.lease != lease:
            lease, last = report.lease, None
            range_lease = unit.leases.get(lease) if current else None
            range_is_live = range_lease is not None and now_ns < range_lease.stored.expires_ns
        result = report.result
        if (
            range_is_live
            and report.end == AttemptOutcome.OK
            and len(result) <= BLOB_THRESHOLD_BYTES
        ):
            assert range_lease is not None
            spec_hash = range_lease.remove(report.seq)
            if spec_hash is not None:
                if result != last:
                    last, row = (
                        result,
                        pack(status_fold.apply_completion(range_lease.status, now_ns, result)),
                    )
                put(statuses + pack_int(report.seq), row)
                answers.append(ReportAnswer.COMMITTED)
                finished.setdefault(spec_hash, []).append(report.seq)
                tasks.append(report.seq)
                leases.append(lease)
                results.append(result)
                continue
        if not fetched:
            _prefetch_rows(unit, reports[index:])
            fetched = True
        packed_seq = pack_int(report.seq)
        prior = unit.status(packed_seq)
        if prior is NEW_STATUS or (not 0 < report.lease <= leases_given and current):
            # Never granted, or removed after retention: the lease is unknown.
            known = prior is not NEW_STATUS or get(keys.bodies + packed_seq) is not None
            answers.append(
                ReportAnswer.REJECTED if current or not known else ReportAnswer.CANCELLED
            )
            continue
        if not current or not is_live(prior, report.lease, now_ns):
            is_repeat = (
                report.end == AttemptOutcome.OK
                and prior.state == TaskState.COMPLETED
                and prior.lease == report.lease
                and current
            )
            if not is_repeat:
                unit.log.append(StaleReport(report.seq, report.lease, worker))
            answers.append(ReportAnswer.COMMITTED if is_repeat else ReportAnswer.CANCELLED)
            continue
        if len(result) > MESSAGE_BYTES_MAX or report.end not in _OUTCOMES:
            answers.append(ReportAnswer.REJECTED)
            continue
        answers.append(ReportAnswer.COMMITTED)
        body, spec = unit.body_and_spec(packed_seq)
        unit.on_lease_end(spec, body.limit)
        if report.end != AttemptOutcome.OK:
            _apply_failure(unit, report, packed_seq, body, spec, prior)
            continue
        blob = b""
        if len(result) > BLOB_THRESHOLD_BYTES:
            result, blob = b"", blobs.put(txn, result)
        unit.write_status(packed_seq, status_fold.apply_completion(prior, now_ns, result, blob))
        unit.finish(report.seq, spec, "completed", awaited=prior.awaited)
        tasks.append(report.seq)
        leases.append(report.lease)
        results.append(report.result)
    for spec_hash, seqs in finished.items():
        spec = get_spec(txn, keys, spec_hash)
        unit.on_lease_end(spec, count=len(seqs))
        unit.finish_many(seqs, spec, "completed")
    if tasks:
        unit.log.append(TasksCompleted(tasks, leases, digest_rows(results)))
    return answers


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
