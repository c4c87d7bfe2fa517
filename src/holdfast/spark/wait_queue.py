"""Children that wait for rows, first come, first served. All of it is called with the lock of the ledger held.

A decision that frees rows wakes the first child that waits for such rows, and no other. That child claims; when
rows are left after its claim it wakes the next. So what a report costs does not grow with the children
that have nothing to do.

The first of a queue also keeps the time: a row that rests until its next try comes free by time alone, without
a decision. The others wait without a look at it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The rows that a child asks for, [lo, hi).
Rows = tuple[int, int]


class Place:
    """One child's place in the queue."""

    __slots__ = ("_queue", "_signal")

    def __init__(self, queue: deque[Place], lock: threading.RLock) -> None:
        self._queue = queue
        self._signal = threading.Condition(lock)

    @property
    def first(self) -> bool:
        return self._queue[0] is self

    def wait(self, timeout_s: float) -> None:
        self._signal.wait(timeout_s)

    def wake(self) -> None:
        self._signal.notify()


class WaitQueue:
    """`claimable`: a child that asks for these rows would be given some, or an end. `resting`: some row comes
    free by time alone."""

    def __init__(
        self,
        lock: threading.RLock,
        claimable: Callable[[Rows], bool],
        resting: Callable[[], bool],
    ) -> None:
        self._lock = lock
        self._claimable = claimable
        self._resting = resting
        self._queues: dict[Rows, deque[Place]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @contextmanager
    def place(self, rows: Rows) -> Iterator[Place]:
        """A place at the end; it is kept until the child has its answer."""
        queue = self._queues.setdefault(rows, deque())
        place = Place(queue, self._lock)
        queue.append(place)
        try:
            yield place
        finally:
            was_first = place.first
            queue.remove(place)
            if not queue:
                self._queues.pop(rows, None)
            elif was_first and (self._resting() or self._claimable(rows)):
                # It keeps the time from here on, and takes what is left.
                queue[0].wake()

    def wake(self) -> None:
        """After a decision: wake one child of each kind that would be given rows, or an end."""
        for rows, queue in self._queues.items():
            if self._claimable(rows):
                queue[0].wake()

    def wake_all(self) -> None:
        """Nothing is handed out any more: each is told so."""
        for queue in self._queues.values():
            for place in queue:
                place.wake()
