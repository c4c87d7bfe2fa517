"""The endpoints of schedules: `POST …/{name}/{verb}` acts with the verbs of `holdfast schedules`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import field

from holdfast.app import schedules as app_schedules
from holdfast.app.schedule_options import ScheduleOptions
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, KeyConflict
from holdfast.ops import schedule_documents
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.client import client_runtime
from holdfast.ops.api.endpoint import (
    ApiAnswer,
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.ops.schedule_documents import (
    BackfilledDocument,
    OccurrenceDocument,
    ScheduleChangeDocument,
    ScheduleDocument,
    parse_time,
)
from holdfast.schedules import backfills, operations, queries
from holdfast.schedules.model import ScheduleExists
from holdfast.schedules.operations import UsedOccurrence
from holdfast.store.api import Txn

OCCURRENCES_SHOWN = 10


class ScheduleBody(RequestModel):
    """A cron rule that starts `target`, the name of a task or flow of the app, with `args`."""

    name: str
    target: str
    every: str
    zone: str = "UTC"
    missed: str = "one"
    overlap: str = "skip"
    args: list[Any] = field(default_factory=list)


class BackfillBody(RequestModel):
    """A range of times. A time without an offset is in the time zone of the schedule."""

    start: str = field(name="from")
    end: str = field(name="to")
    dry_run: bool = False


class ScheduleDetails(ScheduleDocument, frozen=True):
    """A schedule with its last occurrences, newest first, and its changes, oldest first."""

    occurrences: list[OccurrenceDocument]
    changes: list[ScheduleChangeDocument]


class PausedSchedule(ScheduleDocument, frozen=True):
    """A schedule after `pause` or `resume`."""

    changed: bool


class BackfillAnswer(msgspec.Struct, frozen=True):
    dry_run: bool
    occurrences: list[BackfilledDocument]


class DeletedSchedule(msgspec.Struct, frozen=True):
    deleted: str


def list_schedules(call: ApiCall) -> Page[ScheduleDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""
    found = call.read(queries.list_after, call.universe, after, limit + 1)
    items = [schedule_documents.schedule_document(status) for status in found[:limit]]
    return Page(items=items, next=cursors.encode(items[-1].name) if len(found) > limit else None)


def show_schedule(call: ApiCall) -> ScheduleDetails:
    name = call.path["name"]

    def read(txn: Txn) -> ScheduleDetails:
        status = queries.get_status(txn, call.universe, name)
        last = queries.last_occurrences(txn, call.universe, name, OCCURRENCES_SHOWN)
        changes = queries.list_changes(txn, call.universe, name)
        return ScheduleDetails(
            **status._asdict(),
            occurrences=[schedule_documents.occurrence_document(*one) for one in last],
            changes=[schedule_documents.change_document(row) for row in changes],
        )

    document: ScheduleDetails = call.read(read)
    return document


def create_schedule(call: ApiCall) -> ApiAnswer:
    body: ScheduleBody = call.body
    runtime = client_runtime(call)
    app = runtime.app
    target = app.tasks.get(body.target) or app.flows.get(body.target)
    if target is None:
        known = sorted([*app.tasks, *app.flows])
        raise Invalid(what="target", found=body.target[:64], why="unknown to the app", known=known)
    options = ScheduleOptions(body.every, body.zone, body.missed, body.overlap, tuple(body.args))
    definition = app_schedules.define(runtime, body.name, target, options)
    made: bool = call.transact(
        operations.create,
        call.universe,
        definition,
        "",
        SYSTEM.wall_ns(),
        subject=f"schedule/{body.name}",
        detail=body.every,
    )
    status = call.read(queries.get_status, call.universe, body.name)
    return ApiAnswer(schedule_documents.schedule_document(status), 201 if made else 200)


def pause_schedule(call: ApiCall) -> PausedSchedule:
    return _set_paused(call, True)


def resume_schedule(call: ApiCall) -> PausedSchedule:
    return _set_paused(call, False)


def _set_paused(call: ApiCall, paused: bool) -> PausedSchedule:
    name = call.path["name"]
    changed: bool = call.transact(
        operations.set_paused,
        call.universe,
        name,
        paused,
        SYSTEM.wall_ns(),
        subject=f"schedule/{name}",
    )
    status = call.read(queries.get_status, call.universe, name)
    return PausedSchedule(**status._asdict(), changed=bool(changed))


def run_schedule_now(call: ApiCall) -> OccurrenceDocument:
    name = call.path["name"]
    used: UsedOccurrence = call.transact(
        operations.run_now, call.universe, name, SYSTEM.wall_ns(), subject=f"schedule/{name}"
    )
    return schedule_documents.occurrence_document(used.occurrence_ns, used.row)


def backfill_schedule(call: ApiCall) -> BackfillAnswer:
    body: BackfillBody = call.body
    name = call.path["name"]
    start, end = parse_time("from", body.start), parse_time("to", body.end)
    store, wall_ns = call.store, SYSTEM.wall_ns()
    if body.dry_run:
        made = backfills.dry_run(store, call.universe, name, start, end, wall_ns=wall_ns)
    else:
        store = call.recording_store(f"schedule/{name}", f"{body.start} to {body.end}")
        accepted = call.marks.claimed
        made = backfills.run(
            store, call.universe, name, start, end, wall_ns=wall_ns, accepted=accepted
        )
    documents = [schedule_documents.backfilled_document(one) for one in made]
    return BackfillAnswer(dry_run=body.dry_run, occurrences=documents)


def delete_schedule(call: ApiCall) -> DeletedSchedule:
    name = call.path["name"]
    store, accepted = call.recording_store(f"schedule/{name}"), call.marks.claimed
    backfills.delete(store, call.universe, name, accepted=accepted)
    return DeletedSchedule(deleted=name)


_SCHEDULE = "/v1/schedules/{name}"
_EMPTY = EndpointOptions(body=EmptyBody)

ENDPOINTS = (
    Endpoint("GET", "/v1/schedules", Scope.READ, list_schedules, Page[ScheduleDocument],
             "List schedules by name", EndpointOptions(query=PageQuery)),
    Endpoint("POST", "/v1/schedules", Scope.OPERATE, create_schedule, ScheduleDocument,
             "Create a schedule for a task or flow of the app",
             EndpointOptions(body=ScheduleBody, status=201, needs_app=True,
                             problems=(ScheduleExists, KeyConflict))),
    Endpoint("GET", _SCHEDULE, Scope.READ, show_schedule, ScheduleDetails,
             "Show a schedule, its last occurrences and its changes"),
    Endpoint("POST", f"{_SCHEDULE}/pause", Scope.OPERATE, pause_schedule, PausedSchedule,
             "Start no occurrence of a schedule until it is resumed", _EMPTY),
    Endpoint("POST", f"{_SCHEDULE}/resume", Scope.OPERATE, resume_schedule, PausedSchedule,
             "Continue a schedule with its next occurrence", _EMPTY),
    Endpoint("POST", f"{_SCHEDULE}/run-now", Scope.OPERATE, run_schedule_now, OccurrenceDocument,
             "Start an extra occurrence of a schedule now", _EMPTY),
    Endpoint("POST", f"{_SCHEDULE}/backfill", Scope.OPERATE, backfill_schedule, BackfillAnswer,
             "Start the past occurrences of a range that have not run",
             EndpointOptions(body=BackfillBody, continues=True)),
    Endpoint("POST", f"{_SCHEDULE}/delete", Scope.OPERATE, delete_schedule, DeletedSchedule,
             "Delete a schedule; its tasks and flows continue",
             EndpointOptions(body=EmptyBody, continues=True)),
)  # fmt: skip
