"""Generated requests against the whole API, one by one and along the links of the OpenAPI document.

No answer is a server error, every answer matches its schema, and nothing acknowledged is lost."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.ops import verify
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.openapi import documented_routes
from tests.api_server import linked_requests
from tests.api_server.fuzzed_api import LEFT_OUT, FuzzedApi
from tests.api_server.linked_requests import LinkedApi
from tests.api_server.served_rig import BANK, ServedRig, create, token_lines, token_of
from tests.ops.app import app

SEED = 7
REQUESTS_OF_EACH = 8
# Each part has other seeds. Processes may run them at the same time.
PARTS = 4
PART_REQUESTS = 25_000
SENDS = 4
LINKED_REQUESTS = 300
SEQUENCES = 10
TOKENS = token_lines(
    all=",".join(scope.value for scope in Scope), **{scope.value: scope.value for scope in Scope}
)


def fuzz(cases_of_each: int, sequences: int, *, sends: int = 1, seed: int = SEED) -> Counter[int]:
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
            fuzzed = FuzzedApi(server, seed, names)
            fuzzed.run(cases_of_each, sends)
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
@pytest.mark.parametrize("part", range(PARTS))
def test_100_000_generated_requests_get_documented_answers(part: int) -> None:
    routes = len(documented_routes()) - len(LEFT_OUT)
    statuses = fuzz(
        PART_REQUESTS // (routes * SENDS) + 1, 1_000 // PARTS, sends=SENDS, seed=SEED + part
    )
    print(statuses)
    assert sum(statuses.values()) >= PART_REQUESTS


def follow_links(requests: int, seed: int = SEED) -> LinkedApi:
    """Follow links with tokens of different scopes, and check the store afterwards."""
    linked_app = linked_requests.app
    with linked_app.open("memory:") as runtime:
        served = ServedRig(runtime.store)
        try:
            server = served.serve(TOKENS, apps={BANK: linked_app}, default=BANK)
            linked = LinkedApi(server, seed, {})
            linked.run_links(requests)
            linked.check_acknowledged()
            assert runtime.store.read(verify.find_differences) == []
        finally:
            served.close()
    assert linked.requests >= requests
    assert {200, 201, 403, 404, 422} <= {status for _, status in linked.statuses}
    return linked


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_requests_along_links_get_documented_answers() -> None:
    linked = follow_links(LINKED_REQUESTS)
    assert len(linked.links) >= 15
    assert linked.paths
    assert linked.created


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_100_000_requests_along_links_get_documented_answers(part: int) -> None:
    linked = follow_links(PART_REQUESTS, SEED + (part + 1) * linked_requests.ROUNDS_MAX)
    print(linked.requests, len(linked.links), linked.statuses.total())
    pairs = [("create_world", "send_world_event"), ("send_world_event", "fork_world")]
    pairs += [("fork_world", "purge_world"), ("submit_tasks", "show_task")]
    pairs += [("start_flow", "show_flow"), ("create_schedule", "delete_schedule")]
    assert set(pairs) <= set(linked.links)
