"""The table sink: rows in any table that Spark can append to, such as JDBC, Hive or a catalog's own
format.

    TableSink("cat.db.labels", partition_by=["lang"])

- The driver writes the table with Spark when all rows are final: `df.writeTo(table).append()` for
  each part.
- The column `_holdfast_part` has the run and the interval of each row. Before it appends a part,
  the sink counts the part's rows in the table. A complete part is skipped. The rows of a partial
  part are deleted first, if the table supports deletes.
- Delivery is **at least once**: a task that Spark repeats, or a partial part in a table without
  deletes, may leave a row twice. `_holdfast_part` and the key identify such rows.
- A missing table is created with `partition_by`. An empty append before the first call lets the
  table check names, types and permissions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from holdfast.errors import Invalid
from holdfast.spark.sinks.api import (
    NOTHING,
    KeptPart,
    OutputError,
    Part,
    Spec,
    part_with_schema,
    parts_after,
    without_metadata,
)
from holdfast.spark.sinks.location import OutputUnknown
from holdfast.spark.sinks.parquet_files import StepHook, ignore_step, one_line
from holdfast.spark.sinks.partitions import parse_partition_by, parse_partition_transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART_COLUMN = "_holdfast_part"
MODES = ("append",)
_TABLE_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
_TRANSFORMS = ("years", "months", "days", "hours")


class TableSink:
    # The driver writes it, because the ledger service has no Spark session.
    in_driver = True

    def __init__(
        self,
        table: str,
        *,
        mode: str = "append",
        partition_by: str | Sequence[str] = (),
        step: StepHook = ignore_step,
    ) -> None:
        if mode not in MODES:
            why = 'only "append" is supported; use DeltaSink or IcebergSink to replace rows'
            raise Invalid(what="mode", found=mode, why=why)
        if not isinstance(table, str) or not _TABLE_NAME.fullmatch(table):
            raise OutputUnknown(output=str(table), why="name a table of a catalog")
        self.table = table
        self._quoted = ".".join(f"`{name}`" for name in table.split("."))
        self._partition_by = parse_partition_by(partition_by)
        self._step = step
        self._spark: SparkSession | None = None
        self._run_id = ""
        self._schema = pa.schema([])
        self._version = NOTHING
        self._existing_rows: dict[str, int] = {}

    def spec(self) -> Spec:
        spec: Spec = {"kind": "table", "table": self.table}
        if self._partition_by:
            spec["partition_by"] = json.dumps(self._partition_by)
        return spec

    def use(self, spark: SparkSession) -> None:
        """Set the session that knows the table's catalog."""
        self._spark = spark

    def check_vacant(self) -> None:
        """Do nothing: the table may contain foreign rows."""

    def check(self, schema: pa.Schema) -> None:
        """Create the table, or check with an empty append that it accepts these columns."""
        self._create_or_check(schema)

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._run_id = run_id
        self._create_or_check(schema)
        self._existing_rows = self._counts(run_id)
        self._version = NOTHING
        return NOTHING

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart]) -> int:
        for part in parts_after(parts, self._version, path=self.table):
            if isinstance(part, Part):
                groups = list(part_with_schema(part, self._schema, path=self.table).groups())
                if groups:
                    self._append_table(
                        f"{self._run_id}/{part.lo}-{part.hi}", pa.concat_tables(groups)
                    )
            self._version = part.version
        return self._version

    def commit_frame(self, lo: int, hi: int, frame: DataFrame, rows: int) -> int:
        """Commit a part that executors read. `rows` is its number of rows."""
        if hi - 1 > self._version:
            if rows:
                self._append_part(f"{self._run_id}/{lo}-{hi}", frame, rows)
            self._version = hi - 1
        return self._version

    def finish(self) -> None:
        """Do nothing: the table has no completion state."""

    def parts(self, run_id: str) -> list[str]:
        """Return no files: those of the table are unknown."""
        return []

    # --- table ----------------------------------------------------------------------------------

    def _session(self) -> SparkSession:
        if self._spark is None:
            from pyspark.sql import SparkSession

            self._spark = SparkSession.getActiveSession()
        if self._spark is None:
            raise Invalid(what="table", table=self.table, why="there is no Spark session here")
        return self._spark

    def _create_or_check(self, schema: pa.Schema) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._schema = without_metadata(schema)
        if PART_COLUMN in self._schema.names:
            why = f"the sink adds the column {PART_COLUMN} itself; rename yours"
            raise Invalid(what="schema", table=self.table, columns=[PART_COLUMN], why=why)
        try:
            columns = from_arrow_schema(self._schema).add(PART_COLUMN, "string")
            empty = self._session().createDataFrame([], columns)
            if self._exists():
                empty.writeTo(self._quoted).append()
            else:
                self._create(empty)
        except Invalid:
            raise
        except Exception as error:  # errors of Spark, a catalog or a database
            raise Invalid(what="table", table=self.table, why=_error_text(error)) from error

    def _exists(self) -> bool:
        """Check by name instead of the catalog's list, so that an unreadable table reports its
        error.
        """
        return bool(self._session().catalog.tableExists(self._quoted))

    def _create(self, empty: DataFrame) -> None:
        from pyspark.sql import functions
        from pyspark.sql.functions import partitioning

        by: list[Any] = []
        for text in self._partition_by:
            name, column, _ = parse_partition_transform(text)
            if column not in empty.columns or name not in ("identity", *_TRANSFORMS):
                why = f"must be a column of the output, or one of {', '.join(_TRANSFORMS)} of it"
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
            found = functions.col(f"`{column}`")
            by.append(found if name == "identity" else getattr(partitioning, name)(found))
        writer = empty.writeTo(self._quoted)
        (writer.partitionedBy(*by) if by else writer).create()

    def _counts(self, begin: str) -> dict[str, int]:
        """Count the rows of each part with this name prefix in the table."""
        from pyspark.sql import functions

        name = functions.col(PART_COLUMN)
        try:
            rows = self._session().table(self._quoted).where(name.startswith(f"{begin}/"))
            return {row[0]: int(row[1]) for row in rows.groupBy(name).count().collect()}
        except Exception as error:
            raise OutputError(path=self.table, why=_error_text(error)) from error

    def _append_table(self, name: str, table: pa.Table) -> None:
        frame = self._session().createDataFrame(table.combine_chunks())
        self._append_part(name, frame, table.num_rows)

    def _append_part(self, name: str, frame: DataFrame, rows: int) -> None:
        from pyspark.sql import functions

        existing = self._existing_rows.get(name, 0)
        if existing >= rows:
            return
        if existing:
            self._delete_part(name)
        frame = frame.withColumn(PART_COLUMN, functions.lit(name))
        self._step("append-before")
        try:
            # One task, because a database commits the rows of one task as a unit.
            frame.coalesce(1).writeTo(self._quoted).append()
        except Exception as error:
            # The reply may be lost although the rows were written.
            if self._counts(self._run_id).get(name, 0) < rows:
                raise OutputError(path=self.table, why=_error_text(error)) from error
        self._step("append")

    def _delete_part(self, name: str) -> None:
        """Delete a partial part if the table supports it. Otherwise its rows are appended again."""
        import contextlib

        with contextlib.suppress(Exception):
            self._session().sql(
                f"DELETE FROM {self._quoted} WHERE {PART_COLUMN} = '{name}'"
            ).collect()


def _error_text(error: BaseException) -> str:
    return one_line(str(error).split("\n\n")[0].split("\tat ")[0])[:400] or type(error).__name__
