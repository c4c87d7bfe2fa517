"""Reports of a child about its grants: finished rows with their results, and rows to begin.

A report has a number and a digest, so that the ledger recognises a repeat. An oversized report is split.
"""

from __future__ import annotations

from hashlib import blake2b

from holdfast.codec import pack
from holdfast.spark import ledger_protocol, row_reports
from holdfast.spark.call_pool import GrantedRows
from holdfast.spark.caller import FunctionCaller

REPORT_NS = 250_000_000


class GrantReports:
    def __init__(
        self,
        caller: FunctionCaller,
        interval_ns: int = REPORT_NS,
        bytes_max: int = row_reports.REPORT_BYTES_MAX,
    ) -> None:
        self._caller = caller
        self._interval_ns = interval_ns
        self.bytes_max = bytes_max
        # When the oldest unreported call ended; 0: none.
        self.oldest_outcome_ns = 0
        # Grants of the exchange under way, with the rows to begin.
        self.sent: list[tuple[GrantedRows, int]] = []

    def due_ns(self) -> int:
        """When the oldest unreported outcome is due."""
        return self.oldest_outcome_ns + self._interval_ns

    def build(self, granted: GrantedRows, begin: int) -> tuple[ledger_protocol.GrantReport, bytes]:
        """Build the next report of a grant and its attachment: finished rows, and rows to begin."""
        granted.last_report_no += 1
        done, others, data, seqs, lo = self._row_report(granted)
        begins = row_reports.to_ranges(granted.seqs[granted.begun : granted.begun + begin])
        digest = blake2b(data, digest_size=16)
        digest.update(pack([done, begins, [(other.error, other.raw) for other in others]]))
        return (
            ledger_protocol.GrantReport(
                epoch=granted.epoch,
                report_no=granted.last_report_no,
                digest=digest.digest(),
                done=done,
                begin=begins,
                seqs=seqs,
                lo=lo,
                resultless=others,
                size=len(data),
            ),
            data,
        )

    def _row_report(self, granted: GrantedRows) -> row_reports.RowReport:
        """Report finished rows of a grant. An oversized report is split; the rest waits for the
        next frame.
        """
        if granted.batches:
            return self._batch_report(granted)
        results, granted.results = (
            granted.results[: row_reports.REPORT_ROWS_MAX],
            granted.results[row_reports.REPORT_ROWS_MAX :],
        )
        while True:
            report = row_reports.report_rows(results, self._caller)
            if len(report.data) + row_reports.error_bytes(report.resultless) <= self.bytes_max:
                break
            if len(results) == 1:
                if len(report.data) <= row_reports.RESULT_BYTES_MAX:
                    break
                results = [
                    self._caller.as_schema_failure(
                        results[0], row_reports.too_large_text(len(report.data))
                    )
                ]
                continue
            half = len(results) // 2
            granted.results = results[half:] + granted.results
            results = results[:half]
        granted.reported += len(results)
        return report

    def _batch_report(self, granted: GrantedRows) -> row_reports.RowReport:
        piece = granted.batches.pop(0)
        while True:
            report = row_reports.report_batch(piece)
            if len(report.data) <= self.bytes_max:
                break
            half = piece.batch.num_rows // 2
            if not half:
                if len(report.data) <= row_reports.RESULT_BYTES_MAX:
                    break
                piece = row_reports.fail_oversized(
                    piece, row_reports.too_large_text(len(report.data))
                )
                continue
            granted.batches.insert(0, row_reports.slice_batch(piece, half, piece.batch.num_rows))
            piece = row_reports.slice_batch(piece, 0, half)._replace(resultless=piece.resultless)
        granted.reported += len(piece.seqs) + len(piece.resultless)
        return report
