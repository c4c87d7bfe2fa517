"""The endpoints of the leader lease of a universe, of its readiness, of the audit log, and of the last verification."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.errors import NotFound
from holdfast.leadership import leader_lease
from holdfast.ops import audit, leadership_documents, verify_report
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
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
    REASON,
    LeaderEventDocument,
    LeaderLeaseDocument,
    require_universe,
)
from holdfast.ops.verify_report import VerifyReport
from holdfast.store.api import Txn
from holdfast.workers.readiness import ReadinessSnapshot
from holdfast.workers.readiness_facts import read_readiness


class ForceReleaseBody(RequestModel):
    reason: str = REASON


class LeadershipDocument(LeaderLeaseDocument, frozen=True):
    """The leader lease with the last decisions about it."""

    events: list[LeaderEventDocument]


class ReleasedLease(LeadershipDocument, frozen=True):
    """The leader lease after its release. `released` is the former owner."""

    released: str | None


class MarkedLease(LeadershipDocument, frozen=True):
    """`marked`: the lease had expired, and this request marked it stale."""

    marked: bool


class AuditDocument(msgspec.Struct, frozen=True):
    """An action of an operator. `actor` is the name of the token."""

    number: int
    at_ns: int
    actor: str
    action: str
    subject: str
    detail: str


def show_authority(call: ApiCall) -> LeadershipDocument:
    return LeadershipDocument(**_fields(call))


def force_release_authority(call: ApiCall) -> ReleasedLease:
    call.read(require_universe, call.universe)
    reason = call.body.reason

    def release(txn: Txn) -> str:
        owner = leader_lease.read(txn, call.universe).owner
        leader_lease.force_release(txn, call.universe, reason)
        return owner

    owner: str = call.transact(release, subject=f"universe/{call.universe}", detail=reason)
    return ReleasedLease(**_fields(call), released=owner or None)


def mark_authority_stale(call: ApiCall) -> MarkedLease:
    call.read(require_universe, call.universe)
    marked: bool = call.transact(
        leader_lease.mark_stale, call.universe, subject=f"universe/{call.universe}"
    )
    return MarkedLease(**_fields(call), marked=bool(marked))


def _fields(call: ApiCall) -> dict[str, Any]:
    call.read(require_universe, call.universe)
    lease, events = call.read(leadership_documents.read_leadership, call.universe)
    document = leadership_documents.lease_document(call.store, call.universe, lease)
    return {
        **msgspec.structs.asdict(document),
        "events": [leadership_documents.event_document(event) for event in events],
    }


def show_readiness(call: ApiCall) -> ReadinessSnapshot:
    return read_readiness(call.store, call.universe)


def show_verify_report(call: ApiCall) -> VerifyReport:
    report: VerifyReport = call.read(verify_report.find_last, call.universe)
    return report


def list_verify_reports(call: ApiCall) -> Page[VerifyReport]:
    try:
        return Page(items=[show_verify_report(call)])
    except NotFound:
        return Page(items=[])


def list_audit(call: ApiCall) -> Page[AuditDocument]:
    limit = cursors.page_limit(call.query)
    before = cursors.decode(call.query.cursor, int)
    found: list[audit.NumberedEntry] = call.read(
        audit.list_entries, call.universe, before, limit + 1
    )
    items = [
        AuditDocument(number, entry.at_ns, entry.actor, entry.action, entry.subject, entry.detail)
        for number, entry in found[:limit]
    ]
    return Page(items=items, next=cursors.encode(items[-1].number) if len(found) > limit else None)


ENDPOINTS = (
    Endpoint("GET", "/v1/authority", Scope.READ, show_authority, LeadershipDocument,
             "Show the leader lease of the universe and the last decisions about it"),
    Endpoint("POST", "/v1/authority/force-release", Scope.OPERATE, force_release_authority,
             ReleasedLease, "Revoke the leader lease, live or not",
             EndpointOptions(body=ForceReleaseBody)),
    Endpoint("POST", "/v1/authority/mark-stale", Scope.OPERATE, mark_authority_stale, MarkedLease,
             "Record the expiry of an expired leader lease", EndpointOptions(body=EmptyBody)),
    Endpoint("GET", "/v1/readiness", Scope.READ, show_readiness, ReadinessSnapshot,
             "Show whether the universe is ready, and each blocker"),
    Endpoint("GET", "/v1/verify", Scope.READ, show_verify_report, VerifyReport,
             "Show the report of the last `holdfast verify --save`"),
    Endpoint("GET", "/v1/verify/reports", Scope.READ, list_verify_reports, Page[VerifyReport],
             "List the report of the last `holdfast verify --save`, if there is one"),
    Endpoint("GET", "/v1/audit", Scope.READ, list_audit, Page[AuditDocument],
             "List the actions of operators, newest first", EndpointOptions(query=PageQuery)),
)  # fmt: skip
