"""The report buffer of a task worker: outcomes until the commit that reports them.

Reports are idempotent. After a commit with an unknown outcome the buffer sends the same reports
again, and the store repeats its first answer.
"""

from __future__ import annotations

import threading

from holdfast import failpoints
from holdfast.clock import Clock
from holdfast.config import SETTLEMENT_BYTES_MAX
from holdfast.errors import HoldfastError
from holdfast.runner.unknown_outcome import can_repeat
from holdfast.store.api import Store
from holdfast.tasks import operations as tasks
from holdfast.tasks.operations import AttemptOutcome, TaskReport
from holdfast.workers.tasks.attempt import AttemptObserver, AttemptResult

REPORTS_MAX = 2_000
RETRY_PAUSE_S = 0.05


class ReportBuffer:
    def __init__(
        self, store: Store, universe: str, owner: str, observer: AttemptObserver, clock: Clock
    ) -> None:
        self.observer = observer
        self.pending: list[TaskReport] = []
        # The answers of the store, counted.
        self.counts = dict.fromkeys(tasks.ReportAnswer, 0)
        self._store = store
        self._universe = universe
        self._owner = owner
        self._clock = clock
        self._counting = threading.Lock()

    def add_release(self, token: tuple[int, int]) -> None:
        """Add a report that returns a task unstarted."""
        self.pending.append(TaskReport(*token, AttemptOutcome.RELEASED))

    def next_batch(self) -> list[TaskReport]:
        """Return the first reports, within the limits of one commit."""
        size = 0
        for count, report in enumerate(self.pending[:REPORTS_MAX]):
            size += len(report.result) + len(report.error)
            if size > SETTLEMENT_BYTES_MAX and count:
                return self.pending[:count]
        return self.pending[:REPORTS_MAX]

    def on_committed(self, batch: list[TaskReport], answers: list[int]) -> None:
        """Remove the reports of a commit and count their answers."""
        del self.pending[: len(batch)]
        with self._counting:
            for answer in tasks.ReportAnswer:
                self.counts[answer] += answers.count(int(answer))

    def count_committed(self, count: int) -> None:
        """Count attempts whose own commits have completed their tasks."""
        if count:
            with self._counting:
                self.counts[tasks.ReportAnswer.COMMITTED] += count

    def commit_all(self) -> None:
        while self.pending:
            batch = self.next_batch()
            self.commit(batch)
            del self.pending[: len(batch)]

    def commit(self, reports: list[TaskReport]) -> list[int]:
        if failpoints.armed:
            failpoints.hit("task_worker.report", reports)
        answers: list[int] = self._store.transact(
            tasks.apply_reports, self._universe, self._owner, self._store.generation, reports
        )
        return answers

    def commit_one(self, result: AttemptResult) -> bool:
        """Commit one report in its executor thread, while no task starts. Returns whether it
        succeeded. On failure the report joins the next batch.
        """
        attempt = result.work
        while not attempt.lease_expired and not attempt.dropped:
            try:
                [answer] = self.commit([result.report])
            except HoldfastError as error:
                if not can_repeat(error):
                    return False
                # Also while the worker stops: it retries until the lease is over.
                self._clock.sleep(RETRY_PAUSE_S)
                continue
            with self._counting:
                self.counts[tasks.ReportAnswer(answer)] += 1
            return True
        return False
