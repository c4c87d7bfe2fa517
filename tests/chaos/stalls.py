"""How badly this machine keeps its time: the longest that a short sleep took too long.

A bound on how long something takes is a bound on the code only as far as the code gets to run. Whoever
asserts one adds what was measured here over the same while.
"""

from __future__ import annotations

import threading
import time
from typing import Self

SLEEP_S = 0.01


class Stalls:
    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(SLEEP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began - SLEEP_S)
