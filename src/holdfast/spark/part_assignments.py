"""Part assignments: which executor writes the files of which rows. Pure state, without IO or a
clock.

    offered -> assigned -> written | failed

The committer offers intervals of final rows in seq order. A requesting executor gets the first unassigned
interval. When its connection closes, the interval becomes unassigned. A straggler interval is assigned to a
second executor (speculative execution): the files of all writers have the same bytes, and the first report
counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.spark.sinks.part_files import WrittenPart

# An interval is a straggler when it is older than both: this age, and this multiple of the median.
STRAGGLER_NS = 30_000_000_000
STRAGGLER_TIMES = 3
DURATIONS_KEPT = 32
# Target interval between requests of all waiting writers together, in milliseconds.
REQUEST_SPACING_MS = 20
WAIT_MS_MIN = 50
WAIT_MS_MAX = 5_000


class RowInterval(NamedTuple):
    lo: int
    hi: int


class IntervalResult(NamedTuple):
    """The result of an interval: its written parts, or an error."""

    parts: Sequence[WrittenPart]
    error: HoldfastError | None = None


class PartAssignments:
    """`writer` holds the sink's settings for executors, as bytes. `closed`: the committer offers no
    further interval.
    """

    def __init__(self, writer: bytes) -> None:
        self.writer = writer
        self.closed = False
        # Number of written intervals. It changes with the progress of the output.
        self.written_count = 0
        self._offered: OrderedDict[int, RowInterval] = OrderedDict()
        # By first seq: the owners of an interval, and the assignment time of each.
        self._assigned: dict[int, dict[str, int]] = {}
        self._results: dict[int, IntervalResult] = {}
        self._requesters: set[str] = set()
        self._durations_ns: list[int] = []

    # --- the commit -----------------------------------------------------------------------------

    def offer(self, lo: int, hi: int) -> None:
        self._offered[lo] = RowInterval(lo, hi)

    def has_result(self, lo: int, *, failed: bool = True) -> bool:
        """Whether the interval at this seq is written, or has failed (unless `failed` is False)."""
        result = self._results.get(lo)
        return result is not None and (failed or result.error is None)

    def take_result(self, lo: int) -> IntervalResult:
        """Remove and return the result of an interval. After an error the interval is offered
        again.
        """
        result = self._results.pop(lo)
        if result.error is None:
            del self._offered[lo]
        return result

    def close(self) -> None:
        self.closed = True

    # --- executors ------------------------------------------------------------------------------

    def assign(self, owner: str, now_ns: int) -> RowInterval | None:
        """Assign an interval to this executor. None: no interval is available."""
        self._requesters.add(owner)
        free = [one for one in self._offered.values() if self._is_unassigned(one.lo)]
        interval = free[0] if free else self._find_straggler(owner, now_ns)
        if interval is not None:
            self._assigned.setdefault(interval.lo, {})[owner] = now_ns
        return interval

    def report(self, owner: str, lo: int, parts: Sequence[WrittenPart], now_ns: int) -> bool:
        """Record written parts. Return False if the interval is no longer assigned to this owner."""
        since_ns = self._assigned.get(lo, {}).get(owner)
        if since_ns is None:
            return False
        del self._assigned[lo]
        self._durations_ns = [*self._durations_ns, now_ns - since_ns][-DURATIONS_KEPT:]
        self._results[lo] = IntervalResult(parts)
        self.written_count += 1
        return True

    def report_failure(self, owner: str, lo: int, error: HoldfastError) -> None:
        """Record an error. It counts if no other executor is working on the interval."""
        if self._assigned.get(lo, {}).pop(owner, None) is not None and not self._assigned[lo]:
            self._results[lo] = IntervalResult((), error)

    def on_disconnect(self, owner: str) -> None:
        """Unassign the intervals of a closed connection."""
        self._requesters.discard(owner)
        for owners in self._assigned.values():
            owners.pop(owner, None)

    def wait_ms(self) -> int:
        """Return how long an executor without an interval waits before its next request."""
        return min(max(REQUEST_SPACING_MS * len(self._requesters), WAIT_MS_MIN), WAIT_MS_MAX)

    @property
    def has_unassigned(self) -> bool:
        """Whether an offered interval is unassigned."""
        return any(self._is_unassigned(lo) for lo in self._offered)

    def _is_unassigned(self, lo: int) -> bool:
        return not self._assigned.get(lo) and lo not in self._results

    def _find_straggler(self, owner: str, now_ns: int) -> RowInterval | None:
        usual_ns = median(self._durations_ns) if self._durations_ns else 0
        limit_ns = max(STRAGGLER_NS, STRAGGLER_TIMES * usual_ns)
        for lo, owners in self._assigned.items():
            late = [since_ns for since_ns in owners.values() if now_ns - since_ns > limit_ns]
            if late and len(late) == len(owners) and owner not in owners and lo in self._offered:
                return self._offered[lo]
        return None
