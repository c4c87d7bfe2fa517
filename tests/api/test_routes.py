"""The table of routes and scopes: every endpoint that the design names exists, and each is well formed."""

import re

import msgspec
import pytest

from holdfast.ops.api.endpoint import PageQuery, Scope
from holdfast.ops.api.registry import endpoints
from tests.api.rig import find_endpoint

MODULES = ("holdfast.ops.api.registry", "holdfast.ops.api.endpoint")

READ, SUBMIT, WORK, OPERATE = Scope.READ, Scope.SUBMIT, Scope.WORK, Scope.OPERATE
WORLD, FLOW, TASK = "/v1/worlds/T/n", "/v1/flows/f1-1", "/v1/tasks/1-1"
SCHEDULE, LETTER, RUN = "/v1/schedules/s", "/v1/dead/u%2Fq/1", "/v1/runs/r"
LISTS = (
    "worlds", "flows", "tasks", "effects", "timers", "schedules", "dead", "queues", "budgets",
    "workers", "runs", "dispatches", "audit",
)  # fmt: skip
TABLE = [
    *(("GET", f"/v1/{name}", READ) for name in LISTS),
    *(("GET", path, READ) for path in (WORLD, FLOW, TASK, SCHEDULE, LETTER, RUN)),
    *(("GET", f"{WORLD}/{part}", READ) for part in ("state", "journal", "lineage")),
    *(("GET", path, READ) for path in ("/v1/effects/00", "/v1/timers/T/n/k", "/v1/workers/w")),
    *(("GET", path, READ) for path in ("/v1/dead/q", "/v1/queues/q", "/v1/dispatches/d")),
    *(("GET", path, READ) for path in (f"{FLOW}/steps", f"{RUN}/failed", "/v1/readiness")),
    *(("GET", path, READ) for path in ("/v1/authority", "/v1/why/flow/f1-1", "/v1/why/world/T/n")),
    *(("POST", f"/v1/{name}", SUBMIT) for name in ("worlds", "flows", "tasks")),
    ("POST", "/v1/schedules", OPERATE),
    *(("POST", f"{WORLD}/{verb}", SUBMIT) for verb in ("send", "ask")),
    *(("POST", f"{WORLD}/{verb}", OPERATE) for verb in ("fork", "pause", "resume", "delete")),
    *(("POST", f"{WORLD}/{verb}", OPERATE) for verb in ("purge", "pin", "unpin")),
    ("POST", f"{FLOW}/send", SUBMIT),
    *(("POST", f"{FLOW}/{verb}", OPERATE) for verb in ("cancel", "fork", "resume", "redrive")),
    *(("POST", f"{TASK}/{verb}", OPERATE) for verb in ("cancel", "redrive")),
    *(("POST", f"{SCHEDULE}/{verb}", OPERATE) for verb in ("pause", "resume", "run-now")),
    *(("POST", f"{SCHEDULE}/{verb}", OPERATE) for verb in ("backfill", "delete")),
    *(("POST", f"{LETTER}/{verb}", OPERATE) for verb in ("redrive", "drop")),
    *(("POST", f"{RUN}/{verb}", OPERATE) for verb in ("retry", "cancel")),
    ("POST", "/v1/runs/prune", OPERATE),
    ("GET", "/v1/limits", READ),
    ("POST", "/v1/limits", OPERATE),
    ("GET", "/v1/store/usage", READ),
    ("POST", "/v1/effects/00/redrive", OPERATE),
    *(("POST", f"/v1/workers/w/{verb}", OPERATE) for verb in ("drain", "undrain")),
    *(("POST", f"/v1/authority/{verb}", OPERATE) for verb in ("force-release", "mark-stale")),
    *(("GET", path, READ) for path in ("/v1/jobs", "/v1/jobs/1", "/v1/verify")),
    *(("POST", path, OPERATE) for path in ("/v1/jobs", "/v1/jobs/1/cancel", "/v1/jobs/1/pace")),
    *(("POST", f"/v1/operations/{name}", SUBMIT) for name in ("event_send", "enqueue_ingress")),
    *(
        ("POST", f"/v1/operations/{name}", WORK)
        for name in ("acquire_lease", "renew_lease", "release_lease", "list_worker_worlds")
    ),
    *(
        ("POST", f"/v1/operations/{name}", OPERATE)
        for name in (
            "assign_world",
            "unassign_world",
            "world_fork",
            "world_create_from_seed",
            "receipt_inject",
        )
    ),
]


@pytest.mark.parametrize(("method", "path", "scope"), TABLE)
def test_route_of_the_design_has_its_scope(method: str, path: str, scope: Scope) -> None:
    endpoint, _ = find_endpoint(method, path)
    assert endpoint.scope is scope


def test_every_get_needs_read_and_no_post_does() -> None:
    for endpoint in endpoints():
        assert endpoint.method in ("GET", "POST")
        assert (endpoint.scope is Scope.READ) == (endpoint.method == "GET"), endpoint.path


def test_every_list_of_the_design_takes_cursor_and_limit() -> None:
    for name in LISTS:
        if name != "queues":
            endpoint, _ = find_endpoint("GET", f"/v1/{name}")
            assert issubclass(endpoint.options.query, PageQuery), name


def test_operation_ids_are_unique() -> None:
    ids = [endpoint.operation_id for endpoint in endpoints()]
    assert len(ids) == len(set(ids))


def test_no_two_endpoints_have_the_same_path() -> None:
    shapes = [
        (endpoint.method, re.sub(r"\{[^}]*\}", "{}", endpoint.path)) for endpoint in endpoints()
    ]
    assert len(shapes) == len(set(shapes))


def test_every_body_and_query_refuses_unknown_fields() -> None:
    for endpoint in endpoints():
        for kind in (endpoint.options.query, endpoint.options.body):
            if kind is not None:
                assert kind.__struct_config__.forbid_unknown_fields, endpoint.path


def test_every_endpoint_has_a_json_schema() -> None:
    for endpoint in endpoints():
        kinds = [endpoint.answer, endpoint.options.query, endpoint.options.body]
        msgspec.json.schema_components([kind for kind in kinds if kind is not None])


def test_only_a_post_has_a_body() -> None:
    for endpoint in endpoints():
        assert (endpoint.options.body is None) == (endpoint.method == "GET"), endpoint.path
