"""Time and entropy: the only module that reads either.

Three clocks, all in integer nanoseconds:

- `wall_ns`   calendar time; may step either way
- `boot_ns`   since the machine started, counting suspend; never steps; alike for all processes
- `mono_ns`   for measuring how long something took in this process

*Store time* is built from these by `Anchor`: it advances with `boot_ns`, is set to the wall clock
when a store is opened first after a boot, and never falls below the persisted floor. So a wall
clock that jumps by hours neither freezes leases nor expires them all.
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
    """The machine's own clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(_BOOT)

    def mono_ns(self) -> int:
        return time.perf_counter_ns()

    def boot_id(self) -> str:
        return _boot_id()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def entropy(self, count: int) -> bytes:
        """From the system, fetched by the block: identities are made by the thousand."""
        with _entropy_lock:
            if len(_entropy) < count:
                _entropy.extend(os.urandom(max(count, _ENTROPY_BLOCK)))
            taken = bytes(_entropy[:count])
            del _entropy[:count]
        return taken


class SimClock:
    """A clock that moves only when told to. `step_wall` moves the calendar alone."""

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
        """The boot clock starts anew, as after a restart of the machine; the calendar goes on."""
        self._boots += 1
        self._wall_offset += self._boot - S
        self._boot = S


class Anchor(NamedTuple):
    """What turns boot time into store time: `boot_ns + offset_ns`, within one boot."""

    boot_id: str
    offset_ns: int

    def now_ns(self, boot_ns: int) -> int:
        return boot_ns + self.offset_ns


def anchor(clock: Clock, *, last: Anchor | None, floor_ns: int) -> Anchor:
    """The anchor for a store opened now. Same boot: the old one, whatever the wall clock did."""
    if last is not None and last.boot_id == clock.boot_id():
        return last
    start = max(clock.wall_ns(), floor_ns + 1)
    return Anchor(clock.boot_id(), start - clock.boot_ns())


def iso_time(at_ns: int) -> str:
    """A time in nanoseconds since 1970 as text, to the millisecond."""
    return datetime.fromtimestamp(at_ns // 1_000_000 / 1_000, UTC).isoformat(
        timespec="milliseconds"
    )


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without a boot id every boot looks new: the anchor is then taken from the wall clock.
        return f"{time.time_ns() - time.clock_gettime_ns(_BOOT):x}"[:-10]


def _forget_entropy() -> None:
    """A forked child must not hand out what its parent hands out."""
    global _entropy_lock
    _entropy_lock = threading.Lock()
    _entropy.clear()


_ENTROPY_BLOCK = 4096
_entropy = bytearray()
_entropy_lock = threading.Lock()
os.register_at_fork(after_in_child=_forget_entropy)
SYSTEM = SystemClock()
