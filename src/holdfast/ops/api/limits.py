"""The endpoints of load limits, on the operations of `holdfast limits show` and `holdfast limits set`."""

from __future__ import annotations

from holdfast.ops import limit_documents
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, RequestModel, Scope
from holdfast.ops.limit_documents import LimitsDocument
from holdfast.store.api import Txn
from holdfast.workers import limit_settings
from holdfast.workers.limit_settings import BadLimits


class LimitsBody(RequestModel):
    """`limits` has the new values by name: `tasks`, `queue:mail`, …. 0 removes a limit. Other limits stay."""

    limits: dict[str, int]


def show_limits(call: ApiCall) -> LimitsDocument:
    document: LimitsDocument = call.read(limit_documents.read_limits, call.universe)
    return document


def set_limits(call: ApiCall) -> LimitsDocument:
    changes: dict[str, int] = call.body.limits
    limit_documents.check_changes(changes)

    def change(txn: Txn) -> None:
        limit_settings.change_limits(txn, call.universe, changes)

    subject, detail = f"universe/{call.universe}", limit_documents.changes_text(changes)
    call.transact(change, subject=subject, detail=detail)
    return show_limits(call)


ENDPOINTS = (
    Endpoint("GET", "/v1/limits", Scope.READ, show_limits, LimitsDocument,
             "Show the load limits of the universe and their present figures"),
    Endpoint("POST", "/v1/limits", Scope.OPERATE, set_limits, LimitsDocument,
             "Set load limits; 0 removes one",
             EndpointOptions(body=LimitsBody, problems=(BadLimits,))),
)  # fmt: skip
