"""The external service of the chaos run: records the calls of effects and tasks.

It listens on a Unix socket, which is reachable also from a machine without network. It records every call before it
answers. A line is `caller kind id key`: the worker, "effect" or "task", the order, and the idempotency key.
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


class ReceivedCall(NamedTuple):
    caller: str
    kind: str
    id: str
    key: str
    # Time of the monotonic clock, which all network namespaces share.
    at_s: float


class Receiver:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[ReceivedCall] = []
        receiver = self

        class CallHandler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    receiver.calls.append(ReceivedCall(*line.decode().split(), time.monotonic()))
                    self.wfile.write(b"taken\n")

        self._server = _Server(str(path), CallHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def keys_by_id(self, kind: str) -> dict[str, list[str]]:
        """For each order: the idempotency key of each call."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for call in list(self.calls):
            if call.kind == kind:
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
        """Ignore the error: a caller that was killed during its call has closed the connection."""


def call(path: str, caller: str, kind: str, id: str, key: str) -> None:
    """Send a call and wait until the receiver has recorded it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(path)
        connection.sendall(f"{caller} {kind} {id} {key}\n".encode())
        with connection.makefile("rb") as answers:
            if answers.readline() != b"taken\n":
                raise ConnectionError("the receiver did not answer")
