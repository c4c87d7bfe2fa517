"""How badly this machine keeps its time: how late sleepers wake, and how much longer computing takes.

A bound on how long something takes is a bound on the code only as far as the code gets to run. Whoever
asserts one allows for what was measured here over the same while: `longest_s` once, and `slowdown` times as
long for what has to be computed.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Self

SLEEP_S = 0.02
# About a millisecond of plain computing, more than the interpreter's own turns.
WORK = range(40_000)


class Stalls:
    def __init__(self) -> None:
        self.longest_s = 0.0
        self._took_s: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def slowdown(self) -> float:
        """How much longer than at its best the same computation took, as a rule."""
        return statistics.fmean(self._took_s) / min(self._took_s)

    def _measure(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(SLEEP_S)
            woke = time.monotonic()
            sum(WORK)
            self._took_s.append(time.monotonic() - woke)
            self.longest_s = max(self.longest_s, woke - began - SLEEP_S)
