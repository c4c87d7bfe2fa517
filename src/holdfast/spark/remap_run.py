"""Remap runs: map the stored values of rows that failed the schema, without calls.

A remap is a run over the same input that adopts the successful outcomes. For a sink that cannot
follow another run it is a retry run (`retry_run`) over the failed rows. It reports its rows like
any run. A retry calls the stage's function in Spark tasks. A remap passes the decoded `_raw` of
each row to the user's mapping, in the driver. A row whose mapped value fits the schema succeeds.
Any other row fails as before: without a stored value with its former class and text, otherwise as
`schema`, and the original value is kept for another mapping.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

from holdfast.ledger import runs
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark import raw_values
from holdfast.spark.arrow_rows import ResultEncoder
from holdfast.spark.call_slots import CallSlot
from holdfast.spark.caller import CallOutcome, FunctionCaller, OriginPosition
from holdfast.spark.child_job import ChildJob
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.row_executor import RowExecutor
from holdfast.spark.spool import open_spool, resultless_with_raws
from holdfast.store.api import Store


class FailedRowIndex:
    """The failed rows of a run, by their rank among them (`ranked`) or by seq. Reads a page at a
    time.
    """

    def __init__(self, store: Store, record: runs.RunRecord, *, ranked: bool = True) -> None:
        self._store = store
        self._record = record
        self._by_rank_number = ranked
        self._spool = open_spool(record)
        # Pages with failed rows, and the rank of the first failed row of each.
        self._pages: list[int] = []
        self._first_ranks: list[int] = []
        self.count = self.with_raw_count = 0
        self._loaded_page = -1
        self._rows: list[runs.ResultlessRow] = []
        for page in range(-(-record.size // record.policy.page_rows)):
            rows = self._read_page(page)
            if rows:
                self._pages.append(page)
                self._first_ranks.append(self.count)
            self.count += len(rows)
            self.with_raw_count += sum(1 for row in rows if row.raw)

    def row(self, number: int) -> runs.ResultlessRow:
        if self._by_rank_number:
            return self._row_by_rank(number)
        at = bisect_right(self._pages, number // self._record.policy.page_rows) - 1
        rows = self._load_page(at)
        return rows[bisect_left(rows, number, key=lambda row: row.seq)]

    def _row_by_rank(self, rank: int) -> runs.ResultlessRow:
        at = bisect_right(self._first_ranks, rank) - 1
        return self._load_page(at)[rank - self._first_ranks[at]]

    def _load_page(self, at: int) -> list[runs.ResultlessRow]:
        if at != self._loaded_page:
            self._loaded_page, self._rows = at, self._read_page(self._pages[at])
        return self._rows

    def _read_page(self, page: int) -> list[runs.ResultlessRow]:
        by_seq = {
            other.seq: other
            for _, chunk in self._store.read(runs.list_chunks, self._record.run_id, page)
            for other in resultless_with_raws(self._spool, chunk)
            if other.state == RowState.TERMINAL_FAIL
        }
        return [by_seq[seq] for seq in sorted(by_seq)]


class RemapCaller(FunctionCaller):
    """Finishes each row by mapping its stored value."""

    calls_per_row = 0

    def __init__(
        self,
        mapping: Callable[[Any], Any],
        failed: FailedRowIndex,
        encoder: ResultEncoder,
        job: ChildJob,
    ) -> None:
        super().__init__(lambda row: None, (), encoder, job.run_id, job.timeout_s)
        self._mapping = mapping
        self._failed = failed

    def call_row(
        self,
        seq: int,
        row: Any,
        attempt: int,
        origin: OriginPosition | None = None,
        slot: CallSlot | None = None,
    ) -> CallOutcome:
        failed_row = self._failed.row(seq)
        if not failed_row.raw:
            return CallOutcome(
                seq=seq,
                state=failed_row.state,
                values=None,
                error_class=failed_row.error_class,
                error=failed_row.error,
                delay_ns=0,
                cost=0.0,
                micros=0,
            )
        self.fn = lambda row: self._mapping(raw_values.decode(failed_row.raw))
        ended = super().call_row(seq, row, attempt, origin, slot)
        if ended.state != RowState.TERMINAL_FAIL:
            return ended
        return ended._replace(error_class=ErrorClass.SCHEMA, raw=failed_row.raw, delay_ns=0)

    def as_schema_failure(self, outcome: CallOutcome, why: str) -> CallOutcome:
        failed = super().as_schema_failure(outcome, why)
        return failed._replace(raw=self._failed.row(outcome.seq).raw)


def make_remap_work(
    job: ChildJob, mapping: Callable[[Any], Any], failed: FailedRowIndex, encoder: ResultEncoder
) -> Callable[[], str]:
    """Build the work of a remap run, for a thread of the driver."""

    def work() -> str:
        with LedgerClient(job.address, "child") as client:
            return RowExecutor(job, RemapCaller(mapping, failed, encoder, job), client).run()

    return work
