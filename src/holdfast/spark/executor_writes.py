"""Spark jobs that write the output of a finished run from the spool. The driver reads no result.

    write_parts(spark, …)     each row of the job is an interval; its task writes the interval's part files
    frame_between(spark, …)   a DataFrame of the successes of an interval, for tables that Spark appends to

During a run, the tasks that make its calls write the files (`part_writer`). This module serves exports
and outputs that the driver appends to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from holdfast import codec
from holdfast.ledger import runs
from holdfast.ledger.states import RowState
from holdfast.spark import ledger_protocol
from holdfast.spark.outcome_bundles import OutcomeReader, make_bundle
from holdfast.spark.part_writer import check_output, write_interval
from holdfast.spark.run_data import RunOutcomes, encode_schema
from holdfast.spark.sinks import ExecutorSink, Sink, WrittenPart
from holdfast.spark.sinks.object_store import keep_options, options_for
from holdfast.spark.spark_jobs import use_driver_python
from holdfast.spark.write_access import WriteAccess
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Intervals per job. Their files are committed before the next job begins.
INTERVALS_MAX = 64


class WriteIntervals(msgspec.Struct, frozen=True):
    """The body of a job: each input row is an interval to write. It yields the written parts."""

    work: bytes
    access: WriteAccess

    def __repr__(self) -> str:
        return "WriteIntervals()"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for url, options in self.access.options.items():
            keep_options(url, options)
        work = msgspec.msgpack.decode(self.work, type=ledger_protocol.PartAssignment)
        check_output(work)
        for batch in batches:
            for data in batch.column(0):
                yield pa.RecordBatch.from_pydict(
                    {"parts": [codec.pack(write_interval(work, data.as_py()))]}
                )


def write_parts(
    spark: SparkSession,
    store: Store,
    record: runs.RunRecord,
    sink: ExecutorSink,
    version: int,
    file_limits: tuple[int, int],
) -> Iterator[list[WrittenPart]]:
    """Write the parts of a run above a version on executors. Yield them in order, one job at a
    time. `file_limits` is the maximum of rows and bytes per file.
    """
    file_rows, file_bytes = file_limits
    assert isinstance(sink, Sink)
    work = ledger_protocol.PartAssignment(
        "write",
        sink=msgspec.json.encode(sink.spec()),
        writer=sink.part_writer(),
        file_rows=file_rows,
        file_bytes=file_bytes,
    )
    access = WriteAccess(options_for(record.spool, sink.spec().get("path")))
    body = WriteIntervals(msgspec.msgpack.encode(work), access)
    intervals = list(file_intervals(record.size, version + 1, file_rows))
    for at in range(0, len(intervals), INTERVALS_MAX):
        bundles = [
            make_bundle(store, record, lo, hi, successes_only=True)
            for lo, hi in intervals[at : at + INTERVALS_MAX]
        ]
        source = spark.createDataFrame(pa.table({"bundle": pa.array(bundles, pa.binary())}))
        with use_driver_python(spark):
            rows = source.repartition(len(bundles)).mapInArrow(body, "parts binary").collect()
        parts = [
            one for row in rows for one in codec.unpack_as(list[WrittenPart], bytes(row.parts))
        ]
        yield sorted(parts, key=lambda part: part.lo)


def frame_between(
    spark: SparkSession, store: Store, rows: RunOutcomes, lo: int, hi: int
) -> tuple[DataFrame, int]:
    """Return a DataFrame of the successes of [lo, hi), read by executors, and their number."""
    from pyspark.sql.pandas.types import from_arrow_schema

    data = make_bundle(store, rows.record, lo, hi, successes_only=True)
    source = spark.createDataFrame(pa.table({"bundle": pa.array([data], pa.binary())}))
    with use_driver_python(spark):
        options = options_for(rows.record.spool)
        body = OutcomeReader(encode_schema(rows.schema), RowState.TERMINAL_SUCCESS, options)
        frame = source.mapInArrow(body, from_arrow_schema(rows.schema))
    return frame, rows.success_count(lo, hi)


def file_intervals(size: int, lo: int, file_rows: int) -> Iterator[tuple[int, int]]:
    """Yield intervals that end where a part ends independent of row sizes."""
    while lo < size:
        hi = min(lo - lo % file_rows + file_rows, size)
        yield lo, hi
        lo = hi
