"""The wake-up signal of an idle loop: a store subscription that other threads can set too.

The signal is set when an item enters one of the loop's queues, when a handler in another thread has
finished, and when a stop is requested. It is a hint: the loop then checks for work.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast import failpoints
from holdfast.store.api import Store

# After an error of the store a wait pauses this long at most.
ERROR_PAUSE_S = 1.0


class Wakeup:
    def __init__(self, store: Store, topics: Sequence[str]) -> None:
        self._subscription = store.subscribe(list(topics))

    def wait(self, timeout_s: float, since: int | None = None) -> None:
        """Wait until the signal is set or the timeout passes. Return at once if the signal was set
        since the last wait.

        `since` is the last commit that the loop has already seen: only later commits end the wait.
        """
        if since is not None:
            self._subscription.since = since
        try:
            if failpoints.armed:
                failpoints.hit("runner.wait")
            self._subscription.wait(timeout_s)
        except Exception:
            # The loop gets the same error from its next call and handles it. OSError and RuntimeError: the waiting
            # thread may start a writer process.
            self._subscription.wait_for_wake(min(timeout_s, ERROR_PAUSE_S))

    def wait_local(self, timeout_s: float) -> None:
        """Wait for signals of this process only, without listening to the store."""
        self._subscription.wait_for_wake(timeout_s)

    @property
    def last_commit(self) -> int:
        """The last commit that a wait was notified of."""
        return self._subscription.since

    def set(self) -> None:
        self._subscription.wake()

    def close(self) -> None:
        self._subscription.cancel()
