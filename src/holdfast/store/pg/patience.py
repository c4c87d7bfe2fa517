"""A bound on how long an answer may take: a connection that brings none is cut off.

A server that stands still, or a network that swallows what is sent, tells nobody; keep-alives do not help
where the other side's kernel, or something in between, answers them. The library waits without a bound. So
one thread of the process looks, every second, at the connections that somebody waits for, and shuts down the
sockets of those that have taken too long: whoever waits there hears of it at once, as if the server had left.

Whoever is about to stop has less patience (`Haste`): for a while it waits as ever, then for moments only.
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

LOOK_S = 1.0
# How long an answer may take for somebody in haste: one of a server that is there comes sooner.
HASTE_S = 4.0
# How long a server may take to let us in then. The library takes no less.
HASTE_CONNECT_S = 2


class Haste:
    """Of all connections of a store: whether its process is about to stop, and how long it still waits."""

    def __init__(self) -> None:
        # By the monotonic clock; 0: it does not stop.
        self._until_ns = 0

    def stop_within(self, seconds: float) -> None:
        self._until_ns = SYSTEM.mono_ns() + int(seconds * S)

    @property
    def stopping(self) -> bool:
        return self._until_ns > 0

    @property
    def over(self) -> bool:
        """Whether a server that is away is waited for no longer."""
        return 0 < self._until_ns <= SYSTEM.mono_ns()


class Patient(Protocol):
    """A connection that says since when it is waited for."""

    # When what is under way was asked for, by the monotonic clock; 0 when nothing is.
    asked_ns: int
    # How long an answer may take.
    patience_s: float
    haste: Haste
    # Held while it is cut off, and when an answer is taken: a socket that is gone may be another's.
    ending: threading.Lock

    def fileno(self) -> int: ...


class _Watch:
    def __init__(self) -> None:
        self._watched: weakref.WeakSet[Patient] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._looking = False

    def disown(self) -> None:
        """In a forked child: the connections are the parent's, and the thread that looks is not there."""
        self._watched = weakref.WeakSet()
        self._lock = threading.Lock()
        self._looking = False

    def add(self, connection: Patient) -> None:
        with self._lock:
            self._watched.add(connection)
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="holdfast-patience", daemon=True).start()

    def _look(self) -> None:
        while True:
            SYSTEM.sleep(LOOK_S)
            with self._lock:
                watched = list(self._watched)
            for connection in watched:
                self._end_if_late(connection)

    def _end_if_late(self, connection: Patient) -> None:
        with connection.ending:
            waited_ns = SYSTEM.mono_ns() - connection.asked_ns
            patience_s = connection.patience_s
            if connection.haste.over:
                patience_s = min(patience_s, HASTE_S)
            if connection.asked_ns and waited_ns > patience_s * S:
                with (
                    contextlib.suppress(OSError, psycopg.Error),
                    socket.socket(fileno=os.dup(connection.fileno())) as other,
                ):
                    other.shutdown(socket.SHUT_RDWR)


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.disown)


def watch(connection: Patient) -> None:
    """Cut this connection off when an answer takes too long, for as long as there is anybody who has it."""
    _WATCH.add(connection)
