"""Writes the outcomes of a run that is over to a sink, again or elsewhere.

The outcomes are in the store. The parts are those that the run itself would write there, so an
export that was killed goes on where it ended, and one that is done does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from holdfast.errors import Invalid
from holdfast.ledger import runs
from holdfast.spark import keys
from holdfast.spark.journal import Input, Outcomes
from holdfast.spark.part_cuts import FILE_BYTES, PartCuts, Span
from holdfast.spark.sinks import KeptPart, Part, Sink, SuccessorSink
from holdfast.spark.succession import owner_of
from holdfast.store.api import Store

FILE_ROWS = 1 << 18


def export(store: Store, records: Sequence[runs.RunRecord], sink: Sink) -> None:
    """All rows that succeeded, in key order. `records` are the run and those that it retries."""
    newest = records[0]
    if newest.status in runs.GOING:
        raise Invalid(what="run", name=newest.name, why="it is still going", run=newest.run_id)
    if not (isinstance(sink, SuccessorSink) and owner_of(sink, store, newest) == newest.run_id):
        sink.check_vacant()
    rows = [Outcomes(store, record, Input(store, record)) for record in records]
    schema = rows[-1].schema
    version = sink.begin(newest.run_id, newest.name, schema)
    parts = parts_of(rows[0], version) if len(rows) == 1 else _merged(rows, version)
    for part in parts:
        sink.commit_many([part])
    sink.finish()


def parts_of(
    rows: Outcomes, version: int, kept: Sequence[KeptPart] = ()
) -> Iterator[Part | KeptPart]:
    """The parts of a run that is over, above a version; `kept` need no rows."""
    record = rows.record
    cuts = PartCuts(
        record.size,
        int(record.config.get("file_rows", FILE_ROWS)),
        int(record.config.get("file_bytes", FILE_BYTES)),
        rows.row_bytes,
        width=rows.row_width(),
        kept=kept,
    )
    at = version + 1
    while (span := cuts.next(at, record.size)) is not None:
        yield span.kept or Part(span.lo, span.hi, _Groups(rows, span))
        at = span.hi


class _Groups:
    """The rows of a part, read anew each time."""

    def __init__(self, rows: Outcomes, span: Span) -> None:
        self._rows = rows
        self._span = span

    def __call__(self) -> Iterator[pa.Table]:
        for lo, hi in pairwise([self._span.lo, *self._span.groups]):
            yield self._rows.successes(lo, hi)


def _merged(rows: Sequence[Outcomes], version: int) -> Iterator[Part | KeptPart]:
    """Rows of a run and of those that tried its failed rows again, which have seqs of their own."""
    tables = [one.successes(0, one.record.size) for one in rows]
    whole = pa.concat_tables(tables).combine_chunks()
    record = rows[-1].record
    if whole.num_rows:
        [batch] = whole.to_batches()
        whole = whole.take(keys.order(keys.columns(batch, list(record.key))))
    step = int(record.config.get("file_rows", FILE_ROWS))
    for lo in range(version + 1, record.size, step):
        hi = min(lo + step, record.size)
        yield Part(lo, hi, whole.slice(lo, hi - lo))
