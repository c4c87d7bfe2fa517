"""The connections of children: one thread reads them all, and posts the steps.

A thread for each connection would wait for the interpreter after every read, and hundreds of them spend more on
that than on the work. Steps (reports, claims) are the bulk, and short: they are read here and posted to the writer
of the log, which also sends the reply. Any other request, and a step that is long, is taken by a thread of a pool,
which may wait; its connection is not read meanwhile, since one request has one answer.
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
from holdfast.spark import wire
from holdfast.spark.reply_ticket import ReplyTicket

# As many requests that are no steps are served at once: outcomes, blocks of the input.
THREADS_MAX = 512


class ChildLine:
    """One connection, admitted. `sent` is the ticket of its last step."""

    def __init__(self, line: socket.socket, owner: str) -> None:
        self.line = line
        self.owner = owner
        self.requests = wire.Requests(line)
        self.sent: ReplyTicket | None = None


# Posts a request if it is a step; False: it is another one.
Post = Callable[[ChildLine, Any, memoryview], bool]
# Serves one request, and may wait.
Serve = Callable[[ChildLine, Any, memoryview], None]


class ChildLines:
    """`ended` is told of each connection that ended, in a thread that may wait."""

    def __init__(self, post: Post, serve: Serve, ended: Callable[[ChildLine], None]) -> None:
        self._post = post
        self._serve = serve
        self._ended = ended
        self._selector = selectors.DefaultSelector()
        self._added: deque[ChildLine] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="line")
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def add(self, child: ChildLine) -> None:
        """Read this connection from here on."""
        self._added.append(child)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    # --- the thread that reads ----------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                child = key.data
                if child is not None:
                    self._readable(child)
                    continue
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
                while self._added:
                    new = self._added.popleft()
                    self._selector.register(new.line, selectors.EVENT_READ, new)
                    # A request may have come whole with the one before it.
                    self._take(new)

    def _readable(self, child: ChildLine) -> None:
        try:
            alive = child.requests.read()
        except OSError:
            alive = False
        if alive:
            self._take(child)
        else:
            self._hand_over(child, self._ended)

    def _take(self, child: ChildLine) -> None:
        """Post the steps that are there; another request goes to the pool."""
        while True:
            if child.sent is not None and not child.sent.answered:
                if child.requests.begun:
                    # It did not wait for its answer: it is served by a thread that does.
                    self._hand_over(child, self._next)
                return
            try:
                found = child.requests.ready()
            except HoldfastError:
                self._hand_over(child, self._ended)
                return
            if found is None:
                if child.requests.long:
                    self._hand_over(child, self._next)
                return
            if not self._post(child, *found):
                self._hand_over(child, self._other, *found)
                return

    def _hand_over(self, child: ChildLine, work: Callable[..., None], *request: Any) -> None:
        self._selector.unregister(child.line)
        self._pool.submit(work, child, *request)

    # --- threads of the pool ------------------------------------------------------------------

    def _next(self, child: ChildLine) -> None:
        """Read one request, however long it takes, and serve it."""
        try:
            if child.sent is not None:
                child.sent.until_settled()
            request, data = child.requests.next()
        except (OSError, HoldfastError):
            self._ended(child)
            return
        if self._post(child, request, data):
            self.add(child)
        else:
            self._other(child, request, data)

    def _other(self, child: ChildLine, request: Any, data: memoryview) -> None:
        try:
            self._serve(child, request, data)
        except (OSError, HoldfastError):
            self._ended(child)
            return
        self.add(child)
