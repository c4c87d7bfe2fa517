"""Validation of reports for a run with a spool: names of durable objects, without data.

A row succeeds only with an object that holds its result, reported with length and hash.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ledger.runs import RunRecord, SpoolBlock
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from holdfast.spark.arrow_rows import encode_stream
from holdfast.spark.run_data import RunInput
from holdfast.spark.spool import check_stored


def checked_block_value(
    record: RunRecord, data: memoryview, at: SpoolBlock | None
) -> tuple[int, bytes]:
    """Return the size of an input block, and the value to store for it."""
    if not record.spool and at is None:
        return len(data), bytes(data)
    if not record.spool or at is None or len(data):
        raise Invalid(
            what="block",
            why="a run with a spool accepts object names only, and a run without one accepts data only",
        )
    check_stored(at.at, "i")
    if not 0 < at.keys_size <= at.at.size or at.rows <= 0:
        raise Invalid(
            what="block",
            why="the number of rows or the size of the keys is not valid",
            found=at.at.name,
        )
    return at.at.size, codec.pack(at)


def check_spool_report(record: RunRecord, report: ledger_protocol.GrantReport) -> None:
    """Refuse results outside the spool. Without a spool, refuse names of objects."""
    if not record.spool:
        if report.spool_object is not None:
            raise Invalid(what="report", why="the run has no spool", found=report.spool_object.name)
        return
    if report.size or report.seqs or any(other.raw for other in report.resultless):
        raise Invalid(what="report", why="results of this run must be in its spool")
    successes = [done for done in report.done if done.code == RowState.TERMINAL_SUCCESS]
    if report.spool_object is not None:
        check_stored(report.spool_object, "o")
    elif successes:
        raise Invalid(what="report", why="the report has results and names no spool object")
    if successes and not report.lo <= successes[0].lo < successes[-1].hi <= report.hi:
        raise Invalid(
            what="report", why="rows of the report are outside the range of its spool object"
        )


def attach_rows(
    grant: ledger_protocol.GrantedRowsMessage, source: RunInput
) -> tuple[ledger_protocol.GrantedRowsMessage, bytes]:
    """Attach the rows of a grant. With a spool, attach the names of their blocks instead."""
    ranges = [(part.lo, part.hi) for part in grant.ranges]
    if not source.is_spooled:
        return grant, encode_stream(source.rows(ranges))
    blocks = [ledger_protocol.BlockRef(*place) for place in source.block_locations(ranges)]
    columns = source.schema.names
    return replace(grant, blocks=blocks, blocks_run=source.run_id, columns=columns), b""
