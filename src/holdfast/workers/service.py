"""The base class of worker services: tick, sleep until a notification or a timeout, tick again,
until stopped.

A service declares the topics that wake it (`topics`) and its longest sleep (`idle_s`). A tick that
finds the store busy or loses a race is retried with backoff. Any other error ends the service and
is kept in `failure` for its supervisor.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from holdfast.clock import Clock
from holdfast.errors import Busy, CommitUnknown, HoldfastError, StoreClosed
from holdfast.store.api import Store
from holdfast.store.subscription import Subscription

# The backoff after a failed tick. It doubles with each consecutive failure, up to `idle_s`.
RETRY_PAUSE_S = 0.05
BACKOFF_DOUBLINGS_MAX = 10


class ManagedService(Protocol):
    """A service that a process starts, watches and stops."""

    name: str
    rounds: int
    ticking: bool

    @property
    def failure(self) -> BaseException | None: ...
    @property
    def running(self) -> bool: ...
    def start(self) -> None: ...
    def request_stop(self) -> None: ...
    def join(self, timeout_s: float | None = None) -> None: ...


class TickService(ABC):
    name: str = "role"
    idle_s: float = 1.0

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.failure: BaseException | None = None
        self.last_progress_ns = clock.mono_ns()
        # For the watchdog: the number of finished ticks, and whether a tick or the shutdown is
        # running.
        self.rounds = 0
        self.ticking = False
        self._stopping = threading.Event()
        # Created by `run`. A stop request ends its wait.
        self._subscription: Subscription | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def tick(self) -> bool:
        """Do a bounded amount of work. Returns whether more work may be ready now."""

    @property
    @abstractmethod
    def topics(self) -> Sequence[str]:
        """The topics whose notifications wake this service."""

    def sleep_s(self) -> float:
        """The longest sleep before the next tick."""
        return self.idle_s

    def shut_down(self) -> None:
        """Release resources. Called once, after the last tick."""
        return

    # -- running -------------------------------------------------------------------------------

    def run(self) -> None:
        since, failures, store_away = 0, 0, False
        try:
            self._subscription = self.store.subscribe(self.topics)
            while not self._stopping.is_set():
                try:
                    since = self._wait(since, 0.0)
                    self.ticking = True
                    more = self.tick()
                    self.last_progress_ns = self.clock.mono_ns()
                    self.rounds, self.ticking = self.rounds + 1, False
                    if not more and not self._stopping.is_set():
                        since = self._wait(since, max(self.sleep_s(), 0.0))
                    failures, store_away = 0, False
                except HoldfastError as error:
                    # The next tick reads the store first, which resolves an unknown commit outcome.
                    if not error.retryable and not isinstance(error, CommitUnknown):
                        raise
                    self.rounds, self.ticking = self.rounds + 1, False
                    self._stopping.wait(min(RETRY_PAUSE_S * 2**failures, self.idle_s))
                    failures = min(failures + 1, BACKOFF_DOUBLINGS_MAX)
                    # A stop request then skips `shut_down`, which would wait for the store again.
                    store_away = isinstance(error, Busy)
            self.ticking = True
            if not store_away:
                self._shut_down_if_reachable()
        except StoreClosed:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            if self._subscription is not None:
                self._subscription.cancel()

    def _shut_down_if_reachable(self) -> None:
        """Shut down. If the store is unavailable, leases that were not released expire."""
        try:
            self.shut_down()
        except HoldfastError as error:
            if not error.retryable and not isinstance(error, CommitUnknown):
                raise

    def _wait(self, since: int, timeout_s: float) -> int:
        assert self._subscription is not None
        self._subscription.since = since
        self._subscription.wait(timeout_s)
        return self._subscription.since

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"holdfast-{self.name}", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        self._stopping.set()
        if self._subscription is not None:
            self._subscription.wake()

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
