"""Metrics of a runner: counts and latencies since boot or the last reset.

The sink is called synchronously after every update, with a copy that it may keep. It cannot break the
loop: its exceptions are counted and dropped. It may call these methods, because it runs outside the
lock and its own updates do not call it again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields

from holdfast.clock import MS
from holdfast.runner.error_policy import ErrorKind

# Inclusive upper bounds of the latency histogram's buckets. A last bucket has no bound.
LATENCY_BOUNDS_MS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    30_000,
    60_000,
)


@dataclass(frozen=True, slots=True)
class Metrics:
    """A copy of the counters at one moment."""

    attempts: int = 0
    successes: int = 0
    conflicts: int = 0
    busies: int = 0
    transients: int = 0
    fatals: int = 0
    requeues: int = 0
    dead_letters: int = 0
    lost: int = 0
    released: int = 0
    loop_errors: int = 0
    sink_errors: int = 0
    latency_samples: int = 0
    latency_total_ns: int = 0
    latency_max_ns: int = 0
    # Samples per bucket, including the unbounded last one.
    latency_histogram: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_MS) + 1)

    @property
    def retryable(self) -> int:
        return self.conflicts + self.busies + self.transients

    @property
    def latency_total_ms(self) -> int:
        return self.latency_total_ns // MS

    @property
    def latency_max_ms(self) -> int:
        return self.latency_max_ns // MS


Sink = Callable[[Metrics], object]

# The counter of each kind of outcome.
COUNTER_OF = {
    ErrorKind.SUCCESS: "successes",
    ErrorKind.CONFLICT: "conflicts",
    ErrorKind.BUSY: "busies",
    ErrorKind.TRANSIENT: "transients",
    ErrorKind.REFUSED: "fatals",
    ErrorKind.FATAL: "fatals",
}


class RunnerCounters:
    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = sink
        self._lock = threading.Lock()
        self._notifying = threading.local()
        self._clear()

    def snapshot(self) -> Metrics:
        with self._lock:
            return Metrics(**self._counts, latency_histogram=tuple(self._histogram))

    def reset(self) -> None:
        with self._lock:
            self._clear()
        self._notify_sink()

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n
        self._notify_sink()

    def count_attempt(self, kind: ErrorKind, latency_ns: int) -> None:
        """Count the outcome and latency of one attempt, as one update."""
        bucket = bisect_left(LATENCY_BOUNDS_MS, -(-latency_ns // MS))
        with self._lock:
            counts = self._counts
            counts[COUNTER_OF[kind]] += 1
            counts["latency_samples"] += 1
            counts["latency_total_ns"] += latency_ns
            counts["latency_max_ns"] = max(counts["latency_max_ns"], latency_ns)
            self._histogram[bucket] += 1
        self._notify_sink()

    def _clear(self) -> None:
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._histogram = [0] * (len(LATENCY_BOUNDS_MS) + 1)

    def _notify_sink(self) -> None:
        if self.sink is None or getattr(self._notifying, "now", False):
            return
        self._notifying.now = True
        try:
            self.sink(self.snapshot())
        except Exception:
            self.add("sink_errors")
        finally:
            self._notifying.now = False


_COUNTS = tuple(field.name for field in fields(Metrics) if field.name != "latency_histogram")
