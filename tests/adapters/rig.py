"""Counterparts on loopback: an HTTP server with routes, and certificates of our own authority.

`Recorder` is a connector that notes where it was asked to connect and never does. `Scripted` is one
whose connections go nowhere either: at the addresses it knows it plays back the bytes of an answer.
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

from holdfast.adapters.guard import Reach
from holdfast.adapters.http import Http

T = TypeVar("T")

LOOPBACK = Reach(ports=(), cidrs=("127.0.0.0/8", "::1/128"))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


@dataclass
class Seen:
    """One request, as the server had it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Route = Callable[[BaseHTTPRequestHandler, Seen], None]


@dataclass
class Server:
    host: str
    port: int
    scheme: str
    routes: dict[str, Route] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    # Set when the test is over: routes that hang wait for it.
    over: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str = "/") -> str:
        return f"{self.scheme}://{self.host}:{self.port}{path}"


@contextmanager
def serving(
    host: str = "127.0.0.1", *, name: str | None = None, context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    server = Server(name or host, 0, "http" if context is None else "https")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            seen = Seen(self.command, self.path, headers, self.rfile.read(size))
            server.seen.append(seen)
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
        server.over.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def answer(status: int = 200, body: bytes = b"", headers: dict[str, str] | None = None) -> Route:
    def route(handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        handler.send_response(status)
        told = {"content-length": str(len(body)), **(headers or {})}
        for name, value in told.items():
            handler.send_header(name, value)
        handler.end_headers()
        if seen.method != "HEAD":
            handler.wfile.write(body)

    return route


def redirect(to: str, status: int = 302) -> Route:
    return answer(status, headers={"location": to})


def context_for(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


class Recorder(httpcore.AsyncNetworkBackend):
    """Notes every connection that is asked for, and makes none."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.asked.append((host, port))
        raise httpcore.ConnectError("recorded")

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


class Scripted(Recorder):
    """At an address that it knows, the n-th connection gets the n-th answer; elsewhere nothing."""

    def __init__(self, answers: dict[str, list[bytes]]) -> None:
        super().__init__()
        self._answers = answers
        self.sent: list[bytes] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        if not self._answers.get(host):
            return await super().connect_tcp(host, port, timeout, local_address, socket_options)
        self.asked.append((host, port))
        return _Played(self._answers[host].pop(0), self.sent)


class _Played(httpcore.AsyncMockStream):
    def __init__(self, answer: bytes, sent: list[bytes]) -> None:
        super().__init__([answer])
        self._sent = sent
        sent.append(b"")

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._sent[-1] += buffer


def moved(to: str, status: int = 302) -> bytes:
    """The bytes of a redirect."""
    return b"HTTP/1.1 %d Moved\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % (
        status,
        to.encode(),
    )


class Names:
    """A resolver with answers of its own: the n-th look-up of a name gets its n-th answer."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        given = self._answers.get(host, [["93.184.216.34"]])
        return given.pop(0) if len(given) > 1 else given[0]


def recorded(
    reach: Reach | None = None, names: Names | None = None
) -> tuple[Http, Recorder, Names]:
    """Requests that are judged in full and go nowhere."""
    connector, names = Recorder(), names or Names()
    return Http(reach or Reach(), resolve=names, connector=connector), connector, names
