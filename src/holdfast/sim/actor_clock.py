"""Clock of one actor: the machine's clock with its own skew, and a sleep that yields.

After faults have stopped, the skew is gone.

Entropy is a function of the identity and the call count. Two incarnations never share an identity,
and entropy spends no choices of the tape.
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
        faults_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._machine = machine
        self._scheduler = scheduler
        self._identity = identity
        self._skew_ns = skew_ns
        self._faults_stopped = faults_stopped
        self._entropy_calls = 0

    def wall_ns(self) -> int:
        return self._machine.wall_ns() + (0 if self._faults_stopped() else self._skew_ns)

    def boot_ns(self) -> int:
        return self._machine.boot_ns()

    def mono_ns(self) -> int:
        return self._machine.mono_ns()

    def boot_id(self) -> str:
        return self._machine.boot_id()

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(int(seconds * S))

    def entropy(self, count: int) -> bytes:
        self._entropy_calls += 1
        return hashlib.shake_128(f"{self._identity}#{self._entropy_calls}".encode()).digest(count)
