"""The HTTP server: connections, time limits, and the way of a request through them.

    head → parse → who asks (`http_guard`) → route → body → handler → answer → next request

- One event loop in one thread; whatever waits for the store waits as a future, and reads run in a few
  threads. A client that is slow costs its connection and nobody's time.
- Everything has a limit: how long a head, a body, an answer may take, how long a connection may idle, how
  many there are, how many bytes of bodies are in memory. A request is judged by its head: the body of one
  that is refused is not read.
- Stopping answers what is under way, ends long polls with what they have, and closes the rest.

The standard library only: workers in other languages need no more than what the core needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import HoldfastError, Invalid
from holdfast.ops.http_guard import Address, Guard
from holdfast.ops.http_wire import (
    HEAD_BYTES_MAX,
    HeadTooLarge,
    NoRoute,
    Request,
    Response,
    Stopping,
    TooMany,
    TooSlow,
    WrongMethod,
    bytes_of,
    internal,
    parse,
    problem,
)

CONNECTIONS_MAX = 1_000
BODIES_BYTES_MAX = 256 * 1024 * 1024
IDLE_S = 75.0
HEAD_S = 10.0
BODY_S = 60.0
ANSWER_S = 60.0
# What is read and thrown away of a body that was refused, so that its sender reads why.
LINGER_S = 2.0
LINGER_BYTES_MAX = 1024 * 1024
STOP_S = 5.0
READERS = 4
BACKLOG = 128

T = TypeVar("T")


class HttpServer:
    """A service like the roles, so whoever supervises those supervises this too."""

    name = "http"
    # It is never busy for long in one place: nothing for a watchdog of ticks.
    ticking = False

    def __init__(
        self,
        make_api: Callable[[HttpServer], Api],
        *,
        address: Address,
        guard: Guard,
        connections_max: int = CONNECTIONS_MAX,
        idle_s: float = IDLE_S,
        head_s: float = HEAD_S,
        body_s: float = BODY_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._make_api = make_api
        self._guard = guard
        self._connections_max = connections_max
        self._idle_s, self._head_s = idle_s, head_s
        self._body_s, self._answer_s = body_s, answer_s
        self.rounds = 0
        self.failure: BaseException | None = None
        self._socket = _bound(address)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        self._connections: dict[asyncio.Task[None], bool] = {}
        self._bodies_bytes = 0
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-http-read")
        self._thread: threading.Thread | None = None
        self.stopping = False

    # -- life --------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="holdfast-http", daemon=True)
        self._thread.start()
        self._started.wait()

    def request_stop(self) -> None:
        self.stopping = True
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.request_stop()
        self.join(STOP_S * 2)

    async def aside(self, fn: Callable[..., T], *args: Any) -> T:
        """Run what reads the store elsewhere, so that nobody here waits for it."""
        return await self.loop.run_in_executor(self._readers, fn, *args)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self._socket.close()
            self._readers.shutdown(wait=False, cancel_futures=True)
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        api = self._make_api(self)
        self._api = api
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=HEAD_BYTES_MAX, backlog=BACKLOG
        )
        self.rounds = 1
        self._started.set()
        if self.stopping:
            self._stop.set()
        await self._stop.wait()
        server.close()
        api.close()
        for task, busy in list(self._connections.items()):
            if not busy:
                task.cancel()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=STOP_S)
        for task in list(self._connections):
            task.cancel()

    # -- a connection --------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        crowded = len(self._connections) >= self._connections_max
        self._connections[task] = False
        try:
            if crowded:
                await self._answer(writer, problem(TooMany(max=self._connections_max)), False)
                await _linger(reader, writer)
                return
            while await self._one(task, reader, writer):
                pass
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        except Exception as error:
            _complain(error)
        finally:
            del self._connections[task]
            writer.close()

    async def _one(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """One request and its answer; whether there may be another on this connection."""
        async with asyncio.timeout(self._idle_s):
            first = await reader.read(1)
        if not first:
            return False
        self._connections[task] = True
        request: Request | None = None
        try:
            request = parse(first + await self._head(reader))
            self._guard.check(request)
            route, names = self._route(request)
            trusted = self._guard.trusts(request)
            if not route.open:
                self._guard.require_trust(request)
            if self.stopping:
                raise Stopping()
        except HoldfastError as error:
            await self._answer(writer, problem(error), False, request)
            await _linger(reader, writer)
            return False
        except asyncio.IncompleteReadError:
            return False
        self._bodies_bytes += request.length
        try:
            if self._bodies_bytes > BODIES_BYTES_MAX:
                await self._answer(writer, problem(TooMany(what="bytes in flight")), False, request)
                await _linger(reader, writer)
                return False
            try:
                body = await self._body(request, reader, writer)
            except TooSlow as error:
                await self._answer(writer, problem(error), False, request)
                return False
            except asyncio.IncompleteReadError:
                return False

            def gone() -> bool:
                return reader.at_eof() or writer.is_closing()

            response = await _handled(route, Call(request, names, body, trusted, gone))
        finally:
            self._bodies_bytes -= request.length
        keep_alive = request.keep_alive and not self.stopping
        try:
            if gone():
                raise ConnectionResetError
            await self._answer(writer, response, keep_alive, request)
        except (ConnectionError, TimeoutError):
            if response.undo is not None:
                await response.undo()
            return False
        self._connections[task] = False
        return keep_alive

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._head_s):
                return await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise TooSlow(what="head", after_s=self._head_s) from None
        except asyncio.LimitOverrunError:
            raise HeadTooLarge(what="head", bytes_max=HEAD_BYTES_MAX) from None

    async def _body(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        if not request.length:
            return b""
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._body_s):
                return await reader.readexactly(request.length)
        except TimeoutError:
            raise TooSlow(what="body", after_s=self._body_s) from None

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        response: Response,
        keep_alive: bool,
        request: Request | None = None,
    ) -> None:
        head_only = request is not None and request.method == "HEAD"
        writer.write(bytes_of(response, keep_alive=keep_alive, head_only=head_only))
        async with asyncio.timeout(self._answer_s):
            await writer.drain()

    def _route(self, request: Request) -> tuple[Route, tuple[str, ...]]:
        method = "GET" if request.method == "HEAD" else request.method
        allowed: list[str] = []
        for route in self._api.routes:
            names = _match(route.path, request.path)
            if names is None:
                continue
            if route.method == method:
                return route, names
            allowed.append(route.method)
        if allowed:
            raise WrongMethod(what="method", found=request.method[:64], allowed=sorted(allowed))
        raise NoRoute(what="path", found="/" + "/".join(request.path)[:64])


# -- inside ----------------------------------------------------------------------------------------


def _bound(address: Address) -> socket.socket:
    """Listening from here on: what cannot be bound is told to whoever starts the server."""
    try:
        kind = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(kind[0], kind[1])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(kind[4])
        return made
    except OSError as error:
        why = error.strerror or str(error)
        raise Invalid(what="--http", address=str(address), why=why) from None


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


async def _handled(route: Route, call: Call) -> Response:
    try:
        return await route.handler(call)
    except HoldfastError as error:
        return problem(error)
    except Exception as error:
        _complain(error)
        return internal()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closing with bytes unread would take the answer away from whoever is still sending."""
    with contextlib.suppress(OSError, TimeoutError):
        if writer.can_write_eof():
            writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            left = LINGER_BYTES_MAX
            while left > 0 and (data := await reader.read(65536)):
                left -= len(data)


def _complain(error: BaseException) -> None:
    print(f"holdfast: http: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if os.environ.get("HOLDFAST_DEBUG"):
        traceback.print_exception(error)
