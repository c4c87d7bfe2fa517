"""The shape of every role: tick, sleep until there is work, tick again, until told to stop.

A role says what wakes it (`topics`) and how long it may sleep at most (`idle_s`). A tick
that finds the store busy, or loses a race, is tried again; anything else ends the role and is kept
in `failure`, for whoever supervises it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from holdfast.clock import Clock
from holdfast.errors import Busy, CommitUnknown, HoldfastError, StoreClosed
from holdfast.store.api import Store

# After a tick that failed; each further one in a row waits twice as long, up to the idle time.
PAUSE_S = 0.05
FAILURES_MAX = 10


class Service(Protocol):
    """What a process runs and watches, whatever is inside."""

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


class Role(ABC):
    name: str = "role"
    idle_s: float = 1.0

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.failure: BaseException | None = None
        self.last_progress_ns = clock.mono_ns()
        # For a watchdog: how many ticks have ended, and whether one, or the finish, is under way.
        self.rounds = 0
        self.ticking = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def tick(self) -> bool:
        """Do what there is to do, a bounded amount; whether there may be more at once."""

    @property
    @abstractmethod
    def topics(self) -> Sequence[str]:
        """What wakes this role."""

    def next_s(self) -> float:
        """How long it may sleep."""
        return self.idle_s

    def finish(self) -> None:
        """Leave in good order: called once, after the last tick."""
        return

    # -- running -------------------------------------------------------------------------------

    def run(self) -> None:
        since, failures, away = 0, 0, False
        try:
            while not self._stopping.is_set():
                try:
                    since = self._wait(since, 0.0)
                    self.ticking = True
                    more = self.tick()
                    self.last_progress_ns = self.clock.mono_ns()
                    self.rounds, self.ticking = self.rounds + 1, False
                    if not more and not self._stopping.is_set():
                        since = self._wait(since, max(self.next_s(), 0.0))
                    failures, away = 0, False
                except HoldfastError as error:
                    # A tick begins by looking: an unknown outcome is known by then.
                    if not error.retryable and not isinstance(error, CommitUnknown):
                        raise
                    self.rounds, self.ticking = self.rounds + 1, False
                    self._stopping.wait(min(PAUSE_S * 2**failures, self.idle_s))
                    failures = min(failures + 1, FAILURES_MAX)
                    # Whoever is told to stop then does not wait for it again.
                    away = isinstance(error, Busy)
            self.ticking = True
            if not away:
                self._leave()
        except StoreClosed:
            pass
        except BaseException as error:
            self.failure = error

    def _leave(self) -> None:
        """What cannot be given back, because the store is away, runs out by itself."""
        try:
            self.finish()
        except HoldfastError as error:
            if not error.retryable and not isinstance(error, CommitUnknown):
                raise

    def _wait(self, since: int, timeout_s: float) -> int:
        return self.store.wait(self.topics, since, timeout_s)

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"holdfast-{self.name}", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        self._stopping.set()
        # A hint, and nobody waits for it: without it, too, it looks up before long.
        self.store.submit(lambda txn: txn.notify(self.topics[0]))

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
