"""The OpenAPI 3.1 document, generated from the types that parse the requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from holdfast import __version__
from holdfast.errors import HoldfastError, KeyConflict
from holdfast.ops.api.call import NeedsApp
from holdfast.ops.api.endpoint import BodyScope, Endpoint, NoQuery, RequestModel, Scope
from holdfast.ops.api.registry import endpoints
from holdfast.ops.api.universes import UniverseRequired
from holdfast.ops.http import answer_schemas as answers
from holdfast.ops.http import request_schemas as bodies
from holdfast.ops.http.openapi_links import LinkedRoute, links_by_operation
from holdfast.ops.http.problem import problem_response

REF = "#/components/schemas/{name}"
PROBLEM = "application/problem+json"
# Every route may answer with these.
COMMON_STATUSES = (400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 422, 429, 431, 503)
STREAM = "text/event-stream"
TEXT = "text/plain"
PAGE = "text/html"


_PROBLEM = {"content": {PROBLEM: {"schema": {"$ref": REF.format(name="ProblemDocument")}}}}
_ANY_PROBLEM = {"$ref": "#/components/responses/Problem"}


class DocumentedRoute(NamedTuple):
    method: str
    path: str
    operation_id: str
    summary: str
    # None: no token is needed.
    scope: Scope | None
    answer: Any = None
    query: type[msgspec.Struct] = NoQuery
    body: type[msgspec.Struct] | None = None
    status: int = 200
    content_type: str = "application/json"
    problems: tuple[type[HoldfastError], ...] = ()
    # Whether `?universe=` applies.
    has_universe: bool = True
    body_scope: BodyScope | None = None


class EventsQuery(RequestModel):
    """`also`: `readiness`, `counts` or both with a comma, in the same stream."""

    subject: str
    also: str = ""


_GET, _POST = "GET", "POST"
SERVER_ROUTES = (
    DocumentedRoute(_GET, "/healthz", "healthz", "Whether this process is alive", None,
                    answers.HealthAnswer, has_universe=False),
    DocumentedRoute(_GET, "/readyz", "readyz", "Whether the universe is ready; 503 if it is not",
                    None, answers.ReadyAnswer),
    DocumentedRoute(_GET, "/metrics", "metrics", "Metrics for Prometheus", Scope.READ,
                    content_type=TEXT, has_universe=False),
    DocumentedRoute(_GET, "/v1/openapi.json", "openapi", "This document", Scope.READ, Any,
                    has_universe=False),
    DocumentedRoute(_GET, "/v1/universes", "list_universes", "List the universes of the store",
                    Scope.READ, answers.UniverseList, has_universe=False),
    DocumentedRoute(_GET, "/v1/events", "events",
                    "Stream the document of a subject each time that it changes", Scope.READ,
                    query=EventsQuery, content_type=STREAM),
    DocumentedRoute(_GET, "/", "console_page", "The console", None, content_type=PAGE,
                    has_universe=False),
    DocumentedRoute(_GET, "/console/{file}", "console_file", "A module or style of the console",
                    None, content_type="*/*", has_universe=False),
    DocumentedRoute(_GET, "/v1/session", "show_session", "Show the token of this client", None,
                    answers.SessionDocument, has_universe=False),
    DocumentedRoute(_POST, "/v1/session", "start_session",
                    "Exchange a token for the cookie of a browser", None, answers.SessionDocument,
                    body=bodies.SessionBody, has_universe=False),
    DocumentedRoute(_POST, "/v1/session/end", "end_session", "End the session of this browser",
                    None, answers.SessionDocument, has_universe=False),
    DocumentedRoute(_POST, "/v1/tasks/lease", "lease_tasks",
                    "Lease tasks, and wait for them up to wait_s", Scope.WORK,
                    answers.LeaseAnswer, body=bodies.LeaseBody),
    DocumentedRoute(_POST, "/v1/tasks/heartbeat", "heartbeat_tasks", "Extend leases",
                    Scope.WORK, answers.HeartbeatAnswer, body=bodies.HeartbeatBody),
    DocumentedRoute(_POST, "/v1/tasks/complete", "complete_tasks", "Report completed tasks",
                    Scope.WORK, answers.WorkerReportAnswer, body=bodies.CompletionBody),
    DocumentedRoute(_POST, "/v1/tasks/fail", "fail_tasks", "Report failed tasks", Scope.WORK,
                    answers.WorkerReportAnswer, body=bodies.FailureBody),
)  # fmt: skip


def documented_routes() -> list[DocumentedRoute]:
    """Return every route of a server."""
    return [*SERVER_ROUTES, *(_of_endpoint(endpoint) for endpoint in endpoints())]


def _of_endpoint(endpoint: Endpoint) -> DocumentedRoute:
    options = endpoint.options
    problems = (*options.problems, *((NeedsApp,) if options.needs_app else ()))
    return DocumentedRoute(
        endpoint.method,
        endpoint.path,
        endpoint.operation_id,
        endpoint.summary,
        endpoint.scope,
        answer=endpoint.answer,
        query=options.query,
        body=options.body,
        status=options.status,
        problems=problems,
        body_scope=options.body_scope,
    )


def openapi_document(routes: Iterable[DocumentedRoute] | None = None) -> dict[str, Any]:
    documented = documented_routes() if routes is None else list(routes)
    types: list[Any] = [answers.ProblemDocument]
    for route in documented:
        types += [kind for kind in (route.answer, route.body, route.query) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    _open_objects(components)
    schema_of = dict(zip(map(_type_key, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    links = links_by_operation(LinkedRoute(route.operation_id, route.path) for route in documented)
    for route in documented:
        operation = _operation(route, schema_of, components)
        if route.operation_id in links:
            for status in {route.status, 200}:
                answer = operation["responses"][str(status)]
                operation["responses"][str(status)] = {**answer, "links": links[route.operation_id]}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {"Problem": {"description": "a problem", **_PROBLEM}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _open_objects(schema: Any) -> None:
    """State that an object without declared members may have any. Some generators of clients read it as empty."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" not in schema:
            schema.setdefault("additionalProperties", True)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _open_objects(part)


def _type_key(kind: Any) -> str:
    return repr(kind)


def _operation(
    route: DocumentedRoute, schema_of: Mapping[str, Any], components: Mapping[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "parameters": _parameters(route, schema_of, components),
        "responses": _responses(route, schema_of),
        "security": [{"token": []}, {}] if route.scope is not None else [{}],
    }
    if route.scope is not None:
        operation["x-scope"] = route.scope.value
    if route.body_scope is not None:
        scope = route.body_scope.scope.value
        operation["x-body-scope"] = {"scope": scope, "when": route.body_scope.when}
        operation["description"] = f"Needs the scope `{scope}` if {route.body_scope.when}."
    if route.body is not None:
        schema = schema_of[_type_key(route.body)]
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(
    route: DocumentedRoute, schema_of: Mapping[str, Any], components: Mapping[str, Any]
) -> list[dict[str, Any]]:
    parameters = [
        _parameter(part[1:-1], "path", {"type": "string", "minLength": 1}, required=True)
        for part in route.path.split("/")
        if part.startswith("{")
    ]
    query = _resolved(schema_of[_type_key(route.query)], components)
    required = query.get("required", ())
    for name, schema in query.get("properties", {}).items():
        parameters.append(
            _parameter(name, "query", _text_schema(schema), required=name in required)
        )
    if route.has_universe:
        parameters.append(_parameter("universe", "query", {"type": "string"}))
    if route.content_type == STREAM:
        parameters.append(_parameter("Last-Event-ID", "header", {"type": "string"}))
    if route.method == _POST and route.scope is not Scope.WORK:
        schema = {"type": "string", "maxLength": 255, "pattern": "^[ -~]*$"}
        parameters.append(_parameter("Idempotency-Key", "header", schema))
    return parameters


def _parameter(
    name: str, place: str, schema: dict[str, Any], *, required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _text_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a query field. A query string has no null: the field is left out instead."""
    variants = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(variants) == 1:
        return dict(variants[0])
    return {key: value for key, value in schema.items() if key != "default"}


def _resolved(schema: Mapping[str, Any], components: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in schema:
        found: Mapping[str, Any] = components[schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _responses(route: DocumentedRoute, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    codes: dict[int, set[str]] = {}
    kinds: tuple[type[HoldfastError], ...] = (*route.problems, KeyConflict, UniverseRequired)
    for kind in kinds:
        codes.setdefault(problem_response(kind()).status, set()).add(kind.code)
    responses: dict[str, Any] = {}
    for status in sorted({*COMMON_STATUSES, *codes}):
        described = ", ".join(sorted(codes.get(status, ())))
        responses[str(status)] = (
            {"description": described, **_PROBLEM} if described else _ANY_PROBLEM
        )
    content = {"schema": schema_of[_type_key(route.answer)]} if route.answer is not None else {}
    answer = {"description": "the answer", "content": {route.content_type: content}}
    # A repeated creation answers 200.
    for status in {route.status, 200}:
        responses[str(status)] = answer
    if route.method == _GET:
        responses["304"] = {"description": "not modified"}
    if route.path == "/readyz":
        both = {**_PROBLEM["content"], "application/json": content}
        responses["503"] = {"description": "not ready", "content": both}
    return dict(sorted(responses.items()))
