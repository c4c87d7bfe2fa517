"""The board: every task's status, as the records of the log say, and nothing else.

`after` is one step: a status and a record in, the next status out, or `IllegalTransition` and no
change. It asks no clock and knows no policy. The coordinator writes its rows by the functions that
`after` is made of, so a row and a replay cannot disagree about what a record means; whether the right
records were written is what the simulator's own model checks.

`Board` folds a whole log, checks the preconditions of each record, and keeps the invariants of
document 003: at most one lease of a task, none of a task that waits, COMPLETED for good.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.errors import IllegalTransition, Invalid
from holdfast.tasks import records
from holdfast.tasks.records import Single
from holdfast.tasks.rows import FRESH, Body, Status
from holdfast.tasks.states import TABLE, Event, State

_next = TABLE.table


def granted(was: Status, lease: int, worker: str, expires_ns: int, at_ns: int) -> Status:
    if (was.state, Event.GRANT) not in _next:
        raise _illegal(was, Event.GRANT)
    return Status(
        State.LEASED,
        was.attempt + 1,
        was.failures,
        was.expiries,
        lease,
        worker,
        expires_ns,
        at_ns,
        at_ns,
        0,
        0,
        was.awaited,
        0,
        was.reason,
        was.error,
    )


def extended(was: Status, expires_ns: int, progressed: bool, at_ns: int) -> Status:
    if was.state != State.LEASED:
        raise _illegal(was, Event.EXTEND)
    return Status(
        State.LEASED,
        was.attempt,
        was.failures,
        was.expiries,
        was.lease,
        was.worker,
        expires_ns,
        was.granted_ns,
        at_ns if progressed else was.progress_ns,
        0,
        0,
        was.awaited,
        0,
        was.reason,
        was.error,
    )


def completed(was: Status, at_ns: int, result: bytes = b"", blob: bytes = b"") -> Status:
    if was.state != State.LEASED:
        raise _illegal(was, Event.COMPLETE)
    return Status(
        State.COMPLETED,
        was.attempt,
        was.failures,
        was.expiries,
        was.lease,
        was.worker,
        0,
        was.granted_ns,
        0,
        0,
        0,
        was.awaited,
        at_ns,
        "",
        "",
        0,
        result,
        blob,
    )


def expired(was: Status) -> Status:
    if was.state != State.LEASED:
        raise _illegal(was, Event.EXPIRE)
    return _waiting(was, was.failures, was.expiries + 1, 0, "lease_expired", was.error)


def failed(
    was: Status,
    *,
    reason: str,
    error: str,
    counts: str,
    final: bool,
    not_before_ns: int,
    at_ns: int,
) -> Status:
    if was.state != State.LEASED:
        raise _illegal(was, Event.FAIL if final else Event.RETRY)
    failures = was.failures + (counts == "failure")
    expiries = was.expiries + (counts == "expiry")
    if not final:
        return _waiting(was, failures, expiries, not_before_ns, reason, error)
    return _ended(was, State.FAILED, failures, expiries, reason, error, at_ns)


def buried(was: Status, reason: str, at_ns: int) -> Status:
    if (was.state, Event.BURY) not in _next:
        raise _illegal(was, Event.BURY)
    return _ended(was, State.DEAD, was.failures, was.expiries, reason, was.error, at_ns)


def _waiting(
    was: Status, failures: int, expiries: int, not_before_ns: int, reason: str, error: str
) -> Status:
    return Status(
        State.WAITING,
        was.attempt,
        failures,
        expiries,
        not_before_ns=not_before_ns,
        awaited=was.awaited,
        reason=reason,
        error=error,
    )


def _ended(
    was: Status, state: State, failures: int, expiries: int, reason: str, error: str, at_ns: int
) -> Status:
    return Status(
        state,
        was.attempt,
        failures,
        expiries,
        was.lease,
        was.worker,
        0,
        was.granted_ns,
        awaited=was.awaited,
        ended_ns=at_ns,
        reason=reason,
        error=error,
    )


def _illegal(was: Status, event: Event) -> IllegalTransition:
    return IllegalTransition(
        machine=TABLE.name,
        prior=State(was.state).name,
        attempted=event.name,
        owner=was.worker,
    )


class Board:
    """The fold of a log. Tasks are known by their seq."""

    def __init__(self) -> None:
        self.tasks: dict[int, Status] = {}
        self.bodies: dict[int, Body] = {}

    def apply(self, record: Single) -> None:
        """One record; an illegal one raises and changes nothing."""
        task = record.task_id
        if isinstance(record, records.TaskCreated):
            if task in self.tasks:
                raise Invalid(what="log", why="a task is created twice", task=task)
            if record.body is not None:
                self.bodies[task] = record.body
            self.tasks[task] = FRESH
            return
        was = self.tasks.get(task)
        if was is None:
            raise Invalid(what="log", why="a record names no task", task=task)
        self.tasks[task] = after(was, record)

    def replay(self, log: Iterable[Single]) -> Board:
        for record in log:
            self.apply(record)
        return self


def after(was: Status, record: Single) -> Status:
    """What a task is after a record."""
    at_ns = record.decided_at
    match record:
        case records.LeaseGranted():
            return granted(was, record.lease_id, record.worker_id, record.expiry_timestamp, at_ns)
        case records.LeaseExtended():
            _holds(was, record.lease_id, at_ns)
            return extended(was, record.new_expiry_timestamp, record.progressed, at_ns)
        case records.LeaseExpired():
            after_it = expired(was)
            if was.lease != record.lease_id or at_ns < was.expires_ns:
                raise Invalid(what="log", why="a lease ends that is another's, or before its time")
            return after_it
        case records.TaskCompleted():
            _holds(was, record.lease_id, at_ns)
            return completed(was, at_ns)
        case records.TaskFailed():
            _holds(was, record.lease_id, at_ns)
            return failed(
                was,
                reason=record.reason,
                error=record.error,
                counts=record.counts,
                final=record.final,
                not_before_ns=record.not_before,
                at_ns=at_ns,
            )
        case records.TaskDead():
            return buried(was, record.reason, at_ns)
        case records.TaskCancelled():
            return was
    raise Invalid(what="log", why="an unknown record", found=type(record).__name__)


def _holds(was: Status, lease: int, at_ns: int) -> None:
    if was.state == State.LEASED and (was.lease != lease or at_ns >= was.expires_ns):
        raise Invalid(
            what="log", why="decided under a lease that is none", lease=lease, current=was.lease
        )
