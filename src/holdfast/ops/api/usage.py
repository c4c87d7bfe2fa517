"""The endpoint of the space that a store uses, on the figures of `holdfast store usage`."""

from __future__ import annotations

from typing import cast

from holdfast.ops import usage_documents
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import Endpoint, EndpointOptions, RequestModel, Scope
from holdfast.ops.usage_documents import UsageDocument


class UsageQuery(RequestModel):
    """`figures_of` selects the figures of one universe. `universe` is the universe of the request, as everywhere."""

    figures_of: str = ""


def show_usage(call: ApiCall) -> UsageDocument:
    return usage_documents.read_usage(call.store, cast(UsageQuery, call.query).figures_of)


ENDPOINTS = (
    Endpoint("GET", "/v1/store/usage", Scope.READ, show_usage, UsageDocument,
             "Show rows and bytes of the store by universe, kind and type, as of the last census",
             EndpointOptions(query=UsageQuery)),
)  # fmt: skip
