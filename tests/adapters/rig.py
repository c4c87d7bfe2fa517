"""Fake servers and connectors of adapter tests: a loopback HTTP server with routes and test
certificates.

`RecordingConnector` records each requested connection and opens none. `ScriptedConnector` also
opens none: for known addresses it replays the bytes of a response.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import httpcore
import trustme

from holdfast.adapters.address_guard import Reach
from holdfast.adapters.http import HttpClient

T = TypeVar("T")

LOOPBACK = Reach(ports=(), cidrs=("127.0.0.0/8", "::1/128"))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


@dataclass
class ReceivedRequest:
    """One request received by the server."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Route = Callable[[BaseHTTPRequestHandler, ReceivedRequest], None]


@dataclass
class FakeHttpServer:
    host: str
    port: int
    scheme: str
    routes: dict[str, Route] = field(default_factory=dict)
    requests: list[ReceivedRequest] = field(default_factory=list)
    # Set at the end of the test. Hanging routes wait for it.
    stopped: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str = "/") -> str:
        return f"{self.scheme}://{self.host}:{self.port}{path}"


@contextmanager
def run_http_server(
    host: str = "127.0.0.1", *, name: str | None = None, context: ssl.SSLContext | None = None
) -> Iterator[FakeHttpServer]:
    server = FakeHttpServer(name or host, 0, "http" if context is None else "https")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = ReceivedRequest(self.command, self.path, headers, self.rfile.read(size))
            server.requests.append(seen)
            self.close_connection = True
            with suppress(BrokenPipeError, ConnectionResetError):
                server.routes[self.path.partition("?")[0]](self, seen)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    httpd = Quiet((host, 0), Handler)
    if context is not None:
        httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    server.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def respond_with(
    status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None
) -> Route:
    def route(handler: BaseHTTPRequestHandler, seen: ReceivedRequest) -> None:
        handler.send_response(status)
        all_headers = {"content-length": str(len(body)), **(headers or {})}
        for name, value in all_headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        if seen.method != "HEAD":
            handler.wfile.write(body)

    return route


def redirect(to: str, status: int = 302) -> Route:
    return respond_with(status, headers={"location": to})


def context_for(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


class RecordingConnector(httpcore.AsyncNetworkBackend):
    """Network backend that records each requested connection and opens none."""

    def __init__(self) -> None:
        self.connections: list[tuple[str, int]] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.connections.append((host, port))
        raise httpcore.ConnectError("recorded")

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


class ScriptedConnector(RecordingConnector):
    """Network backend that replays responses: the n-th connection to a known address gets the n-th
    response. Other addresses fail to connect."""

    def __init__(self, responses: dict[str, list[bytes]]) -> None:
        super().__init__()
        self._responses = responses
        self.sent: list[bytes] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        if not self._responses.get(host):
            return await super().connect_tcp(host, port, timeout, local_address, socket_options)
        self.connections.append((host, port))
        return _ReplayStream(self._responses[host].pop(0), self.sent)


class _ReplayStream(httpcore.AsyncMockStream):
    def __init__(self, response: bytes, sent: list[bytes]) -> None:
        super().__init__([response])
        self._sent = sent
        sent.append(b"")

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._sent[-1] += buffer


def redirect_bytes(to: str, status: int = 302) -> bytes:
    """Return the bytes of a redirect response."""
    return b"HTTP/1.1 %d Moved\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % (
        status,
        to.encode(),
    )


class FakeResolver:
    """Resolver with scripted results: the n-th lookup of a name gets its n-th address list."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.lookups: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        given = self._answers.get(host, [["93.184.216.34"]])
        return given.pop(0) if len(given) > 1 else given[0]


def recording_client(
    reach: Reach | None = None, resolver: FakeResolver | None = None
) -> tuple[HttpClient, RecordingConnector, FakeResolver]:
    """Make an HTTP client that runs all address checks and opens no connection."""
    connector, resolver = RecordingConnector(), resolver or FakeResolver()
    return HttpClient(reach or Reach(), resolve=resolver, connector=connector), connector, resolver
