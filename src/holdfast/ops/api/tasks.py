"""The endpoints of tasks and queues, with the requests and answers of the worker protocol (docs/tasks-http.md)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from holdfast import traces
from holdfast.app.keyed_tasks import KeyedTasks
from holdfast.errors import KeyConflict, NotFound
from holdfast.ops import task_documents
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import (
    ApiAnswer,
    EmptyBody,
    Endpoint,
    EndpointOptions,
    ListQuery,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.ops.api.task_lists import TaskListQuery, read_page
from holdfast.ops.http.request_schemas import CancelBody, NewTaskBody, SubmissionBody
from holdfast.ops.http.task_batch import build_batch, require_tasks
from holdfast.ops.task_documents import TaskReport, read_report
from holdfast.store.api import Txn
from holdfast.tasks import operations, queries
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import QueueLimits, get_limits, keys_of
from holdfast.tasks.task_list import TaskPage


class WaitQuery(RequestModel):
    """`wait_s`: answer when the task has ended, or after this time."""

    wait_s: float = 0.0


class QueueLimitBody(RequestModel):
    """0 removes a limit. A limit that is left out stays."""

    concurrency: int | None = None
    per_key: int | None = None


class SubmittedTaskDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client submitted."""

    id: str
    name: str
    queue: str
    priority: int
    attempts: int
    expiries_max: int
    created_ns: int
    key: str | None
    limit_key: str | None
    tag: str | None


class TaskDocument(SubmittedTaskDocument, frozen=True):
    """A task as it appears in a list."""

    state: str
    where: str
    attempt: int
    failures: int
    expiries: int
    not_before_ns: int | None
    worker: str | None
    expires_ns: int | None
    ended_ns: int | None
    reason: str | None
    error: str | None


class TaskDetailsDocument(TaskDocument, frozen=True, kw_only=True):
    """A task with all details. `result` is present if it completed."""

    why: str
    lease: str | None
    granted_ns: int | None
    progress: Any
    after: list[str]
    redrive_of: str | None
    redriven_by: str | None
    trace_id: str | None
    args: list[Any]
    kwargs: dict[str, Any]
    result: Any | UnsetType = UNSET


class TaskPageDocument(msgspec.Struct, frozen=True):
    """A page of tasks. `cursor` starts the next page."""

    tasks: list[TaskDocument]
    cursor: str | None


class SubmittedTasks(msgspec.Struct, frozen=True):
    """`id` for one task, `ids` for several."""

    id: str | UnsetType = UNSET
    ids: list[str] | UnsetType = UNSET


class CancelledTask(msgspec.Struct, frozen=True):
    """`cancelled`: this request ended the task."""

    id: str
    cancelled: bool


class RedrivenTask(msgspec.Struct, frozen=True):
    id: str
    redrive_of: str


class QueueDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue: the number of tasks in each place, its limits, and the time of its pause."""

    queue: str
    waiting: int
    ready: int
    suspect: int
    parked: int
    delayed: int
    blocked: int
    leased: int
    completed: int
    failed: int
    dead: int
    stray: int
    concurrency: int | None
    per_key: int | None
    paused_ns: int | None


class PausedQueue(QueueDocument, frozen=True):
    """A queue after `pause` or `resume`. `changed`: this request paused or resumed it."""

    changed: bool


class QueueListDocument(msgspec.Struct, frozen=True):
    queues: list[QueueDocument]


class LimitKeyDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit key that tasks of a queue wait for. `leased` tasks with it run; `first` is the task that gets the next slot."""

    limit_key: str
    leased: int
    first: str


class QueueLimitDocument(msgspec.Struct, frozen=True):
    """The limits of a queue; 0: no limit."""

    queue: str
    concurrency: int
    per_key: int


# -- tasks -----------------------------------------------------------------------------------------


def list_tasks(call: ApiCall) -> TaskPageDocument:
    page: TaskPage = call.read(read_page, call.universe, call.query)
    tasks = [msgspec.convert(task_documents.task_summary(row), TaskDocument) for row in page.rows]
    return TaskPageDocument(tasks, page.cursor or None)


def show_task(call: ApiCall) -> TaskDetailsDocument:
    """Before this call, the server waits up to `wait_s` (`ops/http/task_routes.py`)."""
    report: TaskReport = call.read(read_report, call.universe, parse_task_id(call.path["id"]))
    return msgspec.convert(task_documents.task_details(report), TaskDetailsDocument)


def submit_tasks(call: ApiCall) -> ApiAnswer:
    """The idempotency key of the request is the key of a single task, unless its options have one."""
    body: SubmissionBody = call.body
    new_tasks = body.new_tasks()
    if body.tasks is not UNSET:
        return ApiAnswer(SubmittedTasks(ids=[str(task) for task in _submit(call, new_tasks)]))
    [new] = new_tasks
    if call.key and not new.options.key:
        new.options = msgspec.structs.replace(new.options, key=call.key)
    [task] = _submit(call, [new])
    return ApiAnswer(SubmittedTasks(id=str(task)), headers=(("Location", f"/v1/tasks/{task}"),))


def _submit(call: ApiCall, new_tasks: list[NewTaskBody]) -> list[TaskId]:
    declared = {} if call.app is None else call.app.tasks
    batch = build_batch(new_tasks, declared)
    if batch.dependencies:
        call.read(require_tasks, call.universe, batch.dependencies)
    with traces.sending("submit", "tasks", batch.first_queue) as sending:
        new = batch.new
        if trace := sending.context:
            new = [msgspec.structs.replace(task, trace=trace) for task in new]
        tasks = KeyedTasks(batch.specs, batch.spec_indexes, new)
        seqs = tasks.submit(call.transact, call.read, call.universe, declared)
        sending.sent_batch(len(seqs))
    found: list[TaskId] = call.read(queries.task_ids, call.universe, seqs)
    return found


def cancel_task(call: ApiCall) -> CancelledTask:
    task = _task(call)
    reason = call.body.reason
    [ended] = call.transact(
        operations.cancel,
        call.universe,
        [task.seq],
        reason,
        subject=f"task/{task}",
        detail=reason,
    )
    return CancelledTask(str(task), bool(ended))


def redrive_task(call: ApiCall) -> RedrivenTask:
    task = _task(call)
    seqs: list[int] = call.transact(
        operations.redrive, call.universe, [task.seq], subject=f"task/{task}"
    )
    [new] = call.read(queries.task_ids, call.universe, seqs)
    return RedrivenTask(str(new), str(task))


def _task(call: ApiCall) -> TaskId:
    task = parse_task_id(call.path["id"])
    call.read(queries.get_task, call.universe, task)
    return task


# -- queues ----------------------------------------------------------------------------------------


def list_queues(call: ApiCall) -> QueueListDocument:
    rows: list[queries.QueueRow] = call.read(queries.list_queues, call.universe)
    return QueueListDocument([_queue_document(row) for row in rows])


def show_queue(call: ApiCall) -> QueueDocument:
    name = call.path["queue"]
    row: queries.QueueRow | None = call.read(queries.find_queue, call.universe, name)
    if row is None:
        raise NotFound(what="queue", queue=name[:256], universe=call.universe)
    return _queue_document(row)


def list_limit_keys(call: ApiCall) -> Page[LimitKeyDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""
    found: list[queries.LimitKeyRow] = call.read(
        queries.list_limit_keys, call.universe, call.path["queue"], after, limit + 1
    )
    items = [LimitKeyDocument(row.key, row.leased, str(row.first)) for row in found[:limit]]
    more = len(found) > limit
    return Page(items=items, next=cursors.encode(items[-1].limit_key) if more else None)


def limit_queue(call: ApiCall) -> QueueLimitDocument:
    body: QueueLimitBody = call.body
    name = call.path["queue"]

    def change(txn: Txn) -> QueueLimits:
        was = get_limits(txn, keys_of(call.universe), name)
        limits = QueueLimits(
            was.concurrency if body.concurrency is None else body.concurrency,
            was.per_key if body.per_key is None else body.per_key,
        )
        if (limits.concurrency, limits.per_key) != (was.concurrency, was.per_key):
            operations.set_limits(txn, call.universe, name, limits)
        return limits

    detail = f"concurrency {body.concurrency}, per_key {body.per_key}"
    limits: QueueLimits = call.transact(change, subject=f"queue/{name}", detail=detail)
    return QueueLimitDocument(name, limits.concurrency, limits.per_key)


def pause_queue(call: ApiCall) -> PausedQueue:
    return _set_paused(call, True)


def resume_queue(call: ApiCall) -> PausedQueue:
    return _set_paused(call, False)


def _set_paused(call: ApiCall, paused: bool) -> PausedQueue:
    name = call.path["queue"]
    changed: bool = call.transact(
        operations.set_queue_paused, call.universe, name, paused, subject=f"queue/{name}"
    )
    row: queries.QueueRow = call.read(queries.read_queue, call.universe, name)
    return PausedQueue(**task_documents.queue_summary(row), changed=bool(changed))


def _queue_document(row: queries.QueueRow) -> QueueDocument:
    return msgspec.convert(task_documents.queue_summary(row), QueueDocument)


_TASK = "/v1/tasks/{id}"

ENDPOINTS = (
    Endpoint("GET", "/v1/tasks", Scope.READ, list_tasks, TaskPageDocument,
             "List tasks by state, queue, name, tag, key and time", EndpointOptions(query=TaskListQuery)),
    Endpoint("POST", "/v1/tasks", Scope.SUBMIT, submit_tasks, SubmittedTasks,
             "Submit a task, or several in one commit",
             EndpointOptions(body=SubmissionBody, status=201, finds_repeat=True,
                             problems=(KeyConflict,))),
    Endpoint("GET", _TASK, Scope.READ, show_task, TaskDetailsDocument,
             "Show a task, and optionally wait for its end", EndpointOptions(query=WaitQuery)),
    Endpoint("POST", f"{_TASK}/cancel", Scope.OPERATE, cancel_task, CancelledTask,
             "Cancel a waiting or running task", EndpointOptions(body=CancelBody)),
    Endpoint("POST", f"{_TASK}/redrive", Scope.OPERATE, redrive_task, RedrivenTask,
             "Submit a failed or dead task again as a new task",
             EndpointOptions(body=EmptyBody, status=201)),
    Endpoint("GET", "/v1/queues", Scope.READ, list_queues, QueueListDocument,
             "List the queues of tasks with their counts and limits", EndpointOptions(query=ListQuery)),
    Endpoint("GET", "/v1/queues/{queue}", Scope.READ, show_queue, QueueDocument,
             "Show the counts and limits of a queue"),
    Endpoint("GET", "/v1/queues/{queue}/keys", Scope.READ, list_limit_keys, Page[LimitKeyDocument],
             "List the limit keys that tasks of a queue wait for", EndpointOptions(query=PageQuery)),
    Endpoint("POST", "/v1/queues/{queue}/limit", Scope.OPERATE, limit_queue, QueueLimitDocument,
             "Set the concurrency limits of a queue", EndpointOptions(body=QueueLimitBody)),
    Endpoint("POST", "/v1/queues/{queue}/pause", Scope.OPERATE, pause_queue, PausedQueue,
             "Grant no task of a queue until it is resumed; running tasks continue",
             EndpointOptions(body=EmptyBody)),
    Endpoint("POST", "/v1/queues/{queue}/resume", Scope.OPERATE, resume_queue, PausedQueue,
             "Grant the tasks of a paused queue again", EndpointOptions(body=EmptyBody)),
)  # fmt: skip
