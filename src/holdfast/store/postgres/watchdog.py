"""The watchdog for answers: it shuts down connections whose answer takes too long.

A stopped server or a network that drops packets gives no error. Keep-alives do not help if the peer's kernel or
a middlebox answers them, and psycopg waits without a bound. One thread per process checks the waiting
connections every second and shuts down the sockets that exceed their timeout. The waiting thread then gets an
error at once, as if the server had closed the connection.

A stopping process has a `ShutdownDeadline`: after it, the timeouts are short.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from typing import Protocol

import psycopg

from holdfast.clock import SYSTEM, S

CHECK_INTERVAL_S = 1.0
# The answer timeout after the shutdown deadline. A reachable server answers sooner.
SHUTDOWN_ANSWER_S = 4.0
# The connect timeout of a stopping process, the minimum of libpq.
SHUTDOWN_CONNECT_S = 2


class ShutdownDeadline:
    """The shutdown deadline of a store, shared by all of its connections."""

    def __init__(self) -> None:
        # By the monotonic clock; 0: not stopping.
        self._until_ns = 0

    def stop_within(self, seconds: float) -> None:
        self._until_ns = SYSTEM.mono_ns() + int(seconds * S)

    @property
    def is_stopping(self) -> bool:
        return self._until_ns > 0

    @property
    def is_expired(self) -> bool:
        """Whether the deadline has passed: no call waits for an unreachable server."""
        return 0 < self._until_ns <= SYSTEM.mono_ns()


class WatchedConnection(Protocol):
    """A connection that the watchdog checks."""

    # The start of the current wait by the monotonic clock; 0 without a wait.
    waiting_since_ns: int
    # The answer timeout.
    answer_timeout_s: float
    shutdown_deadline: ShutdownDeadline
    # Held during the shutdown and at the end of a wait: a closed descriptor may belong to another socket.
    socket_lock: threading.Lock

    def fileno(self) -> int: ...


class _Watchdog:
    def __init__(self) -> None:
        self._watched: weakref.WeakSet[WatchedConnection] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._running = False

    def reset_in_child(self) -> None:
        """Reset in a forked child: the connections belong to the parent, and the thread does not exist."""
        self._watched = weakref.WeakSet()
        self._lock = threading.Lock()
        self._running = False

    def add(self, connection: WatchedConnection) -> None:
        with self._lock:
            self._watched.add(connection)
            if not self._running:
                self._running = True
                threading.Thread(
                    target=self._run, name="holdfast-connection-watchdog", daemon=True
                ).start()

    def _run(self) -> None:
        while True:
            SYSTEM.sleep(CHECK_INTERVAL_S)
            with self._lock:
                watched = list(self._watched)
            for connection in watched:
                self._shut_down_if_late(connection)

    def _shut_down_if_late(self, connection: WatchedConnection) -> None:
        with connection.socket_lock:
            waited_ns = SYSTEM.mono_ns() - connection.waiting_since_ns
            timeout_s = connection.answer_timeout_s
            if connection.shutdown_deadline.is_expired:
                timeout_s = min(timeout_s, SHUTDOWN_ANSWER_S)
            if connection.waiting_since_ns and waited_ns > timeout_s * S:
                with (
                    contextlib.suppress(OSError, psycopg.Error),
                    socket.socket(fileno=os.dup(connection.fileno())) as duplicate,
                ):
                    duplicate.shutdown(socket.SHUT_RDWR)


_WATCHDOG = _Watchdog()
os.register_at_fork(after_in_child=_WATCHDOG.reset_in_child)


def watch(connection: WatchedConnection) -> None:
    """Watch this connection until it is garbage-collected."""
    _WATCHDOG.add(connection)
