"""A histogram of durations that one thread at a time adds to. The metrics of a process read it.

A bucket has the durations of one bit length. So an addition searches no bounds.
"""

from __future__ import annotations

# Exponents of the exported upper bounds: 2^16 ns is 66 µs, and 2^40 ns is 18 minutes.
EXPONENTS = range(16, 42, 2)
_BITS_MAX = 63


class LatencyHistogram:
    __slots__ = ("_counts", "total_ns")

    def __init__(self) -> None:
        self._counts = [0] * (_BITS_MAX + 1)
        self.total_ns = 0

    def add(self, duration_ns: int) -> None:
        """Add a duration below 2^63 ns."""
        self._counts[duration_ns.bit_length()] += 1
        self.total_ns += duration_ns

    def cumulative(self) -> list[tuple[int | None, int]]:
        """Return each upper bound in nanoseconds with the number of durations below it. The last one has no bound."""
        counts = list(self._counts)
        buckets: list[tuple[int | None, int]] = [
            (1 << exponent, sum(counts[: exponent + 1])) for exponent in EXPONENTS
        ]
        return [*buckets, (None, sum(counts))]
