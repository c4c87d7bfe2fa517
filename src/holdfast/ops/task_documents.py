"""JSON documents of tasks and queues, shared by the HTTP API and the command line."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from holdfast import traces
from holdfast.blockers import tasks as task_blockers
from holdfast.ops.http.json_values import arguments_to_json, to_json
from holdfast.store.api import Txn
from holdfast.tasks import queries
from holdfast.tasks.ids import TaskId
from holdfast.tasks.queries import QueueRow, TaskDetails, TaskRow
from holdfast.tasks.states import TaskState


class TaskReport(NamedTuple):
    """All that is shown of one task, read in one transaction. `why` explains its state in words."""

    details: TaskDetails
    why: str


def read_report(txn: Txn, universe: str, task: TaskId) -> TaskReport:
    details = queries.get_details(txn, universe, task)
    return TaskReport(details, task_blockers.explain_state(txn, universe, details.row))


def task_summary(row: TaskRow) -> dict[str, Any]:
    """Return a task as it appears in a list."""
    spec, status, body = row.spec, row.status, row.body
    return {
        "id": str(row.id),
        "name": spec.name,
        "queue": spec.queue,
        "priority": spec.priority,
        "state": row.state.name,
        "where": row.where,
        "attempt": status.attempt,
        "failures": status.failures,
        "attempts": spec.attempts,
        "expiries": status.expiries,
        "expiries_max": spec.expiries_max,
        "created_ns": body.created_ns,
        "not_before_ns": row.not_before_ns or None,
        "worker": status.worker or None,
        "expires_ns": status.expires_ns or None,
        "ended_ns": status.ended_ns or None,
        "key": body.key or None,
        "limit_key": body.limit or None,
        "tag": body.tag or None,
        "reason": status.reason or None,
        "error": status.error or None,
    }


def task_details(report: TaskReport) -> dict[str, Any]:
    """Return a task with all details."""
    details = report.details
    args, kwargs = arguments_to_json(details.args)
    row = details.row
    document = task_summary(row)
    document["why"] = report.why
    document["lease"] = str(details.lease) if details.lease else None
    document["granted_ns"] = row.status.granted_ns or None
    document["progress"] = to_json(details.progress) if details.progress else None
    document["after"] = [str(task) for task in details.after]
    document["redrive_of"] = str(details.redrive_of) if details.redrive_of else None
    document["redriven_by"] = str(details.redriven_by) if details.redriven_by else None
    document["trace_id"] = traces.trace_id(row.body.trace) or None
    document["args"] = args
    document["kwargs"] = kwargs
    if row.state is TaskState.COMPLETED:
        document["result"] = to_json(details.result) if details.result else None
    return document


def queue_summary(row: QueueRow) -> dict[str, Any]:
    return {
        "queue": row.queue,
        "waiting": row.counts.waiting,
        **msgspec.structs.asdict(row.counts),
        "concurrency": row.limits.concurrency or None,
        "per_key": row.limits.per_key or None,
        "paused_ns": row.limits.paused_ns or None,
    }
