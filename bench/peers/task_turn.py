"""A turn of the task workload, the same for every system: its parts, and the timing of each.

`Tasks` hides the differences: a producer that answers in lines, a worker that can be started and
ended, and the processes of the server. Completion times come from the tally, which the workers of all
systems write in the same way.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol

from bench.peers import tally
from bench.peers.process import Load, Process, ProcessFailed
from bench.peers.processors import used_by_side, used_ns
from bench.peers.suite import percentile
from bench.peers.task_workload import BATCH, CALLERS, LATENCY_PER_S, WHO, TaskAmount

POLL_S = 0.002
# A longer interval, because the count of unfinished tasks is not free.
SETTLE_POLL_S = 0.02
WITHIN_S = 180.0
WARM_S = 0.3
WARM_PACED = 20
QUIET_S = 1.0
# Not on the measured disk, if the machine has this directory.
SHARED_MEMORY = Path("/dev/shm")


class Tasks(Protocol):
    """A running system."""

    producer: Load
    tally: Path

    def worker(self) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Runs tasks while the context is open. Yields the process ids."""

    def server(self) -> Sequence[int]:
        """The processes other than worker and producer."""

    def load(self, count: int) -> None:
        """Enqueue `count` tasks in the fastest way. Not timed."""

    def left(self) -> int:
        """The number of tasks that are not settled, if the system can report it."""

    @property
    def embedded(self) -> Callable[[], Process] | None:
        """Starts a process that creates a store, enqueues and runs. None if the system needs a server."""

    @property
    def starts(self) -> bool:
        """Whether the worker process is started, rather than continued."""


class TaskTurn:
    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._small_rate: float | None = None
        # Warm-up: use every component once before anything is timed.
        self._drained(self._ask("single", callers=CALLERS, seconds=WARM_S)["count"])

    def enqueue(self, amount: TaskAmount) -> dict[str, float]:
        single = self._ask("single", callers=CALLERS, seconds=amount.seconds)
        self._drained(single["count"])
        measures = {"single": single["rate"]}
        if amount.batched:
            batched = self._ask("batched", count=amount.batched, size=BATCH)
            self._drained(batched["count"])
            measures["batched"] = batched["rate"]
        return measures

    def drain(self, amount: TaskAmount) -> dict[str, float]:
        self._tasks.load(amount.small)
        self._small_rate = _rate(self._drained(amount.small))
        return {"drain_10k": self._small_rate}

    def end_to_end(self, amount: TaskAmount) -> dict[str, float]:
        measures = {}
        with self._tasks.worker() as worker:
            self._done(self._ask("single", callers=CALLERS, seconds=WARM_S)["count"])
            rate, used = self._both(worker, "single", callers=CALLERS, seconds=amount.seconds)
            measures = {"end_to_end": rate, **used}
            if amount.batched:
                rate, used = self._both(worker, "batched", count=amount.batched, size=BATCH)
                measures["end_to_end_batched"] = rate
                measures |= {f"{name}_batched": value for name, value in used.items()}
        return measures

    def latency(self, amount: TaskAmount) -> dict[str, float]:
        with self._tasks.worker():
            self._done(self._ask("paced", count=WARM_PACED, per_s=LATENCY_PER_S)["count"])
            sent = self._ask("paced", count=amount.paced, per_s=LATENCY_PER_S)
            records = self._done(sent["count"])
        # Some systems run a task before it is on disk. It counts from the later of the two events.
        acked = dict(sent["acks"])
        ran = [(done_ns - sent_ns) / 1e6 for sent_ns, done_ns in records]
        took = [(max(done_ns, acked[sent_ns]) - sent_ns) / 1e6 for sent_ns, done_ns in records]
        return {
            "p50": percentile(took, 0.5),
            "p95": percentile(took, 0.95),
            "ran_p95": percentile(ran, 0.95),
        }

    def idle(self, amount: TaskAmount) -> dict[str, float]:
        with self._tasks.worker() as worker:
            self._done(self._ask("paced", count=WARM_PACED, per_s=LATENCY_PER_S)["count"])
            time.sleep(QUIET_S)
            pids = [*worker, *self._tasks.server()]
            before, began = used_ns(pids), time.monotonic_ns()
            time.sleep(amount.idle_s)
            return {"idle": 100 * (used_ns(pids) - before) / (time.monotonic_ns() - began)}

    def cold(self, amount: TaskAmount) -> dict[str, float]:
        measures = {}
        if self._tasks.starts:
            self._ask("paced", count=1, per_s=LATENCY_PER_S)
            began = time.monotonic_ns()
            with self._tasks.worker():
                measures["worker_start"] = (self._done(1)[0][1] - began) / 1e6
        if self._tasks.embedded:
            began = time.monotonic_ns()
            with self._tasks.embedded():
                measures["cold"] = (self._until(1)[0][1] - began) / 1e6
            self._forget()
        return measures

    def backlog(self, amount: TaskAmount) -> dict[str, float]:
        if not amount.large:
            return {}
        self._tasks.load(amount.large)
        with self._tasks.worker():
            self._until(1)
            rate = _rate(self._until(amount.large, for_s=amount.drain_s))
        measures = {"drain_200k": rate}
        if self._small_rate:
            measures["flat"] = rate / self._small_rate
        return measures

    # -- helpers -------------------------------------------------------------------------------

    def _ask(self, what: str, **parameters: Any) -> dict[str, Any]:
        return self._tasks.producer.ask(what, **parameters)

    def _both(
        self, worker: Sequence[int], what: str, **parameters: Any
    ) -> tuple[float, dict[str, float]]:
        """Enqueue and run at the same time: the rate, and the processor time per task of each side."""
        pids = ([self._tasks.producer.pid], worker, self._tasks.server())
        sides = dict(zip(WHO, pids, strict=True))
        before = used_by_side(sides)
        count = self._ask(what, **parameters)["count"]
        records = self._done(count)
        used = {side: ns - before[side] for side, ns in used_by_side(sides).items()}
        began = min(sent_ns for sent_ns, _ in records)
        rate = 1e9 * count / (max(done_ns for _, done_ns in records) - began)
        return rate, {f"{side}_us": ns / 1000 / count for side, ns in used.items() if ns}

    def _drained(self, count: int) -> list[tuple[int, int]]:
        """Start a worker and wait until it has completed `count` tasks."""
        with self._tasks.worker():
            return self._done(count)

    def _done(self, count: int) -> list[tuple[int, int]]:
        """Wait until `count` tasks are completed and settled, and empty the tally."""
        records = self._until(count)
        until = time.monotonic() + WITHIN_S
        while left := self._tasks.left():
            if time.monotonic() > until:
                raise ProcessFailed(f"{left} tasks are completed but not settled")
            time.sleep(SETTLE_POLL_S)
        self._forget()
        return records

    def _until(self, count: int, for_s: float | None = None) -> list[tuple[int, int]]:
        """Wait until `count` tasks are completed, or for a time. Times come from the records, not from the polls."""
        until = time.monotonic() + (for_s or WITHIN_S)
        while (done := tally.count(self._tasks.tally)) < count and time.monotonic() < until:
            time.sleep(POLL_S)
        if for_s is None and done < count:
            raise ProcessFailed(f"{done} of {count} tasks completed within {WITHIN_S:g} s")
        return tally.records(self._tasks.tally)

    def _forget(self) -> None:
        os.truncate(self._tasks.tally, 0)


@contextlib.contextmanager
def tally_file(directory: Path) -> Iterator[Path]:
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else directory
    home = Path(mkdtemp(prefix="bench-tally-", dir=parent))
    path = home / "done"
    path.touch()
    try:
        yield path
    finally:
        path.unlink()
        home.rmdir()


def _rate(records: Sequence[tuple[int, int]]) -> float:
    """The rate from the first completed task on. The time before is the start of the worker."""
    times = [done_ns for _, done_ns in records]
    return 1e9 * (len(times) - 1) / (max(times) - min(times))
