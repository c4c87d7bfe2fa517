"""Figures of the calls of a child: how many ended, what they cost, how long they took.

`taken` is what a report tells: the figures since the report before it. `calls` and `cost` are those of the
whole duty, and `mean_us` is the moving mean that the executor sizes its lots by.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.spark.caller import Ended

LATENCY_BUCKETS = 32
UNKNOWN_US = 1e9
# A mean beyond this is replaced by the next call: it is not known, or of calls that take minutes.
_MEAN_US_MAX = 1e8
# The share of the last call in the mean.
NEW_SHARE = 0.02


class CallFigures:
    def __init__(self) -> None:
        self.calls = 0
        self.cost = 0.0
        self.mean_us = UNKNOWN_US
        # Not told yet.
        self._calls = 0
        self._cost = 0.0
        self._latency = [0] * LATENCY_BUCKETS

    def add(self, calls: int, cost: float, micros: int) -> None:
        """Calls that ended together, such as a batch and its halves."""
        self._sum(calls, cost)
        self._latency[_bucket(micros)] += calls
        self.mean_us = _mean(self.mean_us, micros)

    def add_rows(self, rows: Iterable[Ended], calls_each: int) -> None:
        """As `add` of each row that was called, in one loop: it runs for every row of a quick function."""
        latency, mean_us, old = self._latency, self.mean_us, 1 - NEW_SHARE
        calls, cost = 0, 0.0
        for ended in rows:
            micros = ended.micros
            if micros < 0:
                continue  # it was not called
            calls += calls_each
            cost += ended.cost
            latency[_bucket(micros) if micros > 1 else 0] += calls_each
            mean_us = micros if mean_us > _MEAN_US_MAX else mean_us * old + micros * NEW_SHARE
        self.mean_us = mean_us
        self._sum(calls, cost)

    def taken(self) -> tuple[int, float, list[int]]:
        """Calls, cost and latencies since this was asked last."""
        told = self._calls, self._cost, self._latency
        self._calls, self._cost, self._latency = 0, 0.0, [0] * LATENCY_BUCKETS
        return told

    def _sum(self, calls: int, cost: float) -> None:
        self.calls += calls
        self.cost += cost
        self._calls += calls
        self._cost += cost


def _bucket(micros: int) -> int:
    """The place of a latency among powers of two."""
    return min(micros.bit_length(), LATENCY_BUCKETS) - 1 if micros else 0


def _mean(mean_us: float, micros: int) -> float:
    if mean_us > _MEAN_US_MAX:
        return micros
    return mean_us * (1 - NEW_SHARE) + micros * NEW_SHARE
