"""The HTTP server: a socket, an event loop in a thread of its own, and its connections.

- Whatever waits for the store waits as a future, and reads run in a few threads. A client that is slow
  costs its connection and nobody's time.
- Stopping answers what is under way, ends long polls with what they have, and closes the rest.

The standard library only: workers in other languages need no more than what the core needs.
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.errors import Invalid
from holdfast.ops.http.connection import Connection, Limits, Reader
from holdfast.ops.http.guard import Address, Guard
from holdfast.ops.http.route import Api

STOP_S = 5.0
READERS = 4
BACKLOG = 128
# A body of this size is parsed in a thread: it takes a millisecond or more.
LARGE_BYTES = 64 * 1024

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
        limits: Limits | None = None,
    ) -> None:
        """`make_api` is called in the loop, once it runs."""
        self._make_api = make_api
        self.guard = guard
        self.limits = limits or Limits()
        self.connections_max = min(self.limits.connections_max, _files_max() // 2)
        self.rounds = 0
        self.failure: BaseException | None = None
        self.stopping = False
        self.bodies_bytes = 0
        self._socket = _bound(address)
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        self._connections: dict[asyncio.Task[None], Connection] = {}
        # One too many, each for a moment, the first of them first.
        self._refused: dict[Connection, None] = {}
        self._started = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-http-read")
        # One at a time, so that large bodies take no more than their share of the interpreter.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="holdfast-http-parse")
        self._thread: threading.Thread | None = None
        _servers.add(self)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    @property
    def busy(self) -> int:
        """Requests under way."""
        return sum(connection.busy for connection in list(self._connections.values()))

    @property
    def connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Returns when it listens."""
        assert self._thread is None, "a server starts once"
        self._thread = threading.Thread(target=self._run, name="holdfast-http", daemon=True)
        self._thread.start()
        self._started.wait()
        if self.failure is not None:
            raise self.failure

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

    async def parse(self, size: int, fn: Callable[..., T], *args: Any) -> T:
        """Run what takes as long as a body of this size is large: elsewhere, if that is long for the others."""
        if size < LARGE_BYTES:
            return fn(*args)
        return await self.loop.run_in_executor(self._parser, fn, *args)

    def make_room_for_bodies(self, newest: Connection) -> bool:
        """Whether all bodies find room. If not, the one that arrives most slowly gives way: a client that
        sends all but the end of a body, and dribbles that, keeps nobody out."""
        while self.bodies_bytes > self.limits.bodies_bytes_max:
            now_s = self.loop.time()
            rates = [
                (rate, at, connection)
                for at, connection in enumerate(self._connections.values())
                if connection is not newest and (rate := connection.body_rate(now_s)) is not None
            ]
            if not rates:
                return False
            *_, connection = min(rates)
            connection.release()
            connection.drop()
        return True

    # -- inside ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
        finally:
            self._socket.close()
            self._readers.shutdown(wait=False, cancel_futures=True)
            self._parser.shutdown(wait=False, cancel_futures=True)
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        api = self._make_api(self)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            assert isinstance(reader, Reader)
            connection = Connection(self, api, reader, writer)
            if not self._make_room(connection.peer):
                await self._turn_away(connection)
                return
            self._connections[task] = connection
            try:
                await connection.serve()
            finally:
                self._connections.pop(task, None)

        server = await self._loop.create_server(
            lambda: asyncio.StreamReaderProtocol(Reader(), connected),
            sock=self._socket,
            backlog=BACKLOG,
        )
        self.rounds = 1
        self._started.set()
        if self.stopping:
            self._stop.set()
        await self._stop.wait()
        server.close()
        api.close()
        for task, connection in list(self._connections.items()):
            if not connection.busy:
                task.cancel()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=STOP_S)
        for task in list(self._connections):
            task.cancel()

    def _make_room(self, peer: str) -> bool:
        """Whether there is room for one more. A connection on which the server waits for its client gives way:
        one without a trusted request before others, then the one that has waited longest. So connections
        that idle, or dribble, keep nobody out."""
        self._limit_unproven(peer)
        if len(self._connections) < self.connections_max:
            return True
        silent = [
            (connection.proven, connection.unread, connection.waits_since_s, at, task)
            for at, (task, connection) in enumerate(self._connections.items())
            if connection.waits_since_s is not None
        ]
        if not silent:
            return False
        *_, task = min(silent)
        self._connections.pop(task).drop()
        return True

    def _limit_unproven(self, peer: str) -> None:
        """Let unproven connections go that have waited for longer than the grace, where there are too many."""
        limits = self.limits
        most = self.connections_max * limits.unproven_share
        if len(self._connections) < self.connections_max * limits.unproven_per_peer_share:
            return
        unproven = [one for one in self._connections.items() if not one[1].proven]
        own = [one for one in unproven if one[1].peer == peer]
        if len(own) >= self.connections_max * limits.unproven_per_peer_share:
            unproven = own
        elif len(unproven) < most:
            return
        before_s = self.loop.time() - limits.unproven_grace_s
        for task, connection in unproven:
            since_s = connection.waits_since_s
            if since_s is not None and since_s < before_s:
                self._connections.pop(task).drop()

    async def _turn_away(self, connection: Connection) -> None:
        if len(self._refused) >= self.limits.refused_max:
            first = next(iter(self._refused))
            del self._refused[first]
            first.drop()
        self._refused[connection] = None
        try:
            await connection.turn_away()
        finally:
            self._refused.pop(connection, None)


def _files_max() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _bound(address: Address) -> socket.socket:
    """Bound from here on: what cannot be is told to whoever makes the server."""
    made: socket.socket | None = None
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, _, _, where = found[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        return made
    except OSError as error:
        if made is not None:
            made.close()
        why = error.strerror or str(error)
        raise Invalid(what="--http", address=str(address), why=why) from None


# Those of this process.
_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


def _disown_in_child() -> None:
    """A forked child does not listen: its parent's port would stay taken when the parent ends."""
    for server in _servers:
        server._socket.close()


os.register_at_fork(after_in_child=_disown_in_child)
