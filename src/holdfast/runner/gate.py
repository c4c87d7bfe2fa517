"""A gate: one at a time ticks, or looks what is due.

Every runner has one; several may share it. The stores do not need that, being thread-safe: it is for
runners whose handlers share something that is not, for in-line handlers run inside their tick. Once
shut it stays shut: whoever comes, or was waiting, gets `GateClosed`. Coming in twice, from a handler
or a sink, is refused: it would wait for itself.
"""

from __future__ import annotations

import threading

from holdfast.errors import HoldfastError, Invalid


class GateClosed(HoldfastError):
    code = "gate_closed"
    hint = "the group of runners was shut down; make a new gate"


class Gate:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._closed = threading.Event()

    def shutdown(self) -> None:
        """Shut it, and return when nobody else is inside any more."""
        self._closed.set()
        if self._holder != threading.get_ident():
            with self._lock:
                pass

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            raise Invalid(what="gate", why="this thread is inside already")
        self._lock.acquire()
        if self._closed.is_set():
            self._lock.release()
            raise GateClosed()
        self._holder = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._holder = 0
        self._lock.release()
