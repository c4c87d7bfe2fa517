"""The status fold: computes task statuses from log records. It is pure.

`apply_record` takes a status and a record and returns the next status, or raises
`IllegalTransition` and changes nothing. It reads no clock and applies no policy. Operations write
status rows with the same `apply_*` functions, so a stored row and a replay cannot disagree about
the meaning of a record. The simulator's model checks that operations write the right records.

`TaskFold` folds a whole log and checks the preconditions of each record. It maintains the
invariants of document 003: a task has at most one lease, a waiting task has none, and COMPLETED is
terminal.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import IllegalTransition, Invalid
from holdfast.tasks import events
from holdfast.tasks.events import TaskRecord
from holdfast.tasks.model import NEW_STATUS, TaskBodyRow, TaskStatusRow
from holdfast.tasks.states import TASK_TRANSITIONS, TaskEvent, TaskState

_legal_moves = TASK_TRANSITIONS.table


def apply_grant(
    prior: TaskStatusRow, lease: int, worker: str, expires_ns: int, at_ns: int
) -> TaskStatusRow:
    if (prior.state, TaskEvent.GRANT) not in _legal_moves:
        raise _illegal_transition(prior, TaskEvent.GRANT)
    return TaskStatusRow(
        TaskState.LEASED,
        prior.attempt + 1,
        prior.failures,
        prior.expiries,
        lease,
        worker,
        expires_ns,
        at_ns,
        at_ns,
        0,
        0,
        prior.awaited,
        0,
        prior.reason,
        prior.error,
    )


def apply_extension(
    prior: TaskStatusRow, expires_ns: int, progressed: bool, at_ns: int
) -> TaskStatusRow:
    if prior.state != TaskState.LEASED:
        raise _illegal_transition(prior, TaskEvent.EXTEND)
    return TaskStatusRow(
        TaskState.LEASED,
        prior.attempt,
        prior.failures,
        prior.expiries,
        prior.lease,
        prior.worker,
        expires_ns,
        prior.granted_ns,
        at_ns if progressed else prior.progress_ns,
        0,
        0,
        prior.awaited,
        0,
        prior.reason,
        prior.error,
    )


def apply_completion(
    prior: TaskStatusRow, at_ns: int, result: bytes = b"", blob: bytes = b""
) -> TaskStatusRow:
    if prior.state != TaskState.LEASED:
        raise _illegal_transition(prior, TaskEvent.COMPLETE)
    return TaskStatusRow(
        TaskState.COMPLETED,
        prior.attempt,
        prior.failures,
        prior.expiries,
        prior.lease,
        prior.worker,
        0,
        prior.granted_ns,
        0,
        0,
        0,
        prior.awaited,
        at_ns,
        "",
        "",
        0,
        result,
        blob,
    )


def apply_expiry(prior: TaskStatusRow) -> TaskStatusRow:
    if prior.state != TaskState.LEASED:
        raise _illegal_transition(prior, TaskEvent.EXPIRE)
    return _to_waiting(prior, prior.failures, prior.expiries + 1, 0, "lease_expired", prior.error)


def apply_failure(
    prior: TaskStatusRow,
    *,
    reason: str,
    error: str,
    counts: str,
    final: bool,
    not_before_ns: int,
    at_ns: int,
) -> TaskStatusRow:
    if prior.state != TaskState.LEASED:
        raise _illegal_transition(prior, TaskEvent.FAIL if final else TaskEvent.RETRY)
    failures = prior.failures + (counts == "failure")
    expiries = prior.expiries + (counts == "expiry")
    if not final:
        return _to_waiting(prior, failures, expiries, not_before_ns, reason, error)
    return _to_ended(prior, TaskState.FAILED, failures, expiries, reason, error, at_ns)


def apply_death(prior: TaskStatusRow, reason: str, at_ns: int) -> TaskStatusRow:
    if (prior.state, TaskEvent.BURY) not in _legal_moves:
        raise _illegal_transition(prior, TaskEvent.BURY)
    return _to_ended(
        prior, TaskState.DEAD, prior.failures, prior.expiries, reason, prior.error, at_ns
    )


def _to_waiting(
    prior: TaskStatusRow, failures: int, expiries: int, not_before_ns: int, reason: str, error: str
) -> TaskStatusRow:
    return TaskStatusRow(
        TaskState.WAITING,
        prior.attempt,
        failures,
        expiries,
        not_before_ns=not_before_ns,
        awaited=prior.awaited,
        reason=reason,
        error=error,
    )


def _to_ended(
    prior: TaskStatusRow,
    state: TaskState,
    failures: int,
    expiries: int,
    reason: str,
    error: str,
    at_ns: int,
) -> TaskStatusRow:
    return TaskStatusRow(
        state,
        prior.attempt,
        failures,
        expiries,
        prior.lease,
        prior.worker,
        0,
        prior.granted_ns,
        awaited=prior.awaited,
        ended_ns=at_ns,
        reason=reason,
        error=error,
    )


def _illegal_transition(prior: TaskStatusRow, event: TaskEvent) -> IllegalTransition:
    return IllegalTransition(
        machine=TASK_TRANSITIONS.name,
        prior=TaskState(prior.state).name,
        attempted=event.name,
        owner=prior.worker,
    )


class TaskFold:
    """The fold of a whole log, keyed by task seq."""

    def __init__(self) -> None:
        self.tasks: dict[int, TaskStatusRow] = {}
        self.bodies: dict[int, TaskBodyRow] = {}

    def apply(self, record: TaskRecord) -> None:
        """Apply one record. An illegal record raises and changes nothing."""
        task = record.task_id
        if isinstance(record, events.TaskCreated):
            if task in self.tasks:
                raise Invalid(what="log", why="a task is created twice", task=task)
            if record.body is not None:
                self.bodies[task] = record.body
            self.tasks[task] = NEW_STATUS
            return
        prior = self.tasks.get(task)
        if prior is None:
            raise Invalid(what="log", why="a record names an unknown task", task=task)
        self.tasks[task] = apply_record(prior, record)

    def replay(self, log: Iterable[TaskRecord]) -> TaskFold:
        for record in log:
            self.apply(record)
        return self


def apply_record(prior: TaskStatusRow, record: TaskRecord) -> TaskStatusRow:
    """Return the status of a task after a record."""
    at_ns = record.decided_at
    match record:
        case events.LeaseGranted():
            return apply_grant(
                prior, record.lease_id, record.worker_id, record.expiry_timestamp, at_ns
            )
        case events.LeaseExtended():
            _require_live_lease(prior, record.lease_id, at_ns)
            return apply_extension(prior, record.new_expiry_timestamp, record.progressed, at_ns)
        case events.LeaseExpired():
            expired_status = apply_expiry(prior)
            if prior.lease != record.lease_id or at_ns < prior.expires_ns:
                raise Invalid(
                    what="log",
                    why="a record expires a lease too early, or a lease that is not the current one",
                )
            return expired_status
        case events.TaskCompleted():
            _require_live_lease(prior, record.lease_id, at_ns)
            return apply_completion(prior, at_ns)
        case events.TaskFailed():
            _require_live_lease(prior, record.lease_id, at_ns)
            return apply_failure(
                prior,
                reason=record.reason,
                error=record.error,
                counts=record.counts,
                final=record.final,
                not_before_ns=record.not_before,
                at_ns=at_ns,
            )
        case events.TaskDead():
            return apply_death(prior, record.reason, at_ns)
        case events.TaskCancelled():
            return prior
    raise Invalid(what="log", why="an unknown record", found=type(record).__name__)


def _require_live_lease(prior: TaskStatusRow, lease: int, at_ns: int) -> None:
    if prior.state == TaskState.LEASED and (prior.lease != lease or at_ns >= prior.expires_ns):
        raise Invalid(
            what="log",
            why="a record names a lease that is not live",
            lease=lease,
            current=prior.lease,
        )
