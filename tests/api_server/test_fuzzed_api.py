"""Generated requests against the whole API: no server error, every answer matches its schema, nothing acknowledged is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.ops import verify
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.openapi import documented_routes
from tests.api_server.fuzzed_api import LEFT_OUT, FuzzedApi
from tests.api_server.served_rig import ServedRig, create, token_lines, token_of
from tests.ops.app import app

SEED = 7
REQUESTS_OF_EACH = 8
DEEP_REQUESTS = 100_000
SEQUENCES = 10
TOKENS = token_lines(
    all=",".join(scope.value for scope in Scope), **{scope.value: scope.value for scope in Scope}
)


def fuzz(requests_of_each: int, sequences: int) -> Counter[int]:
    """Run the requests, check the store afterwards, and return how often each status was answered."""
    with app.open("memory:") as runtime:
        served = ServedRig(runtime.store)
        try:
            server = served.bank(TOKENS)
            client = served.client(server, token_of("all"))
            for name in ("ada", "bob"):
                create(client, name)
            task = client.submit("add")
            names = {
                "type": ["QuotedAccount"],
                "name": ["ada", "bob"],
                "id": [task],
                "queue": ["default"],
            }
            fuzzed = FuzzedApi(server, SEED, names)
            fuzzed.run(requests_of_each)
            fuzzed.run_sequences(sequences)
            fuzzed.check_acknowledged()
            assert runtime.store.read(verify.find_differences) == []
        finally:
            served.close()
    statuses: Counter[int] = Counter()
    for (_, status), count in fuzzed.statuses.items():
        statuses[status] += count
    operations = {operation for operation, _ in fuzzed.statuses}
    assert operations >= {route.operation_id for route in documented_routes()} - LEFT_OUT
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_generated_requests_get_documented_answers() -> None:
    statuses = fuzz(REQUESTS_OF_EACH, SEQUENCES)
    # The requests reach the handlers, and are refused for several reasons.
    assert {200, 201, 403, 404, 409, 422} <= set(statuses)


@pytest.mark.deep
@pytest.mark.timeout(7200)
def test_100_000_generated_requests_get_documented_answers() -> None:
    routes = len(documented_routes()) - len(LEFT_OUT)
    statuses = fuzz(DEEP_REQUESTS // routes + 1, 1_000)
    assert sum(statuses.values()) >= DEEP_REQUESTS * 0.9
