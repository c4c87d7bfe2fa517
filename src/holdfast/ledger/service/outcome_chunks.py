"""Outcome chunks: the stored results of a report and the final outcomes of rows without a result."""

from __future__ import annotations

from holdfast.ledger import runs
from holdfast.ledger.error_groups import ErrorGroups
from holdfast.ledger.events import GrantReclaimed, RowRange
from holdfast.ledger.ranges import RowRanges
from holdfast.ledger.replies import ReportAccepted
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.run_scheduler import LogEntries, RunScheduler
from holdfast.ledger.service.group_log import RowPut
from holdfast.ledger.service.messages import GrantReport
from holdfast.ledger.states import RowState

LOST_ROW_ERROR = "its interpreter died, or its lease ran out, at every try"


def build_chunk(
    board: RunScheduler,
    report: GrantReport,
    accepted: ReportAccepted,
    batch: memoryview,
    errors: ErrorGroups,
) -> runs.OutcomeChunk | None:
    """Build the chunk of an accepted report. `errors` counts its failures."""
    if not report.done:
        return None
    retried = RowRanges()
    for one in accepted.retried:
        retried.add(one.lo, one.hi)
    resultless = []
    for row in report.resultless:
        final = not retried.contains(row.seq, row.seq + 1)
        if row.state == RowState.TERMINAL_FAIL:
            errors.add(row.error_class, row.error, rows=int(final))
        if final:
            tries = _attempts_of(board, row.seq)
            resultless.append(
                runs.ResultlessRow(row.seq, row.state, tries, row.error_class, row.error, row.raw)
            )
    if not resultless and not batch and report.spool_object is None:
        return None
    retried_successes = [
        RowRange(lo, hi, tries + 1)
        for done in report.done
        if done.code == RowState.TERMINAL_SUCCESS
        for lo, hi, tries in board.ledger.attempts_by_range(done.lo, done.hi)
        if tries
    ]
    return runs.OutcomeChunk(
        lo=report.lo,
        seqs=report.seqs,
        batch=bytes(batch),
        resultless=resultless,
        attempts=retried_successes,
        cost=0.0,
        calls=0,
        spent_us_log2=[],
        at=report.spool_object,
        hi=report.hi,
    )


def reclaimed_chunk_rows(
    board: RunScheduler, run_id: str, entries: LogEntries, first_height: int, errors: ErrorGroups
) -> list[RowPut]:
    """Build the chunk rows of rows that a reclaim failed: no child remains to report them."""
    puts: list[RowPut] = []
    page_rows = board.policy.page_rows
    error_class = int(ErrorClass.LEASE_EXPIRED)
    for height, entry in enumerate(entries, first_height):
        if not isinstance(entry, GrantReclaimed):
            continue
        pages: dict[int, list[runs.ResultlessRow]] = {}
        for lo, hi in entry.failed:
            for seq in range(lo, hi):
                errors.add(error_class, LOST_ROW_ERROR, rows=1)
                row = runs.ResultlessRow(
                    seq,
                    int(RowState.TERMINAL_FAIL),
                    _attempts_of(board, seq),
                    error_class,
                    LOST_ROW_ERROR,
                )
                pages.setdefault(seq // page_rows, []).append(row)
        for page, others in pages.items():
            chunk = runs.OutcomeChunk(
                lo=0,
                seqs=b"",
                batch=b"",
                resultless=others,
                attempts=[],
                cost=0.0,
                calls=0,
                spent_us_log2=[],
            )
            puts += runs.chunk_rows(run_id, page, height, chunk)
    return puts


def _attempts_of(board: RunScheduler, seq: int) -> int:
    """Return the number of tries of a row, including the last."""
    [(_, _, retries)] = board.ledger.attempts_by_range(seq, seq + 1)
    return retries + 1
