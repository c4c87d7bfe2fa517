"""The HTTP server: a socket, uvicorn in a dedicated thread, and its connections.

- Commits are awaited as futures, and reads run in a thread pool. A slow client delays only its own
  connection.
- On stop the server finishes running requests, ends long polls with their current result, and closes all
  other connections.

uvicorn accepts connections and runs the ASGI application (`application`). `protocol` is its protocol for a connection.
The module needs the extra `ops`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import uvicorn

from holdfast.errors import Invalid
from holdfast.ops.http.application import HttpApplication
from holdfast.ops.http.auth import ListenAddress, RequestGuard
from holdfast.ops.http.limits import ConnectionLimits
from holdfast.ops.http.listener import (
    ACCEPT_QUEUE,
    AcceptErrors,
    TlsHandshakes,
    TlsProtocol,
    accepts_per_tick,
)
from holdfast.ops.http.protocol import HttpConnection
from holdfast.ops.http.request_rate import RequestRate
from holdfast.ops.http.routes import HttpApi, Route
from holdfast.ops.http.sessions import BrowserSessions
from holdfast.ops.http.threads import HttpThreads
from holdfast.ops.http.tls import CertificateFiles

STOP_S = 5.0
# The interval of looks at the files of tokens and certificates, in ticks of 0.1 s.
REFRESH_TICKS = 10

T = TypeVar("T")


class HttpServer:
    """The HTTP server as a service, with the same interface as the roles for the supervisor."""

    name = "http"
    # It has no tick loop that the watchdog could check.
    ticking = False

    def __init__(
        self,
        make_api: Callable[[HttpServer], HttpApi],
        *,
        address: ListenAddress,
        guard: RequestGuard,
        limits: ConnectionLimits | None = None,
        tls: CertificateFiles | None = None,
        rate: RequestRate | None = None,
    ) -> None:
        """Bind the socket. `make_api` is called in the event loop when it runs."""
        self._make_api = make_api
        self.guard = guard
        self._tls = tls
        self.rate = rate or RequestRate(0)
        self.limits = limits or ConnectionLimits()
        self.rounds = 0
        self.failure: BaseException | None = None
        self.stopping = False
        self.bodies_bytes = 0
        # The number of responses by the first digit of their status.
        self.responses = dict.fromkeys(range(2, 6), 0)
        self._socket = _bind(address)
        host, port = self._socket.getsockname()[:2]
        self.address = ListenAddress(host, port)
        guard.sessions = BrowserSessions(port, is_secure=tls is not None)
        # By identity, oldest first.
        self._connections: dict[int, HttpConnection] = {}
        # Connections above the limit that are being rejected, oldest first.
        self._rejected: dict[int, HttpConnection] = {}
        self._started = threading.Event()
        self._api: HttpApi | None = None
        self._uvicorn: UvicornServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.threads = HttpThreads()
        self._thread: threading.Thread | None = None
        _servers.add(self)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://{self.address}"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes of the running server."""
        return () if self._api is None else self._api.routes

    @property
    def busy(self) -> int:
        """The number of requests in progress."""
        return sum(connection.busy for connection in list(self._connections.values()))

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def connections_max(self) -> int:
        return min(self.limits.connections_max, _open_files_max() // 2)

    @property
    def rejected_max(self) -> int:
        """The most connections that are being rejected; also of TLS handshakes beside full connections."""
        return max(min(self.limits.rejected_max, _open_files_max() // 8), 1)

    @property
    def handshakes_max(self) -> int:
        """The most unfinished TLS handshakes: the places that are free, and a few beside full connections."""
        return max(self.connections_max - self.connections, self.rejected_max)

    def start(self) -> None:
        """Start the thread and return when the server accepts connections."""
        assert self._thread is None, "a server starts once"
        self._thread = threading.Thread(target=self._run, name="holdfast-http", daemon=True)
        self._thread.start()
        self._started.wait()
        if self.failure is not None:
            raise self.failure

    def request_stop(self) -> None:
        self.stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._begin_stop)

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.request_stop()
        self.join(STOP_S * 2)

    async def run_in_thread(self, fn: Callable[..., T], *args: Any) -> T:
        """Run a blocking store read in the thread pool."""
        return await self.threads.read(fn, *args)

    async def parse(self, size: int, fn: Callable[..., T], *args: Any) -> T:
        """Run a parser: in the event loop for a small body, in the parser thread for a large one."""
        return await self.threads.parse(size, fn, *args)

    def make_room_for_bodies(self, newest: HttpConnection) -> bool:
        """Free body memory until the limit holds, and return whether it does. Drops the connection with the
        slowest body first, so that a client that delays the end of its body cannot block other clients."""
        while self.bodies_bytes > self.limits.bodies_bytes_max:
            now_s = self.loop.time()
            rates = [
                (rate, at, connection)
                for at, connection in enumerate(self._connections.values())
                if connection is not newest and (rate := connection.body.rate(now_s)) is not None
            ]
            if not rates:
                return False
            *_, connection = min(rates)
            connection.body.release()
            connection.abort()
        return True

    def add_connection(self, connection: HttpConnection) -> bool:
        """Register a new connection; return False if it is above the connection limit."""
        if self._uvicorn is not None and self._uvicorn.handshakes is not None:
            self._uvicorn.handshakes.remove(connection)
        if self._make_room(connection.peer):
            self._connections[id(connection)] = connection
            return True
        if len(self._rejected) >= self.rejected_max:
            oldest = next(iter(self._rejected))
            self._rejected.pop(oldest).abort()
        self._rejected[id(connection)] = connection
        return False

    def remove_connection(self, connection: HttpConnection) -> None:
        for connections in (self._connections, self._rejected):
            connections.pop(id(connection), None)

    def refresh(self) -> None:
        """Read the files of tokens and certificates again if they changed."""
        self.guard.refresh()
        if self._tls is not None:
            self._tls.refresh()

    def check_times(self) -> None:
        """Close the connections whose timeouts are over."""
        now_s = self.loop.time()
        for connection in (*self._connections.values(), *self._rejected.values()):
            connection.check_time(now_s)

    def mark_started(self) -> None:
        self.rounds = 1
        self._started.set()

    # -- inside ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self._socket.close()
            self.threads.shutdown()
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        api = self._api = self._make_api(self)
        config = uvicorn.Config(
            HttpApplication(self, api),
            http=HttpConnection,
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            timeout_graceful_shutdown=int(STOP_S),
        )
        self._loop.set_exception_handler(AcceptErrors().handle)
        self._uvicorn = UvicornServer(self, config, self._tls)
        if self.stopping:
            self._begin_stop()
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            api.close()
            self._uvicorn.abort_handshakes()
            for connection in (*self._connections.values(), *self._rejected.values()):
                connection.abort()

    def _begin_stop(self) -> None:
        """End all long polls, and let uvicorn stop."""
        if self._api is not None and self._uvicorn is not None:
            self._api.close()
            self._uvicorn.abort_handshakes()
            self._uvicorn.should_exit = True

    def _make_room(self, peer: str) -> bool:
        """Make room for one more connection, and return whether there is. Evicts a connection that waits for
        its client: an unproven one first, then the one that has waited longest. So idle or slow connections
        cannot block new clients."""
        self._limit_unproven(peer)
        if len(self._connections) < self.connections_max:
            return True
        waiting = [
            (connection.proven, connection.has_unsent, connection.client_wait_since_s, at, key)
            for at, (key, connection) in enumerate(self._connections.items())
            if connection.client_wait_since_s is not None
        ]
        if not waiting:
            return False
        *_, key = min(waiting)
        self._connections.pop(key).abort()
        return True

    def _limit_unproven(self, peer: str) -> None:
        """Drop unproven connections older than the grace period if there are too many of them."""
        limits = self.limits
        unproven_max = self.connections_max * limits.unproven_share
        if len(self._connections) < self.connections_max * limits.unproven_per_peer_share:
            return
        unproven = [item for item in self._connections.items() if not item[1].proven]
        same_peer = [item for item in unproven if item[1].peer == peer]
        if len(same_peer) >= self.connections_max * limits.unproven_per_peer_share:
            unproven = same_peer
        elif len(unproven) < unproven_max:
            return
        before_s = self.loop.time() - limits.unproven_grace_s
        for key, connection in unproven:
            since_s = connection.client_wait_since_s
            if since_s is not None and since_s < before_s:
                self._connections.pop(key).abort()


class UvicornServer(uvicorn.Server):
    """uvicorn's server with the timeouts of our connections."""

    def __init__(
        self, http_server: HttpServer, config: uvicorn.Config, tls: CertificateFiles | None
    ) -> None:
        super().__init__(config)
        self._http_server = http_server
        self.handshakes: TlsHandshakes | None = None
        if tls is not None:
            self.handshakes = TlsHandshakes(
                tls.context,
                timeout_s=http_server.limits.head_s,
                limit=lambda: http_server.handshakes_max,
            )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn itself would let a TLS handshake take a minute, and count it only after its end."""
        config, handshakes = self.config, self.handshakes
        loop = asyncio.get_running_loop()

        def new_protocol() -> asyncio.BaseProtocol:
            connection = HttpConnection(
                self._http_server,
                config=config,
                server_state=self.server_state,
                app_state={},
                _loop=loop,
            )
            return connection if handshakes is None else TlsProtocol(handshakes, connection)

        self.servers = [
            await loop.create_server(
                new_protocol,
                sock=listener,
                # Also the number of sockets that one tick accepts.
                backlog=accepts_per_tick(self._http_server.connections_max),
            )
            for listener in sockets or ()
        ]
        for listener in sockets or ():
            listener.listen(ACCEPT_QUEUE)
        self.started = True

    def abort_handshakes(self) -> None:
        if self.handshakes is not None:
            self.handshakes.abort()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self._http_server.check_times()
        self._http_server.mark_started()
        if counter % REFRESH_TICKS == 0:
            self._http_server.refresh()
        return await super().on_tick(counter)


def _open_files_max() -> int:
    """The limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _bind(address: ListenAddress) -> socket.socket:
    """Create the bound socket. An address error is raised to the caller that creates the server."""
    listener: socket.socket | None = None
    try:
        addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, _, _, socket_address = addresses[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        why = error.strerror or str(error)
        raise Invalid(what="--http", address=str(address), why=why) from None


# The servers of this process.
_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


def _close_sockets_in_child() -> None:
    """Close listening sockets in a forked child, which would otherwise keep the port after the parent ends."""
    for server in _servers:
        server._socket.close()


os.register_at_fork(after_in_child=_close_sockets_in_child)
