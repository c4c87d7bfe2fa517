"""The wake-up signal of an idle loop.

The signal is set when an item enters one of the loop's queues, when a handler in another thread has
finished, and when a stop is requested. It is a hint: the loop then checks for work.

`store.wait` cannot be cancelled, so a separate thread calls it. The thread listens only while the loop
sleeps, so a busy loop has no overhead. It stores the last commit number that it was notified of, so that
no put in between is missed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.store.api import Store

# Timeout of one `store.wait`. The listener thread ends at most this long after `close`.
LISTEN_TIMEOUT_S = 1.0


class Wakeup:
    def __init__(self, store: Store, topics: Sequence[str], *, name: str) -> None:
        self._store = store
        self._event = threading.Event()
        self._closed = threading.Event()
        self._sleeping = threading.Event()
        self._topics = list(topics)
        self._last_commit = 0
        threading.Thread(target=self._listen, name=f"{name} bell", daemon=True).start()

    def wait(self, timeout_s: float, since: int | None = None) -> None:
        """Sleep until the signal is set, or was set since the last wait, or the timeout has passed.

        `since` is the last commit that the loop knows of from another source.
        """
        if since is not None:
            self._last_commit = since
        self._sleeping.set()
        self._event.wait(timeout_s)
        self._sleeping.clear()
        self._event.clear()

    def wait_local(self, timeout_s: float) -> None:
        """Wait for signals of this process only, without listening to the store."""
        self._event.wait(timeout_s)
        self._event.clear()

    @property
    def last_commit(self) -> int:
        """The last commit number that the listener was notified of."""
        return self._last_commit

    @property
    def event(self) -> threading.Event:
        """The event behind the signal. Setting it wakes the loop."""
        return self._event

    def set(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._closed.set()
        self._sleeping.set()
        self._event.set()

    def _listen(self) -> None:
        while True:
            self._sleeping.wait()
            if self._closed.is_set():
                return
            try:
                self._last_commit = self._store.wait(
                    self._topics, self._last_commit, LISTEN_TIMEOUT_S
                )
            except Exception:
                # The loop gets the same error and handles it. The listener only waits.
                self._closed.wait(LISTEN_TIMEOUT_S)
            else:
                # Set the signal without a notification too: a wait that ends early has a reason.
                self._sleeping.clear()
                self._event.set()
            # After a concurrent `close` the loop never sleeps again.
            if self._closed.is_set():
                return
