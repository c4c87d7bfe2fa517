"""Reports of a grant: what ended, as ranges of the ledger, Arrow batches and rows without a result.

Pure functions between calls that ended (`caller`) and the frame that tells of them (`wire`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.ranges import Range
from holdfast.ledger.records import Done
from holdfast.ledger.states import State
from holdfast.spark import raw_values, wire
from holdfast.spark.caller import BatchEnded, Caller, Ended
from holdfast.spark.rows import message_of

# One report of a grant: so many rows, unless they are consecutive, and about so many bytes; a single
# row may be larger, and is stored in parts.
REPORT_ROWS_MAX = 5000
REPORT_BYTES_MAX = 8 * 1024 * 1024
# ... into a spool, where it is an object: as many rows of 4 KB as a batch has, and as one of 8 bytes.
SPOOL_BYTES_MAX = 160 * 1024 * 1024
RESULT_BYTES_MAX = 64 * 1024 * 1024


def ranges_of(seqs: Iterable[int]) -> list[Range]:
    """Ascending numbers as half-open ranges."""
    if isinstance(seqs, range):
        return [(seqs.start, seqs.stop)] if seqs else []
    found: list[Range] = []
    lo = hi = -1
    for seq in seqs:
        if seq != hi:
            if lo >= 0:
                found.append((lo, hi))
            lo = seq
        hi = seq + 1
    if lo >= 0:
        found.append((lo, hi))
    return found


class Report(NamedTuple):
    done: list[Done]
    others: list[wire.Other]
    data: bytes
    seqs: bytes
    lo: int


def row_report(results: list[Ended], caller: Caller) -> Report:
    if not results:
        return Report([], [], b"", b"", 0)
    results.sort()
    good = [ended for ended in results if ended.values is not None]
    rest = [ended for ended in results if ended.values is None]
    batch = None
    if good:
        try:
            batch = caller.encoder.batch([ended.values for ended in good if ended.values])
        except Exception:
            good, rest, batch = _sift(good, rest, caller)
    done = [Done(lo, hi, int(State.TERMINAL_SUCCESS)) for lo, hi in _runs(good)]
    done += _alike(rest)
    data = message_of(batch) if batch is not None and batch.num_rows else b""
    return Report(done, _others(rest), data, *_places([ended.seq for ended in good]))


def _runs(ended: list[Ended]) -> list[Range]:
    return ranges_of(one.seq for one in ended)


def _sift(
    good: list[Ended], rest: list[Ended], caller: Caller
) -> tuple[list[Ended], list[Ended], pa.RecordBatch]:
    """Find the rows whose values are no values of the schema: they fail, the others stay."""
    kept: list[Ended] = []
    for ended in good:
        assert ended.values is not None
        why = caller.encoder.fits(ended.values)
        if why:
            bad = caller.wrong_schema(ended, f"returned {why}")
            rest = [*rest, bad]
        else:
            kept.append(ended)
    batch = caller.encoder.batch([ended.values for ended in kept if ended.values])
    return kept, sorted(rest), batch


def pieces(ended: BatchEnded, bytes_max: int = REPORT_BYTES_MAX) -> list[BatchEnded]:
    """A batch's outcome in parts that fit into a frame, and into a value of the store."""
    rows, size = ended.batch.num_rows, ended.batch.nbytes
    step = min(max(rows * bytes_max // max(size, 1) // 2, 1), max(rows, 1))
    if not isinstance(ended.seqs, range):
        step = min(step, REPORT_ROWS_MAX)
    others = _lots(ended.others)
    if rows <= step and len(others) <= 1:
        return [ended]
    found = [slice_of(ended, at, min(at + step, rows)) for at in range(0, rows, step)]
    nothing = ended.batch.slice(0, 0)
    return found + [BatchEnded([], nothing, lot, 0.0, 0, 0) for lot in others]


def slice_of(ended: BatchEnded, lo: int, hi: int) -> BatchEnded:
    return BatchEnded(ended.seqs[lo:hi], ended.batch.slice(lo, hi - lo), [], 0.0, 0, 0)


def _lots(others: list[Ended]) -> list[list[Ended]]:
    """Rows without a result, so many at a time that their errors fit into a report."""
    found: list[list[Ended]] = []
    size = 0
    for other in others:
        more = 4 * len(other.error) + len(other.raw)
        size += more
        if not found or len(found[-1]) >= REPORT_ROWS_MAX or size > REPORT_BYTES_MAX:
            found.append([])
            size = more
        found[-1].append(other)
    return found


def told_bytes(others: list[wire.Other]) -> int:
    """A character of an error is up to four bytes of the store's; raw text is ASCII."""
    return sum(4 * len(other.error) + len(other.raw) for other in others)


def too_large(size: int) -> str:
    return f"returned a result of {size:,} bytes; at most {RESULT_BYTES_MAX:,} fit"


def without_result(ended: BatchEnded, why: str) -> BatchEnded:
    """The one row of it fails: its result is too large. Its beginning is kept."""
    fail, kind = int(State.TERMINAL_FAIL), int(ErrorClass.SCHEMA)
    [row] = ended.batch.to_pylist()
    failed = Ended(ended.seqs[0], fail, None, kind, why, 0, 0.0, 0, raw_values.encode(row))
    others = sorted([*ended.others, failed])
    return BatchEnded([], ended.batch.slice(0, 0), others, 0.0, 0, 0)


def batch_report(ended: BatchEnded) -> Report:
    done = [Done(lo, hi, int(State.TERMINAL_SUCCESS)) for lo, hi in ranges_of(ended.seqs)]
    done += _alike(ended.others)
    data = message_of(ended.batch) if ended.batch.num_rows else b""
    return Report(done, _others(ended.others), data, *_places(ended.seqs))


def _alike(rest: list[Ended]) -> list[Done]:
    """Rows without a result, in order; neighbours that ended alike are one."""
    found: list[Done] = []
    for one in rest:
        last = found[-1] if found else None
        how = (int(one.state), int(one.error_class), one.delay_ns)
        if last and last.hi == one.seq and (last.code, last.error_class, last.delay_ns) == how:
            found[-1] = Done(last.lo, one.seq + 1, *how)
        else:
            found.append(Done(one.seq, one.seq + 1, *how))
    return found


def _places(seqs: Sequence[int]) -> tuple[bytes, int]:
    """Where results belong: their distances from the first; none when they are consecutive."""
    if not seqs:
        return b"", 0
    if seqs[-1] - seqs[0] + 1 == len(seqs):
        return b"", seqs[0]
    first = seqs[0]
    return array("I", [seq - first for seq in seqs]).tobytes(), first


def _others(rest: list[Ended]) -> list[wire.Other]:
    return [
        wire.Other(one.seq, int(one.state), int(one.error_class), one.error, one.delay_ns, one.raw)
        for one in rest
    ]
