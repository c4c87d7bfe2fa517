"""Requests that schemathesis generates from the OpenAPI document, with a fixed seed, against a running server.

Path parameters name existing subjects most of the time. Tokens with all scopes take turns with tokens with one. A
request fails the run if its answer is a server error other than a documented 503, or does not match its schema.

The generation of a case takes longer than its request. So a case may be sent several times, each with other existing
subjects and another token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.openapi import documented_routes, openapi_document
from holdfast.ops.http.server import HttpServer
from tests.api_server.served_rig import token_of

TIMEOUT_S = 300.0
CHECKS = [response_schema_conformance, status_code_conformance, content_type_conformance]
# Codes of 503 that the documentation names.
CODES_503 = {
    "states_busy",
    "timeout",
    "answer_pending",
    "too_many",
    "commit_unknown",
    "store_busy",
    "overloaded",
}
# The operations whose acknowledged changes are checked at the end.
CHANGES = {
    "create_world", "fork_world", "delete_world", "purge_world",
    "submit_tasks", "start_flow", "create_schedule", "delete_schedule",
}  # fmt: skip
# These wait for a message, never end, or refuse all later requests.
LEFT_OUT = {"ask_world", "events", "set_limits"}
# The last parts of paths without parameters.
LAST_PARTS = {
    route.path.rpartition("/")[2] for route in documented_routes() if "{" not in route.path
}


class FuzzedApi:
    def __init__(self, server: HttpServer, seed: int, names: dict[str, list[str]]) -> None:
        """`names` has values of path parameters that exist."""
        self._server = server
        self._seed = seed
        self._names = names
        self._random = random.Random(seed)
        self._session = requests.Session()
        self.statuses: Counter[tuple[str, int]] = Counter()
        # Worlds that the server has acknowledged, and those with an acknowledged purge or delete.
        self.created: set[tuple[str, str]] = set()
        self.purged: set[tuple[str, str]] = set()
        # The paths of acknowledged tasks, flows and schedules.
        self.paths: set[str] = set()
        self._name_of: dict[str, tuple[str, str]] = {}

    def run(self, cases_of_each: int, sends: int = 1) -> None:
        """Generate cases for each operation, and send each case `sends` times."""
        schema = schemathesis.openapi.from_dict(openapi_document())
        for result in schema.get_all_operations():
            operation = result.ok()
            operation_id = operation.definition.raw["operationId"]
            if operation_id not in LEFT_OUT:
                self._run_operation(operation, operation_id, cases_of_each, sends)

    def _run_operation(self, operation: Any, operation_id: str, count: int, sends: int) -> None:
        @seed(self._seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy())
        def call(case: Any) -> None:
            generated = dict(case.path_parameters or {})
            for _ in range(sends):
                case.path_parameters = dict(generated)
                self.send(case, operation_id)

        call()

    def send(self, case: Any, operation_id: str, *, keeps_path: bool = False) -> Any:
        """Send a request, check its answer and record the acknowledged change. Known names replace most of the generated
        path parameters, unless they are kept."""
        for name in () if keeps_path else (case.path_parameters or {}):
            known = self._names.get(name)
            if known and self._random.random() < 0.7:
                case.path_parameters[name] = self._random.choice(known)
        for name, value in (case.path_parameters or {}).items():
            # A value such as `counts` would make the path of another operation.
            if value in LAST_PARTS:
                case.path_parameters[name] = f"{value}-"
        if isinstance(case.body, dict) and "wait_s" in case.body:
            case.body["wait_s"] = 0.0
        for task in _tasks_of(case.body):
            # A task may not be forgotten before the check of acknowledged tasks.
            if isinstance(task.get("options"), dict):
                task["options"].pop("retain_s", None)
        if case.query and "wait_s" in case.query:
            case.query["wait_s"] = 0.0
        response = case.call(
            base_url=self._server.url,
            session=self._session,
            headers=_headers(self._token()),
            timeout=TIMEOUT_S,
        )
        self.statuses[operation_id, response.status_code] += 1
        if response.status_code == 503 and operation_id != "readyz":
            assert response.json()["code"] in CODES_503, response.json()
        elif response.status_code >= 500 and response.status_code != 503:
            raise AssertionError(f"{operation_id}: {response.status_code} {response.text}")
        case.validate_response(response, checks=CHECKS)
        if response.status_code in (200, 201):
            self._note(operation_id, response.json)
        return response

    def _note(self, operation_id: str, read: Callable[[], Any]) -> None:
        if operation_id not in CHANGES:
            return
        document = read()
        if operation_id == "submit_tasks":
            ids = document["ids"] if "ids" in document else [document["id"]]
            self.paths.update(f"/v1/tasks/{id}" for id in ids)
        elif operation_id == "start_flow":
            self.paths.add(f"/v1/flows/{document['id']}")
        elif operation_id == "create_schedule":
            self.paths.add(f"/v1/schedules/{quote(document['name'], safe='')}")
        elif operation_id == "delete_schedule":
            self.paths.discard(f"/v1/schedules/{quote(document['deleted'], safe='')}")
        elif operation_id in ("create_world", "fork_world"):
            self.created.add((document["type"], document["name"]))
            self._name_of[document["world_id"]] = (document["type"], document["name"])
        elif operation_id == "delete_world":
            self.purged.add((document["type"], document["name"]))
        elif operation_id == "purge_world":
            # The answer has the id only. Generated requests purge the worlds of `names`, and worlds that they created.
            if document["world_id"] in self._name_of:
                self.purged.add(self._name_of[document["world_id"]])
            self.purged.update(("QuotedAccount", name) for name in self._names.get("name", ()))

    def run_sequences(self, count: int) -> None:
        """Create, send, fork and purge worlds that no generated request names."""
        for number in range(count):
            name = f"sequence-{number}"
            event = {"type": "QuotedDeposit", "event": {"amount": number}}
            path = f"/v1/worlds/QuotedAccount/{name}"
            body = {"type": "QuotedAccount", "name": name}
            assert self._post("create_world", "/v1/worlds", body).status_code == 201
            assert self._post("send_world_event", f"{path}/send", event).status_code == 200
            self.created.add(("QuotedAccount", name))
            # A fork needs the state after an entry, so the event must have been handled.
            assert self._post("ask_world", f"{path}/ask", event).json() == {"reply": number}
            fork = self._post("fork_world", f"{path}/fork", {"name": f"{name}-fork"})
            assert fork.status_code == 201, fork.text
            self.created.add(("QuotedAccount", f"{name}-fork"))
            if number % 2:
                purged = self._post("purge_world", f"{path}/purge", {"force": True})
                assert purged.status_code == 200, purged.text
                self.purged.add(("QuotedAccount", name))

    def check_acknowledged(self) -> None:
        """Check that every acknowledged world, task, flow and schedule is there, unless it was purged or deleted."""
        for type, name in sorted(self.created):
            path = f"/v1/worlds/{quote(type, safe='')}/{quote(name, safe='')}"
            response = self._session.get(
                self._server.url + path, headers=_headers(token_of("all")), timeout=TIMEOUT_S
            )
            gone = (type, name) in self.purged
            assert response.status_code == (404 if gone else 200), (path, response.text)
        for path in sorted(self.paths):
            response = self._session.get(
                self._server.url + path, headers=_headers(token_of("all")), timeout=TIMEOUT_S
            )
            assert response.status_code == 200, (path, response.text)

    def _post(self, operation_id: str, path: str, body: Any) -> requests.Response:
        response = self._session.post(
            self._server.url + path, json=body, headers=_headers(token_of("all")), timeout=TIMEOUT_S
        )
        self.statuses[operation_id, response.status_code] += 1
        return response

    def _token(self) -> str:
        if self._random.random() < 0.8:
            return token_of("all")
        return token_of(self._random.choice(list(Scope)).value)


def _tasks_of(body: Any) -> list[dict[str, Any]]:
    """The body of a submission and the tasks in it."""
    if not isinstance(body, dict):
        return []
    tasks = body.get("tasks")
    return (
        [body, *(task for task in tasks if isinstance(task, dict))]
        if isinstance(tasks, list)
        else [body]
    )


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
