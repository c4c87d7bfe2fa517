"""A duty: a lock for whoever does something for all threads, and may be interrupted in it.

The handler of a signal may raise in the main thread between any two steps, also right after the lock was
taken. A duty that the main thread has and is not at, whenever one looks, has lost its owner, and the next
who looks takes it.
"""

from __future__ import annotations

import gc
import operator
import sys
import threading
from types import FrameType
from typing import Any

from holdfast.clock import SYSTEM, S

# How often whoever waits for it looks.
LOOK_S = 0.25
# A duty that nobody is at for this long has lost its owner.
ORPHANED_S = 0.2


def _frames() -> dict[int, FrameType]:
    """The current frame of each thread."""
    if sys.version_info >= (3, 12):
        return sys._current_frames()
    # Python 3.11 may begin a collection in there, which waits for ever for a lock that this very call has
    # (gh-106883). Called from C, one after the other: no thread, no signal and no fork comes in between.
    after = gc.enable if gc.isenabled() else gc.disable
    steps: tuple[Any, ...] = (gc.disable, sys._current_frames, after)
    frames: dict[int, FrameType]
    try:
        _, frames, _ = map(operator.call, steps)
    except BaseException:
        after()
        raise
    return frames


class Duty:
    def __init__(self, file: str, names: frozenset[str]) -> None:
        """It is done by functions of these names, in this file."""
        self._file = file
        self._names = names
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._owner = 0
        self._times = 0
        self._seen: tuple[int, int] = (0, 0)

    def take(self, *, look: bool = False) -> bool:
        """Take it if it is free; with `look`, also if it has lost its owner."""
        if self._lock.acquire(False):
            self._begin()
            return True
        if look:
            with self._looking:
                if self._orphaned():
                    self._begin()
                    return True
        return False

    def _begin(self) -> None:
        self._owner = threading.get_ident()
        self._times += 1

    def release(self) -> None:
        self._owner = 0
        try:
            self._lock.release()
        except RuntimeError:
            return  # it was taken from us, for it had lost its owner

    def _orphaned(self) -> bool:
        now_ns, main = SYSTEM.mono_ns(), threading.main_thread().ident
        if self._owner not in (0, main) or (self._owner == main and self._is_at_it(main)):
            self._seen = (0, 0)
            return False
        times, since_ns = self._seen
        if times != self._times or not since_ns:
            self._seen = (self._times, now_ns)
            return False
        return now_ns - since_ns > ORPHANED_S * S

    def _is_at_it(self, thread: int | None) -> bool:
        """Whether a thread does what takes a duty."""
        frame = _frames().get(thread or 0)
        while frame is not None:
            if frame.f_code.co_filename == self._file and frame.f_code.co_name in self._names:
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> None:
        look = False
        while not self.take(look=look):
            look = not self._lock.acquire(timeout=LOOK_S)
            if not look:
                self._lock.release()

    def __exit__(self, *exc: object) -> None:
        self.release()
