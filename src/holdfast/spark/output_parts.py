"""The parts of final rows: where they end, and the rows of each, a row group at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from holdfast.ledger import runs
from holdfast.spark.journal import Outcomes
from holdfast.spark.part_cuts import FILE_BYTES, PartCuts, Span
from holdfast.spark.sinks import KeptPart, Part

FILE_ROWS = 1 << 18


def parts_of(
    rows: Outcomes, version: int, kept: Sequence[KeptPart] = ()
) -> Iterator[Part | KeptPart]:
    """The parts of a run that is over, above a version; `kept` need no rows."""
    yield from parts_between(rows, version + 1, rows.record.size, *cut_of(rows.record), kept)


def cut_of(record: runs.RunRecord) -> tuple[int, int]:
    """The most rows and bytes of a file of a run."""
    config = record.config
    return int(config.get("file_rows", FILE_ROWS)), int(config.get("file_bytes", FILE_BYTES))


def parts_between(
    rows: Outcomes,
    lo: int,
    hi: int,
    file_rows: int,
    file_bytes: int,
    kept: Sequence[KeptPart] = (),
) -> Iterator[Part | KeptPart]:
    """The parts of final rows [lo, hi), where a part ends at `hi` in any case."""
    width = rows.row_width()
    cuts = PartCuts(hi, file_rows, file_bytes, rows.row_bytes, width=width, kept=kept)
    while (span := cuts.next(lo, hi)) is not None:
        yield span.kept or Part(span.lo, span.hi, _Groups(rows, span))
        lo = span.hi


class _Groups:
    """The rows of a part, read anew each time."""

    def __init__(self, rows: Outcomes, span: Span) -> None:
        self._rows = rows
        self._span = span

    def __call__(self) -> Iterator[pa.Table]:
        for lo, hi in pairwise([self._span.lo, *self._span.groups]):
            yield self._rows.successes(lo, hi)
