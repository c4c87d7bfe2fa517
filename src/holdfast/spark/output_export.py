"""Output export: writes the outcomes of a finished run to a sink, again or to another place.

The parts equal the parts of the run itself. An interrupted export therefore resumes, and
a completed one does nothing. With a spool, executors write the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.errors import Invalid
from holdfast.ledger import runs
from holdfast.spark import keys
from holdfast.spark.driver_writes import append_rows
from holdfast.spark.executor_writes import write_parts
from holdfast.spark.outcome_bundles import can_bundle
from holdfast.spark.output_parts import FILE_ROWS, file_limits
from holdfast.spark.output_succession import previous_owner
from holdfast.spark.run_data import RunInput, RunOutcomes
from holdfast.spark.sinks import ExecutorSink, KeptPart, Part, Sink, SuccessorSink
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def export_outcomes(
    spark: SparkSession, store: Store, records: Sequence[runs.RunRecord], sink: Sink
) -> None:
    """Write all successful rows in key order. `records` are the run and the runs that it retries."""
    newest = records[0]
    if newest.status in runs.UNFINISHED:
        raise Invalid(what="run", name=newest.name, why="it is not finished", run=newest.run_id)
    if not (
        isinstance(sink, SuccessorSink) and previous_owner(sink, store, newest) == newest.run_id
    ):
        sink.check_vacant()
    rows = [RunOutcomes(store, record, RunInput(store, record)) for record in records]
    version = sink.begin(newest.run_id, newest.name, rows[-1].schema)
    if len(rows) > 1:
        for part in _merge_retry_chain(rows, version):
            sink.commit_many([part])
    elif isinstance(sink, ExecutorSink) and can_bundle(store, newest):
        for parts in write_parts(spark, store, newest, sink, version, file_limits(newest)):
            sink.commit_many(parts)
    else:
        append_rows(spark, store, rows[0], sink, version)
    sink.finish()


def _merge_retry_chain(rows: Sequence[RunOutcomes], version: int) -> Iterator[Part | KeptPart]:
    """Merge the rows of a run and of its retry runs, which have separate seqs."""
    tables = [one.successes(0, one.record.size) for one in rows]
    merged = pa.concat_tables(tables).combine_chunks()
    record = rows[-1].record
    if merged.num_rows:
        [batch] = merged.to_batches()
        merged = merged.take(keys.sort_order(keys.comparable_columns(batch, list(record.key))))
    step = int(record.config.get("file_rows", FILE_ROWS))
    for lo in range(version + 1, record.size, step):
        hi = min(lo + step, record.size)
        yield Part(lo, hi, merged.slice(lo, hi - lo))
