"""The figures of a run that people watch: calls, cost, times, errors, the series over time.

They are of the run, not of one process: a service that goes on with a run begins with the figures that the
last one published. The counts of rows are not kept here; they come from the ledger at each look.

Time is the time of drivers. The gap between two drivers is no time of the run; the gap between two
services of one driver is. What passes before the first row is begun is set-up: Spark starts, the input
is read and sorted, children are started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.ledger import runs
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.error_groups import ErrorGroups
from holdfast.ledger.records import Adopted, Advanced, LogEntry, Reclaimed
from holdfast.ledger.states import State

LATENCY_BUCKETS = 32
SERIES_MAX = 512
ERRORS_SHOWN = 20
_CLASSES = len(ErrorClass)


class RunMetrics:
    """Not thread-safe: the service calls it with the lock of the ledger held."""

    def __init__(
        self,
        now_ns: int,
        known: runs.Progress | None = None,
        *,
        same_driver: bool = False,
    ) -> None:
        known = known or runs.Progress(now_ns, now_ns)
        self.started_ns = known.started_ns
        self.calls, self.cost, self.tokens = known.calls, known.cost, known.tokens
        self.errors = ErrorGroups(known.errors)
        self.failed_by_class = [0] * _CLASSES
        self._latency = (list(known.latency_log2_us) + [0] * LATENCY_BUCKETS)[:LATENCY_BUCKETS]
        self._series = list(known.series)
        self._every = 1
        self._sampled = 0
        # Sums over the drivers before this process, and the marks of this one.
        self._time_ns = known.time_ns or known.updated_ns - known.started_ns
        self._setup_ns, self._calls_ns = known.setup_ns, known.calls_ns
        self._calls_rows = known.calls_rows
        self._begun_ns = now_ns
        self._first_ns: int | None = None
        self._last_ns = now_ns
        # Rows that had ended when this process began to look, and at the last look.
        self._ended_before: int | None = None
        self._ended = 0
        if same_driver and known.updated_ns:
            # The service was away; its driver, and the calls, were not.
            self._begun_ns = min(known.updated_ns, now_ns)
            if known.calls or sum(known.ended):
                self._first_ns = self._last_ns = self._begun_ns
                self._ended_before = self._ended = sum(known.ended)

    def took(self, calls: int, cost: float, latency: Sequence[int], tokens: int = 0) -> None:
        """What a child tells of the calls that it made."""
        self.calls += calls
        self.tokens += tokens
        self.cost += cost
        for at, count in enumerate(latency[:LATENCY_BUCKETS]):
            self._latency[at] += count

    def moved(self, entries: Iterable[LogEntry]) -> None:
        """Count the rows that these decisions failed for good."""
        for error_class, rows in failed_for_good(entries).items():
            self.failed_by_class[error_class] += rows

    def stand(self, now_ns: int, ended: int, in_flight: int) -> None:
        """Note how many rows have ended and how many are begun, after a decision."""
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
    ) -> runs.Progress:
        in_flight = counts[State.IN_FLIGHT]
        self.stand(now_ns, sum(ended), in_flight)
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
        return runs.Progress(
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
        """One more point of the series; every second one goes when there are too many."""
        succeeded, skipped, failed, _ = ended
        point = (time_ns // 1_000_000, succeeded, failed, skipped, in_flight, self.cost)
        self._sampled += 1
        if self._series and self._sampled % self._every:
            self._series[-1] = point
            return
        self._series.append(point)
        if len(self._series) > SERIES_MAX:
            self._series = self._series[::2]
            self._every *= 2


def failed_for_good(entries: Iterable[LogEntry]) -> Counter[int]:
    """Rows by error class that these decisions failed for good."""
    found: Counter[int] = Counter()
    for entry in entries:
        if isinstance(entry, Advanced | Adopted):
            for done in entry.done if isinstance(entry, Advanced) else entry.rows:
                if done.code == State.TERMINAL_FAIL:
                    found[done.error_class] += done.hi - done.lo
        elif isinstance(entry, Reclaimed):
            for lo, hi in entry.failed:
                found[int(ErrorClass.LEASE_EXPIRED)] += hi - lo
    return found
