"""The endpoints of what a world owns: its open effects, its timers, its forks, and the events that it handles.

No index has the effects and the forks by world. A page reads at most SCANNED_MAX rows of the universe. It may therefore
be short or empty and still have a cursor for the next page.
"""

from __future__ import annotations

from holdfast.ops import pending_documents, pending_work
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, Page, PageQuery, Scope
from holdfast.ops.api.worlds import find_world
from holdfast.ops.event_documents import EventTypeDocument, event_type_documents
from holdfast.ops.pending_documents import EffectListItem, TimerDocument
from holdfast.ops.pending_work import IntentRow, TimerRow
from holdfast.ops.world_documents import ForkDocument
from holdfast.store.api import Txn
from holdfast.world import catalog
from holdfast.world.catalog import WorldRecord, WorldStatus

SCANNED_MAX = 5_000


def list_world_effects(call: ApiCall) -> Page[EffectListItem]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, bytes) or b""

    def read(txn: Txn) -> tuple[list[IntentRow], bytes]:
        record = _world(txn, call)
        return pending_work.world_page(
            txn, record.universe, record.world_id, after, limit, SCANNED_MAX
        )

    rows, last = call.read(read)
    items = [pending_documents.intent_document(row) for row in rows]
    return Page(items=items, next=cursors.encode(last) if last else None)


def list_world_timers(call: ApiCall) -> Page[TimerDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""

    def read(txn: Txn) -> tuple[list[TimerRow], str]:
        record = _world(txn, call)
        return pending_work.world_timers(txn, record.universe, record.world_id, after, limit)

    rows, last = call.read(read)
    items = [pending_documents.timer_document(row) for row in rows]
    return Page(items=items, next=cursors.encode(last) if last else None)


def list_world_forks(call: ApiCall) -> Page[ForkDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""

    def read(txn: Txn) -> tuple[list[WorldRecord], str]:
        parent = _world(txn, call)
        page = catalog.list_worlds(txn, parent.universe, after, SCANNED_MAX)
        found = [one for one in page if _is_fork(one, parent)]
        if len(found) > limit:
            return found[:limit], found[limit - 1].world_id
        return found, page[-1].world_id if len(page) == SCANNED_MAX else ""

    records, last = call.read(read)
    items = [
        ForkDocument(record.world_id, record.type, record.name, record.lineage.forked_at_height)
        for record in records
        if record.lineage is not None
    ]
    return Page(items=items, next=cursors.encode(last) if last else None)


def list_world_event_types(call: ApiCall) -> Page[EventTypeDocument]:
    app = call.require_app()
    record = call.read(_world, call)
    program = app.programs.get(record.type)
    causes = () if program is None else program.handlers
    return Page(items=event_type_documents(app, [name for kind, name in causes if kind == "event"]))


def _is_fork(record: WorldRecord, parent: WorldRecord) -> bool:
    lineage = record.lineage
    return (
        lineage is not None
        and lineage.parent_world_id == parent.world_id
        and record.status is not WorldStatus.DELETED
    )


def _world(txn: Txn, call: ApiCall) -> WorldRecord:
    return find_world(txn, call.universe, call.path["type"], call.path["name"])


_WORLD = "/v1/worlds/{type}/{name}"
_PAGED = EndpointOptions(query=PageQuery)

ENDPOINTS = (
    Endpoint("GET", f"{_WORLD}/effects", Scope.READ, list_world_effects, Page[EffectListItem],
             "List the open and dead effects of a world; a page may be short", _PAGED),
    Endpoint("GET", f"{_WORLD}/timers", Scope.READ, list_world_timers, Page[TimerDocument],
             "List the pending timers of a world by key", _PAGED),
    Endpoint("GET", f"{_WORLD}/forks", Scope.READ, list_world_forks, Page[ForkDocument],
             "List the direct forks of a world; a page may be short", _PAGED),
    Endpoint("GET", f"{_WORLD}/event-types", Scope.READ, list_world_event_types,
             Page[EventTypeDocument], "List the event types that a world handles, with their fields",
             EndpointOptions(needs_app=True)),
)  # fmt: skip
