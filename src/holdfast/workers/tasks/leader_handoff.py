"""Leader hand-off: two threads alternate in running a loop (leader/followers).

The leader thread that is woken for a task runs the task itself and promotes the standby thread to
run the loop. The task starts without a thread switch (about 0.1 ms saved).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

LocalRun = Callable[[], None]


class LeaderHandoff:
    def __init__(self, loop: Callable[[], LocalRun | None], name: str) -> None:
        """`loop` runs the loop. It returns None at the end, or a callable that its thread runs
        next. It may return a callable only while a standby thread exists (`has_standby`).
        """
        self._loop = loop
        self._name = name
        self._standbys: deque[threading.Lock] = deque()
        self.finished = threading.Event()

    @property
    def has_standby(self) -> bool:
        return bool(self._standbys)

    def run(self) -> None:
        """Run until the loop has ended and this thread has finished its own callable."""
        threading.Thread(target=self._run_standby, name=self._name, daemon=True).start()
        self._lead_until_done()

    def _lead_until_done(self) -> None:
        while True:
            local_run = self._loop()
            if local_run is None:
                self.finished.set()
                while self._standbys:
                    self._standbys.popleft().release()
                return
            self._standbys.popleft().release()
            local_run()
            if not self._wait_for_lead():
                return

    def _run_standby(self) -> None:
        if self._wait_for_lead():
            self._lead_until_done()

    def _wait_for_lead(self) -> bool:
        """Wait for promotion to leader. Returns False when the loop has ended."""
        promotion = threading.Lock()
        promotion.acquire()
        self._standbys.append(promotion)
        if not self.finished.is_set():
            promotion.acquire()
        return not self.finished.is_set()
