"""What is told of a task, a queue: plain documents, the same over HTTP and on the command line."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.ops.http.values import arguments, plain
from holdfast.tasks.look import QueueRow, Seen, TaskRow
from holdfast.tasks.states import State


def row_document(row: TaskRow) -> dict[str, Any]:
    """A line of a list."""
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
        "reason": status.reason or None,
        "error": status.error or None,
    }


def seen_document(seen: Seen) -> dict[str, Any]:
    """All of it."""
    args, kwargs = arguments(seen.args)
    row = seen.row
    document = row_document(row)
    document["why"] = seen.why
    document["lease"] = str(seen.lease) if seen.lease else None
    document["granted_ns"] = row.status.granted_ns or None
    document["progress"] = plain(seen.progress) if seen.progress else None
    document["after"] = [str(task) for task in seen.after]
    document["redrive_of"] = str(seen.redrive_of) if seen.redrive_of else None
    document["redriven_by"] = str(seen.redriven_by) if seen.redriven_by else None
    document["args"] = args
    document["kwargs"] = kwargs
    if row.state is State.COMPLETED:
        document["result"] = plain(seen.result) if seen.result else None
    return document


def queue_document(row: QueueRow) -> dict[str, Any]:
    return {
        "queue": row.queue,
        "waiting": row.counts.waiting,
        **msgspec.structs.asdict(row.counts),
        "concurrency": row.limits.concurrency or None,
        "per_key": row.limits.per_key or None,
    }
