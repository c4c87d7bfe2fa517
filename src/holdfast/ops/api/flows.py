"""The endpoints of flows. A flow is named by its id, such as `f1-17`, or by `NAME/KEY`, percent-encoded as one part."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType, field

from holdfast.app import flow_start
from holdfast.blockers.answer import Blocker
from holdfast.durable import error_groups
from holdfast.durable.creation_times import TimeRange
from holdfast.errors import Invalid, KeyConflict
from holdfast.flows import flow_list, fork, mailbox, operations, step_list
from holdfast.flows.flow_list import FlowPage, FlowRow
from holdfast.flows.model import FlowId, MailRow, StartedFlow, keys_of
from holdfast.flows.redrive import redrive
from holdfast.flows.step_list import StepPage
from holdfast.ops import error_group_documents, flow_documents, world_operations
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import (
    ApiAnswer,
    EmptyBody,
    Endpoint,
    EndpointOptions,
    NoQuery,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.ops.api.task_lists import refuse_beside
from holdfast.ops.event_documents import EventTypeDocument, event_type_documents
from holdfast.ops.flow_documents import SpentDocument, find_flow
from holdfast.store.api import Txn


class FlowListQuery(PageQuery):
    """`since_ns` and `until_ns` bound the time of the start. Several of `state`, `name` and `tag` read the flows of one of
    them: a page may be short. `key` takes no other filter, and neither does `error`, an error group of
    `GET /v1/errors?kind=flow`, the oldest first."""

    state: str = ""
    name: str = ""
    tag: str = ""
    key: str = ""
    error: str = ""
    since_ns: int = 0
    until_ns: int = 0


class StepQuery(PageQuery):
    """`run` is the number of the run; null: the last run."""

    run: int | None = None


class FlowOptionsBody(RequestModel):
    key: str | None = None
    queue: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    tag: str | None = None


class StartFlowBody(RequestModel):
    name: str
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: FlowOptionsBody = field(default_factory=FlowOptionsBody)


class FlowEventBody(RequestModel):
    type: str
    event: dict[str, Any] = field(default_factory=dict)
    key: str = ""


class FlowForkBody(RequestModel):
    """`at` is a step, such as `charge` or `charge#3`, or the registration of a compensation, such as `undo:refund`: the fork
    takes over the steps before it. Empty: all steps."""

    key: str
    at: str = ""


class FlowDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A flow as it appears in a list."""

    id: str
    name: str
    key: str | None
    tag: str | None
    state: str
    queue: str
    priority: int
    run: int
    failures: int
    attempts: int
    started_ns: int
    run_started_ns: int
    ended_ns: int | None
    cancelled: bool
    code: str | None
    step: str | None
    error_type: str | None
    error: str | None


class MailDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event in the mailbox of a flow."""

    type: str
    event: Any


class ActivationDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The task under whose lease a worker runs a flow. Without a lease it waits in its queue."""

    task: str
    state: str
    attempt: int
    expiries: int
    worker: str | None
    lease: str | None
    created_ns: int
    granted_ns: int | None
    expires_ns: int | None


class ChildFlowDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    name: str
    state: str


class FlowDetailsDocument(FlowDocument, frozen=True, kw_only=True):
    """A flow with all details. `activation` is null while it waits and after its end. `children` has its first 1,000 child
    flows, `cost` what its effects spent by unit. `result` is present if it completed."""

    blockers: list[Blocker]
    timeout_ns: int | None
    fork_of: str | None
    fork_at: str | None
    redrive_of: str | None
    redriven_by: str | None
    trace_id: str | None
    activation: ActivationDocument | None
    children: list[ChildFlowDocument]
    cost: list[SpentDocument]
    parent: str | None
    args: list[Any]
    kwargs: dict[str, Any]
    published: dict[str, Any]
    events: list[MailDocument]
    result: Any | UnsetType = UNSET


class FlowCountsDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of flows of one name in each state."""

    name: str
    running: int
    waiting: int
    parked: int
    compensating: int
    completed: int
    failed: int
    cancelled: int
    dead: int


class StepDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step. Of an open step: `due_ns` is the end of its sleep or of its timeout, `types` the events that it waits for,
    `child` the id of its task or flow, or the intent of its effect."""

    position: int
    name: str
    occurrence: int
    kind: str
    state: str
    attempts: int
    began_ns: int | None
    ended_ns: int | None
    due_ns: int | None
    types: list[str]
    child: str | None
    value: Any
    code: str | None
    error_type: str | None
    error: str | None


class StartedFlowDocument(msgspec.Struct, frozen=True):
    id: str
    name: str
    key: str | None


class SentMail(msgspec.Struct, frozen=True):
    """An accepted event and its number in the mailbox."""

    id: str
    type: str
    number: int


class CancelledFlow(msgspec.Struct, frozen=True):
    """`cancelled`: this request caused the cancellation."""

    id: str
    cancelled: bool


class ResumedFlow(msgspec.Struct, frozen=True):
    id: str
    resumed: bool


class ForkedFlow(msgspec.Struct, frozen=True):
    id: str
    name: str
    key: str
    fork_of: str
    fork_at: str | None


class RedrivenFlow(msgspec.Struct, frozen=True):
    """`flow` is the flow that runs: the same one, or a new one after compensations."""

    id: str
    flow: str


# -- queries ---------------------------------------------------------------------------------------

_FLOW_FILTERS = ("state", "name", "tag", "key", "error", "since_ns", "until_ns")


def list_flows(call: ApiCall) -> Page[FlowDocument]:
    query: FlowListQuery = call.query
    limit = cursors.page_limit(query)
    for alone in ("key", "error"):
        if getattr(query, alone):
            refuse_beside(alone, query, tuple(set(_FLOW_FILTERS) - {alone}), (alone,))

    def read(txn: Txn) -> FlowPage:
        if query.key:
            return FlowPage(flow_list.find_by_key(txn, call.universe, query.key), "")
        if query.error:
            return _page_of_error(txn, call.universe, query)
        return flow_list.list_flows(
            txn,
            call.universe,
            query.state.lower(),
            query.name,
            query.cursor,
            limit,
            tag=query.tag,
            times=TimeRange(query.since_ns, query.until_ns),
        )

    page: FlowPage = call.read(read)
    items = [msgspec.convert(flow_documents.flow_summary(row), FlowDocument) for row in page.rows]
    return Page(items=items, next=page.cursor or None)


def _page_of_error(txn: Txn, universe: str, query: FlowListQuery) -> FlowPage:
    members, next = error_group_documents.members_page(
        txn, universe, error_groups.FLOW, query.error, query.cursor, cursors.page_limit(query)
    )
    keys = keys_of(universe)
    rows = (flow_list.get_flow(txn, keys, seq) for seq in members)
    return FlowPage([row for row in rows if row is not None], next or "")


def count_flows(call: ApiCall) -> Page[FlowCountsDocument]:
    rows: list[flow_list.NameCounts] = call.read(flow_list.list_counts, call.universe)
    items = [
        msgspec.convert(flow_documents.counts_summary(row), FlowCountsDocument) for row in rows
    ]
    return Page(items=items)


def show_flow(call: ApiCall) -> FlowDetailsDocument:
    def read(txn: Txn) -> flow_documents.FlowReport:
        row = find_flow(txn, call.universe, call.path["id"])
        return flow_documents.read_report(txn, call.universe, row)

    return msgspec.convert(flow_documents.flow_details(call.read(read)), FlowDetailsDocument)


def list_flow_event_types(call: ApiCall) -> Page[EventTypeDocument]:
    app = call.require_app()
    _flow(call)
    return Page(items=event_type_documents(app, app.events))


def list_flow_steps(call: ApiCall) -> Page[StepDocument]:
    """A cursor is the position of the last step of a page."""
    query: StepQuery = call.query
    limit = cursors.page_limit(query)
    start = cursors.decode(query.cursor, int)

    def read(txn: Txn) -> StepPage:
        row = find_flow(txn, call.universe, call.path["id"])
        if query.run is not None and not 1 <= query.run <= row.head.run:
            raise Invalid(what="run", found=query.run, min=1, max=row.head.run)
        return step_list.list_steps(txn, call.universe, row.seq, query.run, start or 0, limit)

    page = call.read(read)
    items = [
        msgspec.convert(flow_documents.step_document(step), StepDocument) for step in page.steps
    ]
    return Page(items=items, next=cursors.encode(page.next_after) if page.next_after else None)


# -- changes ---------------------------------------------------------------------------------------


def start_flow(call: ApiCall) -> ApiAnswer:
    """The idempotency key of the request is the key of the flow, unless `options` has one."""
    body: StartFlowBody = call.body
    flow = call.require_app().flows.get(body.name)
    if flow is None:
        known = sorted(call.require_app().flows)
        raise Invalid(what="flow", name=body.name[:64], why="unknown to the app", known=known)
    options = msgspec.structs.asdict(body.options)
    options["key"] = options["key"] or call.key or None
    chosen = flow.options(**options)
    packed = flow.pack(tuple(body.args), body.kwargs)
    started = flow_start.start_packed(call.transact, call.read, call.universe, chosen, packed)
    id = FlowId(started.generation, started.seq)
    return ApiAnswer(
        StartedFlowDocument(str(id), body.name, chosen.key or None),
        headers=(("Location", f"/v1/flows/{id}"),),
    )


def send_flow_event(call: ApiCall) -> SentMail:
    body: FlowEventBody = call.body
    app, row = call.require_app(), _flow(call)
    event = world_operations.event_of(app, body.type, body.event)
    name, value = app.encode_event(event)
    mail = MailRow(name, value, key=body.key or call.key)
    number: int = call.transact(mailbox.send, call.universe, row.seq, row.body.generation, mail)
    return SentMail(str(row.id), name, number)


def cancel_flow(call: ApiCall) -> CancelledFlow:
    row = _flow(call)
    caused: bool = call.transact(
        operations.cancel, call.universe, row.seq, row.body.generation, subject=f"flow/{row.id}"
    )
    return CancelledFlow(str(row.id), bool(caused))


def resume_flow(call: ApiCall) -> ResumedFlow:
    row = _flow(call)
    resumed: bool = call.transact(
        operations.resume, call.universe, row.seq, subject=f"flow/{row.id}"
    )
    return ResumedFlow(str(row.id), bool(resumed))


def fork_flow(call: ApiCall) -> ForkedFlow:
    body: FlowForkBody = call.body
    row = _flow(call)
    started: StartedFlow = call.transact(
        fork.fork,
        call.universe,
        row.seq,
        row.body.generation,
        body.key,
        body.at,
        subject=f"flow/{row.id}",
        detail=body.key,
    )
    new = FlowId(started.generation, started.seq)
    return ForkedFlow(str(new), row.body.spec.name, body.key, str(row.id), body.at or None)


def redrive_flow(call: ApiCall) -> RedrivenFlow:
    row = _flow(call)
    started: StartedFlow = call.transact(redrive, call.universe, row.seq, subject=f"flow/{row.id}")
    return RedrivenFlow(str(row.id), str(FlowId(started.generation, started.seq)))


def _flow(call: ApiCall) -> FlowRow:
    row: FlowRow = call.read(find_flow, call.universe, call.path["id"])
    return row


_FLOW = "/v1/flows/{id}"
_EMPTY = EndpointOptions(body=EmptyBody)

ENDPOINTS = (
    Endpoint("GET", "/v1/flows", Scope.READ, list_flows, Page[FlowDocument],
             "List flows, newest first", EndpointOptions(query=FlowListQuery)),
    Endpoint("GET", "/v1/flows/counts", Scope.READ, count_flows, Page[FlowCountsDocument],
             "Count flows by name and state", EndpointOptions(query=NoQuery)),
    Endpoint("POST", "/v1/flows", Scope.SUBMIT, start_flow, StartedFlowDocument, "Start a flow",
             EndpointOptions(body=StartFlowBody, status=201, needs_app=True, finds_repeat=True,
                             problems=(KeyConflict,))),
    Endpoint("GET", _FLOW, Scope.READ, show_flow, FlowDetailsDocument,
             "Show a flow: its state with the reason, its arguments, its result or error"),
    Endpoint("GET", f"{_FLOW}/steps", Scope.READ, list_flow_steps, Page[StepDocument],
             "List the steps of a flow with their outcomes", EndpointOptions(query=StepQuery)),
    Endpoint("GET", f"{_FLOW}/event-types", Scope.READ, list_flow_event_types,
             Page[EventTypeDocument], "List the event types of the app, with their fields",
             EndpointOptions(needs_app=True)),
    Endpoint("POST", f"{_FLOW}/send", Scope.SUBMIT, send_flow_event, SentMail,
             "Send an event to a flow",
             EndpointOptions(body=FlowEventBody, needs_app=True, finds_repeat=True,
                             problems=(KeyConflict,))),
    Endpoint("POST", f"{_FLOW}/cancel", Scope.OPERATE, cancel_flow, CancelledFlow,
             "Cancel a flow; its compensations run", _EMPTY),
    Endpoint("POST", f"{_FLOW}/resume", Scope.OPERATE, resume_flow, ResumedFlow,
             "Run a parked flow again", _EMPTY),
    Endpoint("POST", f"{_FLOW}/fork", Scope.OPERATE, fork_flow, ForkedFlow,
             "Start a flow that takes over recorded steps of another flow",
             EndpointOptions(body=FlowForkBody, status=201, problems=(KeyConflict,))),
    Endpoint("POST", f"{_FLOW}/redrive", Scope.OPERATE, redrive_flow, RedrivenFlow,
             "Run a failed or dead flow again", _EMPTY),
)  # fmt: skip
