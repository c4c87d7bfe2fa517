"""Clocks and entropy. No other module reads the system clock or the system's random source.

Three clocks, all in integer nanoseconds:

- `wall_ns`   calendar time; may step forwards or backwards
- `boot_ns`   time since boot including suspend (CLOCK_BOOTTIME); never steps; equal in all processes
- `mono_ns`   for measuring durations in this process

`ClockAnchor` derives *store time* from them. Store time advances with `boot_ns`. The first open after
a boot sets it to the wall clock, but never below the persisted floor. A wall clock that jumps by hours
therefore neither freezes leases nor expires all of them.
"""

from __future__ import annotations

import os
import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

MS = 1_000_000
S = 1_000_000_000


class Clock(Protocol):
    def wall_ns(self) -> int: ...
    def boot_ns(self) -> int: ...
    def mono_ns(self) -> int: ...
    def boot_id(self) -> str: ...
    def sleep(self, seconds: float) -> None: ...
    def entropy(self, count: int) -> bytes: ...


class SystemClock:
    """The system clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(_BOOT_CLOCK)

    def mono_ns(self) -> int:
        return time.perf_counter_ns()

    def boot_id(self) -> str:
        return _boot_id()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def entropy(self, count: int) -> bytes:
        """Return random bytes of the system. Reads them in blocks, because ids need many small draws."""
        with _entropy_lock:
            if len(_entropy) < count:
                _entropy.extend(os.urandom(max(count, _ENTROPY_BLOCK)))
            drawn = bytes(_entropy[:count])
            del _entropy[:count]
        return drawn


class SimClock:
    """A simulated clock: only `advance` and `sleep` move it. `step_wall` moves the wall clock alone."""

    def __init__(self, start_ns: int = 1_700_000_000 * S, seed: int = 0) -> None:
        self._boot = 1_000 * S
        self._wall_offset = start_ns - self._boot
        self._boots = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def wall_ns(self) -> int:
        return self._boot + self._wall_offset

    def boot_ns(self) -> int:
        return self._boot

    def mono_ns(self) -> int:
        return self._boot

    def boot_id(self) -> str:
        return f"sim-{self._boots}"

    def sleep(self, seconds: float) -> None:
        self.advance(int(seconds * S))

    def entropy(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def advance(self, ns: int) -> None:
        assert ns >= 0, "time does not run backwards; step_wall moves the calendar"
        with self._lock:
            self._boot += ns

    def step_wall(self, ns: int) -> None:
        self._wall_offset += ns

    def reboot(self) -> None:
        """Reset the boot clock, as a restart of the machine does. The wall clock keeps its value."""
        self._boots += 1
        self._wall_offset += self._boot - S
        self._boot = S


class ClockAnchor(NamedTuple):
    """The offset from boot time to store time (`boot_ns + offset_ns`), valid within one boot."""

    boot_id: str
    offset_ns: int

    def now_ns(self, boot_ns: int) -> int:
        return boot_ns + self.offset_ns


def anchor_at_open(clock: Clock, *, last: ClockAnchor | None, floor_ns: int) -> ClockAnchor:
    """Return the anchor for a store that opens now. Within one boot the old anchor stays, so a step
    of the wall clock has no effect."""
    if last is not None and last.boot_id == clock.boot_id():
        return last
    start = max(clock.wall_ns(), floor_ns + 1)
    return ClockAnchor(clock.boot_id(), start - clock.boot_ns())


def iso_time(at_ns: int) -> str:
    """Format nanoseconds since 1970 as ISO 8601 with milliseconds."""
    return datetime.fromtimestamp(at_ns // 1_000_000 / 1_000, UTC).isoformat(
        timespec="milliseconds"
    )


_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without a boot id, derive one from the boot time by the wall clock.
        return f"{time.time_ns() - time.clock_gettime_ns(_BOOT_CLOCK):x}"[:-10]


def _clear_entropy_in_child() -> None:
    """Clear the buffer in a forked child: it must not return the same bytes as its parent."""
    global _entropy_lock
    _entropy_lock = threading.Lock()
    _entropy.clear()


_ENTROPY_BLOCK = 4096
_entropy = bytearray()
_entropy_lock = threading.Lock()
os.register_at_fork(after_in_child=_clear_entropy_in_child)
SYSTEM = SystemClock()
