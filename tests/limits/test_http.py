"""Load limits over HTTP: 503 with Retry-After for new work, and none for workers."""

from __future__ import annotations

import pytest

from holdfast.workers.limit_settings import change_limits
from tests.ops.http_rig import UNIVERSE, HttpRig, JsonClient, client, rig, server

__all__ = ["client", "rig", "server"]

pytestmark = pytest.mark.timeout(60)


def test_worker_protocol_refuses_submissions_and_serves_workers(
    rig: HttpRig, client: JsonClient
) -> None:
    rig.store.transact(change_limits, UNIVERSE, {"tasks": 1})
    first = client.submit("add", 1, key="k")
    for document in ({"name": "add"}, {"tasks": [{"name": "add"}]}):
        refused = client.post("/v1/tasks", document)
        assert (refused.status, refused.document["code"]) == (503, "overloaded")
        assert refused.document["retryable"] is True
        assert refused.headers["retry-after"] == "1"
    assert client.submit("add", 1, key="k") == first
    [lease] = client.lease("w")
    assert client.submit("add", 2) == "1-2", "a leased task does not wait"
    client.complete(lease["lease"])
    assert client.task(first)["state"] == "COMPLETED"
