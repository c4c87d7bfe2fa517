"""Rows as any table that Spark itself can append to: JDBC, Hive, a catalog's own format.

    TableSink("cat.db.labels", partition_by=["lang"])

- The driver writes it by Spark, `df.writeTo(table).append()` for each part, when all rows have ended.
- A column `_holdfast_part` names the run and the interval of each row. Before a part is appended, the rows
  that the table has of it are counted: all of them are there, or the part is appended. Of a part that is
  there by half the rows are deleted first, where the table can delete.
- So a row is there **at least once**: a task that Spark repeats, or half a part in a table that cannot
  delete, may leave it twice. `_holdfast_part` and the key tell such rows.
- A table that is not there is created, with `partition_by`, and an empty append is made before the first
  call: names, types and rights are checked by the table itself.
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
    fitted_part,
    pending,
    plain,
)
from holdfast.spark.sinks.files import Step, no_step, readable
from holdfast.spark.sinks.location import OutputUnknown
from holdfast.spark.sinks.partitions import names_of, transform_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART = "_holdfast_part"
MODES = ("append",)
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
_TRANSFORMS = ("years", "months", "days", "hours")


class TableSink:
    # Spark writes it, so the ledger service, which has no session, leaves it to the driver.
    in_driver = True

    def __init__(
        self,
        table: str,
        *,
        mode: str = "append",
        partition_by: str | Sequence[str] = (),
        step: Step = no_step,
    ) -> None:
        if mode not in MODES:
            why = (
                'only "append": any table takes rows; use DeltaSink or IcebergSink to replace them'
            )
            raise Invalid(what="mode", found=mode, why=why)
        if not isinstance(table, str) or not _NAME.fullmatch(table):
            raise OutputUnknown(output=str(table), why="name a table of a catalog")
        self.table = table
        self._quoted = ".".join(f"`{name}`" for name in table.split("."))
        self._partition_by = names_of(partition_by)
        self._step = step
        self._spark: SparkSession | None = None
        self._run_id = ""
        self._schema = pa.schema([])
        self._version = NOTHING
        self._there: dict[str, int] = {}

    def spec(self) -> Spec:
        spec: Spec = {"kind": "table", "table": self.table}
        if self._partition_by:
            spec["partition_by"] = json.dumps(self._partition_by)
        return spec

    def use(self, spark: SparkSession) -> None:
        """The session that knows the table's catalog."""
        self._spark = spark

    def check_vacant(self) -> None:
        """Rows of others may be in the table."""

    def check(self, schema: pa.Schema) -> None:
        """Create the table, or see that it takes rows of these columns: an empty append is made."""
        self._fit(schema)

    def begin(self, run_id: str, name: str, schema: pa.Schema) -> int:
        self._run_id = run_id
        self._fit(schema)
        self._there = self._counts(run_id)
        self._version = NOTHING
        return NOTHING

    def commit(self, lo: int, hi: int, table: pa.Table) -> int:
        return self.commit_many([Part(lo, hi, table)])

    def commit_many(self, parts: Sequence[Part | KeptPart]) -> int:
        for part in pending(parts, self._version, path=self.table):
            if isinstance(part, Part):
                groups = list(fitted_part(part, self._schema, path=self.table).groups())
                if groups:
                    self._put(f"{self._run_id}/{part.lo}-{part.hi}", pa.concat_tables(groups))
            self._version = part.version
        return self._version

    def commit_frame(self, lo: int, hi: int, frame: DataFrame, rows: int) -> int:
        """A part whose rows executors read; `rows` is how many they are."""
        if hi - 1 > self._version:
            if rows:
                self._append_part(f"{self._run_id}/{lo}-{hi}", frame, rows)
            self._version = hi - 1
        return self._version

    def finish(self) -> None:
        """The table has no state of its own."""

    def parts(self, run_id: str) -> list[str]:
        """A table has no files that are known here."""
        return []

    # --- the table ------------------------------------------------------------------------------

    def _session(self) -> SparkSession:
        if self._spark is None:
            from pyspark.sql import SparkSession

            self._spark = SparkSession.getActiveSession()
        if self._spark is None:
            raise Invalid(what="table", table=self.table, why="there is no Spark session here")
        return self._spark

    def _fit(self, schema: pa.Schema) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._schema = plain(schema)
        if PART in self._schema.names:
            why = f"{PART} is the table's own column"
            raise Invalid(what="schema", table=self.table, columns=[PART], why=why)
        try:
            columns = from_arrow_schema(self._schema).add(PART, "string")
            empty = self._session().createDataFrame([], columns)
            if self._exists():
                empty.writeTo(self._quoted).append()
            else:
                self._create(empty)
        except Invalid:
            raise
        except Exception as error:  # of Spark, a catalog, a database
            raise Invalid(what="table", table=self.table, why=_told_by(error)) from error

    def _exists(self) -> bool:
        """Asked by name, not by the catalog's list: a table that cannot be read says why."""
        return bool(self._session().catalog.tableExists(self._quoted))

    def _create(self, empty: DataFrame) -> None:
        from pyspark.sql import functions
        from pyspark.sql.functions import partitioning

        by: list[Any] = []
        for text in self._partition_by:
            name, column, _ = transform_of(text)
            if column not in empty.columns or name not in ("identity", *_TRANSFORMS):
                why = f"a column of the output, or one of {', '.join(_TRANSFORMS)} of it"
                raise Invalid(what="partition_by", table=self.table, found=text, why=why)
            found = functions.col(f"`{column}`")
            by.append(found if name == "identity" else getattr(partitioning, name)(found))
        writer = empty.writeTo(self._quoted)
        (writer.partitionedBy(*by) if by else writer).create()

    def _counts(self, begin: str) -> dict[str, int]:
        """How many rows the table has of each part whose name begins so."""
        from pyspark.sql import functions

        name = functions.col(PART)
        try:
            rows = self._session().table(self._quoted).where(name.startswith(f"{begin}/"))
            return {row[0]: int(row[1]) for row in rows.groupBy(name).count().collect()}
        except Exception as error:
            raise OutputError(path=self.table, why=_told_by(error)) from error

    def _put(self, name: str, table: pa.Table) -> None:
        frame = self._session().createDataFrame(table.combine_chunks())
        self._append_part(name, frame, table.num_rows)

    def _append_part(self, name: str, frame: DataFrame, rows: int) -> None:
        from pyspark.sql import functions

        there = self._there.get(name, 0)
        if there >= rows:
            return
        if there:
            self._remove(name)
        frame = frame.withColumn(PART, functions.lit(name))
        self._step("append-before")
        try:
            # One task: a database commits what one task wrote as a whole.
            frame.coalesce(1).writeTo(self._quoted).append()
        except Exception as error:
            # The answer may be lost, and the rows there.
            if self._counts(self._run_id).get(name, 0) < rows:
                raise OutputError(path=self.table, why=_told_by(error)) from error
        self._step("append")

    def _remove(self, name: str) -> None:
        """A part that is there by half, if the table can delete; else its rows come again."""
        import contextlib

        with contextlib.suppress(Exception):
            self._session().sql(f"DELETE FROM {self._quoted} WHERE {PART} = '{name}'").collect()


def _told_by(error: BaseException) -> str:
    return readable(str(error).split("\n\n")[0].split("\tat ")[0])[:400] or type(error).__name__
