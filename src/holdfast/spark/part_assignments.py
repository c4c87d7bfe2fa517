"""Which executor writes the files of which rows: pure bookkeeping, without IO and without a clock.

    offered -> given -> written | failed

The commit offers intervals of final rows in the order of seqs. An executor that asks is given the first one that
nobody has. When its connection closes, the interval is given to another. An interval that takes much longer than the
others is given to one more: the files of all writers have the same bytes, and the first report counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.spark.sinks.written import WrittenPart

# An interval is given to another executor when it is older than both: this age, and this multiple of the median.
SLOW_NS = 30_000_000_000
SLOW_TIMES = 3
TIMES_KEPT = 32
# Writers that wait send about one request in this many milliseconds together.
ASK_MS = 20
WAIT_MS_MIN = 50
WAIT_MS_MAX = 5_000


class Interval(NamedTuple):
    lo: int
    hi: int


class Written(NamedTuple):
    """What became of an interval: its parts, or an error."""

    parts: Sequence[WrittenPart]
    error: HoldfastError | None = None


class PartAssignments:
    """`writer` is what the sink tells executors, as bytes. `closed`: the commit offers no further interval."""

    def __init__(self, writer: bytes) -> None:
        self.writer = writer
        self.closed = False
        # How many intervals were written: it changes as the output gets on.
        self.count = 0
        self._offered: OrderedDict[int, Interval] = OrderedDict()
        # By its first seq: the owners that an interval was given to, and when.
        self._given: dict[int, dict[str, int]] = {}
        self._ended: dict[int, Written] = {}
        self._asking: set[str] = set()
        self._took_ns: list[int] = []

    # --- the commit -----------------------------------------------------------------------------

    def offer(self, lo: int, hi: int) -> None:
        self._offered[lo] = Interval(lo, hi)

    def is_over(self, lo: int, *, failed: bool = True) -> bool:
        """Whether the interval that begins here is written, or has `failed`."""
        ended = self._ended.get(lo)
        return ended is not None and (failed or ended.error is None)

    def take_ended(self, lo: int) -> Written:
        """What became of an interval that is over. After an error it is offered once more."""
        ended = self._ended.pop(lo)
        if ended.error is None:
            del self._offered[lo]
        return ended

    def close(self) -> None:
        self.closed = True

    # --- executors ------------------------------------------------------------------------------

    def take(self, owner: str, now_ns: int) -> Interval | None:
        """The interval that this executor is to write. None: there is none just now."""
        self._asking.add(owner)
        free = [one for one in self._offered.values() if self._is_free(one.lo)]
        found = free[0] if free else self._slow(owner, now_ns)
        if found is not None:
            self._given.setdefault(found.lo, {})[owner] = now_ns
        return found

    def report(self, owner: str, lo: int, parts: Sequence[WrittenPart], now_ns: int) -> bool:
        """False: the report does not count, of an owner that the interval was taken from."""
        since_ns = self._given.get(lo, {}).get(owner)
        if since_ns is None:
            return False
        del self._given[lo]
        self._took_ns = [*self._took_ns, now_ns - since_ns][-TIMES_KEPT:]
        self._ended[lo] = Written(parts)
        self.count += 1
        return True

    def fail(self, owner: str, lo: int, error: HoldfastError) -> None:
        """An error counts when no other executor is at work on the interval."""
        if self._given.get(lo, {}).pop(owner, None) is not None and not self._given[lo]:
            self._ended[lo] = Written((), error)

    def gone(self, owner: str) -> None:
        """Its connection closed: what it was given is free again."""
        self._asking.discard(owner)
        for owners in self._given.values():
            owners.pop(owner, None)

    def wait_ms(self) -> int:
        """How long an executor that got nothing waits before it asks again."""
        return min(max(ASK_MS * len(self._asking), WAIT_MS_MIN), WAIT_MS_MAX)

    @property
    def waiting(self) -> bool:
        """Whether an interval is offered that no executor has."""
        return any(self._is_free(lo) for lo in self._offered)

    def _is_free(self, lo: int) -> bool:
        return not self._given.get(lo) and lo not in self._ended

    def _slow(self, owner: str, now_ns: int) -> Interval | None:
        usual_ns = median(self._took_ns) if self._took_ns else 0
        limit_ns = max(SLOW_NS, SLOW_TIMES * usual_ns)
        for lo, owners in self._given.items():
            late = [since_ns for since_ns in owners.values() if now_ns - since_ns > limit_ns]
            if late and len(late) == len(owners) and owner not in owners and lo in self._offered:
                return self._offered[lo]
        return None
