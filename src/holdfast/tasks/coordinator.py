"""The coordinator: the only writer of task state (document 003).

    submit    TaskCreated                        WAITING
    lease     LeaseExpired …, LeaseGranted       LEASED: what is overdue expires before anything is granted
    extend    LeaseExtended                      as long as it goes on, within its window
    settle    TaskCompleted | TaskFailed | TaskCancelled
    cancel    TaskDead                           whoever runs it is told
    redrive   TaskCreated(redrive_of)            a new task in the place of one that FAILED or is DEAD

Each is an operation: it runs where commits are applied, judges leases by the time of that commit, and
writes its log entry together with the rows that follow from it. All take batches; a batch costs one
entry. `turn` settles and leases in one commit.

An answer to a report is COMMITTED, CANCELLED (the lease was lost: discard the work; it is logged) or
REJECTED (no such task, or a lease that was never given: the worker's bug; nothing is logged).
"""

from __future__ import annotations

from holdfast.tasks.control import cancel, limit, maintain, redrive, report_progress
from holdfast.tasks.giving import Grant
from holdfast.tasks.lease import Hold, Leased, extend, lease
from holdfast.tasks.settle import Answer, End, Report, Turned, settle, turn
from holdfast.tasks.standby import lease_when
from holdfast.tasks.submit import (
    CyclicDependency,
    Each,
    New,
    check_spec,
    submit,
    submit_all,
    submit_each,
)

__all__ = [
    "Answer", "CyclicDependency", "Each", "End", "Grant", "Hold", "Leased", "New", "Report", "Turned", "cancel",
    "check_spec", "extend", "lease", "lease_when", "limit", "maintain", "redrive", "report_progress", "settle", "submit", "submit_all",
    "submit_each", "turn",
]  # fmt: skip
