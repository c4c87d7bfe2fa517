"""How well a runner does: counts and latencies, kept since boot or the last reset.

The sink is called synchronously after every update, with a copy that it may keep. It cannot break
the loop: what it raises is counted and dropped, and it may call back in here, for it is called
outside the lock, and updates that it makes do not call it again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields

from holdfast.clock import MS
from holdfast.runner.faults import Fault

# Upper bounds of the buckets of the latency histogram, inclusive; a last one takes the rest.
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
    # How many samples fell into each bucket, the one above the last bound included.
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

# Which counter a handler's outcome moves.
OF_FAULT = {
    Fault.SUCCESS: "successes",
    Fault.CONFLICT: "conflicts",
    Fault.BUSY: "busies",
    Fault.TRANSIENT: "transients",
    Fault.REFUSED: "fatals",
    Fault.FATAL: "fatals",
}


class Counters:
    def __init__(self, sink: Sink | None = None) -> None:
        self.sink = sink
        self._lock = threading.Lock()
        self._telling = threading.local()
        self._clear()

    def snapshot(self) -> Metrics:
        with self._lock:
            return Metrics(**self._counts, latency_histogram=tuple(self._histogram))

    def reset(self) -> None:
        with self._lock:
            self._clear()
        self._tell()

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n
        self._tell()

    def finished(self, fault: Fault, latency_ns: int) -> None:
        """One attempt ended: its outcome and its latency, as one update."""
        bucket = bisect_left(LATENCY_BOUNDS_MS, -(-latency_ns // MS))
        with self._lock:
            counts = self._counts
            counts[OF_FAULT[fault]] += 1
            counts["latency_samples"] += 1
            counts["latency_total_ns"] += latency_ns
            counts["latency_max_ns"] = max(counts["latency_max_ns"], latency_ns)
            self._histogram[bucket] += 1
        self._tell()

    def _clear(self) -> None:
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._histogram = [0] * (len(LATENCY_BOUNDS_MS) + 1)

    def _tell(self) -> None:
        if self.sink is None or getattr(self._telling, "now", False):
            return
        self._telling.now = True
        try:
            self.sink(self.snapshot())
        except Exception:
            self.add("sink_errors")
        finally:
            self._telling.now = False


_COUNTS = tuple(field.name for field in fields(Metrics) if field.name != "latency_histogram")
