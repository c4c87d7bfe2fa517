"""Run metrics: calls, cost, times, errors and a time series for operators.

The metrics belong to the run, not to a process. A new service starts from the last published
figures. Row counts are not kept here: they are read from the ledger at each update.

Time is driver time. The gap between two drivers does not count. The gap between two services of one
driver does. The time before the first row begins is set-up: Spark starts, the input is read and
sorted, children start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.ledger import runs
from holdfast.ledger.error_groups import ErrorGroups
from holdfast.ledger.events import GrantReclaimed, LogEntry, RowsAdopted, RowsReported
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState

LATENCY_BUCKETS = 32
SERIES_MAX = 512
ERRORS_SHOWN = 20
_CLASSES = len(ErrorClass)


class RunMetrics:
    """Not thread-safe: the service calls it under the ledger lock."""

    def __init__(
        self,
        now_ns: int,
        previous: runs.RunProgress | None = None,
        *,
        same_driver: bool = False,
    ) -> None:
        previous = previous or runs.RunProgress(now_ns, now_ns)
        self.started_ns = previous.started_ns
        self.calls, self.cost, self.tokens = previous.calls, previous.cost, previous.tokens
        self.errors = ErrorGroups(previous.errors)
        self.failed_by_class = [0] * _CLASSES
        self._latency = (list(previous.latency_log2_us) + [0] * LATENCY_BUCKETS)[:LATENCY_BUCKETS]
        self._series = list(previous.series)
        self._sample_every = 1
        self._sampled = 0
        # Totals of earlier processes, and the timestamps of this one.
        self._time_ns = previous.time_ns or previous.updated_ns - previous.started_ns
        self._setup_ns, self._calls_ns = previous.setup_ns, previous.calls_ns
        self._calls_rows = previous.calls_rows
        self._begun_ns = now_ns
        self._first_ns: int | None = None
        self._last_ns = now_ns
        # Finished rows at the first and at the last update of this process.
        self._ended_before: int | None = None
        self._ended = 0
        if same_driver and previous.updated_ns:
            # The service restarted, but its driver and the calls continued.
            self._begun_ns = min(previous.updated_ns, now_ns)
            if previous.calls or sum(previous.ended):
                self._first_ns = self._last_ns = self._begun_ns
                self._ended_before = self._ended = sum(previous.ended)

    def add_calls(self, calls: int, cost: float, latency: Sequence[int], tokens: int = 0) -> None:
        """Add the figures of calls that a child reports."""
        self.calls += calls
        self.tokens += tokens
        self.cost += cost
        for at, count in enumerate(latency[:LATENCY_BUCKETS]):
            self._latency[at] += count

    def add_final_failures(self, entries: Iterable[LogEntry]) -> None:
        """Count the rows that these entries failed finally."""
        for error_class, rows in count_final_failures(entries).items():
            self.failed_by_class[error_class] += rows

    def update_counts(self, now_ns: int, ended: int, in_flight: int) -> None:
        """Update the times from the finished and begun rows after a decision."""
        if self._ended_before is None:
            self._ended_before = self._ended = ended
        if in_flight and self._first_ns is None:
            self._first_ns = now_ns
        if in_flight or ended != self._ended:
            self._last_ns = now_ns
        self._ended = ended

    def progress(
        self,
        now_ns: int,
        *,
        counts: list[int],
        ended: list[int],
        reused: int,
        retries: int,
        reclaims: int,
        fenced: int,
        tasks: int,
        height: int,
        tokens_left: float = 0.0,
    ) -> runs.RunProgress:
        in_flight = counts[RowState.IN_FLIGHT]
        self.update_counts(now_ns, sum(ended), in_flight)
        assert self._ended_before is not None
        time_ns = self._time_ns + max(now_ns - self._begun_ns, 0)
        setup_ns, calls_ns, rows = self._setup_ns, self._calls_ns, self._calls_rows
        if self._first_ns is None:
            setup_ns += max(now_ns - self._begun_ns, 0)
        else:
            setup_ns += self._first_ns - self._begun_ns
            calls_ns += self._last_ns - self._first_ns
            rows += sum(ended) - self._ended_before
        self._sample(time_ns, ended, in_flight)
        return runs.RunProgress(
            updated_ns=now_ns,
            started_ns=self.started_ns,
            counts=counts,
            calls=self.calls,
            reused=reused,
            retries=retries,
            reclaims=reclaims,
            fenced=fenced,
            cost=self.cost,
            tasks=tasks,
            series=list(self._series),
            latency_log2_us=list(self._latency),
            errors=self.errors.top(ERRORS_SHOWN),
            ended=ended,
            failed_by_class=list(self.failed_by_class),
            time_ns=time_ns,
            setup_ns=setup_ns,
            calls_ns=calls_ns,
            calls_rows=rows,
            height=height,
            tokens=self.tokens,
            tokens_left=tokens_left,
        )

    def _sample(self, time_ns: int, ended: Sequence[int], in_flight: int) -> None:
        """Add a point to the series. A full series drops every second point."""
        succeeded, skipped, failed, _ = ended
        point = (time_ns // 1_000_000, succeeded, failed, skipped, in_flight, self.cost)
        self._sampled += 1
        if self._series and self._sampled % self._sample_every:
            self._series[-1] = point
            return
        self._series.append(point)
        if len(self._series) > SERIES_MAX:
            self._series = self._series[::2]
            self._sample_every *= 2


def count_final_failures(entries: Iterable[LogEntry]) -> Counter[int]:
    """Count the rows by error class that these entries failed finally."""
    counts: Counter[int] = Counter()
    for entry in entries:
        if isinstance(entry, RowsReported | RowsAdopted):
            for done in entry.done if isinstance(entry, RowsReported) else entry.rows:
                if done.code == RowState.TERMINAL_FAIL:
                    counts[done.error_class] += done.hi - done.lo
        elif isinstance(entry, GrantReclaimed):
            for lo, hi in entry.failed:
                counts[int(ErrorClass.LEASE_EXPIRED)] += hi - lo
    return counts
