"""Connections of children: one thread reads all of them and posts their exchanges.

With one thread per connection, hundreds of threads would spend more time waiting for the GIL after each
read than on the work. Exchanges (reports and claims) are most of the requests, and short. The reader
thread decodes them and posts them to the log writer, which also sends the reply. A pool thread takes any
other request and any long exchange, since it may block. The reader does not read that connection
meanwhile: a connection has one request under way.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.spark import ledger_protocol
from holdfast.spark.reply_ticket import ReplyTicket

# Concurrent requests other than exchanges: outcomes, input blocks.
REQUEST_THREADS_MAX = 512


class ChildConnection:
    """An authenticated connection. `last_ticket` belongs to its latest exchange."""

    def __init__(self, sock: socket.socket, owner: str) -> None:
        self.sock = sock
        self.owner = owner
        self.requests = ledger_protocol.RequestReader(sock)
        self.last_ticket: ReplyTicket | None = None


# Posts a request if it is an exchange; else returns False.
PostExchange = Callable[[ChildConnection, Any, memoryview], bool]
# Serves one request and may block.
ServeRequest = Callable[[ChildConnection, Any, memoryview], None]


class ConnectionReader:
    """The reader thread. It calls `on_closed` for each closed connection, in a thread that may block."""

    def __init__(
        self, post: PostExchange, serve: ServeRequest, on_closed: Callable[[ChildConnection], None]
    ) -> None:
        self._post = post
        self._serve = serve
        self._on_closed = on_closed
        self._selector = selectors.DefaultSelector()
        self._added: deque[ChildConnection] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._pool = ThreadPoolExecutor(REQUEST_THREADS_MAX, thread_name_prefix="ledger-request")
        self._closing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-connections", daemon=True)
        self._thread.start()

    def add(self, child: ChildConnection) -> None:
        """Start reading this connection."""
        self._added.append(child)
        self._wake()
        if self._closed:
            self._close_added()

    def close(self) -> None:
        """End the reader thread and close its connections, those of requests under way after their replies."""
        self._closing = True
        self._wake()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.sock.close()
        # Before the connections that were added meanwhile: `add` uses the opposite order.
        self._closed = True
        self._close_added()
        for resource in (self._selector, self._wake_in, self._wake_out):
            resource.close()
        self._pool.shutdown(wait=False)

    def _close_added(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._added.popleft().sock.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    # --- the thread that reads ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                child = key.data
                if child is not None:
                    self._on_readable(child)
                    continue
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
                while self._added:
                    new = self._added.popleft()
                    self._selector.register(new.sock, selectors.EVENT_READ, new)
                    # A complete request may already be buffered behind the previous one.
                    self._post_ready(new)

    def _on_readable(self, child: ChildConnection) -> None:
        try:
            alive = child.requests.read_available()
        except OSError:
            alive = False
        if alive:
            self._post_ready(child)
        else:
            self._submit_to_pool(child, self._on_closed)

    def _post_ready(self, child: ChildConnection) -> None:
        """Post the buffered exchanges. Any other request goes to the pool."""
        while True:
            if child.last_ticket is not None and not child.last_ticket.is_woken:
                if child.requests.has_bytes:
                    # The client pipelined a request before its reply: a thread that waits serves
                    # it.
                    self._submit_to_pool(child, self._serve_next)
                return
            try:
                request = child.requests.take_ready()
            except HoldfastError:
                self._submit_to_pool(child, self._on_closed)
                return
            if request is None:
                if child.requests.is_long:
                    self._submit_to_pool(child, self._serve_next)
                return
            if not self._post(child, *request):
                self._submit_to_pool(child, self._serve_request, *request)
                return

    def _submit_to_pool(
        self, child: ChildConnection, work: Callable[..., None], *request: Any
    ) -> None:
        self._selector.unregister(child.sock)
        self._pool.submit(work, child, *request)

    # --- threads of the pool ------------------------------------------------------------------

    def _serve_next(self, child: ChildConnection) -> None:
        """Read one request of any length and serve it. Blocks."""
        try:
            if child.last_ticket is not None:
                child.last_ticket.wait_settled()
            request, data = child.requests.wait_next()
        except (OSError, HoldfastError):
            self._on_closed(child)
            return
        if self._post(child, request, data):
            self.add(child)
        else:
            self._serve_request(child, request, data)

    def _serve_request(self, child: ChildConnection, request: Any, data: memoryview) -> None:
        try:
            self._serve(child, request, data)
        except (OSError, HoldfastError):
            self._on_closed(child)
            return
        self.add(child)
