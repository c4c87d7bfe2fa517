"""The ASGI application: admits a request by its head, reads its body, calls the handler of its route.

    Host and Origin (`auth`) → route → token → body → handler → response

A request is admitted by its head, so the body of a rejected request is not kept. Body bytes count when they arrive;
Content-Length reserves nothing. A body must arrive at a minimum rate.
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Match, Router

from holdfast import failpoints, traces
from holdfast.errors import HoldfastError
from holdfast.ops.api.endpoint import Scope as TokenScope
from holdfast.ops.http.limits import OPEN_BODY_BYTES_MAX
from holdfast.ops.http.problem import (
    BadRequest,
    BodyTooLarge,
    HttpResponse,
    RequestTooSlow,
    ServerOverloaded,
    ServerStopping,
    internal_error_response,
    problem_response,
)
from holdfast.ops.http.protocol import HttpConnection, response_messages
from holdfast.ops.http.request_head import HttpRequest
from holdfast.ops.http.routes import HttpApi, RouteCall, RouteTable

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from holdfast.ops.http.server import HttpServer


class HttpApplication:
    """The outermost ASGI application: checks every request, and sends every error as a problem."""

    def __init__(self, server: HttpServer, api: HttpApi) -> None:
        self._server = server
        self._router = Router([ApiRoute(server, api)], redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, request = scope["extensions"]["holdfast"]
        try:
            try:
                self._server.guard.check(request)
                await self._router(scope, receive, send)
            except HoldfastError as error:
                shown = connection.too_many() if connection.is_rejected else error
                await _send(self._server, send, problem_response(shown), close=True)
        except (ConnectionError, asyncio.CancelledError):
            connection.abort()
        except Exception as error:
            log_error(error)
            connection.abort()
        finally:
            connection.body.release()


class ApiRoute(BaseRoute):
    """All routes of the API as one route of Starlette's router: one lookup finds the handler."""

    def __init__(self, server: HttpServer, api: HttpApi) -> None:
        self._server = server
        self._api = api
        self._table = RouteTable(api.routes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return Match.FULL, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self._server
        connection: HttpConnection
        request: HttpRequest
        connection, request = scope["extensions"]["holdfast"]
        route, names = self._table.find(request)
        token = server.guard.find_token(request, server.loop.time(), checks_csrf=not route.open)
        if not route.open:
            server.guard.require_scope(request, token, *route.scopes)
            server.rate.take("" if token is None else token.name, server.loop.time())
        if request.length and route.method == "GET":
            # Some GET routes are open to clients without a token, whose bytes must not use memory.
            raise BadRequest(what="body", why="this route takes no body", bytes=request.length)
        if route.open and request.length > OPEN_BODY_BYTES_MAX:
            raise BodyTooLarge(what="body", bytes=request.length, bytes_max=OPEN_BODY_BYTES_MAX)
        if server.stopping:
            raise ServerStopping()
        if connection.is_rejected and not route.always:
            raise connection.too_many()
        body = await self._read_body(connection, receive) if request.length else b""
        connection.client_wait_since_s = None
        connection.proven = connection.proven or token is not None
        call = RouteCall(request, names, body, token, connection.disconnect)
        response = await self._handle(route.handler, call)
        redact = self._api.redact
        if redact is not None and TokenScope.WORK not in route.scopes:
            response = await self._redact(partial(redact, call, response))
        connection.body.release()
        try:
            # A half-closed client may still read. But a response with an undo must reach a live client.
            if response.undo is not None and connection.disconnect.is_set:
                raise ConnectionResetError
            await _send(server, send, response, close=connection.is_rejected)
        except ConnectionError:
            if response.undo is not None:
                await response.undo()
            raise

    async def _handle(self, handler: Any, call: RouteCall) -> HttpResponse:
        try:
            if failpoints.armed:
                failpoints.hit("http.handle", call.request)
            headers = call.request.headers
            if traces.TRACEPARENT in headers:
                # Each request has an asyncio task, whose context ends with it.
                state = headers.get(traces.TRACESTATE)
                traces.receive(traces.parse(headers[traces.TRACEPARENT], state))
            response: HttpResponse = await handler(call)
            return response
        except HoldfastError as error:
            return problem_response(error)
        except Exception as error:
            log_error(error, with_text=self._api.redact is None)
            return internal_error_response()

    async def _redact(self, redact: Callable[[], HttpResponse]) -> HttpResponse:
        """Hide values in a response. A response that cannot be redacted is not sent."""
        try:
            return await self._server.threads.handle(redact)
        except Exception as error:
            log_error(error, with_text=False)
            return internal_error_response()

    async def _read_body(self, connection: HttpConnection, receive: Receive) -> bytes:
        arrival, cycle = connection.body, connection.cycle
        parts: list[bytes] = []
        more = True
        while more:
            if cycle.more_body:
                until_s, within_s = arrival.time_left_s()
                try:
                    async with asyncio.timeout_at(until_s):
                        message = await receive()
                except TimeoutError:
                    raise RequestTooSlow(what="body", after_s=round(within_s, 1)) from None
            else:
                message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            more = message["more_body"]
            data: bytes = message["body"]
            parts.append(data)
            arrival.add(len(data))
            if not self._server.make_room_for_bodies(connection):
                raise ServerOverloaded(
                    what="bytes in flight", max=self._server.limits.bodies_bytes_max
                )
        return parts[0] if len(parts) == 1 else b"".join(parts)


async def _send(server: HttpServer, send: Send, response: HttpResponse, *, close: bool) -> None:
    server.responses[response.status // 100] += 1
    start, end = response_messages(response, close=close)
    await send(start)
    if response.stream is not None:
        async with aclosing(response.stream) as parts:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
    await send(end)


def log_error(error: BaseException, *, with_text: bool = True) -> None:
    """Print an unexpected error. Its text may quote hidden values."""
    text = f"{type(error).__name__}: {error}" if with_text else type(error).__name__
    print(f"holdfast: http: {text}", file=sys.stderr, flush=True)
    if os.environ.get("HOLDFAST_DEBUG"):
        traceback.print_exception(error)
