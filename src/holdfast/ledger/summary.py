"""Run summary: the figures of a run and their text.

- All functions are pure functions of `RunRecord` and `RunProgress`. The caller passes `now_ns`.
- The live display, the report and the command line use these functions, so their figures agree.
- This module uses no arrays. A run can be inspected without NumPy and Spark.

The outcomes come from `RunProgress.ended`, not from the counts by state: a committed row has the
state COMMITTED, with any outcome.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

from holdfast.clock import S
from holdfast.ledger.runs import RunLifecycle, RunProgress, RunRecord

SeriesPoint = tuple[int, int, int, int, int, float]

# Half-life of the exponential moving average.
RATE_HALF_LIFE_NS = 5 * S
# A rate below one row per hour counts as stalled.
STALLED_PER_S = 1 / 3600
_MS = 1_000_000


# -- figures -------------------------------------------------------------------------------------


class RowTally(NamedTuple):
    """Row counts of a run by outcome. The first four are final, committed or not."""

    succeeded: int
    skipped: int
    failed: int
    cancelled: int
    in_flight: int
    committed: int

    @property
    def ended(self) -> int:
        return self.succeeded + self.skipped + self.failed + self.cancelled


def tally_rows(progress: RunProgress) -> RowTally:
    counts = [*progress.counts, *[0] * (8 - len(progress.counts))]
    if progress.ended:
        succeeded, skipped, failed, cancelled = progress.ended
    else:
        succeeded, skipped, failed, cancelled = counts[3:7]
    return RowTally(succeeded, skipped, failed, cancelled, counts[2], counts[7])


def tally_retry_chain(newest: RunProgress, older: Sequence[RunProgress]) -> RowTally:
    """Combine a retry run with the runs that it retries. Rows failed in an older run were retried
    in the next.
    """
    last = tally_rows(newest)
    before = [tally_rows(one) for one in older]
    return last._replace(
        succeeded=last.succeeded + sum(one.succeeded for one in before),
        skipped=last.skipped + sum(one.skipped for one in before),
        cancelled=last.cancelled + sum(one.cancelled for one in before),
        committed=before[-1].committed if before else last.committed,
    )


class SmoothedRate(NamedTuple):
    """Rows per second as an exponential moving average; None until a row has finished.

    `seconds` is the decayed time that the average covers. A young average equals the mean so far.
    """

    at_ns: int
    ended: int
    per_s: float | None = None
    seconds: float = RATE_HALF_LIFE_NS / S / log(2)


def smoothed(rate: SmoothedRate | None, ended: int, now_ns: int) -> SmoothedRate:
    """Update the rate with `ended` rows at `now_ns`. Rows present at the first observation and the
    time before the first finished row do not count.
    """
    if rate is None or ended < rate.ended or (rate.per_s is None and ended == rate.ended):
        return SmoothedRate(now_ns, ended)
    passed_ns = now_ns - rate.at_ns
    if passed_ns <= 0:
        return rate
    present = (ended - rate.ended) * S / passed_ns
    kept: float = 0.5 ** (passed_ns / RATE_HALF_LIFE_NS)
    weight = (1 - kept) * RATE_HALF_LIFE_NS / S / log(2)
    if rate.per_s is None:
        return SmoothedRate(now_ns, ended, present, weight)
    seconds = kept * rate.seconds + weight
    return SmoothedRate(
        now_ns, ended, (kept * rate.seconds * rate.per_s + weight * present) / seconds, seconds
    )


def recent_rate(series: Sequence[SeriesPoint]) -> float | None:
    """Return the smoothed rate at the end of a series."""
    rate: SmoothedRate | None = None
    for t_ms, done, failed, skipped, _, _ in series:
        rate = smoothed(rate, done + failed + skipped, t_ms * _MS)
    return None if rate is None else rate.per_s


def elapsed_ns(progress: RunProgress) -> int:
    """The total driver time of the run, without the gaps between drivers."""
    return progress.time_ns or max(0, progress.updated_ns - progress.started_ns)


def mean_rate(progress: RunProgress) -> float | None:
    """The mean rows per second from the first call to the last finished row, over all drivers."""
    if progress.time_ns:
        return progress.calls_rows * S / progress.calls_ns if progress.calls_ns > 0 else None
    # Older records: exclude the rows that had finished before the series began.
    passed_ns, ended = progress.updated_ns - progress.started_ns, tally_rows(progress).ended
    if progress.series:
        t_ms, done, failed, skipped, _, _ = progress.series[0]
        passed_ns, ended = passed_ns - t_ms * _MS, ended - done - failed - skipped
    return max(0, ended) * S / passed_ns if passed_ns > 0 else None


def throughput(
    series: Sequence[SeriesPoint], parts_max: int = 60
) -> list[tuple[float, float, float]]:
    """Return (begin, end, rows per second) of equal intervals from the first call to the last
    finished row.

    Each rate belongs to its interval alone. The rates times their lengths add up to the finished
    rows.
    """
    points = [
        (t_ms / 1000, done + failed + skipped) for t_ms, done, failed, skipped, _, _ in series
    ]
    rows = [ended for _, ended in points]
    if not points or rows[-1] <= rows[0]:
        return []
    busy = [at for at, point in enumerate(series) if point[4] or rows[at] > rows[0]]
    first = max(busy[0] - (rows[busy[0]] > rows[0]), 0)
    last = rows.index(rows[-1])
    begin, end = points[first][0], points[last][0]
    if end <= begin:
        return []
    parts = max(min(parts_max, last - first), 1)
    edges = [begin + (end - begin) * at / parts for at in range(parts + 1)]
    ended = _interpolate(points[first : last + 1], edges)
    return [
        (lo, hi, (b - a) / (hi - lo))
        for (lo, hi), (a, b) in zip(pairwise(edges), pairwise(ended), strict=True)
    ]


def _interpolate(points: Sequence[tuple[float, int]], times: Sequence[float]) -> list[float]:
    """Interpolate the count linearly at each of these ascending times."""
    counts: list[float] = []
    at = 0
    for time in times:
        while at + 2 < len(points) and points[at + 1][0] < time:
            at += 1
        (t0, n0), (t1, n1) = points[at], points[min(at + 1, len(points) - 1)]
        share = min(max((time - t0) / (t1 - t0), 0.0), 1.0) if t1 > t0 else 1.0
        counts.append(n0 + (n1 - n0) * share)
    return counts


def eta_ns(remaining: int, per_s: float | None) -> int | None:
    """Estimate the time for `remaining` rows; None if the rate is unknown or stalled."""
    if remaining <= 0:
        return 0
    return None if per_s is None or per_s < STALLED_PER_S else int(remaining / per_s * S)


def phase_of(size: int, progress: RunProgress) -> str:
    """Return `ingest` until rows are counted, `commit` when all rows are final, else `run`."""
    if not any(progress.counts):
        return "ingest"
    return "commit" if size and tally_rows(progress).ended >= size else "run"


# -- text ----------------------------------------------------------------------------------------


def duration_text(ns: int) -> str:
    """Format with the two largest units: `850 ms`, `12 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
    if ns < S:
        return f"{max(0, ns) // _MS} ms"
    seconds = ns // S
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def rate_text(per_s: float | None) -> str:
    """Format a rate. Slow rates are given per minute or per hour."""
    if per_s is None:
        return "-"
    if per_s >= 100:
        return f"{per_s:,.0f}/s"
    if per_s >= 1:
        return f"{per_s:.1f}/s"
    if per_s * 60 >= 1:
        return f"{per_s * 60:.1f}/min"
    return f"{per_s * 3600:.1f}/h" if per_s >= STALLED_PER_S else "0/s"


def cost_text(cost: float) -> str:
    """Format a cost in the user's unit."""
    if cost >= 1 or cost == 0:
        return f"{cost:,.2f}"
    return f"{cost:.4f}" if cost >= 0.01 else f"{cost:.2g}"


def percent_text(part: int, whole: int) -> str:
    """Format a percentage, rounded down: 100 % means all rows."""
    return f"{part * 100 // whole} %" if whole else "-"


def times_text(progress: RunProgress) -> str:
    """`54 s: 50 s until the first call, 3 s of calls`."""
    text = duration_text(elapsed_ns(progress))
    if not progress.time_ns:
        return text
    if not progress.calls_ns:
        return f"{text}, no call yet"
    setup, calls = duration_text(progress.setup_ns), duration_text(progress.calls_ns)
    return f"{text}: {setup} until the first call, {calls} of calls"


def counts_text(progress: RunProgress, older: Sequence[RunProgress] = ()) -> str:
    """`1,200 done, 4 failed, 30 skipped, 16 in flight`; zeros except `done` are omitted."""
    tally = tally_retry_chain(progress, older)
    parts = [f"{tally.succeeded:,} done"]
    for count, word in (
        (tally.failed, "failed"),
        (tally.skipped, "skipped"),
        (tally.cancelled, "cancelled"),
        (tally.in_flight, "in flight"),
    ):
        if count:
            parts.append(f"{count:,} {word}")
    return ", ".join(parts)


def calls_text(progress: RunProgress) -> str:
    """`1,250 calls, 10 reused, 3 retried, 500,000 tokens, cost 0.42`."""
    parts = [f"{progress.calls:,} {'call' if progress.calls == 1 else 'calls'}"]
    if progress.reused:
        parts.append(f"{progress.reused:,} reused")
    if progress.retries:
        parts.append(f"{progress.retries:,} retried")
    if progress.tokens:
        parts.append(f"{progress.tokens:,} tokens")
    if progress.cost > 0:
        parts.append(f"cost {cost_text(progress.cost)}")
    return ", ".join(parts)


def one_line_text(
    name: str, size: int, progress: RunProgress, *, phase: str, per_s: float | None
) -> str:
    """Describe an active run in one line."""
    totals = tally_rows(progress)
    done = totals.committed if phase == "commit" else totals.ended
    parts = [f"{name} {phase} {done:,}/{size:,} ({percent_text(done, size)})"]
    parts.append(counts_text(progress))
    if phase == "run":
        remaining_ns = eta_ns(size - totals.ended, per_s)
        parts.append(
            f"{rate_text(per_s)}, {'?' if remaining_ns is None else duration_text(remaining_ns)} left"
        )
    parts.append(calls_text(progress))
    return "; ".join(parts)


def settings(record: RunRecord) -> list[tuple[str, str]]:
    """The settings that a resumed run must repeat, by name, without those in the record's fields."""
    return sorted(item for item in record.config.items() if item[0] not in ("key", "output"))


def next_steps(
    record: RunRecord, progress: RunProgress, *, store: str = "", live: bool = False
) -> list[str]:
    """The recommended next steps, most useful first. `live`: a driver holds the run's lease."""
    name, totals = shlex.quote(record.name), tally_rows(progress)
    option = f" --store {shlex.quote(store.removeprefix('lmdb:'))}" if store else ""
    failed_command = f"holdfast runs failed {name}{option}"
    retry_command = f"holdfast runs retry {name}{option}"
    if (
        record.status in (RunLifecycle.INGESTING, RunLifecycle.OPEN, RunLifecycle.CANCELLING)
        and live
    ):
        steps = [f"the run is active; cancel it with: holdfast runs cancel {name}{option}"]
    elif record.status is RunLifecycle.INGESTING:
        steps = ["its driver stopped before it had read the whole input: run the stage again"]
    elif record.status is RunLifecycle.OPEN and record.stopped:
        is_retry_requested = bool(record.retry_requested_ns)
        steps = [
            f"it stopped: {record.stopped}",
            "fix the cause, then run the stage again: the run resumes",
            "failed rows are retried then"
            if is_retry_requested
            else f"to retry failed rows too: {retry_command}",
        ]
    elif record.status is RunLifecycle.OPEN:
        steps = ["its driver stopped: run the stage again to resume the run"]
    elif record.status is RunLifecycle.CANCELLING:
        steps = ["its driver stopped: run the stage again to complete the cancellation"]
    elif record.status is RunLifecycle.HALTED:
        why = record.halted or "the run record has no reason"
        steps = [
            f"an illegal state transition halted the run: {why}",
            "report this as a bug; fresh=True starts a new run",
        ]
    elif record.status is RunLifecycle.CANCELLED:
        steps = [
            'its outcomes are kept; run the stage with changed="extend" to reuse them in a new run'
        ]
    elif totals.failed:
        steps = [
            f"list the failed rows: {failed_command}",
            f"then mark them for retry: {retry_command}",
        ]
    else:
        steps = ["nothing: every row has its outcome; another run of the stage calls no row"]
    if totals.failed and not steps[0].startswith("list"):
        steps.append(f"list the rows that have failed so far: {failed_command}")
    return steps
