"""What each slot of a child's pool is at, in memory that its parent reads without the child's GIL.

A slot is one thread of the pool, or one of the calls that share its event loop. It holds the row (or
the first row of the batch) that is called, and a number that `call.progress()` moves. A child writes
one number a call; the child's own executor and the Spark worker that started the child both read them
now and then (`Silence`), so neither needs a clock in the call's path.

`tick` counts the rounds of the child's executor. While it stands still, the child cannot speak for
itself: a call holds the GIL, or the process is stopped. The parent then keeps the child's leases, as
long as the process runs and its calls are within their time.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import threading
from typing import IO

# As many calls at once as a stage may ask for (`stage.CONCURRENCY_MAX`).
SLOTS_MAX = 10_000
_HEAD = 2
_CELLS = _HEAD + 2 * SLOTS_MAX
# An attempt is one byte (`ledger.classes.ATTEMPTS_MAX`).
_ATTEMPT_BITS = 8


class CallSlots:
    """Cells of 64 bits: the tick, how many slots are in use, then two for each slot."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self.file = file
        handle = -1 if file is None else file.fileno()
        self.cells = memoryview(mmap.mmap(handle, _CELLS * 8)).cast("q")

    @classmethod
    def shared(cls) -> CallSlots:
        """In a file without a name, for a child that is given its descriptor."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the child
        file.truncate(_CELLS * 8)
        return cls(file)

    def watches(self, count: int) -> list[Watch]:
        """The slots of a pool that begins: all of them empty."""
        self.cells[1] = count
        for at in range(_HEAD, _HEAD + 2 * count):
            self.cells[at] = 0
        return [Watch(self.cells, _HEAD + 2 * slot) for slot in range(count)]

    def tick(self) -> None:
        self.cells[0] += 1

    def ticks(self) -> int:
        return self.cells[0]

    def busy(self) -> dict[int, tuple[int, int]]:
        """(row, progress) of the slots that are at work, by their place."""
        count = 2 * self.cells[1]
        found = self.cells[_HEAD : _HEAD + count].tolist()
        return {_HEAD + at: (found[at], found[at + 1]) for at in range(0, count, 2) if found[at]}


class Watch:
    """One slot, in the hands of the pool that owns it."""

    __slots__ = ("_limit", "_loop", "_timeout_s", "cells", "place")

    def __init__(self, cells: memoryview, place: int) -> None:
        self.cells = cells
        self.place = place
        self._limit: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout_s = 0.0

    def begin(self, seq: int, attempt: int) -> None:
        self.cells[self.place] = row_of(seq, attempt)

    def end(self) -> None:
        self.cells[self.place] = 0

    def progress(self, seq: int, attempt: int) -> None:
        """A call is still at it. One that has ended meanwhile moves nothing."""
        if self.cells[self.place] != row_of(seq, attempt):
            return
        self.cells[self.place + 1] += 1
        if self._limit is None or self._loop is None:
            return
        if threading.get_ident() == getattr(self._loop, "_thread_id", None):
            self._extend(self._limit)
        else:
            self._loop.call_soon_threadsafe(self._extend, self._limit)

    def limit(self, limit: asyncio.Timeout | None, timeout_s: float) -> None:
        """The time-out of an `async def`, which progress moves on; None when its call has ended."""
        self._limit = limit
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop() if limit is not None else None

    def _extend(self, limit: asyncio.Timeout) -> None:
        # A call that has ended, or runs out just now, is past that.
        if limit is self._limit and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


class Silence:
    """For how long each slot has shown the same. Ask it often: it counts from when it saw a change."""

    def __init__(self, slots: CallSlots) -> None:
        self._slots = slots
        self._seen: dict[int, tuple[tuple[int, int], int]] = {}

    def look(self, now_ns: int) -> None:
        self._seen = {
            place: (shown, was[1] if (was := self._seen.get(place)) and was[0] == shown else now_ns)
            for place, shown in self._slots.busy().items()
        }

    def beyond(self, silent_ns: float, now_ns: int) -> dict[int, int]:
        """Rows that have shown nothing for longer than this, by the place of their slot."""
        return {
            place: shown[0]
            for place, (shown, since_ns) in self._seen.items()
            if now_ns - since_ns > silent_ns
        }

    @property
    def at_work(self) -> bool:
        return bool(self._seen)


def row_of(seq: int, attempt: int) -> int:
    """A row and its attempt as one number above 0."""
    return (seq << _ATTEMPT_BITS) | attempt


def seq_of(row: int) -> int:
    return row >> _ATTEMPT_BITS


def timed_out(timeout_s: float) -> TimeoutError:
    """What a call that is given up is said to have raised."""
    return TimeoutError(f"timed out: no end and no progress for timeout_s={timeout_s:g}")
