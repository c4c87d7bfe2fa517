"""Metrics of the calls of a child: count, cost and latency.

`take_delta` returns the figures since the last report. `calls` and `cost` are totals of the whole job.
`mean_us` is a moving average of the latency; the row executor sizes its work units by it.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.spark.caller import CallOutcome

LATENCY_BUCKETS = 32
UNKNOWN_MEAN_US = 1e9
# Above this the next call replaces the mean: it is unknown, or stems from calls of minutes.
_MEAN_US_MAX = 1e8
# Weight of the latest call in the moving average.
LATEST_WEIGHT = 0.02


class CallMetrics:
    def __init__(self) -> None:
        self.calls = 0
        self.cost = 0.0
        self.mean_us = UNKNOWN_MEAN_US
        # Not reported yet.
        self._unreported_calls = 0
        self._unreported_cost = 0.0
        self._unreported_latency = [0] * LATENCY_BUCKETS

    def add(self, calls: int, cost: float, micros: int) -> None:
        """Count calls that ended together, such as a batch and its halves."""
        self._add_totals(calls, cost)
        self._unreported_latency[_latency_bucket(micros)] += calls
        self.mean_us = _moving_average(self.mean_us, micros)

    def add_rows(self, rows: Iterable[CallOutcome], calls_each: int) -> None:
        """Do the same as `add` for each called row, in one loop: it runs for every row of a fast
        function.
        """
        latency, mean_us, old = self._unreported_latency, self.mean_us, 1 - LATEST_WEIGHT
        calls, cost = 0, 0.0
        for ended in rows:
            micros = ended.micros
            if micros < 0:
                continue  # never called
            calls += calls_each
            cost += ended.cost
            latency[_latency_bucket(micros) if micros > 1 else 0] += calls_each
            mean_us = micros if mean_us > _MEAN_US_MAX else mean_us * old + micros * LATEST_WEIGHT
        self.mean_us = mean_us
        self._add_totals(calls, cost)

    def take_delta(self) -> tuple[int, float, list[int]]:
        """Return calls, cost and latencies since the previous call of this method."""
        delta = self._unreported_calls, self._unreported_cost, self._unreported_latency
        self._unreported_calls, self._unreported_cost, self._unreported_latency = (
            0,
            0.0,
            [0] * LATENCY_BUCKETS,
        )
        return delta

    def _add_totals(self, calls: int, cost: float) -> None:
        self.calls += calls
        self.cost += cost
        self._unreported_calls += calls
        self._unreported_cost += cost


def _latency_bucket(micros: int) -> int:
    """Return the histogram bucket of a latency. Buckets are powers of two."""
    return min(micros.bit_length(), LATENCY_BUCKETS) - 1 if micros else 0


def _moving_average(mean_us: float, micros: int) -> float:
    if mean_us > _MEAN_US_MAX:
        return micros
    return mean_us * (1 - LATEST_WEIGHT) + micros * LATEST_WEIGHT
