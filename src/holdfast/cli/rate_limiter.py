"""The rate limit of a command that processes many items, and its SIGINT handler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from holdfast.clock import Clock, S


class RateLimiter:
    """A rate limiter: n items are admitted when the items before them are due."""

    def __init__(self, rate_per_s: float, clock: Clock, interrupt: InterruptHandler) -> None:
        self._rate_per_s = rate_per_s
        self._clock = clock
        self._interrupt = interrupt
        self._next_due_ns: int | None = None

    def acquire(self, n: int) -> bool:
        """Wait until the next n items are due; return False after Ctrl-C."""
        now_ns = self._clock.mono_ns()
        due_ns = now_ns if self._next_due_ns is None else max(self._next_due_ns, now_ns)
        if due_ns > now_ns and not self._interrupt.requested:
            self._interrupt.wait(lambda: self._clock.sleep((due_ns - now_ns) / S))
        self._next_due_ns = due_ns + int(n / self._rate_per_s * S)
        return not self._interrupt.requested


class InterruptHandler:
    """A SIGINT handler: Ctrl-C ends a wait at once, but lets a running commit finish."""

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._previous_handler: Any = None

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)

    def wait(self, wait: Callable[[], None]) -> None:
        self._waiting = True
        try:
            wait()
        except KeyboardInterrupt:
            self.requested = True
        finally:
            self._waiting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._waiting:
            raise KeyboardInterrupt
