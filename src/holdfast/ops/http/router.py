"""Request routing: routes, the calls that handlers receive, and client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from holdfast.ops.http.http1 import HttpRequest
from holdfast.ops.http.problem import HttpResponse, NoRoute, WrongMethod


class ClientDisconnect:
    """The disconnect state of a client. Resolves the watching futures when the client disconnects."""

    def __init__(self) -> None:
        self.is_set = False
        self._watchers: set[asyncio.Future[None]] = set()

    def watch(self, future: asyncio.Future[None]) -> None:
        """Resolve the future when the client disconnects."""
        if self.is_set:
            future.set_result(None)
        else:
            self._watchers.add(future)
            future.add_done_callback(self._watchers.discard)

    def trigger(self) -> None:
        self.is_set = True
        for future in list(self._watchers):
            if not future.done():
                future.set_result(None)


class RouteCall(NamedTuple):
    """A request as passed to a handler."""

    request: HttpRequest
    # The path segments that matched `*`, in order.
    path_parameters: tuple[str, ...]
    body: bytes
    # Whether the client is authenticated. Only open routes get calls that are not.
    trusted: bool
    disconnect: ClientDisconnect


RouteHandler = Callable[[RouteCall], Awaitable[HttpResponse]]


class Route(NamedTuple):
    """A method and a path pattern; `*` matches one segment."""

    method: str
    path: tuple[str, ...]
    handler: RouteHandler
    # Accessible without a token.
    open: bool = False
    # Served even above the connection limit. Its handler must not wait, and it has no body.
    always: bool = False


class HttpApi:
    """The routes of a server. Created in the server's event loop, and closed there before the server ends."""

    routes: tuple[Route, ...] = ()

    def close(self) -> None: ...


def find_route(routes: Sequence[Route], request: HttpRequest) -> tuple[Route, tuple[str, ...]]:
    """Return the route of a request, and the path segments that matched `*`."""
    method = "GET" if request.method == "HEAD" else request.method
    allowed: list[str] = []
    for route in routes:
        path_parameters = _match(route.path, request.path)
        if path_parameters is None:
            continue
        if route.method == method:
            return route, path_parameters
        allowed.append(route.method)
    if allowed:
        raise WrongMethod(what="method", found=request.method[:64], allowed=sorted(allowed))
    raise NoRoute(what="path", found="/" + "/".join(request.path)[:64])


def _match(pattern: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
    if len(pattern) != len(path):
        return None
    path_parameters = []
    for part, segment in zip(pattern, path, strict=True):
        if part == "*":
            path_parameters.append(segment)
        elif part != segment:
            return None
    return tuple(path_parameters)
