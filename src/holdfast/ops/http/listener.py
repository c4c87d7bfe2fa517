"""What precedes a connection: the bound of accepted sockets, TLS handshakes, and errors of `accept`.

asyncio calls `connection_made` of a TLS connection after its handshake. A client that never sends a byte would hold a
socket that no limit counts. So `TlsHandshakes` counts from `accept` on: at its limit, a new handshake replaces the oldest
one. Established connections are not evicted for handshakes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.ops.http.protocol import HttpConnection

ACCEPT_QUEUE = 128
# The least interval of warnings that `accept` fails.
WARNING_INTERVAL_S = 10.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger("holdfast.http")


def accepts_per_tick(connections_max: int) -> int:
    """Return how many sockets are accepted before the limits see the first of them."""
    return max(min(connections_max // 8, ACCEPT_QUEUE), 1)


class TlsHandshakes:
    """The sockets whose TLS handshake has not ended, oldest first. Used in the event loop."""

    def __init__(
        self, context: ssl.SSLContext, *, timeout_s: float, limit: Callable[[], int]
    ) -> None:
        self.context = context
        self.timeout_s = timeout_s
        self._limit = limit
        # By the identity of the connection that the handshake begins.
        self._transports: dict[int, asyncio.Transport] = {}

    def __len__(self) -> int:
        return len(self._transports)

    def add(self, connection: HttpConnection, transport: asyncio.Transport) -> None:
        """Count a new handshake. Abort the oldest ones above the limit."""
        while self._transports and len(self._transports) >= self._limit():
            self._transports.pop(next(iter(self._transports))).abort()
        self._transports[id(connection)] = transport

    def remove(self, connection: HttpConnection) -> None:
        """Forget a handshake that has ended or failed."""
        self._transports.pop(id(connection), None)

    def abort(self) -> None:
        """Abort all handshakes."""
        while self._transports:
            self._transports.popitem()[1].abort()


class TlsProtocol(SSLProtocol):
    """asyncio's TLS protocol, which counts its handshake from `accept` on."""

    def __init__(self, handshakes: TlsHandshakes, connection: HttpConnection) -> None:
        super().__init__(
            connection.loop,
            connection,
            handshakes.context,
            None,  # type: ignore[arg-type]  # no future waits for the handshake
            server_side=True,
            ssl_handshake_timeout=handshakes.timeout_s,  # type: ignore[arg-type]  # floats, too
        )
        self._counted = handshakes
        self._http = connection

    def connection_made(self, transport: Any) -> None:
        self._counted.add(self._http, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._counted.remove(self._http)
        super().connection_lost(exc)


class AcceptErrors:
    """The exception handler of the event loop: one warning in a while if `accept` fails for want of resources. asyncio
    itself would print a traceback for each attempt. It accepts again after a second."""

    def __init__(self) -> None:
        self._warned_s: float | None = None

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_exhausted = isinstance(error, OSError) and error.errno in _EXHAUSTED
        if error is None or not is_exhausted or "socket" not in context:
            loop.default_exception_handler(context)
            return
        now_s = loop.time()
        if self._warned_s is None or now_s >= self._warned_s + WARNING_INTERVAL_S:
            self._warned_s = now_s
            _log.warning("cannot accept connections: %s", error)
