"""What a driver on a host of its own is asked to do (see `tests.spark.host_driver`)."""

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

MEET_S = 120.0
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


@dataclass(frozen=True)
class Where:
    """The host of a call. With `meet`, a shared directory, a call waits until both hosts are at work."""

    meet: str = ""

    def __call__(self, row: Any, call: Any) -> dict[str, Any]:
        host = socket.gethostname()
        if self.meet:
            os.makedirs(self.meet, exist_ok=True)
            Path(self.meet, host).touch()
            until(lambda: len(os.listdir(self.meet)) == 2, "the other host", MEET_S)
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
    """A run of a stage whose rows say where they were called; its store is on the driver's disk."""
    if tls:
        options["tls"] = Tls(f"{tls}/ledger.crt", f"{tls}/ledger.key", f"{tls}/ca.crt")
    stage = Stage(
        name, Where(meet), key="id", schema="host string", store="/var/work/store",
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


def run_missing_module(spark: SparkSession, name: str, inside: bool) -> None:
    """A stage whose function uses a module that only the driver's process has."""
    gone = types.ModuleType("module_of_the_driver")
    exec("def work(row):\n    return {'host': 'x'}\n", gone.__dict__)
    sys.modules[gone.__name__] = gone
    fn = imports_inside if inside else gone.__dict__["work"]
    stage = Stage(
        name, fn, key="id", schema="host string", store="/var/work/store", progress="quiet"
    )
    try:
        stage.run(spark.range(20))
    finally:
        del sys.modules[gone.__name__]


def imports_inside(row: Any) -> dict[str, Any]:
    import module_that_is_nowhere

    return {"host": module_that_is_nowhere.__name__}


def status_of(spark: SparkSession, name: str) -> list[Any]:
    """The run of a name as it stands: its status and its calls."""
    from holdfast.spark import Run

    with Run.of(name, spark, "/var/work/store") as run:
        return [run.status, run.progress().calls]


def exists(spark: SparkSession, path: str) -> bool:
    return Path(path).exists()


# --- with a spool -------------------------------------------------------------------------------


def noting(row: Any) -> dict[str, Any]:
    """A call, which its host keeps a note of."""
    fd = os.open("/var/work/calls", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{row.id}\n".encode())
    os.close(fd)
    time.sleep(0.02)
    return {"y": f"result of {row.id}"}


def make_bucket(spark: SparkSession, endpoint: str, bucket: str) -> None:
    asked = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(asked).close()


def run_spooled(
    spark: SparkSession,
    name: str,
    store: str,
    spool: str,
    rows: int,
    storage_options: dict[str, str],
    **options: Any,
) -> dict[str, Any]:
    """A run whose input and results are in the spool; executors write its output, and read it from there."""
    stage = Stage(
        name, noting, key="id", schema="y string", store=store, spool=spool,
        storage_options=storage_options, progress="quiet", **options,
    )  # fmt: skip
    sink = ParquetSink(f"{spool}-output", grace_s=0, storage_options=storage_options)
    with stage.run(spark.range(rows), output=sink, changed="extend") as run:
        counts, reused = run.counts(), run.reused().count()
        failed = run.failed().count()
    manifest = read_parts(f"{spool}-output")
    # The rows without the output, as executors read them from the spool.
    with Run.of(name, spark, store, storage_options=storage_options) as run:
        run.write(ParquetSink(f"{spool}-again-{rows}", storage_options=storage_options))
    again = read_parts(f"{spool}-again-{rows}")
    return {
        "counts": counts,
        "reused": reused,
        "failed": failed,
        "complete": manifest.complete and again.complete,
        "rows": [manifest.rows, again.rows],
        "written_again": [one.sha256 for one in again.parts],
        "written": [one.sha256 for one in manifest.parts],
    }


def rows_by_host(
    spark: SparkSession, url: str, tasks: int, storage_options: dict[str, str]
) -> list[list[Any]]:
    """What executors read of a Parquet output in an object store: (host, ids, results), one for each task."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        found = read_parts(url, storage_options=storage_options)
        place = locate(url)
        keep_options(url, storage_options)
        bucket = open_bucket(place)
        ids: list[int] = []
        results: list[str] = []
        for file in found.files:
            name = file.removeprefix(f"{place.scheme}://{place.bucket}/")
            data = bytes(obstore.get(bucket, name).bytes())
            table = pq.read_table(pa.BufferReader(data))
            ids += table["id"].to_pylist()
            results += table["y"].to_pylist()
        row = {"host": [socket.gethostname()], "ids": [ids], "results": [results]}
        yield pa.RecordBatch.from_pydict(row)

    schema = "host string, ids array<long>, results array<string>"
    rows = spark.range(0, tasks, 1, tasks).mapInArrow(read, schema).collect()
    return [[row.host, row.ids, row.results] for row in rows]
