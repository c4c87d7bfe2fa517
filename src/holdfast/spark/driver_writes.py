"""Outputs that the driver writes: those for which Spark itself is needed (`TableSink`).

The ledger service has no Spark session. A run with such an output ends without one there, and the driver
writes its rows from the store afterwards, part by part. The run's record says when that is done; until
then every `run` goes on with it. A run over a grown input writes the rows that no earlier run of its
ancestors has written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.ledger import runs
from holdfast.spark.export import parts_of
from holdfast.spark.journal import Input, Outcomes
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
    for part in parts_of(rows, version, [KeptPart(one.lo, one.hi) for one in same]):
        sink.commit_many([part])
    sink.finish()
    written: runs.RunRecord = store.transact(runs.mark_written, record.run_id)
    return written


def _written_ancestor(store: Store, record: runs.RunRecord) -> str:
    """The newest run before this one whose rows are in the output."""
    found: runs.RunRecord | None = record
    while found is not None and found.base_run:
        found = store.read(runs.get, found.base_run)
        if found is not None and runs.WRITTEN in found.config:
            return found.run_id
    return ""
