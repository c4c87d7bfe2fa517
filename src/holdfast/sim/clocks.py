"""The clock that one actor sees: the machine's, with its own skew, and a sleep that yields.

Once faults have stopped, somebody has set the clocks: the skew is gone.

Entropy is a function of who asks and how often: two incarnations never share an identity, and the
tape is not spent on bytes that decide nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from holdfast.clock import S, SimClock
from holdfast.sim.scheduler import Scheduler


class ActorClock:
    def __init__(
        self,
        machine: SimClock,
        scheduler: Scheduler,
        identity: str,
        *,
        skew_ns: int = 0,
        calm: Callable[[], bool] = lambda: False,
    ) -> None:
        self._machine = machine
        self._scheduler = scheduler
        self._identity = identity
        self._skew_ns = skew_ns
        self._calm = calm
        self._asked = 0

    def wall_ns(self) -> int:
        return self._machine.wall_ns() + (0 if self._calm() else self._skew_ns)

    def boot_ns(self) -> int:
        return self._machine.boot_ns()

    def mono_ns(self) -> int:
        return self._machine.mono_ns()

    def boot_id(self) -> str:
        return self._machine.boot_id()

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(int(seconds * S))

    def entropy(self, count: int) -> bytes:
        self._asked += 1
        return hashlib.shake_128(f"{self._identity}#{self._asked}".encode()).digest(count)
