"""Two threads that take turns in leading a loop.

Whoever leads may have something to do itself, at once: it passes the lead on and does it, and the other goes
on where it was. So what a loop has waited for is begun by the thread that was woken for it, and nobody
else has to be woken first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Own = Callable[[], None]


class Relay:
    def __init__(self, lead: Callable[[], Own | None], name: str) -> None:
        """`lead` is the loop: it ends with None, or leaves with what its thread is to do itself. It may do
        the latter only while there is somebody to go on (`ready`)."""
        self._lead = lead
        self._name = name
        self._parked: deque[threading.Lock] = deque()
        self.over = threading.Event()

    @property
    def ready(self) -> bool:
        return bool(self._parked)

    def run(self) -> None:
        """Returns when the loop has ended and what this thread does itself has, too."""
        threading.Thread(target=self._stand_in, name=self._name, daemon=True).start()
        self._go()

    def _go(self) -> None:
        while True:
            own = self._lead()
            if own is None:
                self.over.set()
                while self._parked:
                    self._parked.popleft().release()
                return
            self._parked.popleft().release()
            own()
            if not self._park():
                return

    def _stand_in(self) -> None:
        if self._park():
            self._go()

    def _park(self) -> bool:
        """Wait for the lead; False when there is nothing to lead any more."""
        turn = threading.Lock()
        turn.acquire()
        self._parked.append(turn)
        if not self.over.is_set():
            turn.acquire()
        return not self.over.is_set()
