"""Spark jobs that write the output of a run that is over, from the spool: the driver reads no result.

    write_parts(spark, …)     each row of a job is an interval; its task writes the part files of it
    frame_between(spark, …)   a DataFrame of the successes of an interval, for tables that Spark appends to

During a run the tasks that make its calls write the files (`part_writer`). This is for an export, and for outputs that
the driver appends to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from holdfast import codec
from holdfast.ledger import runs
from holdfast.ledger.states import State
from holdfast.spark import wire
from holdfast.spark.jobs import own_python
from holdfast.spark.journal import Outcomes, schema_bytes
from holdfast.spark.outcome_rows import ReadOutcomes, bundle
from holdfast.spark.part_writer import check, written
from holdfast.spark.sinks import ExecutorSink, Sink, WrittenPart
from holdfast.spark.sinks.object_store import keep_options, options_for
from holdfast.spark.write_access import WriteAccess
from holdfast.store.api import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Intervals of one job: what it wrote is committed before the next begins.
INTERVALS_MAX = 64


class WriteIntervals(msgspec.Struct, frozen=True):
    """The body of a job: each input row is an interval to write, and its parts are yielded."""

    work: bytes
    access: WriteAccess

    def __repr__(self) -> str:
        return "WriteIntervals()"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for url, options in self.access.options.items():
            keep_options(url, options)
        work = msgspec.msgpack.decode(self.work, type=wire.PartWork)
        check(work)
        for batch in batches:
            for data in batch.column(0):
                yield pa.RecordBatch.from_pydict(
                    {"parts": [codec.pack(written(work, data.as_py()))]}
                )


def write_parts(
    spark: SparkSession,
    store: Store,
    record: runs.RunRecord,
    sink: ExecutorSink,
    version: int,
    cut: tuple[int, int],
) -> Iterator[list[WrittenPart]]:
    """The parts of a run above a version, in order, written by executors, some at a time. `cut` are the most rows and
    bytes of a file."""
    file_rows, file_bytes = cut
    assert isinstance(sink, Sink)
    work = wire.PartWork(
        "write",
        sink=msgspec.json.encode(sink.spec()),
        writer=sink.part_writer(),
        file_rows=file_rows,
        file_bytes=file_bytes,
    )
    access = WriteAccess(options_for(record.spool, sink.spec().get("path")))
    body = WriteIntervals(msgspec.msgpack.encode(work), access)
    intervals = list(intervals_of(record.size, version + 1, file_rows))
    for at in range(0, len(intervals), INTERVALS_MAX):
        some = [
            bundle(store, record, lo, hi, successes_only=True)
            for lo, hi in intervals[at : at + INTERVALS_MAX]
        ]
        source = spark.createDataFrame(pa.table({"bundle": pa.array(some, pa.binary())}))
        with own_python(spark):
            rows = source.repartition(len(some)).mapInArrow(body, "parts binary").collect()
        found = [
            one for row in rows for one in codec.unpack_as(list[WrittenPart], bytes(row.parts))
        ]
        yield sorted(found, key=lambda part: part.lo)


def frame_between(
    spark: SparkSession, store: Store, rows: Outcomes, lo: int, hi: int
) -> tuple[DataFrame, int]:
    """The successes of [lo, hi), which executors read, and how many they are."""
    from pyspark.sql.pandas.types import from_arrow_schema

    data = bundle(store, rows.record, lo, hi, successes_only=True)
    source = spark.createDataFrame(pa.table({"bundle": pa.array([data], pa.binary())}))
    with own_python(spark):
        options = options_for(rows.record.spool)
        body = ReadOutcomes(schema_bytes(rows.schema), State.TERMINAL_SUCCESS, options)
        frame = source.mapInArrow(body, from_arrow_schema(rows.schema))
    return frame, rows.success_count(lo, hi)


def intervals_of(size: int, lo: int, file_rows: int) -> Iterator[tuple[int, int]]:
    """Intervals of rows in which parts end whatever their sizes."""
    while lo < size:
        hi = min(lo - lo % file_rows + file_rows, size)
        yield lo, hi
        lo = hi
