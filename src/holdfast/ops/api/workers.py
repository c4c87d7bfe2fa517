"""The endpoints of workers."""

from __future__ import annotations

from holdfast.errors import NotFound
from holdfast.leadership import leader_lease, worker_registry
from holdfast.ops import catalog_queries, leadership_documents
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import (
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    Scope,
)
from holdfast.ops.leadership_documents import WorkerDocument
from holdfast.store.api import Txn


def list_workers(call: ApiCall) -> Page[WorkerDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""

    def read(txn: Txn) -> list[WorkerDocument]:
        rows = catalog_queries.workers_after(txn, call.universe, after, limit + 1)
        return [leadership_documents.worker_document(row) for row in rows]

    found = call.read(read)
    more = len(found) > limit
    return Page(items=found[:limit], next=cursors.encode(found[limit - 1].worker) if more else None)


def show_worker(call: ApiCall) -> WorkerDocument:
    worker = call.path["worker"]

    def read(txn: Txn) -> WorkerDocument:
        records = worker_registry.find_services(txn, call.universe, worker)
        if not records:
            raise NotFound(what="worker", universe=call.universe, worker=worker)
        record = records[0]
        epoch = leader_lease.epoch(txn, call.universe)
        row = catalog_queries.worker_row(txn, call.universe, record, epoch)
        return leadership_documents.worker_document(row)

    document: WorkerDocument = call.read(read)
    return document


def drain_worker(call: ApiCall) -> WorkerDocument:
    return _set_draining(call, True)


def undrain_worker(call: ApiCall) -> WorkerDocument:
    return _set_draining(call, False)


def _set_draining(call: ApiCall, draining: bool) -> WorkerDocument:
    worker = call.path["worker"]
    call.transact(
        worker_registry.set_draining,
        call.universe,
        worker,
        draining,
        subject=f"worker/{worker}",
    )
    return show_worker(call)


_WORKER = "/v1/workers/{worker}"
_EMPTY = EndpointOptions(body=EmptyBody)

ENDPOINTS = (
    Endpoint("GET", "/v1/workers", Scope.READ, list_workers, Page[WorkerDocument],
             "List workers by id", EndpointOptions(query=PageQuery)),
    Endpoint("GET", _WORKER, Scope.READ, show_worker, WorkerDocument, "Show a worker"),
    Endpoint("POST", f"{_WORKER}/drain", Scope.OPERATE, drain_worker, WorkerDocument,
             "Let a worker release its worlds and give it no new ones", _EMPTY),
    Endpoint("POST", f"{_WORKER}/undrain", Scope.OPERATE, undrain_worker, WorkerDocument,
             "Let a draining worker accept worlds again", _EMPTY),
)  # fmt: skip
