"""Row reports of a grant: outcomes as row ranges, Arrow batches and rows without a result.

Pure functions that convert finished calls (`caller`) into the fields of a `GrantReport`
(`ledger_protocol`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from holdfast.ledger.events import FinishedRange
from holdfast.ledger.ranges import Range
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol, raw_values
from holdfast.spark.arrow_rows import encode_batch
from holdfast.spark.caller import BatchOutcome, CallOutcome, FunctionCaller

# Limits of one report of a grant: rows (unless they are consecutive) and approximate bytes. A
# single row may be larger and is stored in parts.
REPORT_ROWS_MAX = 5000
REPORT_BYTES_MAX = 8 * 1024 * 1024
# Into a spool, where a report is one object: enough for a whole batch of rows of 4 KB.
SPOOL_BYTES_MAX = 160 * 1024 * 1024
RESULT_BYTES_MAX = 64 * 1024 * 1024


def to_ranges(seqs: Iterable[int]) -> list[Range]:
    """Convert ascending numbers to half-open ranges."""
    if isinstance(seqs, range):
        return [(seqs.start, seqs.stop)] if seqs else []
    ranges: list[Range] = []
    lo = hi = -1
    for seq in seqs:
        if seq != hi:
            if lo >= 0:
                ranges.append((lo, hi))
            lo = seq
        hi = seq + 1
    if lo >= 0:
        ranges.append((lo, hi))
    return ranges


class RowReport(NamedTuple):
    finished: list[FinishedRange]
    resultless: list[ledger_protocol.ResultlessRowReport]
    data: bytes
    seqs: bytes
    lo: int


def report_rows(results: list[CallOutcome], caller: FunctionCaller) -> RowReport:
    if not results:
        return RowReport([], [], b"", b"", 0)
    results.sort()
    successes = [outcome for outcome in results if outcome.values is not None]
    resultless = [outcome for outcome in results if outcome.values is None]
    batch = None
    if successes:
        try:
            batch = caller.encoder.to_batch(
                [outcome.values for outcome in successes if outcome.values]
            )
        except Exception:
            successes, resultless, batch = _split_invalid(successes, resultless, caller)
    done = [
        FinishedRange(lo, hi, int(RowState.TERMINAL_SUCCESS)) for lo, hi in _seq_ranges(successes)
    ]
    done += _merge_equal(resultless)
    data = encode_batch(batch) if batch is not None and batch.num_rows else b""
    return RowReport(
        done,
        _resultless_reports(resultless),
        data,
        *_result_offsets([outcome.seq for outcome in successes]),
    )


def _seq_ranges(ended: list[CallOutcome]) -> list[Range]:
    return to_ranges(one.seq for one in ended)


def _split_invalid(
    successes: list[CallOutcome], resultless: list[CallOutcome], caller: FunctionCaller
) -> tuple[list[CallOutcome], list[CallOutcome], pa.RecordBatch]:
    """Split off the rows that do not fit the schema: they fail, the rest is encoded."""
    kept: list[CallOutcome] = []
    for ended in successes:
        assert ended.values is not None
        why = caller.encoder.encode_error(ended.values)
        if why:
            bad = caller.as_schema_failure(ended, f"returned {why}")
            resultless = [*resultless, bad]
        else:
            kept.append(ended)
    batch = caller.encoder.to_batch([ended.values for ended in kept if ended.values])
    return kept, sorted(resultless), batch


def split_batch(outcome: BatchOutcome, bytes_max: int = REPORT_BYTES_MAX) -> list[BatchOutcome]:
    """Split the outcome of a batch into parts that fit a frame and a store value."""
    rows, size = outcome.batch.num_rows, outcome.batch.nbytes
    step = min(max(rows * bytes_max // max(size, 1) // 2, 1), max(rows, 1))
    if not isinstance(outcome.seqs, range):
        step = min(step, REPORT_ROWS_MAX)
    resultless = _group_resultless(outcome.resultless)
    if rows <= step and len(resultless) <= 1:
        return [outcome]
    parts = [slice_batch(outcome, at, min(at + step, rows)) for at in range(0, rows, step)]
    nothing = outcome.batch.slice(0, 0)
    return parts + [BatchOutcome([], nothing, group, 0.0, 0, 0) for group in resultless]


def slice_batch(outcome: BatchOutcome, lo: int, hi: int) -> BatchOutcome:
    return BatchOutcome(outcome.seqs[lo:hi], outcome.batch.slice(lo, hi - lo), [], 0.0, 0, 0)


def _group_resultless(resultless: list[CallOutcome]) -> list[list[CallOutcome]]:
    """Group rows without a result so that their errors fit a report."""
    groups: list[list[CallOutcome]] = []
    size = 0
    for other in resultless:
        more = 4 * len(other.error) + len(other.raw)
        size += more
        if not groups or len(groups[-1]) >= REPORT_ROWS_MAX or size > REPORT_BYTES_MAX:
            groups.append([])
            size = more
        groups[-1].append(other)
    return groups


def error_bytes(resultless: list[ledger_protocol.ResultlessRowReport]) -> int:
    """Return the size of the error texts: a character takes up to four bytes; raw text is ASCII."""
    return sum(4 * len(other.error) + len(other.raw) for other in resultless)


def too_large_text(size: int) -> str:
    return f"returned a result of {size:,} bytes; at most {RESULT_BYTES_MAX:,} fit"


def fail_oversized(outcome: BatchOutcome, why: str) -> BatchOutcome:
    """Fail the only row of an outcome because its result is too large. Keep the beginning of the
    result.
    """
    fail, kind = int(RowState.TERMINAL_FAIL), int(ErrorClass.SCHEMA)
    [row] = outcome.batch.to_pylist()
    failed = CallOutcome(
        seq=outcome.seqs[0],
        state=fail,
        values=None,
        error_class=kind,
        error=why,
        delay_ns=0,
        cost=0.0,
        micros=0,
        raw=raw_values.encode(row),
    )
    resultless = sorted([*outcome.resultless, failed])
    return BatchOutcome([], outcome.batch.slice(0, 0), resultless, 0.0, 0, 0)


def report_batch(outcome: BatchOutcome) -> RowReport:
    done = [
        FinishedRange(lo, hi, int(RowState.TERMINAL_SUCCESS)) for lo, hi in to_ranges(outcome.seqs)
    ]
    done += _merge_equal(outcome.resultless)
    data = encode_batch(outcome.batch) if outcome.batch.num_rows else b""
    return RowReport(
        done, _resultless_reports(outcome.resultless), data, *_result_offsets(outcome.seqs)
    )


def _merge_equal(resultless: list[CallOutcome]) -> list[FinishedRange]:
    """Merge adjacent rows with equal outcomes, for rows without a result, in order."""
    merged: list[FinishedRange] = []
    for one in resultless:
        last = merged[-1] if merged else None
        how = (int(one.state), int(one.error_class), one.delay_ns)
        if last and last.hi == one.seq and (last.code, last.error_class, last.delay_ns) == how:
            merged[-1] = FinishedRange(last.lo, one.seq + 1, *how)
        else:
            merged.append(FinishedRange(one.seq, one.seq + 1, *how))
    return merged


def _result_offsets(seqs: Sequence[int]) -> tuple[bytes, int]:
    """Return the offsets of the results from the first seq, and that seq. Consecutive rows need no
    offsets.
    """
    if not seqs:
        return b"", 0
    if seqs[-1] - seqs[0] + 1 == len(seqs):
        return b"", seqs[0]
    first = seqs[0]
    return array("I", [seq - first for seq in seqs]).tobytes(), first


def _resultless_reports(resultless: list[CallOutcome]) -> list[ledger_protocol.ResultlessRowReport]:
    return [
        ledger_protocol.ResultlessRowReport(
            one.seq, int(one.state), int(one.error_class), one.error, one.delay_ns, one.raw
        )
        for one in resultless
    ]
