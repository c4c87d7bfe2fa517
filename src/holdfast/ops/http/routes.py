"""Request routing: the routes of a server, the calls that their handlers receive, and client disconnects.

A route is found by its percent-encoded path, so that a `%2F` in a name does not divide the path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.problem import HttpResponse, NoRoute, WrongMethod
from holdfast.ops.http.request_head import HttpRequest
from holdfast.ops.http.tokens import Token


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
    # The client's token. Only open routes get calls without one.
    token: Token | None
    disconnect: ClientDisconnect


RouteHandler = Callable[[RouteCall], Awaitable[HttpResponse]]


class Route(NamedTuple):
    """A method and a path pattern; `*` matches one segment."""

    method: str
    path: tuple[str, ...]
    handler: RouteHandler
    # The token needs at least one of them.
    scopes: tuple[Scope, ...] = (Scope.READ,)
    # Accessible without a token.
    open: bool = False
    # Served even above the connection limit. Its handler must not wait, and it has no body.
    always: bool = False


class HttpApi:
    """The routes of a server. Created in the server's event loop, and closed there before the server ends."""

    routes: tuple[Route, ...] = ()
    # Removes hidden values from a response. It may block.
    redact: Callable[[RouteCall, HttpResponse], HttpResponse] | None = None

    def close(self) -> None: ...


class RouteTable:
    """The routes by path. A fixed segment precedes `*`."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._fixed: dict[tuple[str, ...], dict[str, Route]] = {}
        patterns: dict[tuple[str, ...], dict[str, Route]] = {}
        for route in routes:
            paths = patterns if "*" in route.path else self._fixed
            paths.setdefault(route.path, {})[route.method] = route
        # Patterns by their number of segments, those with late parameters first.
        self._patterns: dict[int, list[tuple[tuple[str, ...], dict[str, Route]]]] = {}
        for path in sorted(patterns, key=lambda path: [segment == "*" for segment in path]):
            self._patterns.setdefault(len(path), []).append((path, patterns[path]))

    def find(self, request: HttpRequest) -> tuple[Route, tuple[str, ...]]:
        """Return the route of a request, and the path segments that matched `*`."""
        method = "GET" if request.method == "HEAD" else request.method
        allowed: set[str] = set()
        fixed = self._fixed.get(request.path)
        if fixed is not None:
            if method in fixed:
                return fixed[method], ()
            allowed.update(fixed)
        for pattern, by_method in self._patterns.get(len(request.path), ()):
            path_parameters = _match(pattern, request.path)
            if path_parameters is None:
                continue
            if method in by_method:
                return by_method[method], path_parameters
            allowed.update(by_method)
        if allowed:
            raise WrongMethod(what="method", found=request.method[:64], allowed=sorted(allowed))
        raise NoRoute(what="path", found="/" + "/".join(request.path)[:64])


def _match(pattern: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
    path_parameters = []
    for part, segment in zip(pattern, path, strict=True):
        if part == "*":
            path_parameters.append(segment)
        elif part != segment:
            return None
    return tuple(path_parameters)
