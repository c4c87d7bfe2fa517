"""What a server serves: routes, and the calls that come in by them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from holdfast.ops.http.problem import NoRoute, Response, WrongMethod
from holdfast.ops.http.wire import Request


class Gone:
    """Whether whoever asked has hung up, and a way to be woken when that happens."""

    def __init__(self) -> None:
        self.now = False
        self._watching: set[asyncio.Future[None]] = set()

    def watch(self, future: asyncio.Future[None]) -> None:
        """Done at the latest when they have."""
        if self.now:
            future.set_result(None)
        else:
            self._watching.add(future)
            future.add_done_callback(self._watching.discard)

    def happen(self) -> None:
        self.now = True
        for future in list(self._watching):
            if not future.done():
                future.set_result(None)


class Call(NamedTuple):
    """A request as a handler sees it."""

    request: Request
    # What the route's pattern left open, in order.
    names: tuple[str, ...]
    body: bytes
    # Whether it may be told everything; only routes that are open to all are asked otherwise.
    trusted: bool
    gone: Gone


Handler = Callable[[Call], Awaitable[Response]]


class Route(NamedTuple):
    """A method and a path; `*` stands for one part of it."""

    method: str
    path: tuple[str, ...]
    handler: Handler
    # For everybody, with or without a token.
    open: bool = False
    # Answered however many connections there are. Its handler waits for nothing, and it takes no body.
    always: bool = False


class Api:
    """What a server serves. Made in its loop, closed there before the server ends."""

    routes: tuple[Route, ...] = ()

    def close(self) -> None: ...


def find(routes: Sequence[Route], request: Request) -> tuple[Route, tuple[str, ...]]:
    """The route of a request, and what its pattern left open."""
    method = "GET" if request.method == "HEAD" else request.method
    allowed: list[str] = []
    for route in routes:
        names = _match(route.path, request.path)
        if names is None:
            continue
        if route.method == method:
            return route, names
        allowed.append(route.method)
    if allowed:
        raise WrongMethod(what="method", found=request.method[:64], allowed=sorted(allowed))
    raise NoRoute(what="path", found="/" + "/".join(request.path)[:64])


def _match(pattern: tuple[str, ...], path: tuple[str, ...]) -> tuple[str, ...] | None:
    if len(pattern) != len(path):
        return None
    names = []
    for part, found in zip(pattern, path, strict=True):
        if part == "*":
            names.append(found)
        elif part != found:
            return None
    return tuple(names)
