"""All routes of a server: the worker protocol of each universe, the endpoints of `ops.api`, health and readiness.

    /healthz /readyz                        this process; the universes
    /metrics                                the metrics of the store and of this process
    /v1/tasks… /v1/queues                   the worker protocol (`task_routes`)
    / /console/… /v1/session                the console (`console_routes`)
    /v1/universes                           the universes of the store
    /v1/events                              changes of a subject, as server-sent events
    /v1/openapi.json                        every route with the types of its request and answer
    /v1/…                                   the endpoints (`ops.api.registry`)

The worker protocol of a universe starts with its first request. Every server runs the jobs of its store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from holdfast.ops.api.endpoint import Scope
from holdfast.ops.api.registry import endpoints
from holdfast.ops.api.universes import UniverseRequired
from holdfast.ops.http.console_routes import ConsoleRoutes
from holdfast.ops.http.endpoint_routes import EndpointRoutes
from holdfast.ops.http.events import EventStreams
from holdfast.ops.http.openapi import openapi_document
from holdfast.ops.http.problem import HttpResponse, ServerOverloaded, encode_json
from holdfast.ops.http.redacted_responses import ResponseRedactor
from holdfast.ops.http.routes import HttpApi, Route, RouteCall
from holdfast.ops.http.task_batch import DeclaredTask
from holdfast.ops.http.task_routes import TaskApi, metrics_route, task_route, task_routes
from holdfast.ops.jobs.runner import JobRunner
from holdfast.ops.metrics.exposition import MetricsPage

if TYPE_CHECKING:
    from holdfast.ops.api.universes import UniverseChoice
    from holdfast.ops.http.server import HttpServer
    from holdfast.store.api import Store

# The most universes whose worker protocol one server runs.
TASK_UNIVERSES_MAX = 200
# How long the end of a server waits for the current page of a job.
JOBS_STOP_S = 5.0
READINESS = ("readyz",)
TASK_ROUTE = ("GET", ("v1", "tasks", "*"))


class ServedApi(HttpApi):
    def __init__(
        self,
        server: HttpServer,
        store: Store,
        universes: UniverseChoice,
        metrics: MetricsPage | None = None,
        declared: Mapping[str, DeclaredTask] | None = None,
        trace_url: str = "",
    ) -> None:
        """`declared` replaces the declared tasks of the app. `trace_url` has `{trace_id}`; the console links to it."""
        self._server = server
        self._store = store
        self._universes = universes
        self._declared = declared
        self._tasks: dict[str, TaskApi] = {}
        if universes.default:
            self._tasks_of(universes.default)
        by_name = {endpoint.operation_id: endpoint for endpoint in endpoints()}
        redactor = ResponseRedactor(store, universes) if universes.redaction else None
        if redactor is not None:
            self.redact = redactor.response
        self._events = EventStreams(server, store, universes, by_name, redactor)
        fixed = (
            *task_routes(self._resolve_tasks),
            metrics_route(server, metrics or MetricsPage(store)),
            Route("GET", ("v1", "universes"), self._list),
            Route("GET", ("v1", "openapi.json"), self._openapi),
            Route("GET", ("v1", "events"), self._events.serve),
            *ConsoleRoutes(server, trace_url).build(),
        )
        built = {
            (route.method, route.path): route
            for route in EndpointRoutes(server, store, universes).build(endpoints())
        }
        show = built[TASK_ROUTE].handler
        built[TASK_ROUTE] = task_route(self._resolve_tasks, show)
        routes = [
            _keyed_route(route, built.pop((route.method, route.path), None)) for route in fixed
        ]
        self.routes = (*routes, *built.values())
        self._jobs = JobRunner(store)
        self._jobs.start()

    def close(self) -> None:
        self._events.close()
        self._universes.close()
        self._jobs.request_stop()
        self._jobs.join(JOBS_STOP_S)
        for tasks in self._tasks.values():
            tasks.close()

    async def _resolve_tasks(self, call: RouteCall) -> tuple[TaskApi, RouteCall]:
        query = call.request.query
        name = query.get("universe", "")
        if name:
            if call.request.path == READINESS:
                # An open route: a client without this scope must not learn whether a universe exists.
                self._server.guard.require_scope(call.request, call.token, Scope.READ)
            others = {key: value for key, value in query.items() if key != "universe"}
            call = call._replace(request=call.request._replace(query=others))
        if self._universes.is_cached(name):
            universe = self._universes.resolve(name)
        else:
            try:
                universe = await self._server.run_in_thread(self._universes.resolve, name)
            except UniverseRequired:
                if call.token is not None:
                    raise
                # An open route: a client without a token must not learn the names of the universes.
                raise UniverseRequired(what="universe") from None
        return self._tasks_of(universe), call

    def _tasks_of(self, universe: str) -> TaskApi:
        tasks = self._tasks.get(universe)
        if tasks is None:
            if len(self._tasks) >= TASK_UNIVERSES_MAX:
                raise ServerOverloaded(what="universes", max=TASK_UNIVERSES_MAX)
            app, declared = self._universes.app_of(universe), self._declared
            if declared is None:
                declared = {} if app is None else app.tasks
            tasks = self._tasks[universe] = TaskApi(self._server, self._store, universe, declared)
        return tasks

    async def _openapi(self, call: RouteCall) -> HttpResponse:
        return HttpResponse(200, await self._server.run_in_thread(_encoded_document))

    async def _list(self, call: RouteCall) -> HttpResponse:
        names = await self._server.run_in_thread(self._universes.names)
        items = [
            {"universe": name, "has_app": self._universes.app_of(name) is not None}
            for name in names
        ]
        return HttpResponse(200, encode_json({"items": items, "next": None}))


@cache
def _encoded_document() -> bytes:
    return encode_json(openapi_document())


def _keyed_route(route: Route, keyed: Route | None) -> Route:
    """Return a route that sends the requests with an idempotency key to the endpoint of the same path."""
    if keyed is None:
        return route

    async def handle(call: RouteCall) -> HttpResponse:
        has_key = "idempotency-key" in call.request.headers
        return await (keyed.handler if has_key else route.handler)(call)

    return route._replace(handler=handle)
