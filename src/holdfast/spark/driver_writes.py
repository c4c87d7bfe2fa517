"""Outputs that the driver writes: those for which Spark itself is needed (`TableSink`).

The ledger service has no Spark session. A run with such an output ends without one there, and the driver
writes its rows afterwards, part by part: from the store, or by tasks that read the spool. The run's record says when that is done; until
then every `run` goes on with it. A run over a grown input writes the rows that no earlier run of its
ancestors has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import NotFound
from holdfast.ledger import runs
from holdfast.spark.executor_writes import frame_between, intervals_of
from holdfast.spark.journal import Input, Outcomes
from holdfast.spark.outcome_rows import is_bundled
from holdfast.spark.output_parts import cut_of, parts_of
from holdfast.spark.sinks import KeptPart, Sink, open_sink
from holdfast.spark.succession import same_rows
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def is_in_driver(sink: Sink | None) -> bool:
    return bool(getattr(sink, "in_driver", False))


def use(sink: Sink, spark: SparkSession) -> Sink:
    """Give the session to a sink that needs one."""
    taken: Any = getattr(sink, "use", None)
    if taken is not None:
        taken(spark)
    return sink


def write(store: Store, record: runs.RunRecord, spark: SparkSession) -> runs.RunRecord:
    """Write the rows of a finished run, if its output is the driver's and they are not written."""
    if record.status is not runs.Status.FINISHED or runs.WRITTEN in record.config:
        return record
    sink = open_sink(record.sink) if record.sink else None
    if sink is None or not is_in_driver(sink):
        return record
    use(sink, spark)
    rows = Outcomes(store, record, Input(store, record))
    before = _written_ancestor(store, record)
    same = same_rows(store, record, before) if before else []
    version = sink.begin(record.run_id, record.name, rows.schema)
    kept = [KeptPart(one.lo, one.hi) for one in same]
    append(spark, store, rows, sink, version, kept)
    sink.finish()
    written: runs.RunRecord = store.transact(runs.mark_written, record.run_id)
    return written


def append(
    spark: SparkSession,
    store: Store,
    rows: Outcomes,
    sink: Sink,
    version: int,
    kept: Sequence[KeptPart] = (),
) -> None:
    """Append the rows of a run above a version, but for those that are kept."""
    commit_frame: Any = getattr(sink, "commit_frame", None)
    if commit_frame is None or not is_bundled(store, rows.record):
        for part in parts_of(rows, version, kept):
            sink.commit_many([part])
        return
    file_rows, _ = cut_of(rows.record)
    for lo, hi in _left(version + 1, rows.record.size, file_rows, kept):
        frame, count = frame_between(spark, store, rows, lo, hi)
        commit_frame(lo, hi, frame, count)


def _left(
    lo: int, size: int, file_rows: int, kept: Sequence[KeptPart]
) -> Iterator[tuple[int, int]]:
    """The intervals of rows that are to be written, in order."""
    for one in [*kept, KeptPart(size, size)]:
        yield from intervals_of(min(one.lo, size), lo, file_rows)
        lo = max(lo, one.hi)


def _written_ancestor(store: Store, record: runs.RunRecord) -> str:
    """The newest run before this one whose rows are in the output."""
    found: runs.RunRecord | None = record
    while found is not None and found.base_run:
        base = found.base_run
        found = store.read(runs.get, base)
        if found is None:
            why = "it was deleted: whether the table has its rows is not known; use run.write() into another table"
            raise NotFound(what="run", run_id=base, why=why)
        if runs.WRITTEN in found.config:
            return found.run_id
    return ""
