"""What a driver on a host of its own is asked to do (see `tests.spark.host_driver`)."""

import os
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from holdfast.spark import Stage

PLACES = "host string, python string, directory string, pid long"


def place(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield pa.RecordBatch.from_pydict(
        {
            "host": [socket.gethostname()],
            "python": [sys.executable],
            "directory": [os.getcwd()],
            "pid": [os.getpid()],
        }
    )


def places_of_tasks(spark: SparkSession, tasks: int) -> list[dict[str, Any]]:
    """Where the tasks of a plain job ran."""
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(place, PLACES).collect()
    return [row.asDict() for row in rows]


def where(row: Any, call: Any) -> dict[str, Any]:
    return {"host": socket.gethostname()}


def run_stage(
    spark: SparkSession, name: str, rows: int = 20, output: str | None = None, **options: Any
) -> dict[str, Any]:
    """A run of a stage whose rows say where they were called; its store is on the driver's disk."""
    stage = Stage(
        name, where, key="id", schema="host string", store="/var/work/store",
        flush_rows=1, progress="quiet", **options,
    )  # fmt: skip
    with stage.run(spark.range(rows), output=output) as run:
        found = run.output().collect()
        counts = run.counts()
    return {
        "hosts": sorted({row.host for row in found}),
        "ids": [row.id for row in found],
        "counts": counts,
    }


def exists(spark: SparkSession, path: str) -> bool:
    return Path(path).exists()
