"""One tick of a runner: its counts, and the lock that serialises ticks and due checks.

Every runner has a tick lock, and several runners may share one. Stores are thread-safe and do not need
it. It is for runners whose inline handlers, which run inside a tick, share objects that are not
thread-safe. After `shutdown` every entering or waiting thread gets `TickLockClosed`. Reentry from a
handler or sink is rejected, because it would deadlock.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from holdfast.errors import HoldfastError, Invalid


@dataclass(slots=True)
class TickStats:
    """Counts of one tick."""

    claimed: int = 0
    done: int = 0
    requeued: int = 0
    dead: int = 0
    # Claims that expired or were cancelled before settlement.
    lost: int = 0
    # Transient store errors (busy, conflict, not found, unknown outcome).
    busy: int = 0
    # Claims that were released without counting a failure.
    released: int = 0
    # Due items that were not admitted: dropped, refused or delayed.
    not_admitted: int = 0

    @property
    def made_progress(self) -> bool:
        """Whether the tick made progress. Otherwise the runner may sleep."""
        return bool(
            self.claimed
            or self.done
            or self.requeued
            or self.dead
            or self.lost
            or self.not_admitted
        )


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
            raise Invalid(what="tick lock", why="this thread already holds it")
        self._lock.acquire()
        if self._closed.is_set():
            self._lock.release()
            raise TickLockClosed()
        self._holder = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        self._holder = 0
        self._lock.release()
