"""Task operations: the only code that writes task state (document 003).

    submit          TaskCreated                     WAITING
    lease           LeaseExpired …, LeaseGranted    LEASED; overdue leases expire before any grant
    extend          LeaseExtended                   while the attempt makes progress within its window
    apply_reports   TaskCompleted | TaskFailed | TaskCancelled
    cancel          TaskDead                        the worker that holds the lease is notified
    redrive         TaskCreated(redrive_of)         a new task that replaces a FAILED or DEAD one

Each operation runs inside the writer. It judges leases by the commit's timestamp and writes its log
entry together with the derived rows. Every operation accepts a batch, and a batch costs one log
entry. `report_and_lease` applies reports and grants leases in one commit.

The answer to a report is COMMITTED, CANCELLED (the lease was lost and the worker discards the
result; logged) or REJECTED (unknown task, or a lease that was never granted, which is a worker bug;
not logged).
"""

from __future__ import annotations

from holdfast.tasks.admin import (
    cancel,
    maintain,
    redrive,
    report_progress,
    set_limits,
    set_queue_paused,
)
from holdfast.tasks.grants import TaskGrant
from holdfast.tasks.leases import (
    GrantRequest,
    HeldLease,
    LeaseResult,
    extend,
    lease,
    lease_or_park,
)
from holdfast.tasks.reports import (
    AttemptOutcome,
    ReportAndLeaseResult,
    ReportAnswer,
    TaskReport,
    apply_reports,
    report_and_lease,
)
from holdfast.tasks.submit import (
    CyclicDependency,
    SubmitEachResult,
    TaskToSubmit,
    check_spec,
    submit,
    submit_all,
    submit_each,
)

__all__ = [
    "AttemptOutcome",
    "CyclicDependency",
    "GrantRequest",
    "HeldLease",
    "LeaseResult",
    "ReportAndLeaseResult",
    "ReportAnswer",
    "SubmitEachResult",
    "TaskGrant",
    "TaskReport",
    "TaskToSubmit",
    "apply_reports",
    "cancel",
    "check_spec",
    "extend",
    "lease",
    "lease_or_park",
    "maintain",
    "redrive",
    "report_and_lease",
    "report_progress",
    "set_limits",
    "set_queue_paused",
    "submit",
    "submit_all",
    "submit_each",
]  # fmt: skip
