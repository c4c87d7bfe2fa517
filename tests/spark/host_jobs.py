"""Functions that a test calls in a driver on another host (see `tests.spark.host_driver`)."""

import os
import socket
import sys
import time
import types
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from holdfast.spark import Run, Stage, Tls
from holdfast.spark.sinks import ParquetSink, locate, read_parts
from holdfast.spark.sinks.object_store import keep_options, open_bucket
from tests.process.watch import until

MEET_TIMEOUT_S = 120.0
LOCATION_SCHEMA = "host string, python string, directory string, pid long"


def task_location(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
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
    """The locations of the tasks of a plain Spark job."""
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(task_location, LOCATION_SCHEMA).collect()
    return [row.asDict() for row in rows]


@dataclass(frozen=True)
class ReportHost:
    """Returns the host name of a call. With `meet`, a shared directory, a call waits until both hosts have a call."""

    meet: str = ""

    def __call__(self, row: Any, call: Any) -> dict[str, Any]:
        host = socket.gethostname()
        if self.meet:
            os.makedirs(self.meet, exist_ok=True)
            Path(self.meet, host).touch()
            until(lambda: len(os.listdir(self.meet)) == 2, "the other host", MEET_TIMEOUT_S)
        return {"host": host}


def run_stage(
    spark: SparkSession,
    name: str,
    rows: int = 20,
    output: str | None = None,
    tls: str = "",
    meet: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Run a stage whose rows contain the host of their call. Its store is on the disk of the driver."""
    if tls:
        options["tls"] = Tls(f"{tls}/ledger.crt", f"{tls}/ledger.key", f"{tls}/ca.crt")
    stage = Stage(
        name, ReportHost(meet), key="id", schema="host string", store="/var/work/store",
        flush_rows=1, progress="quiet", **options,
    )  # fmt: skip
    with stage.run(spark.range(rows), output=output) as run:
        rows_found = run.output().collect()
        counts = run.counts()
    return {
        "hosts": sorted({row.host for row in rows_found}),
        "ids": [row.id for row in rows_found],
        "counts": counts,
    }


def run_missing_module(spark: SparkSession, name: str, inside: bool) -> None:
    """Run a stage whose function uses a module that exists only in the driver process."""
    module = types.ModuleType("module_of_the_driver")
    exec("def work(row):\n    return {'host': 'x'}\n", module.__dict__)
    sys.modules[module.__name__] = module
    fn = imports_inside if inside else module.__dict__["work"]
    stage = Stage(
        name, fn, key="id", schema="host string", store="/var/work/store", progress="quiet"
    )
    try:
        stage.run(spark.range(20))
    finally:
        del sys.modules[module.__name__]


def imports_inside(row: Any) -> dict[str, Any]:
    import module_that_is_nowhere

    return {"host": module_that_is_nowhere.__name__}


def status_of(spark: SparkSession, name: str) -> list[Any]:
    """The status and the number of calls of the latest run of a name."""
    from holdfast.spark import Run

    with Run.of(name, spark, "/var/work/store") as run:
        return [run.status, run.progress().calls]


def exists(spark: SparkSession, path: str) -> bool:
    return Path(path).exists()


# --- with a spool -------------------------------------------------------------------------------


def record_call(row: Any) -> dict[str, Any]:
    """Record the call in a file of its host and return a result."""
    fd = os.open("/var/work/calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{row.id}\n".encode())
    os.close(fd)
    time.sleep(0.02)
    return {"y": f"result of {row.id}"}


def make_bucket(spark: SparkSession, endpoint: str, bucket: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request).close()


def run_spooled(
    spark: SparkSession,
    name: str,
    store: str,
    spool: str,
    rows: int,
    storage_options: dict[str, str],
    **options: Any,
) -> dict[str, Any]:
    """Run a stage with its input and results in the spool. Executors write its output and read it from there."""
    stage = Stage(
        name, record_call, key="id", schema="y string", store=store, spool=spool,
        storage_options=storage_options, progress="quiet", **options,
    )  # fmt: skip
    sink = ParquetSink(f"{spool}-output", grace_s=0, storage_options=storage_options)
    with stage.run(spark.range(rows), output=sink, changed="extend") as run:
        counts, reused = run.counts(), run.reused().count()
        failed = run.failed().count()
    manifest = read_parts(f"{spool}-output")
    # Executors read the rows from the spool, not from the output.
    with Run.of(name, spark, store, storage_options=storage_options) as run:
        run.write(ParquetSink(f"{spool}-again-{rows}", storage_options=storage_options))
    again = read_parts(f"{spool}-again-{rows}")
    return {
        "counts": counts,
        "reused": reused,
        "failed": failed,
        "complete": manifest.complete and again.complete,
        "rows": [manifest.rows, again.rows],
        "written_again": [part.sha256 for part in again.parts],
        "written": [part.sha256 for part in manifest.parts],
    }


def rows_by_host(
    spark: SparkSession, url: str, tasks: int, storage_options: dict[str, str]
) -> list[list[Any]]:
    """The rows of a Parquet output as executors read them from an object store: (host, ids, results) per task."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        manifest = read_parts(url, storage_options=storage_options)
        location = locate(url)
        keep_options(url, storage_options)
        bucket = open_bucket(location)
        ids: list[int] = []
        results: list[str] = []
        for file in manifest.files:
            name = file.removeprefix(f"{location.scheme}://{location.bucket}/")
            data = bytes(obstore.get(bucket, name).bytes())
            table = pq.read_table(pa.BufferReader(data))
            ids += table["id"].to_pylist()
            results += table["y"].to_pylist()
        row = {"host": [socket.gethostname()], "ids": [ids], "results": [results]}
        yield pa.RecordBatch.from_pydict(row)

    schema = "host string, ids array<long>, results array<string>"
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(read, schema).collect()
    return [[row.host, row.ids, row.results] for row in rows]
