"""A run told to people: its figures, and the words for them.

- Everything here is a pure function of `RunRecord` and `Progress`; whoever calls brings `now_ns`.
- The live display, the report and the command line say the same because they all ask here.
- No arrays: a run can be looked at where neither NumPy nor Spark is installed.

Why `Progress.ended` is asked and not the counts by state alone: a committed row is COMMITTED,
whatever it was before, so the counts of a finished run no longer know what failed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

from holdfast.clock import S
from holdfast.ledger.runs import Progress, RunRecord, Status

Point = tuple[int, int, int, int, int, float]

# A burst of this age weighs half of what happens now.
PACE_HALF_LIFE_NS = 5 * S
# Slower than one row an hour is no speed, but a memory of one.
STALLED_PER_S = 1 / 3600
_MS = 1_000_000


# -- figures -------------------------------------------------------------------------------------


class Tally(NamedTuple):
    """How the rows of a run stand. The first four are final, committed or not."""

    succeeded: int
    skipped: int
    failed: int
    cancelled: int
    in_flight: int
    committed: int

    @property
    def ended(self) -> int:
        return self.succeeded + self.skipped + self.failed + self.cancelled


def tally(progress: Progress) -> Tally:
    counts = [*progress.counts, *[0] * (8 - len(progress.counts))]
    if progress.ended:
        succeeded, skipped, failed, cancelled = progress.ended
    else:
        succeeded, skipped, failed, cancelled = counts[3:7]
    return Tally(succeeded, skipped, failed, cancelled, counts[2], counts[7])


def tally_of_all(newest: Progress, older: Sequence[Progress]) -> Tally:
    """A retry and the runs before it as one: what failed in an older one was tried again in the next."""
    last = tally(newest)
    before = [tally(one) for one in older]
    return last._replace(
        succeeded=last.succeeded + sum(one.succeeded for one in before),
        skipped=last.skipped + sum(one.skipped for one in before),
        cancelled=last.cancelled + sum(one.cancelled for one in before),
        committed=before[-1].committed if before else last.committed,
    )


class Pace(NamedTuple):
    """Rows per second as an exponential moving average; None until a row has ended.

    `seconds` is the time that the average rests on, decayed as it is: a young average is the mean so far.
    """

    at_ns: int
    ended: int
    per_s: float | None = None
    seconds: float = PACE_HALF_LIFE_NS / S / log(2)


def paced(pace: Pace | None, ended: int, now_ns: int) -> Pace:
    """The pace after `ended` rows at `now_ns`. What was there at the first look is no speed, and neither
    is the time before the first row ended."""
    if pace is None or ended < pace.ended or (pace.per_s is None and ended == pace.ended):
        return Pace(now_ns, ended)
    passed_ns = now_ns - pace.at_ns
    if passed_ns <= 0:
        return pace
    present = (ended - pace.ended) * S / passed_ns
    kept: float = 0.5 ** (passed_ns / PACE_HALF_LIFE_NS)
    weight = (1 - kept) * PACE_HALF_LIFE_NS / S / log(2)
    if pace.per_s is None:
        return Pace(now_ns, ended, present, weight)
    seconds = kept * pace.seconds + weight
    return Pace(
        now_ns, ended, (kept * pace.seconds * pace.per_s + weight * present) / seconds, seconds
    )


def pace_of(series: Sequence[Point]) -> float | None:
    """The pace at the end of a series."""
    pace: Pace | None = None
    for t_ms, done, failed, skipped, _, _ in series:
        pace = paced(pace, done + failed + skipped, t_ms * _MS)
    return None if pace is None else pace.per_s


def took_ns(progress: Progress) -> int:
    """The time of the run's drivers, without the gaps between them."""
    return progress.time_ns or max(0, progress.updated_ns - progress.started_ns)


def mean_rate(progress: Progress) -> float | None:
    """Rows that ended per second of the time from the first call to the last end, all drivers together."""
    if progress.time_ns:
        return progress.calls_rows * S / progress.calls_ns if progress.calls_ns > 0 else None
    # Older records: what had ended before the series began was no work of its time.
    passed_ns, ended = progress.updated_ns - progress.started_ns, tally(progress).ended
    if progress.series:
        t_ms, done, failed, skipped, _, _ = progress.series[0]
        passed_ns, ended = passed_ns - t_ms * _MS, ended - done - failed - skipped
    return max(0, ended) * S / passed_ns if passed_ns > 0 else None


def throughput(series: Sequence[Point], parts_max: int = 60) -> list[tuple[float, float, float]]:
    """(begin, end, rows per second) of equal intervals from the first call to the last end, in seconds.

    Each rate is that of its interval alone: the rates times their lengths add up to the rows that ended.
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
    ended = _interpolated(points[first : last + 1], edges)
    return [
        (lo, hi, (b - a) / (hi - lo))
        for (lo, hi), (a, b) in zip(pairwise(edges), pairwise(ended), strict=True)
    ]


def _interpolated(points: Sequence[tuple[float, int]], times: Sequence[float]) -> list[float]:
    """The count at each of these ascending times, on straight lines between the points."""
    found: list[float] = []
    at = 0
    for time in times:
        while at + 2 < len(points) and points[at + 1][0] < time:
            at += 1
        (t0, n0), (t1, n1) = points[at], points[min(at + 1, len(points) - 1)]
        share = min(max((time - t0) / (t1 - t0), 0.0), 1.0) if t1 > t0 else 1.0
        found.append(n0 + (n1 - n0) * share)
    return found


def eta_ns(left: int, per_s: float | None) -> int | None:
    """How long `left` rows take; None while nobody can say."""
    if left <= 0:
        return 0
    return None if per_s is None or per_s < STALLED_PER_S else int(left / per_s * S)


def phase_of(size: int, progress: Progress) -> str:
    """`ingest` until rows are counted, `commit` once all have ended, `run` between."""
    if not any(progress.counts):
        return "ingest"
    return "commit" if size and tally(progress).ended >= size else "run"


# -- words ---------------------------------------------------------------------------------------


def duration_text(ns: int) -> str:
    """The two greatest units: `850 ms`, `12 s`, `3 min 20 s`, `2 h 05 min`, `3 d 4 h`."""
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
    """Always a figure that can be read: slow work is told by the minute or the hour."""
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
    """As the function reported it: its unit is the user's."""
    if cost >= 1 or cost == 0:
        return f"{cost:,.2f}"
    return f"{cost:.4f}" if cost >= 0.01 else f"{cost:.2g}"


def percent_text(part: int, whole: int) -> str:
    """Rounded down: 100 % means all of them."""
    return f"{part * 100 // whole} %" if whole else "-"


def times_text(progress: Progress) -> str:
    """`54 s: 50 s until the first call, 3 s of calls`."""
    text = duration_text(took_ns(progress))
    if not progress.time_ns:
        return text
    if not progress.calls_ns:
        return f"{text}, no call yet"
    setup, calls = duration_text(progress.setup_ns), duration_text(progress.calls_ns)
    return f"{text}: {setup} until the first call, {calls} of calls"


def counts_text(progress: Progress, older: Sequence[Progress] = ()) -> str:
    """`1,200 done, 4 failed, 30 skipped, 16 in flight`: zeros are left out, but for `done`."""
    found = tally_of_all(progress, older)
    parts = [f"{found.succeeded:,} done"]
    for count, word in (
        (found.failed, "failed"),
        (found.skipped, "skipped"),
        (found.cancelled, "cancelled"),
        (found.in_flight, "in flight"),
    ):
        if count:
            parts.append(f"{count:,} {word}")
    return ", ".join(parts)


def calls_text(progress: Progress) -> str:
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


def line(name: str, size: int, progress: Progress, *, phase: str, per_s: float | None) -> str:
    """Everything about a run that goes on, in one line of text."""
    found = tally(progress)
    at = found.committed if phase == "commit" else found.ended
    parts = [f"{name} {phase} {at:,}/{size:,} ({percent_text(at, size)})"]
    parts.append(counts_text(progress))
    if phase == "run":
        left_ns = eta_ns(size - found.ended, per_s)
        parts.append(
            f"{rate_text(per_s)}, {'?' if left_ns is None else duration_text(left_ns)} left"
        )
    parts.append(calls_text(progress))
    return "; ".join(parts)


def settings(record: RunRecord) -> list[tuple[str, str]]:
    """What the run must be resumed with, by name; but for what the record itself tells."""
    return sorted(item for item in record.config.items() if item[0] not in ("key", "output"))


def next_steps(
    record: RunRecord, progress: Progress, *, store: str = "", live: bool = False
) -> list[str]:
    """What a person does now, the most useful first. `live`: a driver holds the run's lease."""
    name, found = shlex.quote(record.name), tally(progress)
    option = f" --store {shlex.quote(store.removeprefix('lmdb:'))}" if store else ""
    look = f"holdfast runs failed {name}{option}"
    again = f"holdfast runs retry {name}{option}"
    if record.status in (Status.INGESTING, Status.OPEN, Status.CANCELLING) and live:
        steps = [f"it goes on; stop it with: holdfast runs cancel {name}{option}"]
    elif record.status is Status.INGESTING:
        steps = ["its driver is gone and the input was not all read: run the stage again"]
    elif record.status is Status.OPEN and record.stopped:
        asked = bool(record.retry_requested_ns)
        steps = [
            f"it stopped: {record.stopped}",
            "mend the cause, then run the stage again: it goes on where it was",
            "rows that had failed are tried again then"
            if asked
            else f"include what failed: {again}",
        ]
    elif record.status is Status.OPEN:
        steps = ["its driver is gone: run the stage again, it goes on where it was"]
    elif record.status is Status.CANCELLING:
        steps = ["its driver is gone: run the stage again, and the cancellation ends"]
    elif record.status is Status.HALTED:
        why = record.halted or "no reason was kept"
        steps = [
            f"it was stopped, for going on would be wrong: {why}",
            "report that as a bug; fresh=True begins a new run",
        ]
    elif record.status is Status.CANCELLED:
        steps = [
            'its outcomes are kept; run the stage with changed="extend" to go on and reuse them'
        ]
    elif found.failed:
        steps = [f"look at what failed: {look}", f"then mark it for another try: {again}"]
    else:
        steps = ["nothing: every row has its outcome; running it again does no work"]
    if found.failed and not steps[0].startswith("look"):
        steps.append(f"look at what failed so far: {look}")
    return steps
