"""The endpoints of timers. A timer is named by its world, `{type}/{name}` or `by-id/{id}`, and its key."""

from __future__ import annotations

from holdfast.ops import pending_documents, pending_work
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, Page, PageQuery, Scope
from holdfast.ops.api.worlds import find_world
from holdfast.ops.pending_documents import TimerDocument
from holdfast.store.api import Txn


def list_timers(call: ApiCall) -> Page[TimerDocument]:
    limit = cursors.page_limit(call.query)
    position = cursors.decode(call.query.cursor, tuple[int, bytes]) or (0, b"")
    rows, last = call.read(pending_work.timers_page, call.universe, position, limit)
    items = [pending_documents.timer_document(row) for row in rows]
    return Page(items=items, next=cursors.encode(last) if last else None)


def show_timer(call: ApiCall) -> TimerDocument:
    def read(txn: Txn) -> TimerDocument:
        record = find_world(txn, call.universe, call.path["type"], call.path["name"])
        row = pending_work.timer(txn, record.world_id, call.path["key"], call.universe)
        return pending_documents.timer_document(row)

    document: TimerDocument = call.read(read)
    return document


ENDPOINTS = (
    Endpoint("GET", "/v1/timers", Scope.READ, list_timers, Page[TimerDocument],
             "List pending timers: due ones first, then by time, those of the store clock first",
             EndpointOptions(query=PageQuery)),
    Endpoint("GET", "/v1/timers/{type}/{name}/{key}", Scope.READ, show_timer, TimerDocument,
             "Show a timer of a world by its key"),
)  # fmt: skip
