"""The lazy form of a stage: a DataFrame whose partitions are fixed intervals of the ledger.

Evaluating a partition processes the unfinished rows of its interval and yields the stored outcomes.
Spark may therefore evaluate it repeatedly: for sorts, self-joins, retries and speculation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.ledger.runs import RunRecord
from holdfast.spark.child_job import ChildJob
from holdfast.spark.run_data import META_SCHEMA, carried_names, decode_schema, encode_schema
from holdfast.spark.spark_jobs import use_driver_python
from holdfast.spark.spark_task import FixedRanges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Partitions per concurrent task: small enough to balance the load, large enough to amortise
# overhead.
PARTS_PER_TASK = 4
# Rows of the first partition. Each following one doubles up to the common size. Spark evaluates the
# first partition alone for `limit`, `take`, `head` and `show`, and more only while rows are
# missing.
FIRST_ROWS = 64


def make_lazy_frame(
    spark: SparkSession,
    record: RunRecord,
    job: ChildJob,
    function: bytes,
    *,
    tasks: int,
    meta: bool,
    strict: bool,
) -> DataFrame:
    """Build the DataFrame of the lazy form."""
    from pyspark.sql.pandas.types import from_arrow_schema

    source = decode_schema(record.input_schema)
    names = [*record.key, *carried_names(record.config.get("carry", ""), source.names, record.key)]
    fields = [*(source.field(name) for name in names), *decode_schema(record.result_schema)]
    if meta:
        # The result columns become nullable, because rows without a result are included.
        fields = [*(field.with_nullable(True) for field in fields), *META_SCHEMA]
    schema = pa.schema(fields)
    ranges = split_intervals(record.size, tasks * PARTS_PER_TASK, record.policy.atomic_rows)
    body = FixedRanges(job, function, ranges, encode_schema(schema), meta, strict)
    parts = max(len(ranges), 1)
    frame = spark.range(0, len(ranges), 1, parts)
    with use_driver_python(spark):
        return frame.mapInArrow(body, from_arrow_schema(schema))


def split_intervals(size: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Split [0, size) into about `count` parts and a few small ones at the start, cut at multiples
    of `unit`.
    """
    most = max(-(-size // max(count, 1)), 1)
    intervals, lo, rows = [], 0, FIRST_ROWS
    while lo < size:
        hi = min(lo + -(-min(rows, most) // unit) * unit, size)
        intervals.append((lo, hi))
        lo, rows = hi, rows * 2
    return intervals
