"""Measures the scheduling delay of this machine: late wake-ups from sleep, and slower computation.

A time bound in a test holds only if the process gets CPU time. A test that asserts a bound adds the delay measured
over the same period: it adds `longest_s` once, and multiplies computing time by `slowdown`.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Self

SLEEP_S = 0.02
# About a millisecond of computation.
WORK = range(40_000)


class SchedulingDelay:
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
        """The mean duration of the same computation divided by its shortest duration."""
        return statistics.fmean(self._took_s) / min(self._took_s)

    def _measure(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(SLEEP_S)
            woke = time.monotonic()
            sum(WORK)
            self._took_s.append(time.monotonic() - woke)
            self.longest_s = max(self.longest_s, woke - began - SLEEP_S)
