"""The bell: what an idle loop sleeps on, and what wakes it.

It rings when something is put into one of the loop's queues, when a handler in another thread has
finished, when a stop is asked for, and when the time is up. A ring is a hint: look again.

`store.wait` cannot be called off, so a thread of its own listens. It does so only while the loop
sleeps, so that a busy loop pays nothing for it, and remembers the commit it has heard of last, so
that nothing put in between is missed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.store.api import Store

# A listener looks up this often, and so outlives its bell by no more.
LISTEN_S = 1.0


class Bell:
    def __init__(self, store: Store, topics: Sequence[str], *, name: str) -> None:
        self._store = store
        self._rung = threading.Event()
        self._closed = threading.Event()
        self._sleeping = threading.Event()
        self._topics = list(topics)
        self._heard = 0
        threading.Thread(target=self._listen, name=f"{name} bell", daemon=True).start()

    def wait(self, timeout_s: float, since: int | None = None) -> None:
        """Sleep until it rings, or rang since the last wait, or the time is up.

        `since` is the last commit that the loop has heard of by itself.
        """
        if since is not None:
            self._heard = since
        self._sleeping.set()
        self._rung.wait(timeout_s)
        self._sleeping.clear()
        self._rung.clear()

    def rest(self, timeout_s: float) -> None:
        """`wait`, for a moment in which only those in this process can ring."""
        self._rung.wait(timeout_s)
        self._rung.clear()

    @property
    def heard(self) -> int:
        """The last commit that it has rung for."""
        return self._heard

    @property
    def rung(self) -> threading.Event:
        """What to set to ring it."""
        return self._rung

    def ring(self) -> None:
        self._rung.set()

    def close(self) -> None:
        self._closed.set()
        self._sleeping.set()
        self._rung.set()

    def _listen(self) -> None:
        while True:
            self._sleeping.wait()
            if self._closed.is_set():
                return
            try:
                self._heard = self._store.wait(self._topics, self._heard, LISTEN_S)
            except Exception:
                # The loop meets the same trouble, and deals with it; here it is only waited out.
                self._closed.wait(LISTEN_S)
            else:
                # Heard or not: a wait that ends early without news has ended for a reason.
                self._sleeping.clear()
                self._rung.set()
            # It may have been closed meanwhile, and nobody will sleep any more.
            if self._closed.is_set():
                return
