"""The task routes of the HTTP API that are hot or that wait, without a thread for each request; health checks.

    POST /v1/tasks                 submit a task, or a batch in one atomic commit
    POST /v1/tasks/lease           lease tasks; long poll of up to `wait_s`
    POST /v1/tasks/heartbeat       extend leases; report progress
    POST /v1/tasks/complete        report completed tasks with their results
    POST /v1/tasks/fail            report failed tasks, and whether a retry may succeed
    GET  /v1/tasks/{id}            the long poll of up to `wait_s` for the end of a task, before it is shown
    GET  /healthz, /readyz         whether this process is alive; whether the universe is ready
    GET  /metrics                  the metrics of the store and of this process, for Prometheus

`worker_routes` implements the lease, heartbeat, complete and fail routes. `ops/api/tasks.py` declares the endpoints of
tasks and has their other routes: list, show, cancel, redrive, and a submission with an idempotency key.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from holdfast import traces
from holdfast.app.keyed_tasks import KeyedTasks
from holdfast.clock import S
from holdfast.errors import HoldfastError, Invalid
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.json_values import decode
from holdfast.ops.http.problem import HttpResponse, encode_json
from holdfast.ops.http.request_schemas import NewTaskBody, SubmissionBody, check_wait
from holdfast.ops.http.routes import HttpApi, Route, RouteCall, RouteHandler
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.task_batch import DeclaredTask, build_batch, require_tasks
from holdfast.ops.http.worker_routes import WorkerRoutes
from holdfast.ops.metrics.exposition import MetricsPage
from holdfast.store.api import Store
from holdfast.tasks import queries
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.states import TaskState
from holdfast.workers import readiness_facts
from holdfast.workers.tasks.upkeep import ACTIVE_INTERVAL_NS, run_round

# The timeout of a readiness check.
READINESS_TIMEOUT_S = 3.0
# The interval of maintenance: deletion of expired tasks, and checkpoints of the log.
MAINTENANCE_S = ACTIVE_INTERVAL_NS / S


class TaskApi(HttpApi):
    def __init__(
        self,
        server: HttpServer,
        store: Store,
        universe: str,
        declared: Mapping[str, DeclaredTask],
        metrics: MetricsPage | None = None,
    ) -> None:
        """`declared` holds the tasks that the app declares. Other tasks may be submitted too, for external
        workers."""
        self._server = server
        self._store = store
        self._universe = universe
        self._declared = declared
        self.worker_routes = WorkerRoutes(server, store, universe)
        self._closing = threading.Event()
        self._maintenance = server.loop.create_task(self._run_maintenance())
        self.routes = (
            *task_routes(self._resolve),
            metrics_route(server, metrics or MetricsPage(store)),
        )

    def close(self) -> None:
        self._closing.set()
        self._maintenance.cancel()
        self.worker_routes.close()

    async def _resolve(self, call: RouteCall) -> tuple[TaskApi, RouteCall]:
        return self, call

    # -- submit ------------------------------------------------------------------------------------

    async def submit(self, call: RouteCall) -> HttpResponse:
        size = len(call.body)
        sent = await self._server.parse(size, decode, SubmissionBody, call.body)
        ids = await self._create(sent.new_tasks(), size)
        if sent.tasks is not UNSET:
            return HttpResponse(201, encode_json({"ids": [str(task) for task in ids]}))
        [task] = ids
        return HttpResponse(
            201, encode_json({"id": str(task)}), (("Location", f"/v1/tasks/{task}"),)
        )

    async def _create(self, new_tasks: Sequence[NewTaskBody], size: int) -> list[TaskId]:
        store, universe = self._store, self._universe
        batch = await self._server.parse(size, build_batch, new_tasks, self._declared)
        if batch.dependencies:
            await self._server.run_in_thread(
                store.read, require_tasks, universe, batch.dependencies
            )
        with traces.sending("submit", "tasks", batch.first_queue) as sending:
            new = batch.new
            if trace := sending.context:
                new = [replace(task, trace=trace) for task in new]
            seqs = await KeyedTasks(batch.specs, batch.spec_indexes, new).submit_async(
                store.submit,
                partial(self._server.run_in_thread, store.read),
                universe,
                self._declared,
            )
            sending.sent_batch(len(seqs))
        if batch.has_keys:
            return await self._server.run_in_thread(store.read, queries.task_ids, universe, seqs)
        return [TaskId(store.generation, seq) for seq in seqs]

    async def wait_until_ended(self, call: RouteCall) -> None:
        """Wait for the end of a task up to `wait_s`, before it is shown."""
        _check_query(call, ("wait_s",))
        task = parse_task_id(call.path_parameters[0])
        wait_s = _parse_seconds(call.request.query.get("wait_s", "0"))
        if not wait_s:
            return
        row = await self._server.run_in_thread(
            self._store.read, queries.get_task, self._universe, task
        )
        if row.state in (TaskState.WAITING, TaskState.LEASED):
            await self.worker_routes.until_ended(task, wait_s, call.disconnect)

    # -- health --------------------------------------------------------------------------------------

    async def readyz(self, call: RouteCall) -> HttpResponse:
        try:
            async with asyncio.timeout(READINESS_TIMEOUT_S):
                snapshot = await self._server.run_in_thread(
                    readiness_facts.read_readiness, self._store, self._universe
                )
        except TimeoutError:
            # The store's own timeout may be longer than that of a health probe.
            snapshot = readiness_facts.store_silent_snapshot(
                self._universe, self._store, READINESS_TIMEOUT_S
            )
        may_read = call.token is not None and call.token.permits(Scope.READ)
        document: Any = snapshot if may_read else {"ready": snapshot.ready}
        return HttpResponse(200 if snapshot.ready else 503, encode_json(document))

    async def _run_maintenance(self) -> None:
        """Run the maintenance loop: if all workers are HTTP clients, no other process deletes expired tasks
        or writes checkpoints."""
        more = False
        while True:
            await asyncio.sleep(0.0 if more else MAINTENANCE_S)
            more = False
            with contextlib.suppress(HoldfastError):
                more = await self._server.run_in_thread(
                    run_round, self._store, self._universe, self._is_open
                )

    def _is_open(self) -> bool:
        return not self._closing.is_set()


ApiOfCall = Callable[[RouteCall], Awaitable[tuple[TaskApi, RouteCall]]]
TaskMethod = Callable[[TaskApi, RouteCall], Awaitable[HttpResponse]]


def task_routes(api_of: ApiOfCall) -> tuple[Route, ...]:
    """Return the routes. `api_of` chooses the universe of a call."""

    def using(method: TaskMethod) -> RouteHandler:
        async def handle(call: RouteCall) -> HttpResponse:
            api, resolved = await api_of(call)
            return await method(api, resolved)

        return handle

    post, get = "POST", "GET"
    submit, work = Scope.SUBMIT, Scope.WORK
    return (
        Route(get, ("healthz",), healthz, open=True, always=True),
        Route(get, ("readyz",), using(TaskApi.readyz), open=True),
        Route(post, ("v1", "tasks"), using(TaskApi.submit), (submit,)),
        Route(post, ("v1", "tasks", "lease"), using(_lease), (work,)),
        Route(post, ("v1", "tasks", "heartbeat"), using(_heartbeat), (work,)),
        Route(post, ("v1", "tasks", "complete"), using(_complete), (work,)),
        Route(post, ("v1", "tasks", "fail"), using(_fail), (work,)),
    )


def task_route(api_of: ApiOfCall, show: RouteHandler) -> Route:
    """Return the route that shows a task, and before that waits for its end without a thread. `show` is the handler of
    its endpoint."""

    async def handle(call: RouteCall) -> HttpResponse:
        api, resolved = await api_of(call)
        await api.wait_until_ended(resolved)
        return await show(call)

    return Route("GET", ("v1", "tasks", "*"), handle)


def metrics_route(server: HttpServer, page: MetricsPage) -> Route:
    async def metrics(call: RouteCall) -> HttpResponse:
        accept = call.request.headers.get("accept", "")
        content_type, body = await server.run_in_thread(page.render, accept)
        return HttpResponse(200, body, content_type=content_type)

    return Route("GET", ("metrics",), metrics)


async def healthz(call: RouteCall) -> HttpResponse:
    return HttpResponse(200, encode_json({"ok": True}))


# -- inside ------------------------------------------------------------------------------------------


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
        check_wait(seconds)
    except ValueError:
        raise Invalid(what="wait_s", found=text[:64], expected="seconds") from None
    return seconds


def _check_query(call: RouteCall, accepted: Sequence[str]) -> None:
    unknown = sorted(set(call.request.query) - set(accepted))
    if unknown:
        raise Invalid(what="query", found=unknown[0][:64], expected=list(accepted))


def _lease(api: TaskApi, call: RouteCall) -> Awaitable[HttpResponse]:
    return api.worker_routes.lease(call)


def _heartbeat(api: TaskApi, call: RouteCall) -> Awaitable[HttpResponse]:
    return api.worker_routes.heartbeat(call)


def _complete(api: TaskApi, call: RouteCall) -> Awaitable[HttpResponse]:
    return api.worker_routes.complete(call)


def _fail(api: TaskApi, call: RouteCall) -> Awaitable[HttpResponse]:
    return api.worker_routes.fail(call)
