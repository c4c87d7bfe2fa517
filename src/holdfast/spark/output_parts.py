"""Output parts of final rows: their boundaries, and the rows of each part by row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from holdfast.ledger import runs
from holdfast.spark.part_cuts import FILE_BYTES, PartCuts, PartSpan
from holdfast.spark.run_data import RunOutcomes
from holdfast.spark.sinks import KeptPart, Part

FILE_ROWS = 1 << 18


def run_parts(
    rows: RunOutcomes, version: int, kept: Sequence[KeptPart] = ()
) -> Iterator[Part | KeptPart]:
    """Yield the parts of a finished run above a version. Kept parts need no rows."""
    yield from parts_between(rows, version + 1, rows.record.size, *file_limits(rows.record), kept)


def file_limits(record: runs.RunRecord) -> tuple[int, int]:
    """Return the maximum rows and bytes per file of a run."""
    config = record.config
    return int(config.get("file_rows", FILE_ROWS)), int(config.get("file_bytes", FILE_BYTES))


def parts_between(
    rows: RunOutcomes,
    lo: int,
    hi: int,
    file_rows: int,
    file_bytes: int,
    kept: Sequence[KeptPart] = (),
) -> Iterator[Part | KeptPart]:
    """Yield the parts of final rows [lo, hi). A part always ends at `hi`."""
    width = rows.row_width()
    cuts = PartCuts(hi, file_rows, file_bytes, rows.row_bytes, width=width, kept=kept)
    while (span := cuts.next_part(lo, hi)) is not None:
        yield span.kept or Part(span.lo, span.hi, _RowGroups(rows, span))
        lo = span.hi


class _RowGroups:
    """The row groups of a part. Each iteration reads them again."""

    def __init__(self, rows: RunOutcomes, span: PartSpan) -> None:
        self._rows = rows
        self._span = span

    def __call__(self) -> Iterator[pa.Table]:
        for lo, hi in pairwise([self._span.lo, *self._span.groups]):
            yield self._rows.successes(lo, hi)
