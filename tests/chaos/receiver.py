"""The outside world: whom effects and tasks call, and who counts the calls.

It listens on a Unix socket, which is reachable also for one whose network is cut, and writes every call down
before it answers. A line is `who what id key`: which worker called, for an effect or a task, of which order,
with which idempotency key.
"""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple, Self

ANSWER_S = 10.0


class Call(NamedTuple):
    who: str
    what: str
    id: str
    key: str
    # By the monotonic clock of this machine, the same in all network namespaces.
    at_s: float


class Receiver:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[Call] = []
        receiver = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    receiver.calls.append(Call(*line.decode().split(), time.monotonic()))
                    self.wfile.write(b"taken\n")

        self._server = _Server(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def keys(self, what: str) -> dict[str, list[str]]:
        """By order: the key of each call."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for call in list(self.calls):
            if call.what == what:
                found[call.id].append(call.key)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Whoever was killed in the midst of a call has left; what it said is written down."""


def call(path: str, who: str, what: str, id: str, key: str) -> None:
    """Call, and wait until it is written down."""
    with socket.socket(socket.AF_UNIX) as outside:
        outside.settimeout(ANSWER_S)
        outside.connect(path)
        outside.sendall(f"{who} {what} {id} {key}\n".encode())
        with outside.makefile("rb") as answers:
            if answers.readline() != b"taken\n":
                raise ConnectionError("the receiver did not answer")
