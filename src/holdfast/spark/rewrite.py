"""Writes the outcomes of a run that is over to a sink, again or elsewhere.

The parts are those that the run itself would write there, so an export that was killed goes on where it ended, and
one that is done does nothing. With a spool executors write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.errors import Invalid
from holdfast.ledger import runs
from holdfast.spark import keys
from holdfast.spark.driver_writes import append
from holdfast.spark.executor_writes import write_parts
from holdfast.spark.journal import Input, Outcomes
from holdfast.spark.outcome_rows import is_bundled
from holdfast.spark.output_parts import FILE_ROWS, cut_of
from holdfast.spark.sinks import ExecutorSink, KeptPart, Part, Sink, SuccessorSink
from holdfast.spark.succession import owner_of
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def rewrite(
    spark: SparkSession, store: Store, records: Sequence[runs.RunRecord], sink: Sink
) -> None:
    """All rows that succeeded, in key order. `records` are the run and those that it retries."""
    newest = records[0]
    if newest.status in runs.GOING:
        raise Invalid(what="run", name=newest.name, why="it is still going", run=newest.run_id)
    if not (isinstance(sink, SuccessorSink) and owner_of(sink, store, newest) == newest.run_id):
        sink.check_vacant()
    rows = [Outcomes(store, record, Input(store, record)) for record in records]
    version = sink.begin(newest.run_id, newest.name, rows[-1].schema)
    if len(rows) > 1:
        for part in _merged(rows, version):
            sink.commit_many([part])
    elif isinstance(sink, ExecutorSink) and is_bundled(store, newest):
        for parts in write_parts(spark, store, newest, sink, version, cut_of(newest)):
            sink.commit_many(parts)
    else:
        append(spark, store, rows[0], sink, version)
    sink.finish()


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
