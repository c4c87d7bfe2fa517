"""The tick lock: serialises ticks and due checks of runners.

Every runner has a tick lock, and several runners may share one. Stores are thread-safe and do not need
it. It is for runners whose inline handlers, which run inside a tick, share objects that are not
thread-safe. After `shutdown` every entering or waiting thread gets `TickLockClosed`. Reentry from a
handler or sink is rejected, because it would deadlock.
"""

from __future__ import annotations

import threading

from holdfast.errors import HoldfastError, Invalid


class TickLockClosed(HoldfastError):
    code = "gate_closed"
    hint = "the group of runners was shut down; create a new TickLock"


class TickLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._closed = threading.Event()

    def shutdown(self) -> None:
        """Close the lock and wait until no other thread holds it."""
        self._closed.set()
        if self._holder != threading.get_ident():
            with self._lock:
                pass

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            raise Invalid(what="gate", why="this thread already holds it")
        self._lock.acquire()
        if self._closed.is_set():
            self._lock.release()
            raise TickLockClosed()
        self._holder = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._holder = 0
        self._lock.release()
