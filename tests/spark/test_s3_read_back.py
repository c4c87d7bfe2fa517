"""Outputs in S3, read back in Spark tasks with pyarrow, deltalake and pyiceberg."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from holdfast.spark.sinks import DeltaSink, IcebergSink, ParquetSink, read_parts
from tests.deep_variants import deep_after
from tests.processes import python_proc
from tests.sinks.test_sink_s3 import SECRET, S3Bucket
from tests.spark.test_stage import StageRig

pytestmark = pytest.mark.timeout(240)

ROWS = 30


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


SERVER = """
    import threading
    from moto.server import ThreadedMotoServer

    made = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    print(f"ready http://{host}:{port}", flush=True)
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server runs in a separate process because the Delta library holds the GIL while it waits."""
    with python_proc(SERVER, ready=None) as proc:
        yield proc.expect("ready http").split()[-1]


def catalog_of(server: str, directory: Path, bucket: str) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"s3://{bucket}/warehouse",
        "s3.endpoint": server,
        "s3.access-key-id": "AKIAEXAMPLE",
        "s3.secret-access-key": SECRET,
        "s3.region": "us-east-1",
    }


def sink_of(kind: str, bucket: S3Bucket, catalog: dict[str, str]) -> Any:
    if kind == "parquet":
        return ParquetSink(bucket.out, grace_s=0, storage_options=bucket.options)
    if kind == "delta":
        return DeltaSink(bucket.out, partition_by="lang", storage_options=bucket.options)
    return IcebergSink("cat.db.labels", catalog=catalog, partition_by="lang")


class OutputReader:
    """Reads the output in the task, with the given storage options and catalog."""

    def __init__(
        self, kind: str, out: str, options: dict[str, str], catalog: dict[str, str]
    ) -> None:
        self.kind = kind
        self.out = out
        self.options = options
        self.catalog = catalog

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            found = getattr(self, self.kind)().sort_by("id").to_pylist()
            yield pa.RecordBatch.from_pydict({"rows": [json.dumps(found)]})

    def parquet(self) -> pa.Table:
        import pyarrow.dataset as ds
        from pyarrow.fs import S3FileSystem

        files = S3FileSystem(
            endpoint_override=self.catalog["s3.endpoint"],
            access_key=self.catalog["s3.access-key-id"],
            secret_key=self.catalog["s3.secret-access-key"],
            region="us-east-1",
        )
        names = [name.removeprefix("s3://") for name in read_parts(self.out, storage_options=self.options).files]  # fmt: skip
        listed = ds.dataset(self.out.removeprefix("s3://"), filesystem=files, format="parquet")
        assert sorted(listed.files) == sorted(names), "a plain listing is the manifest"
        return listed.to_table()

    def delta(self) -> pa.Table:
        from deltalake import DeltaTable

        return DeltaTable(self.out, storage_options=self.options).to_pyarrow_table()

    def iceberg(self) -> pa.Table:
        return load_catalog("cat", **self.catalog).load_table("db.labels").scan().to_arrow()


@pytest.mark.parametrize("kind", deep_after(2, ["parquet", "delta", "iceberg"]))
def test_executors_read_back_the_s3_output_of_a_growing_input(
    spark: SparkSession, server: str, place: StageRig, kind: str
) -> None:
    bucket = S3Bucket(server, f"read-{kind}")
    properties = catalog_of(server, place.path, f"read-{kind}")
    if kind == "iceberg":
        load_catalog("cat", **properties).create_namespace("db")
    stage = place.stage(place.counting_function(), carry=["lang"], file_rows=8)
    reader = OutputReader(kind, bucket.out, bucket.options, properties)
    for rows in (ROWS, ROWS + 3):
        df = spark.range(rows).selectExpr("id", "concat('l', id % 3) as lang")
        sink = sink_of(kind, bucket, properties)
        with stage.run(df, output=sink, changed="extend") as run:
            assert run.counts()["TERMINAL_SUCCESS"] == rows
        want = [{"id": i, "lang": f"l{i % 3}", "y": i * 2} for i in range(rows)]
        read_rows = spark.range(0, 2, 1, 2).mapInArrow(reader, "rows string").collect()
        assert [json.loads(row.rows) for row in read_rows] == [want, want]
    assert len(place.calls()) == ROWS + 3
    for path in Path(place.store).rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_missing_bucket_is_refused_before_the_first_call(
    spark: SparkSession, server: str, place: StageRig, kind: str
) -> None:
    bucket = S3Bucket(server, f"there-{kind}")
    made: Any = {"parquet": ParquetSink, "delta": DeltaSink}[kind]
    sink = made("s3://no-such-bucket-here/out", storage_options=bucket.options)
    with pytest.raises(Exception) as raised:
        place.stage(place.counting_function()).run(spark.range(3), output=sink)
    assert type(raised.value).__module__.startswith("holdfast.")
    assert SECRET not in str(raised.value)
    assert place.calls() == []
