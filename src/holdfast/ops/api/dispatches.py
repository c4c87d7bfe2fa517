"""The endpoints of dispatches: prompts to tmux panes. A dispatch is named by its id or by the mark in its prompt."""

from __future__ import annotations

import msgspec

from holdfast.dispatch import log, notifications
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.request import DispatchRecord, DispatchStatus
from holdfast.errors import IllegalTransition, Invalid
from holdfast.ops import leadership_documents
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall, NoIndex
from holdfast.ops.api.endpoint import (
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.ops.leadership_documents import (
    DispatchDocument,
    LeaderPaneDocument,
    dispatch_document,
    find_dispatch,
)
from holdfast.store.api import Txn


class DispatchListQuery(PageQuery):
    """`status` is needed: pending, notified, delivered or failed."""

    status: str = ""


class FailDispatchBody(RequestModel):
    reason: str


class RewindBody(RequestModel):
    """The log is read again after this height."""

    height: int


class DispatchCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of dispatches by status. `deferred` ones are pending."""

    pending: int
    notified: int
    delivered: int
    failed: int
    deferred: int


def list_dispatches(call: ApiCall) -> Page[DispatchDocument]:
    query: DispatchListQuery = call.query
    limit = cursors.page_limit(query)
    if not query.status:
        raise NoIndex(what="list", why="needs status", indexed=["status"])
    try:
        status = DispatchStatus(query.status)
    except ValueError:
        expected = [status.value for status in DispatchStatus]
        raise Invalid(what="status", found=query.status[:64], expected=expected) from None
    after = cursors.decode(query.cursor, str)

    def read(txn: Txn) -> list[DispatchRecord]:
        last = None if after is None else find_dispatch(txn, call.universe, after)
        return log.list_by_status(txn, call.universe, status, last, limit + 1)

    found = call.read(read)
    items = [dispatch_document(record) for record in found[:limit]]
    more = len(found) > limit
    return Page(items=items, next=cursors.encode(items[-1].request_id) if more else None)


def count_dispatches(call: ApiCall) -> DispatchCounts:
    backlog = call.read(leadership_documents.read_backlog, call.universe)
    return msgspec.convert(backlog, DispatchCounts)


def show_dispatch(call: ApiCall) -> DispatchDocument:
    return dispatch_document(_dispatch(call))


def deliver_dispatch(call: ApiCall) -> DispatchDocument:
    record = _dispatch(call)
    return dispatch_document(_log(call, record).delivered(record.request_id))


def fail_dispatch(call: ApiCall) -> DispatchDocument:
    record = _dispatch(call)
    return dispatch_document(_log(call, record).failed(record.request_id, call.body.reason))


def show_leader_pane(call: ApiCall) -> LeaderPaneDocument:
    document: LeaderPaneDocument = call.read(leadership_documents.read_leader_pane, call.universe)
    return document


def rewind_dispatches(call: ApiCall) -> LeaderPaneDocument:
    height = call.body.height
    call.transact(
        notifications.rewind,
        call.universe,
        height,
        subject=f"universe/{call.universe}",
        detail=str(height),
    )
    return show_leader_pane(call)


def _dispatch(call: ApiCall) -> DispatchRecord:
    record: DispatchRecord = call.read(find_dispatch, call.universe, call.path["request"])
    return record


def _log(call: ApiCall, record: DispatchRecord) -> DispatchLog:
    store = call.recording_store(f"dispatch/{record.request_id}")
    return DispatchLog(store, call.universe)


_DISPATCH = "/v1/dispatches/{request}"

ENDPOINTS = (
    Endpoint("GET", "/v1/dispatches", Scope.READ, list_dispatches, Page[DispatchDocument],
             "List the dispatches with one status, the longest in it first",
             EndpointOptions(query=DispatchListQuery)),
    Endpoint("GET", "/v1/dispatches/counts", Scope.READ, count_dispatches, DispatchCounts,
             "Count dispatches by status"),
    Endpoint("GET", "/v1/dispatches/leader", Scope.READ, show_leader_pane, LeaderPaneDocument,
             "Show the pane of the leader and the position of its notifications"),
    Endpoint("POST", "/v1/dispatches/rewind", Scope.OPERATE, rewind_dispatches, LeaderPaneDocument,
             "Read the log of notifications again from a height", EndpointOptions(body=RewindBody)),
    Endpoint("GET", _DISPATCH, Scope.READ, show_dispatch, DispatchDocument, "Show a dispatch"),
    Endpoint("POST", f"{_DISPATCH}/deliver", Scope.OPERATE, deliver_dispatch, DispatchDocument,
             "Confirm that the agent received a prompt",
             EndpointOptions(body=EmptyBody, problems=(IllegalTransition,))),
    Endpoint("POST", f"{_DISPATCH}/fail", Scope.OPERATE, fail_dispatch, DispatchDocument,
             "Record that the agent rejected a prompt",
             EndpointOptions(body=FailDispatchBody, problems=(IllegalTransition,))),
)  # fmt: skip
