"""The protocol of one connection: uvicorn's httptools protocol with limits, one request at a time.

    bytes → head (httptools) → `check_head` → the ASGI application → body by Content-Length → response → the next head

- llhttp parses each head alone, with a new parser, and never sees the body. Bytes after a request stay unparsed until
  its response is sent, so a client cannot queue requests in memory or mix two responses.
- A response has canonical header names and goes out with its body in one write.
- A connection that is closed with unread bytes would be reset, and the client would lose the error. So the protocol
  reads and discards some of a rejected body first.
- A connection is *proven* after its first authenticated request. An unproven connection has shorter timeouts and is
  evicted first.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from holdfast.errors import HoldfastError
from holdfast.ops.http.limits import HEAD_BYTES_MAX, UNREAD_BYTES_MAX
from holdfast.ops.http.problem import (
    BadRequest,
    HeadTooLarge,
    HttpResponse,
    RequestTooSlow,
    ServerOverloaded,
    problem_response,
    reason_phrase,
)
from holdfast.ops.http.request_head import HttpRequest, check_head, rejected_head
from holdfast.ops.http.routes import ClientDisconnect

if TYPE_CHECKING:
    from holdfast.ops.http.server import HttpServer

_HEAD_END = b"\r\n\r\n"
_HEADER_NAMES = {b"www-authenticate": b"WWW-Authenticate", b"etag": b"ETag"}
_STATUS_LINES = {
    int(status): f"HTTP/1.1 {int(status)} {reason_phrase(status)}\r\n".encode()
    for status in HTTPStatus
}


class HttpConnection(HttpToolsProtocol):
    cycle: ResponseCycle

    def __init__(self, server: HttpServer, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.http_server = server
        self.disconnect = ClientDisconnect()
        self.peer = ""
        self.proven = False
        # Above the connection limit: only routes marked `always` are served.
        self.is_rejected = False
        # Since when the server waits for the client to send or to read.
        self.client_wait_since_s: float | None = self.loop.time()
        self.body = BodyArrival(self)
        self._unread = bytearray()
        # The bytes of the unread head that were searched for its end, and when its first byte arrived.
        self._searched = 0
        self._head_since_s: float | None = None
        self._head_complete = self._keep_alive = False
        self._body_left = 0
        # How many more bytes are discarded before the connection is aborted; None before an error.
        self._linger_left: int | None = None
        self._closing_since_s: float | None = None

    # -- state -------------------------------------------------------------------------------------

    @property
    def is_serving(self) -> bool:
        """Whether a request has been parsed and its response is not sent yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def busy(self) -> bool:
        return self.is_serving or self._head_since_s is not None

    @property
    def has_unsent(self) -> bool:
        """Whether part of a response is still in the write buffer."""
        return self.transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        """Abort the connection immediately."""
        if self.is_serving:
            self.cycle.disconnected = True
        self.transport.abort()

    def check_time(self, now_s: float) -> None:
        """Close the connection if a timeout is over. The server calls it for each connection several times a
        second."""
        limits, since_s = self.http_server.limits, self.client_wait_since_s
        if self._closing_since_s is not None:
            linger_s = limits.answer_s if self._linger_left is None else limits.linger_s
            if now_s >= self._closing_since_s + linger_s:
                self.abort()
        elif self.is_serving:
            is_answering = self.cycle.response_started and since_s is not None
            if is_answering and since_s is not None and now_s >= since_s + limits.answer_s:
                self.abort()
        elif self.is_rejected:
            if since_s is not None and now_s >= since_s + limits.rejected_head_s:
                self.send_error(self.too_many())
        elif self._head_since_s is not None:
            if now_s >= self._head_since_s + limits.head_s:
                self.send_error(RequestTooSlow(what="head", after_s=limits.head_s))
        elif since_s is not None:
            if now_s >= since_s + (limits.idle_s if self.proven else limits.head_s):
                self.close()

    def too_many(self) -> ServerOverloaded:
        return ServerOverloaded(connections_max=self.http_server.connections_max)

    # -- transport callbacks -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = self.client[0] if self.client else ""
        self.is_rejected = not self.http_server.add_connection(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.http_server.remove_connection(self)
        self.disconnect.trigger()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        self.disconnect.trigger()
        if not self.is_serving or self._body_left or self._linger_left is not None:
            self.transport.close()
            return False
        return True  # A client that has closed its sending side still reads the response.

    def data_received(self, data: bytes) -> None:
        if self._linger_left is not None:
            self._linger_left -= len(data)
            if self._linger_left < 0:
                self.abort()
            return
        if self._body_left:
            part = data[: self._body_left]
            self._receive_body(part)
            if len(part) == len(data):
                return
            data = data[len(part) :]
        self._unread += data
        if not self.is_serving:
            self._receive_head()
        elif len(self._unread) > UNREAD_BYTES_MAX:
            self.flow.pause_reading()

    # -- requests ----------------------------------------------------------------------------------

    def _receive_head(self) -> None:
        """Start the request whose head is in the unread bytes, if the head is complete."""
        unread = self._unread
        if not unread:
            return
        end = unread.find(_HEAD_END, max(self._searched - len(_HEAD_END) + 1, 0))
        size = len(unread) if end < 0 else end + len(_HEAD_END)
        if size > HEAD_BYTES_MAX:
            self.send_error(HeadTooLarge(what="head", bytes_max=HEAD_BYTES_MAX))
            return
        if end < 0:
            self._searched = size
            if self._head_since_s is None:
                self._head_since_s = self.loop.time()
            return
        head = bytes(unread[:size])
        del unread[:size]
        self._searched, self._head_since_s = 0, None
        self._start_request(head)

    def _start_request(self, head: bytes) -> None:
        try:
            request = self._parse(head)
        except HoldfastError as error:
            self.send_error(self.too_many() if self.is_rejected else error)
            return
        scope: Any = self.scope
        scope["extensions"] = {"holdfast": (self, request)}
        self._body_left = request.length
        self.body.start()
        self.cycle = ResponseCycle(self, keep_alive=request.keep_alive)
        if not request.length:
            self._complete_body()
        elif self._unread:
            part = bytes(self._unread[: request.length])
            del self._unread[: request.length]
            self._receive_body(part)
        self._start_asgi_task(self.cycle, self.app)

    def _parse(self, head: bytes) -> HttpRequest:
        parser = self.parser = httptools.HttpRequestParser(self)
        self._head_complete = False
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass  # Upgrades are ignored, as RFC 9110 allows.
        except httptools.HttpParserError as error:
            raise rejected_head(head, str(error)[:200]) from None
        if not self._head_complete:
            raise BadRequest(what="head", why="incomplete")
        method, version = parser.get_method().decode(), parser.get_http_version()
        if not head.startswith(
            b"%b %b HTTP/%b\r\n" % (method.encode(), self.url, version.encode())
        ):
            # llhttp accepts further spaces, and empty lines before the request.
            raise BadRequest(what="request line", found=head[:64].decode("latin-1"))
        request = check_head(
            method=method,
            target=self.url,
            version=version,
            headers=self.headers,
            keep_alive=self._keep_alive,
        )
        raw_path, _, query = self.url.partition(b"?")
        scope: Any = self.scope
        scope.update(
            method=method,
            http_version=version,
            path="/" + "/".join(request.path),
            raw_path=raw_path,
            query_string=query,
        )
        return request

    def on_headers_complete(self) -> None:
        # The parser forgets this at the end of the message.
        self._head_complete = True
        self._keep_alive = self.parser.should_keep_alive()

    def on_message_complete(self) -> None: ...

    def _receive_body(self, part: bytes) -> None:
        self._body_left -= len(part)
        if not self.cycle.response_complete:
            self.client_wait_since_s = self.loop.time()
            self.on_body(part)
        if not self._body_left:
            self._complete_body()

    def _complete_body(self) -> None:
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Continue with the next request."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.client_wait_since_s = self.loop.time()
        self.flow.resume_reading()
        self._receive_head()
        if self.disconnect.is_set and not self.is_serving:
            self.close()

    # -- the end -----------------------------------------------------------------------------------

    def send_error(self, error: HoldfastError) -> None:
        """Send an error without the application, and close."""
        response = problem_response(error)
        lines = [(name.encode(), value.encode()) for name, value in response.all_headers]
        self.transport.write(
            head_bytes(response.status, [*lines, (b"connection", b"close")]) + response.body
        )
        self._head_since_s = None
        self.linger()

    def finish(self) -> None:
        """Close after a response. Discard bytes of the request that are still to come."""
        if self._body_left or self._unread:
            self.linger()
        else:
            self.close()

    def close(self) -> None:
        """Close after the client has read the written data, at the latest after `answer_s`."""
        if self._closing_since_s is None:
            self._closing_since_s = self.loop.time()
        self.transport.close()

    def linger(self) -> None:
        limits = self.http_server.limits
        self._closing_since_s = self.loop.time()
        self._linger_left = limits.linger_bytes_max - len(self._unread)
        self._unread.clear()
        if self.disconnect.is_set or self._linger_left < 0:
            self.transport.close()
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def shutdown(self) -> None:
        if self.is_serving:
            self.cycle.keep_alive = False
        else:
            self.close()


class BodyArrival:
    """The body of the current request: its bytes in memory, and the rate at which they arrive."""

    def __init__(self, connection: HttpConnection) -> None:
        self._connection = connection
        self.bytes = 0
        # When the body began; the start of the current measuring interval and the bytes at that time; and the
        # rate of the previous interval.
        self.began_s = self._interval_start_s = 0.0
        self._interval_start_bytes = 0
        self._rate: float | None = None

    def start(self) -> None:
        self.began_s = self._interval_start_s = self._connection.loop.time()
        self._interval_start_bytes, self._rate = 0, None

    def add(self, size: int) -> None:
        self._measure(self._connection.loop.time())
        self.bytes += size
        self._connection.http_server.bodies_bytes += size

    def release(self) -> None:
        """Subtract the bytes of this body from the total in memory."""
        self._connection.http_server.bodies_bytes -= self.bytes
        self.bytes = 0

    def time_left_s(self) -> tuple[float, float]:
        """Return when the next bytes have to be there, and how long the body may take until then."""
        limits = self._connection.http_server.limits
        within_s = min(
            limits.body_s, limits.body_pause_s + self.bytes / limits.body_bytes_per_s_min
        )
        return self.began_s + within_s, within_s

    def rate(self, now_s: float) -> float | None:
        """The arrival rate, in bytes per second; None without a body or a measurement."""
        if not self.bytes or self._connection.client_wait_since_s is None:
            return None
        self._measure(now_s)
        return self._rate

    def _measure(self, now_s: float) -> None:
        elapsed_s = now_s - self._interval_start_s
        if elapsed_s >= self._connection.http_server.limits.unproven_grace_s:
            self._rate = (self.bytes - self._interval_start_bytes) / max(elapsed_s, 1e-9)
            self._interval_start_s, self._interval_start_bytes = now_s, self.bytes


class ResponseCycle(RequestResponseCycle):
    """A request and its response. `send` writes the head with the first part of the body, and returns when the client
    has read most of it. It raises ConnectionResetError if the client is gone."""

    def __init__(self, connection: HttpConnection, *, keep_alive: bool) -> None:
        super().__init__(
            scope=connection.scope,
            transport=connection.transport,
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=connection.expect_100_continue,
            keep_alive=keep_alive,
            on_response=connection.on_response_complete,
        )
        self._connection = connection
        self._head = b""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.response_started = True
            self.waiting_for_100_continue = False
            self._head = self._response_head(message["status"], message["headers"])
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if self.scope["method"] == "HEAD":
            body = b""
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (
                b"" if more else b"0\r\n\r\n"
            )
        data, self._head = self._head + body, b""
        await self._write(data)
        if more:
            # The client waits for the server now.
            self._connection.client_wait_since_s = None
            return
        self.response_complete = True
        self.message_event.set()
        if self.keep_alive:
            self.on_response()
        else:
            self._connection.finish()

    async def _write(self, data: bytes) -> None:
        self._connection.client_wait_since_s = self._connection.loop.time()
        if not self.transport.is_closing():
            self.transport.write(data)
            if self.flow.write_paused:
                await self.flow.drain()
        if self.disconnected or self.transport.is_closing():
            raise ConnectionResetError

    def _response_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        names = {name.lower(): value for name, value in headers}
        if names.get(b"connection") == b"close" or self._connection.http_server.stopping:
            self.keep_alive = False
        lines = [line for line in headers if line[0].lower() != b"connection"]
        has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        if b"content-length" not in names and has_body:
            # Without a length the body is in chunks, or, for HTTP/1.0, it ends with the connection.
            self.chunked_encoding = self.scope["http_version"] == "1.1"
            self.keep_alive = self.keep_alive and self.chunked_encoding
            if self.chunked_encoding:
                lines.append((b"transfer-encoding", b"chunked"))
        # Always explicit: an HTTP/1.0 client without this header waits for the connection to close.
        lines.append((b"connection", b"keep-alive" if self.keep_alive else b"close"))
        return head_bytes(status, lines)


def head_bytes(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    parts = [_STATUS_LINES[status]]
    for name, value in headers:
        canonical = _HEADER_NAMES.get(name)
        if canonical is None:
            canonical = name.title()
            if len(_HEADER_NAMES) < 100:
                _HEADER_NAMES[name] = canonical
        parts += (canonical, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    return b"".join(parts)


def response_messages(response: HttpResponse, *, close: bool = False) -> tuple[Any, Any]:
    """Return the ASGI messages of a response."""
    headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in response.all_headers
    ]
    if close:
        headers.append((b"connection", b"close"))
    return (
        {"type": "http.response.start", "status": response.status, "headers": headers},
        {"type": "http.response.body", "body": response.body},
    )
