"""The endpoints of jobs: an action on a selection of subjects, which a server runs in bounded commits.

Each server of a store runs jobs. `processed` and `refused` count subjects. `audit` has the creation and the end.
"""

from __future__ import annotations

import msgspec
from msgspec import field

from holdfast.errors import Invalid, NotFound
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
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
from holdfast.ops.jobs import model, steps
from holdfast.ops.jobs.model import RATE_PER_S, Job, JobRow, TooManyJobs, selection_text
from holdfast.ops.jobs.states import JobState
from holdfast.store.api import Txn


class JobBody(RequestModel):
    """`selection` has the filters of the action: `state` and optionally `queue` for tasks, `state` for flows, `queue`
    for dead letters, `type` for worlds. `limit` is the most subjects to process; 0: no limit."""

    action: str
    selection: dict[str, str]
    rate_per_s: float = RATE_PER_S
    limit: int = 0


class PaceBody(RequestModel):
    rate_per_s: float


class RefusalDocument(msgspec.Struct, frozen=True):
    subject: str
    why: str


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A job and its progress. `refusals` has the last refused subjects."""

    id: str
    action: str
    selection: dict[str, str]
    actor: str
    state: str
    rate_per_s: float
    limit: int
    processed: int
    refused: int
    created_ns: int
    ended_ns: int | None
    error: str | None
    refusals: list[RefusalDocument] = field(default_factory=list)


class CancelledJob(msgspec.Struct, frozen=True):
    """`cancelled`: this request ended the job."""

    id: str
    cancelled: bool


def create_job(call: ApiCall) -> ApiAnswer:
    body: JobBody = call.body
    row = JobRow(
        body.action,
        body.selection,
        call.actor,
        0,
        rate_per_s=body.rate_per_s,
        limit=body.limit,
    )

    def create(txn: Txn) -> Job:
        return model.create(txn, call.universe, steps.prepare(txn, call.universe, row))

    detail = f"{body.action} {selection_text(body.selection)}"[:1_000]
    job: Job = call.transact(create, subject="job", detail=detail)
    return ApiAnswer(job_document(job), headers=(("Location", f"/v1/jobs/{job.id}"),))


def list_jobs(call: ApiCall) -> Page[JobDocument]:
    limit = cursors.page_limit(call.query)
    before = cursors.decode(call.query.cursor, int)
    found: list[Job] = call.read(model.list_jobs, call.universe, before, limit + 1)
    more = len(found) > limit
    last = found[limit - 1].number if more else 0
    return Page(
        items=[job_document(job) for job in found[:limit]],
        next=cursors.encode(last) if more else None,
    )


def show_job(call: ApiCall) -> JobDocument:
    return job_document(call.read(model.get, call.universe, _number(call)))


def cancel_job(call: ApiCall) -> CancelledJob:
    number = _number(call)
    job, ended = call.transact(model.cancel, call.universe, number, subject=f"job/{number}")
    return CancelledJob(job.id, ended)


def pace_job(call: ApiCall) -> JobDocument:
    number, rate_per_s = _number(call), call.body.rate_per_s
    job: Job = call.transact(
        model.set_rate,
        call.universe,
        number,
        rate_per_s,
        subject=f"job/{number}",
        detail=f"{rate_per_s:g} per second",
    )
    return job_document(job)


def _number(call: ApiCall) -> int:
    text = call.path["id"]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Invalid(what="job", found=text[:64], expected="a number")
    return int(text)


def job_document(job: Job) -> JobDocument:
    row = job.row
    return JobDocument(
        id=job.id,
        action=row.action,
        selection=row.selection,
        actor=row.actor,
        state=JobState(row.state).name.lower(),
        rate_per_s=row.rate_per_s,
        limit=row.limit,
        processed=row.processed,
        refused=row.refused,
        created_ns=row.created_ns,
        ended_ns=row.ended_ns or None,
        error=row.error or None,
        refusals=[RefusalDocument(*refusal) for refusal in row.refusals],
    )


_JOB = "/v1/jobs/{id}"

ENDPOINTS = (
    Endpoint("GET", "/v1/jobs", Scope.READ, list_jobs, Page[JobDocument],
             "List jobs, newest first", EndpointOptions(query=PageQuery)),
    Endpoint("POST", "/v1/jobs", Scope.OPERATE, create_job, JobDocument,
             "Apply an action to a selection of subjects, at a pace",
             EndpointOptions(body=JobBody, status=202, problems=(TooManyJobs,))),
    Endpoint("GET", _JOB, Scope.READ, show_job, JobDocument, "Show a job and its progress"),
    Endpoint("POST", f"{_JOB}/cancel", Scope.OPERATE, cancel_job, CancelledJob,
             "End a job; subjects that were processed stay so",
             EndpointOptions(body=EmptyBody, problems=(NotFound,))),
    Endpoint("POST", f"{_JOB}/pace", Scope.OPERATE, pace_job, JobDocument,
             "Change the pace of a job", EndpointOptions(body=PaceBody)),
)  # fmt: skip
