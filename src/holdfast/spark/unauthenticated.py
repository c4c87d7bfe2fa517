"""Unauthenticated connections: an admission queue, bounded in number and in time.

Each connection occupies a thread of the ledger service until it has sent the token of the run. Above
`UNAUTHENTICATED_MAX` the oldest connection is closed. Each is closed after `HELLO_S`, even if it is sending
slowly.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from holdfast.clock import SYSTEM, S

UNAUTHENTICATED_MAX = 64
HELLO_S = 10.0


class UnauthenticatedConnections:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Arrival time of each connection, oldest first.
        self._sockets: dict[socket.socket, int] = {}

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets[sock] = SYSTEM.mono_ns()
            if len(self._sockets) > UNAUTHENTICATED_MAX:
                self._shutdown_oldest()

    def remove(self, sock: socket.socket) -> None:
        """Forget a connection that has sent the token or has closed."""
        with self._lock:
            self._sockets.pop(sock, None)

    def close_oldest(self) -> None:
        """Close the oldest connection: the process is out of descriptors or threads."""
        with self._lock:
            if self._sockets:
                self._shutdown_oldest()

    def close_expired(self) -> None:
        """Close the connections that have exceeded their time."""
        before_ns = SYSTEM.mono_ns() - int(HELLO_S * S)
        with self._lock:
            while self._sockets and next(iter(self._sockets.values())) < before_ns:
                self._shutdown_oldest()

    def _shutdown_oldest(self) -> None:
        sock = next(iter(self._sockets))
        del self._sockets[sock]
        # Its thread reads end of file and closes it.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
