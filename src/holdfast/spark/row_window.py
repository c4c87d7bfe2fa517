"""The row window of a child: how many rows it begins, reports and claims at a time.

- The window adapts to slow calls: only as many rows are begun and claimed as finish within
  `BEGIN_AHEAD_S` and `CLAIM_AHEAD_S`.
- The window would throttle calls of microseconds, so it grows while the mean call is below `FAST_US`. A
  crash then repeats a few milliseconds of work.
- After deaths among the earlier children of the task the window starts small and grows with each report.
"""

from __future__ import annotations

from holdfast.spark.call_metrics import UNKNOWN_MEAN_US, CallMetrics
from holdfast.spark.child_job import ChildJob

FAST_US = 20
WINDOW_ROWS_MAX = 8192
# Rows to begin (or one per concurrent call) until the call duration is known.
FIRST_ROWS = 16
# Look-ahead of begins and claims in seconds: a slow node must not hoard rows.
BEGIN_AHEAD_S = 0.25
CLAIM_AHEAD_S = 1.0
REPORT_ROWS = 32


class RowWindow:
    def __init__(self, job: ChildJob, metrics: CallMetrics) -> None:
        self._job = job
        self._metrics = metrics
        self.rows = max(job.flush_rows >> min(job.deaths * 2, 16), 1)
        if not job.rate:
            self.rows = min(self.rows, max(FIRST_ROWS, job.concurrency))
        self._goal_rows = job.flush_rows if job.deaths else 0
        # Rows of one call unit.
        self.unit_rows = 1

    def size(self) -> int:
        """Return the maximum number of rows that the child has begun and not yet reported."""
        # Under a rate limit, begin only calls that can start now. Otherwise they would start in a
        # burst later.
        job = self._job
        if job.batch_rows:
            return job.batch_rows * (job.concurrency + (not job.rate))
        return job.concurrency + (0 if job.rate else self.rows)

    def low_water(self) -> int:
        """Return the low-water mark: the child sends a request when at most this number of its rows runs."""
        if self._job.batch_rows:
            return self._job.batch_rows * self._job.concurrency
        return self._job.concurrency + self.rows // 2

    def report_rows(self) -> int:
        """Return the number of finished rows at which they are reported."""
        return max(min(REPORT_ROWS, self.rows), self.rows // 4)

    def claim_rows(self) -> int:
        """Return the number of rows of the next claim."""
        if self._job.batch_rows:
            return self._job.batch_rows
        return max(self.size(), min(self.rows * 8, self._calls_within(CLAIM_AHEAD_S)))

    def rows_to_begin(self, rows: int, room: int) -> int:
        """Return how many rows of a grant to begin. A batch is begun whole or not."""
        if self._job.batch_rows:
            return rows if rows <= room else 0
        return min(rows, room)

    def adapt(self) -> None:
        """Adapt to the mean duration of a call, after each report."""
        job, mean_us = self._job, self._metrics.mean_us
        if job.batch_rows or job.rate or mean_us == UNKNOWN_MEAN_US:
            return
        if self.rows < self._goal_rows:
            self.rows = min(self.rows * 2, self._goal_rows)
            return
        if mean_us < FAST_US and self.rows < WINDOW_ROWS_MAX:
            self.rows = min(self.rows * 4, WINDOW_ROWS_MAX)
            self.unit_rows = max(self.rows // (4 * job.concurrency), 1)
        elif mean_us >= FAST_US * 4:
            ahead = max(self._calls_within(BEGIN_AHEAD_S), job.concurrency)
            self.rows, self.unit_rows = min(job.flush_rows, ahead), 1
        else:
            self.rows = max(self.rows, job.flush_rows)

    def _calls_within(self, seconds: float) -> int:
        """Return how many calls end within this time, at the current mean duration."""
        return int(seconds * 1e6 * self._job.concurrency / max(self._metrics.mean_us, 1.0))
