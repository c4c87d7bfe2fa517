"""The lazy form of a stage: a DataFrame whose partitions are fixed intervals of the ledger.

Evaluating a partition works off what is left of its interval and yields the stored outcomes, so
Spark may evaluate it as often as it likes: sorting, joining with itself, retrying, speculating.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.ledger.runs import RunRecord
from holdfast.spark.engine import Duty
from holdfast.spark.jobs import own_python
from holdfast.spark.journal import META, carried, schema_bytes, schema_of
from holdfast.spark.task import Ranges

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Partitions for each task that runs at once: small enough to even out, large enough to matter.
PARTS_PER_TASK = 4
# Rows of the first partition. Each of the next has twice as many, up to the size of the others: Spark
# evaluates the first alone for `limit`, `take`, `head` and `show`, and more only while rows are missing.
FIRST_ROWS = 64


def lazily(
    spark: SparkSession,
    record: RunRecord,
    duty: Duty,
    function: bytes,
    *,
    tasks: int,
    meta: bool,
    strict: bool,
) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    source = schema_of(record.input_schema)
    names = [*record.key, *carried(record.config.get("carry", ""), source.names, record.key)]
    fields = [*(source.field(name) for name in names), *schema_of(record.result_schema)]
    if meta:
        # Rows without a result are among them.
        fields = [*(field.with_nullable(True) for field in fields), *META]
    schema = pa.schema(fields)
    ranges = intervals(record.size, tasks * PARTS_PER_TASK, record.policy.unit)
    body = Ranges(duty, function, ranges, schema_bytes(schema), meta, strict)
    parts = max(len(ranges), 1)
    frame = spark.range(0, len(ranges), 1, parts)
    with own_python(spark):
        return frame.mapInArrow(body, from_arrow_schema(schema))


def intervals(size: int, count: int, unit: int) -> list[tuple[int, int]]:
    """[0, size) in about so many parts, and a few small ones at the start; cut at multiples of the unit."""
    most = max(-(-size // max(count, 1)), 1)
    found, lo, rows = [], 0, FIRST_ROWS
    while lo < size:
        hi = min(lo + -(-min(rows, most) // unit) * unit, size)
        found.append((lo, hi))
        lo, rows = hi, rows * 2
    return found
