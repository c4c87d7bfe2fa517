"""The run plan: the rows that the next run of a stage would call, reuse and retry."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.ledger.log import count_rows as counts_of
from holdfast.ledger.states import RowState
from holdfast.store.api import Store


@dataclass(frozen=True)
class RunPlan:
    name: str
    run_id: str
    status: str
    rows: int
    to_run: int
    to_retry: int
    reused: int
    failed: int
    skipped: int
    to_commit: int
    stopped: str = ""

    @classmethod
    def of(cls, store: Store, name: str) -> RunPlan:
        record = store.read(runs.get_latest, name)
        if record is None:
            return cls._without_counts(name, "", "new")
        if record.status is runs.RunLifecycle.INGESTING:
            return cls._without_counts(name, record.run_id, record.status.value)
        try:
            row_counts = counts_of(store, record.run_id)
        except NotFound:
            return cls._without_counts(name, record.run_id, record.status.value)
        counts = row_counts.by_state
        succeeded, skipped, failed, _ = row_counts.ended
        begun = counts[RowState.IN_FLIGHT]
        return cls(
            name=name,
            run_id=record.run_id,
            status=record.status.value,
            rows=record.size,
            to_run=counts[RowState.UNSEEN] + counts[RowState.DISPATCHED],
            to_retry=begun,
            reused=succeeded,
            failed=failed,
            skipped=skipped,
            to_commit=record.size - counts[RowState.COMMITTED],
            stopped=record.stopped,
        )

    @classmethod
    def _without_counts(cls, name: str, run_id: str, status: str) -> RunPlan:
        return cls(
            name=name,
            run_id=run_id,
            status=status,
            rows=0,
            to_run=0,
            to_retry=0,
            reused=0,
            failed=0,
            skipped=0,
            to_commit=0,
        )

    def __str__(self) -> str:
        if not self.run_id:
            return f"{self.name}: no run yet; every row of the input will be run"
        if self.status == runs.RunLifecycle.INGESTING.value:
            return f"{self.name}: the ingest of the input was interrupted; it will start again"
        stopped = f"  it stopped: {self.stopped}\n" if self.stopped else ""
        return (
            f"{self.name}: {self.status}, run {self.run_id}\n"
            f"{stopped}"
            f"  {self.rows:,} rows in all\n"
            f"  {self.to_run:,} to run\n"
            f"  {self.to_retry:,} begun and not reported: to be retried, one at a time\n"
            f"  {self.reused:,} done: reused, not called again\n"
            f"  {self.skipped:,} skipped, {self.failed:,} failed: final\n"
            f"  {self.to_commit:,} to be committed to the output"
        )
