"""The endpoints of error groups. Jobs redrive and drop their subjects (`errors.redrive`, `errors.drop`)."""

from __future__ import annotations

from holdfast.durable import error_groups
from holdfast.ops import error_group_documents
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, Page, PageQuery, Scope
from holdfast.ops.error_group_documents import ErrorGroupDocument, ErrorSubjectDocument
from holdfast.store.api import Txn


class ErrorGroupQuery(PageQuery):
    """`kind` is task, flow or dead. Without it the groups of all kinds are listed."""

    kind: str = ""


def list_error_groups(call: ApiCall) -> Page[ErrorGroupDocument]:
    """The order is by number, so a group may move between two pages."""
    query: ErrorGroupQuery = call.query
    limit, start = cursors.page_limit(query), cursors.decode(query.cursor, int) or 0
    if query.kind:
        error_group_documents.check_kind(query.kind)
    kinds = (query.kind,) if query.kind else error_groups.KINDS

    def read(txn: Txn) -> tuple[list[ErrorGroupDocument], bool]:
        found = error_groups.list_groups(txn, call.universe, kinds)
        items = [
            error_group_documents.group_document(txn, call.universe, one)
            for one in found[start : start + limit]
        ]
        return items, len(found) > start + limit

    items, more = call.read(read)
    return Page(items=items, next=cursors.encode(start + limit) if more else None)


def show_error_group(call: ApiCall) -> ErrorGroupDocument:
    def read(txn: Txn) -> ErrorGroupDocument:
        found = error_group_documents.existing_group(
            txn, call.universe, call.path["kind"], call.path["group"]
        )
        return error_group_documents.group_document(txn, call.universe, found)

    document: ErrorGroupDocument = call.read(read)
    return document


def list_error_subjects(call: ApiCall) -> Page[ErrorSubjectDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, bytes) or b""
    kind = call.path["kind"]

    def read(txn: Txn) -> tuple[list[ErrorSubjectDocument], bytes]:
        error_group_documents.existing_group(txn, call.universe, kind, call.path["group"])
        group = error_group_documents.parse_group(call.path["group"])
        members = error_groups.list_members(txn, call.universe, kind, group, after, limit + 1)
        items = [
            error_group_documents.subject_document(txn, call.universe, kind, member)
            for member in members[:limit]
        ]
        return items, members[limit - 1].position if len(members) > limit else b""

    items, last = call.read(read)
    return Page(items=items, next=cursors.encode(last) if last else None)


_GROUP = "/v1/errors/{kind}/{group}"

ENDPOINTS = (
    Endpoint("GET", "/v1/errors", Scope.READ, list_error_groups, Page[ErrorGroupDocument],
             "List groups of failed tasks, flows and dead letters by their error, the largest first",
             EndpointOptions(query=ErrorGroupQuery)),
    Endpoint("GET", _GROUP, Scope.READ, show_error_group, ErrorGroupDocument,
             "Show an error group"),
    Endpoint("GET", f"{_GROUP}/subjects", Scope.READ, list_error_subjects,
             Page[ErrorSubjectDocument],
             "List the tasks, flows or dead letters of an error group, the oldest first",
             EndpointOptions(query=PageQuery)),
)  # fmt: skip
