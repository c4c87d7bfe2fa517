"""A connection of the HTTP server and the processing of its requests.

    head → parse → authenticate (`auth`) → route → body → handler → response → the next request

Every resource has a limit: the time of a head, a body and a response, the idle time, the number of
connections, the bytes of bodies in memory. A request is admitted by its head, so the body of a rejected
request is not kept. A connection counts until its socket is closed. A client that does not read its
response is disconnected, so that such clients cannot exceed the connection limit.

Body bytes count when they arrive; Content-Length reserves nothing. A body must arrive at a minimum rate. A
connection is *proven* after its first authenticated request. An unproven connection has shorter timeouts
and is evicted first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast import failpoints
from holdfast.errors import HoldfastError
from holdfast.ops.http.http1 import HEAD_BYTES_MAX, HttpRequest, parse_head, response_bytes
from holdfast.ops.http.problem import (
    BadRequest,
    HeadTooLarge,
    HttpResponse,
    RequestTooSlow,
    ServerOverloaded,
    ServerStopping,
    internal_error_response,
    problem_response,
)
from holdfast.ops.http.router import ClientDisconnect, HttpApi, Route, RouteCall, find_route

if TYPE_CHECKING:
    from holdfast.ops.http.server import HttpServer


READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    # Also limited to half of the process's file descriptors, because the store needs some.
    connections_max: int = 1_000
    bodies_bytes_max: int = 256 * 1024 * 1024
    # Timeouts: an idle connection, the arrival of a head and of a body, the client's read of a response.
    idle_s: float = 75.0
    head_s: float = 10.0
    body_s: float = 60.0
    answer_s: float = 60.0
    # The total pause allowed to a body, beyond the time that its bytes need at the minimum rate.
    body_pause_s: float = 5.0
    body_bytes_per_s_min: int = 16 * 1024
    # The most unproven connections, as a share of all connections: in total and per client address. Above
    # it, unproven connections older than the grace period are evicted.
    unproven_share: float = 0.5
    unproven_per_peer_share: float = 0.25
    unproven_grace_s: float = 1.0
    # How much of a rejected body is read and discarded, so that the client can read the error; and the most
    # rejected connections at a time.
    linger_s: float = 2.0
    linger_bytes_max: int = 64 * 1024 * 1024
    rejected_max: int = 32
    # The head timeout of a connection above the connection limit.
    rejected_head_s: float = 1.0


class HttpStreamReader(asyncio.StreamReader):
    """A stream reader that reports a client disconnect immediately, even without a pending read."""

    def __init__(self) -> None:
        super().__init__(HEAD_BYTES_MAX)
        self.disconnect = ClientDisconnect()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.disconnect.trigger()

    def set_exception(self, exc: BaseException) -> None:
        super().set_exception(exc)  # type: ignore[arg-type]
        self.disconnect.trigger()


class _AdmittedRequest(NamedTuple):
    request: HttpRequest
    route: Route
    names: tuple[str, ...]
    trusted: bool


class HttpConnection:
    def __init__(
        self,
        server: HttpServer,
        api: HttpApi,
        reader: HttpStreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._server = server
        self._limits = server.limits
        self._api = api
        self._reader = reader
        self._writer = writer
        # Whether a request is in progress; and since when the server waits for the client to send or to read.
        self.busy = False
        self.client_wait_since_s: float | None = server.loop.time()
        self.proven = False
        # Bytes of the incomplete body; the start of the current measuring interval and the bytes at that
        # time; and the rate of the previous interval.
        self.body_bytes = 0
        self._interval_start_s, self._interval_start_bytes = 0.0, 0
        self._rate: float | None = None
        name = writer.get_extra_info("peername")
        self.peer = str(name[0]) if isinstance(name, tuple) else ""

    async def serve(self) -> None:
        """Serve requests sequentially until the client or the server closes the connection."""
        flush = False
        try:
            while await self._serve_one():
                pass
            flush = True
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            flush = True  # the server is stopping
        except Exception as error:
            _log_error(error)
        finally:
            await self._close(self._limits.answer_s if flush else 0)

    @property
    def has_unsent(self) -> bool:
        """Whether part of a response is still in the write buffer."""
        return self._writer.transport.get_write_buffer_size() > 0

    async def reject(self) -> None:
        """Reject the connection because of the connection limit. Serve only routes marked `always`."""
        try:
            await self._reject()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            await self._close(0)

    def abort(self) -> None:
        """Abort the connection immediately."""
        self._writer.transport.abort()

    async def _close(self, within_s: float) -> None:
        """Close after the client has read the written data, at the latest after `within_s`."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        self.abort()

    async def _reject(self) -> None:
        too_many = ServerOverloaded(connections_max=self._server.connections_max)
        parsed: list[HttpRequest] = []
        try:
            head = await self._read_head(b"", self._limits.rejected_head_s)
            admitted = self._admit(head, parsed)
        except HoldfastError:
            await self._send_error(too_many, parsed[0] if parsed else None)
            return
        if not admitted.route.always:
            await self._send_error(too_many, admitted.request)
            return
        response = await self._handle(admitted, b"")
        await self._send_response(response, admitted.request, keep_alive=False)

    async def _serve_one(self) -> bool:
        """Process one request; return whether the connection stays open."""
        self.client_wait_since_s = self._server.loop.time()
        idle_s = self._limits.idle_s if self.proven else self._limits.head_s
        async with asyncio.timeout(idle_s):
            first_byte = await self._reader.read(1)
        if not first_byte:
            return False
        self.busy = True
        parsed: list[HttpRequest] = []
        try:
            head = await self._read_head(first_byte, self._limits.head_s)
            admitted = self._admit(head, parsed)
        except HoldfastError as error:
            await self._send_error(error, parsed[0] if parsed else None)
            return False
        request = admitted.request
        try:
            body = await self._read_body(request)
            self.client_wait_since_s = None
            self.proven = self.proven or admitted.trusted
            response = await self._handle(admitted, body)
        except (ServerOverloaded, RequestTooSlow) as error:
            self.release_body()
            await self._send_error(error, request)
            return False
        finally:
            self.release_body()
        keep_alive = request.keep_alive and not self._server.stopping
        try:
            # A half-closed client may still read. But a response with an undo must reach a live client.
            if response.undo is not None and self._reader.disconnect.is_set:
                raise ConnectionResetError
            await self._send_response(response, request, keep_alive=keep_alive)
        except (ConnectionError, TimeoutError):
            if response.undo is not None:
                await response.undo()
            return False
        self.busy = not keep_alive
        return keep_alive

    def _admit(self, head: bytes, parsed: list[HttpRequest]) -> _AdmittedRequest:
        """Admit or reject a request by its head. The parsed head is appended to `parsed` in both cases."""
        guard = self._server.guard
        request = parse_head(head)
        parsed.append(request)
        guard.check(request)
        route, names = find_route(self._api.routes, request)
        if not route.open:
            guard.require_token(request)
        if request.length and route.method == "GET":
            # Some GET routes are open to clients without a token, whose bytes must not use memory.
            raise BadRequest(what="body", why="this route takes no body", bytes=request.length)
        if self._server.stopping:
            raise ServerStopping()
        return _AdmittedRequest(request, route, names, guard.is_trusted(request))

    async def _handle(self, admitted: _AdmittedRequest, body: bytes) -> HttpResponse:
        request, route, names, trusted = admitted
        try:
            if failpoints.armed:
                failpoints.hit("http.handle", request)
            return await route.handler(
                RouteCall(request, names, body, trusted, self._reader.disconnect)
            )
        except HoldfastError as error:
            return problem_response(error)
        except Exception as error:
            _log_error(error)
            return internal_error_response()

    # -- bytes -------------------------------------------------------------------------------------

    async def _read_head(self, first: bytes, within_s: float) -> bytes:
        try:
            async with asyncio.timeout(within_s):
                return first + await self._reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise RequestTooSlow(what="head", after_s=within_s) from None
        except asyncio.LimitOverrunError:
            raise HeadTooLarge(what="head", bytes_max=HEAD_BYTES_MAX) from None

    async def _read_body(self, request: HttpRequest) -> bytes:
        if not request.length:
            return b""
        if request.headers.get("expect", "").lower() == "100-continue":
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        began_s = self._interval_start_s = self._server.loop.time()
        self._interval_start_bytes, self._rate = 0, None
        parts: list[bytes] = []
        while self.body_bytes < request.length:
            data = await self._read_part(began_s, request.length - self.body_bytes)
            parts.append(data)
            self._measure_rate(self._server.loop.time())
            self.body_bytes += len(data)
            self._server.bodies_bytes += len(data)
            if not self._server.make_room_for_bodies(self):
                raise ServerOverloaded(what="bytes in flight", max=self._limits.bodies_bytes_max)
        return b"".join(parts)

    async def _read_part(self, began_s: float, remaining: int) -> bytes:
        """Read the next bytes of a body that began to arrive at `began_s`."""
        limits, loop = self._limits, self._server.loop
        self.client_wait_since_s = loop.time()
        at_the_lowest_rate_s = self.body_bytes / limits.body_bytes_per_s_min
        within_s = min(limits.body_s, limits.body_pause_s + at_the_lowest_rate_s)
        try:
            async with asyncio.timeout_at(began_s + within_s):
                data = await self._reader.read(min(remaining, READ_BYTES))
        except TimeoutError:
            raise RequestTooSlow(what="body", after_s=round(within_s, 1)) from None
        if not data:
            raise asyncio.IncompleteReadError(b"", remaining)
        return data

    def body_rate(self, now_s: float) -> float | None:
        """The arrival rate of the current body, in bytes per second; None without a body or a measurement."""
        if not self.body_bytes or self.client_wait_since_s is None:
            return None
        self._measure_rate(now_s)
        return self._rate

    def _measure_rate(self, now_s: float) -> None:
        elapsed_s = now_s - self._interval_start_s
        if elapsed_s >= self._limits.unproven_grace_s:
            self._rate = (self.body_bytes - self._interval_start_bytes) / elapsed_s
            self._interval_start_s, self._interval_start_bytes = now_s, self.body_bytes

    def release_body(self) -> None:
        """Subtract the bytes of this body from the total in memory."""
        self._server.bodies_bytes -= self.body_bytes
        self.body_bytes = 0

    async def _send_response(
        self, response: HttpResponse, request: HttpRequest | None, *, keep_alive: bool
    ) -> None:
        self.client_wait_since_s = self._server.loop.time()
        head_only = request is not None and request.method == "HEAD"
        self._writer.write(response_bytes(response, keep_alive=keep_alive, head_only=head_only))
        async with asyncio.timeout(self._limits.answer_s):
            await self._writer.drain()
        # `drain` raises no error if the connection was aborted in the meantime.
        if self._writer.transport.is_closing():
            raise ConnectionResetError

    async def _send_error(self, error: HoldfastError, request: HttpRequest | None = None) -> None:
        """Send the error and close. Closing with unread bytes would reset the connection and lose the
        response, so some of the remaining body is read and discarded."""
        await self._send_response(problem_response(error), request, keep_alive=False)
        with contextlib.suppress(OSError, TimeoutError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            async with asyncio.timeout(self._limits.linger_s):
                remaining = self._limits.linger_bytes_max
                while remaining > 0 and (data := await self._reader.read(65536)):
                    remaining -= len(data)


def _log_error(error: BaseException) -> None:
    print(f"holdfast: http: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if os.environ.get("HOLDFAST_DEBUG"):
        traceback.print_exception(error)
