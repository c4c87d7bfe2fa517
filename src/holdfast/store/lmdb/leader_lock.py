"""A leader lock (leader/followers) that survives an exception raised by a signal handler.

A signal handler may raise in the main thread between any two steps, also right after it acquired the lock. The
function that acquires the lock is its owner: the lock keeps the frame of that function until the release. If the
function has ended without a release, or was interrupted before its frame was recorded, the lock is orphaned. The
next thread that checks repeatedly takes an orphaned lock over.
"""

from __future__ import annotations

import inspect
import sys
import threading
from types import FrameType

from holdfast.clock import SYSTEM, S

# How often a waiting thread checks for an orphaned lock.
RECHECK_S = 0.25
# A lock that has no running owner for this long is orphaned.
ORPHANED_AFTER_S = 0.2
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_running(frame: FrameType) -> bool:
    """Whether the function of a frame has not returned or raised yet."""
    if frame.f_code.co_flags & _SUSPENDABLE:
        return True  # Python 3.11 would close a suspended generator here
    try:
        # Refused while the function runs. Afterwards it drops the local variables, which no code needs then.
        frame.clear()
    except RuntimeError:
        return True
    return False


class LeaderLock:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orphan_check_lock = threading.Lock()
        # The frame of the function that acquired the lock; None while the lock is free.
        self._owner: FrameType | None = None
        self._acquisitions = 0
        self._suspected: tuple[int, int] = (0, 0)

    def try_acquire(self, *, check_orphaned: bool = False) -> bool:
        """Acquire the lock if it is free, and with `check_orphaned` also if it is orphaned.

        The calling function becomes the owner: it must release the lock before it returns.
        """
        if self._lock.acquire(False):
            self._owner = sys._getframe(1)
            self._acquisitions += 1
            return True
        return check_orphaned and self._take_over(sys._getframe(1))

    @property
    def is_locked(self) -> bool:
        return self._lock.locked()

    def release(self) -> None:
        # First: the reference from the lock to the frame is a cycle.
        self._owner = None
        try:
            self._lock.release()
        except RuntimeError:
            return  # another thread took the lock over as orphaned

    def __enter__(self) -> None:
        owner = sys._getframe(1)
        # A wait with a timeout costs more than a try, even if the lock is free.
        if not self._lock.acquire(False):
            while not self._lock.acquire(timeout=RECHECK_S):
                if self._take_over(owner):
                    return
        self._owner = owner
        self._acquisitions += 1

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _take_over(self, new_owner: FrameType) -> bool:
        """Acquire the lock if it is orphaned."""
        with self._orphan_check_lock:
            if not self._is_orphaned():
                return False
            self._owner = new_owner
            self._acquisitions += 1
            return True

    def _is_orphaned(self) -> bool:
        """Whether the same acquisition had no running owner at two checks. A thread may be about to record its
        frame, so one check is not enough."""
        acquisitions, owner, now_ns = self._acquisitions, self._owner, SYSTEM.mono_ns()
        if not self._lock.locked() or (owner is not None and _is_running(owner)):
            self._suspected = (0, 0)
            return False
        suspected, since_ns = self._suspected
        if suspected != acquisitions or not since_ns:
            self._suspected = (acquisitions, now_ns)
            return False
        return now_ns - since_ns > ORPHANED_AFTER_S * S
