"""The routes of the endpoints that are declared as data (`ops.api`).

A handler runs in a thread. Handlers that wait run in another thread pool with a bound. A request above this bound gets
503 `too_many`, so that waiting requests never delay other requests. The disconnect of a client ends its wait and frees
the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.app.store_calls import Cancellation
from holdfast.ops.api.call import ApiCall, decode_query, run
from holdfast.ops.api.endpoint import Endpoint
from holdfast.ops.http.json_values import decode
from holdfast.ops.http.problem import HttpResponse
from holdfast.ops.http.routes import Route, RouteCall, RouteHandler
from holdfast.ops.http.tokens import LOCAL

if TYPE_CHECKING:
    from holdfast.ops.api.universes import UniverseChoice
    from holdfast.ops.http.server import HttpServer
    from holdfast.store.api import Store


class EndpointRoutes:
    def __init__(self, server: HttpServer, store: Store, universes: UniverseChoice) -> None:
        self._server = server
        self._store = store
        self._universes = universes

    def build(self, endpoints: Iterable[Endpoint]) -> list[Route]:
        return [
            Route(
                endpoint.method,
                route_path(endpoint),
                self._handler(endpoint),
                endpoint.scopes,
            )
            for endpoint in endpoints
        ]

    def _handler(self, endpoint: Endpoint) -> RouteHandler:
        server = self._server
        names = [part[1:-1] for part in endpoint.segments if part.startswith("{")]

        async def handle(call: RouteCall) -> HttpResponse:
            options, request = endpoint.options, call.request
            query = dict(request.query)
            universe = query.pop("universe", "")
            body = None
            if options.body is not None:
                body = await server.parse(len(call.body), decode, options.body, call.body or b"{}")
            elif call.body:
                await server.parse(len(call.body), decode, dict[str, Any], call.body)
            server.guard.require_scope(request, call.token, endpoint.scope_of(body))
            make_call = partial(
                ApiCall,
                endpoint=endpoint,
                store=self._store,
                path=dict(zip(names, call.path_parameters, strict=True)),
                query=decode_query(options.query, query),
                body=body,
                actor=(call.token or LOCAL).name,
                key=request.headers.get("idempotency-key", ""),
                etag=request.headers.get("if-none-match", ""),
            )
            if not endpoint.options.waits:
                return await server.threads.handle(self._run, make_call, universe)
            cancellation = Cancellation()
            disconnected: asyncio.Future[None] = server.loop.create_future()
            disconnected.add_done_callback(lambda _: cancellation.cancel())
            call.disconnect.watch(disconnected)
            try:
                waiting = partial(make_call, cancellation=cancellation)
                return await server.threads.wait(self._run, waiting, universe)
            finally:
                disconnected.cancel()

        return handle

    def _run(self, make_call: Callable[..., ApiCall], universe: str) -> HttpResponse:
        name = self._universes.resolve(universe)
        app, states = self._universes.app_of(name), self._universes.states_of(name)
        answer = run(make_call(universe=name, app=app, states=states))
        headers = (*((("ETag", answer.etag),) if answer.etag else ()), *answer.headers)
        if answer.status in (204, 304):
            return HttpResponse(answer.status, b"", headers)
        return HttpResponse(answer.status, msgspec.json.encode(answer.value), headers)


def route_path(endpoint: Endpoint) -> tuple[str, ...]:
    return tuple("*" if part.startswith("{") else part for part in endpoint.segments)
