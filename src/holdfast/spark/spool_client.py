"""The spool client of a child: a ledger client that moves results and input rows through the spool.

- It puts the data of a report into the spool first. The report then names the object, its length and hash.
- It reads the blocks of granted rows from the spool after the grant.
- It renews leases while the spool is slow. It retries an unreachable spool for `SPOOL_RETRY_NS`.

The hook `step` is called with the name of each completed step. Tests kill the process there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from holdfast.clock import SYSTEM
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from holdfast.spark import spool as spools
from holdfast.spark.errors import SpoolLost, SpoolUnreachable
from holdfast.spark.ledger_client import LedgerClient
from holdfast.spark.sinks.parquet_files import StepHook, ignore_step
from holdfast.spark.spool_access import SpoolAccess

SPOOL_RETRY_NS = 300_000_000_000
WAIT_S_MAX = 5.0
BLOCKS_CACHED = 8

step: StepHook = ignore_step

T = TypeVar("T")


class SpoolClient:
    """A client for one thread at a time. `request` returns the rows of a grant as a table."""

    def __init__(
        self, client: LedgerClient, access: SpoolAccess, run_id: str, lease_s: float
    ) -> None:
        self._client = client
        self._access = access
        self._spool = spools.Spool.open_with(access, run_id)
        self._writer = spools.writer_id()
        self._heartbeat_s = lease_s / 4
        self._blocks = spools.BlockCache(BLOCKS_CACHED)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spool")

    def request(
        self, message: ledger_protocol.WireMessage, *attached: ledger_protocol.BytesLike
    ) -> tuple[Any, Any]:
        epochs = (
            message.known_epochs
            if isinstance(message, ledger_protocol.Exchange | ledger_protocol.InheritGrant)
            else []
        )
        if isinstance(message, ledger_protocol.Exchange) and any(map(_has_data, message.reports)):
            reports = message.reports
            reports = self._with_heartbeats(epochs, lambda: self._put_reports(reports, attached))
            message, attached = replace(message, reports=reports), ()
            step("stored")
        answer, data = self._client.request(message, *attached)
        grant = answer.grant if isinstance(answer, ledger_protocol.ExchangeReply) else None
        if grant is None:
            return answer, data
        try:
            return answer, self._with_heartbeats(
                [*epochs, grant.epoch], lambda: self._read_rows(grant)
            )
        except SpoolLost as error:
            self._client.request(
                ledger_protocol.ReportBroken(ledger_protocol.error_reply(error).error)
            )
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _put_reports(
        self,
        reports: list[ledger_protocol.GrantReport],
        attached: tuple[ledger_protocol.BytesLike, ...],
    ) -> list[ledger_protocol.GrantReport]:
        return [
            self._put_report(report, data) for report, data in zip(reports, attached, strict=True)
        ]

    def _put_report(
        self, report: ledger_protocol.GrantReport, batch: ledger_protocol.BytesLike
    ) -> ledger_protocol.GrantReport:
        if not _has_data(report):
            return report
        raws = {one.seq: one.raw for one in report.resultless if one.raw}
        data = spools.encode_chunk(report.seqs, memoryview(batch), raws)
        name = spools.chunk_name(report.epoch, report.report_no, self._writer)
        at = _retry_unreachable(lambda: self._spool.put(name, data, raws=bool(raws)))
        resultless = [replace(one, raw="") for one in report.resultless]
        return replace(
            report, seqs=b"", lo=report.lo if batch else 0, resultless=resultless, size=0, spool_object=at,
            hi=_results_end(report) if batch else 0,
        )  # fmt: skip

    def _read_rows(self, grant: ledger_protocol.GrantedRowsMessage) -> pa.Table:
        spool = spools.Spool.open_with(self._access, grant.blocks_run)
        tables: list[pa.Table] = []
        ends = [block.first_seq + block.spool_block.rows for block in grant.blocks]
        for part in grant.ranges:
            lo = part.lo
            while lo < part.hi:
                block = grant.blocks[int(np.searchsorted(ends, lo, side="right"))]
                upto = min(part.hi, block.first_seq + block.spool_block.rows)
                table = self._read_block(spool, block, grant)
                tables.append(table.slice(lo - block.first_seq, upto - lo))
                lo = upto
        return pa.concat_tables(tables).select(grant.columns)

    def _read_block(
        self,
        spool: spools.Spool,
        block: ledger_protocol.BlockRef,
        grant: ledger_protocol.GrantedRowsMessage,
    ) -> pa.Table:
        try:
            return self._blocks.get(
                block.spool_block.at.name,
                False,
                lambda: _retry_unreachable(lambda: spools.read_block(spool, block.spool_block)),
            )
        except spools.ObjectLost as why:
            rows = [(block.first_seq, block.first_seq + block.spool_block.rows)]
            raise spools.lost_error(
                spool, "input", rows, block.spool_block.at.name, str(why)
            ) from None

    def _with_heartbeats(self, epochs: list[int], work: Callable[[], T]) -> T:
        """Run `work` on the spool in a thread, and renew the leases of these grants meanwhile."""
        under_way = self._thread.submit(work)
        while True:
            try:
                return under_way.result(self._heartbeat_s)
            except Late:
                if under_way.done():
                    raise
                self._client.request(ledger_protocol.ServiceHeartbeat(epochs))


def _has_data(report: ledger_protocol.GrantReport) -> bool:
    return bool(report.size) or any(one.raw for one in report.resultless)


def _results_end(report: ledger_protocol.GrantReport) -> int:
    """Return the end of the last row of a report that has a result."""
    return max(done.hi for done in report.done if done.code == RowState.TERMINAL_SUCCESS)


def _retry_unreachable(work: Callable[[], T]) -> T:
    until_ns = SYSTEM.mono_ns() + SPOOL_RETRY_NS
    wait_s = 0.1
    while True:
        try:
            return work()
        except SpoolUnreachable:
            if SYSTEM.mono_ns() >= until_ns:
                raise
        SYSTEM.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_S_MAX)
