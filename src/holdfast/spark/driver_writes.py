"""Outputs that the driver writes because they need a Spark session (`TableSink`).

The ledger service has no Spark session. It finishes such a run without an output. The driver then writes
the rows part by part: from the store, or by tasks that read the spool. The run's record marks the
completed output. Until then every `run` resumes the write. A run over a grown input writes only the rows
that none of its ancestors has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.spark.executor_writes import file_intervals, frame_between
from holdfast.spark.outcome_bundles import can_bundle
from holdfast.spark.output_parts import file_limits, run_parts
from holdfast.spark.output_succession import same_rows
from holdfast.spark.run_data import RunInput, RunOutcomes
from holdfast.spark.sinks import KeptPart, Sink, open_sink
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_driver_sink(sink: Sink | None) -> bool:
    return bool(getattr(sink, "in_driver", False))


def attach_session(sink: Sink, spark: SparkSession) -> Sink:
    """Attach the session to a sink that needs one."""
    attach: Any = getattr(sink, "use", None)
    if attach is not None:
        attach(spark)
    return sink


def write_driver_output(
    store: Store, record: runs.RunRecord, spark: SparkSession
) -> runs.RunRecord:
    """Write the rows of a finished run, if the driver writes its output and has not done so yet."""
    if record.status is not runs.RunLifecycle.FINISHED or runs.WRITTEN_KEY in record.config:
        return record
    sink = open_sink(record.sink) if record.sink else None
    if sink is None or not is_driver_sink(sink):
        return record
    attach_session(sink, spark)
    rows = RunOutcomes(store, record, RunInput(store, record))
    written_ancestor = _written_ancestor(store, record)
    same = same_rows(store, record, written_ancestor) if written_ancestor else []
    version = sink.begin(record.run_id, record.name, rows.schema)
    kept = [KeptPart(one.lo, one.hi) for one in same]
    append_rows(spark, store, rows, sink, version, kept)
    sink.finish()
    written: runs.RunRecord = store.transact(runs.mark_written, record.run_id)
    return written


def append_rows(
    spark: SparkSession,
    store: Store,
    rows: RunOutcomes,
    sink: Sink,
    version: int,
    kept: Sequence[KeptPart] = (),
) -> None:
    """Append the rows of a run above a version, except the kept parts."""
    commit_frame: Any = getattr(sink, "commit_frame", None)
    if commit_frame is None or not can_bundle(store, rows.record):
        for part in run_parts(rows, version, kept):
            sink.commit_many([part])
        return
    file_rows, _ = file_limits(rows.record)
    for lo, hi in _unwritten_intervals(version + 1, rows.record.size, file_rows, kept):
        frame, count = frame_between(spark, store, rows, lo, hi)
        commit_frame(lo, hi, frame, count)


def _unwritten_intervals(
    lo: int, size: int, file_rows: int, kept: Sequence[KeptPart]
) -> Iterator[tuple[int, int]]:
    """Yield the intervals of rows that remain to be written, in order."""
    for one in [*kept, KeptPart(size, size)]:
        yield from file_intervals(min(one.lo, size), lo, file_rows)
        lo = max(lo, one.hi)


def _written_ancestor(store: Store, record: runs.RunRecord) -> str:
    """Return the newest ancestor run that has written its rows to the output."""
    ancestor: runs.RunRecord | None = record
    while ancestor is not None and ancestor.base_run:
        base = ancestor.base_run
        ancestor = store.read(runs.get_record, base)
        if ancestor is None:
            why = "the run was deleted, so it is unknown whether the table has its rows; use run.write() into another table"
            raise NotFound(what="run", run_id=base, why=why)
        if runs.WRITTEN_KEY in ancestor.config:
            return ancestor.run_id
    return ""
