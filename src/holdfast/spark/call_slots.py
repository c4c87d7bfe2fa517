"""Call slots: shared memory that shows which row each slot of a child's pool is calling.

A slot is one thread of the pool, or one concurrent call of its event loop. It holds the row (or the
first row of the batch) under call and a counter that `call.progress()` increments. The child writes one
number per call. The child's row executor and the Spark worker that started the child both sample the
slots (`StallDetector`), so the call path needs no clock and the parent does not need the child's GIL.

`tick` counts the loop iterations of the child's row executor. While the counter does not change, the
child cannot send heartbeats: a call holds the GIL, or the process is stopped. The parent then renews
the child's leases while the process runs and its calls are within their timeout.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import threading
from typing import IO

# The maximum concurrency of a stage (`stage_settings.CONCURRENCY_MAX`).
SLOTS_MAX = 10_000
_HEADER_CELLS = 2
_CELLS = _HEADER_CELLS + 2 * SLOTS_MAX
# An attempt number fits one byte (`ATTEMPTS_MAX` of the ledger).
_ATTEMPT_BITS = 8


class CallSlots:
    """64-bit cells: the tick, the number of slots in use, then two cells per slot."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self.file = file
        handle = -1 if file is None else file.fileno()
        self.cells = memoryview(mmap.mmap(handle, _CELLS * 8)).cast("q")

    @classmethod
    def shared(cls) -> CallSlots:
        """Allocate the cells in an anonymous file. A child process inherits its descriptor."""
        file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the child runs
        file.truncate(_CELLS * 8)
        return cls(file)

    def open_slots(self, count: int) -> list[CallSlot]:
        """Reset the slots for a new pool and return them."""
        self.cells[1] = count
        for at in range(_HEADER_CELLS, _HEADER_CELLS + 2 * count):
            self.cells[at] = 0
        return [CallSlot(self.cells, _HEADER_CELLS + 2 * slot) for slot in range(count)]

    def tick(self) -> None:
        self.cells[0] += 1

    def tick_count(self) -> int:
        return self.cells[0]

    def active_calls(self) -> dict[int, tuple[int, int]]:
        """Return (row, progress) of the slots with a call, by cell offset."""
        count = 2 * self.cells[1]
        values = self.cells[_HEADER_CELLS : _HEADER_CELLS + count].tolist()
        return {
            _HEADER_CELLS + at: (values[at], values[at + 1])
            for at in range(0, count, 2)
            if values[at]
        }


class CallSlot:
    """One slot, written by the pool that owns it."""

    __slots__ = ("_loop", "_timeout", "_timeout_s", "cells", "offset")

    def __init__(self, cells: memoryview, place: int) -> None:
        self.cells = cells
        self.offset = place
        self._timeout: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout_s = 0.0

    def begin(self, seq: int, attempt: int) -> None:
        self.cells[self.offset] = encode_row(seq, attempt)

    def end(self) -> None:
        self.cells[self.offset] = 0

    def progress(self, seq: int, attempt: int) -> None:
        """Record progress of a call. It has no effect when the call has ended."""
        if self.cells[self.offset] != encode_row(seq, attempt):
            return
        self.cells[self.offset + 1] += 1
        if self._timeout is None or self._loop is None:
            return
        if threading.get_ident() == getattr(self._loop, "_thread_id", None):
            self._extend_timeout(self._timeout)
        else:
            self._loop.call_soon_threadsafe(self._extend_timeout, self._timeout)

    def set_timeout(self, timeout: asyncio.Timeout | None, timeout_s: float) -> None:
        """Register the timeout of an `async def` call, which progress extends; None when the call
        has ended.
        """
        self._timeout = timeout
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop() if timeout is not None else None

    def _extend_timeout(self, timeout: asyncio.Timeout) -> None:
        # The call has ended, or its timeout fires now.
        if timeout is self._timeout and not timeout.expired():
            timeout.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


class StallDetector:
    """A stall detector: how long each slot has not changed. It counts from the sample that saw the
    last change, so sample often.
    """

    def __init__(self, slots: CallSlots) -> None:
        self._slots = slots
        self._samples: dict[int, tuple[tuple[int, int], int]] = {}

    def sample(self, now_ns: int) -> None:
        self._samples = {
            place: (
                shown,
                was[1] if (was := self._samples.get(place)) and was[0] == shown else now_ns,
            )
            for place, shown in self._slots.active_calls().items()
        }

    def stalled_rows(self, silent_ns: float, now_ns: int) -> dict[int, int]:
        """Return the rows without progress for longer than `silent_ns`, by cell offset of their
        slot.
        """
        return {
            place: shown[0]
            for place, (shown, since_ns) in self._samples.items()
            if now_ns - since_ns > silent_ns
        }

    @property
    def has_active_calls(self) -> bool:
        return bool(self._samples)


def encode_row(seq: int, attempt: int) -> int:
    """Encode a row and its attempt as one number above 0."""
    return (seq << _ATTEMPT_BITS) | attempt


def decode_seq(row: int) -> int:
    return row >> _ATTEMPT_BITS


def timeout_error(timeout_s: float) -> TimeoutError:
    """The error recorded for a call that is abandoned after its timeout."""
    return TimeoutError(f"timed out: no end and no progress for timeout_s={timeout_s:g}")
