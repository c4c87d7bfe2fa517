"""Executor-written outputs: with a spool, executors write the part files and the ledger service only commits them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from holdfast import failpoints
from holdfast.errors import HoldfastError
from holdfast.spark import Run, service_supervisor
from holdfast.spark.errors import OutputNotShared, RunCancelled
from holdfast.spark.sinks import (
    DeltaSink,
    IcebergSink,
    OutputCorrupt,
    OutputReadOnly,
    ParquetSink,
    read_parts,
)
from tests.process.watch import until
from tests.sinks.test_sink_s3 import S3Bucket, bucket
from tests.spark.clusters import service_pid
from tests.spark.executor_sinks import FailingParquetSink
from tests.spark.row_functions import append_line, result_text
from tests.spark.test_s3_read_back import server
from tests.spark.test_stage import StageRig, place, tuples

__all__ = ["bucket", "place", "server"]

pytestmark = pytest.mark.timeout(180)

ROWS = 300
# The size of a result, and the bytes that the ledger service may read, 20 MB of them for its modules.
RESULT_BYTES = 200_000
SERVICE_READ_BYTES_MAX = 40 << 20


def sized_results(log: str) -> Callable[[Any], Any]:
    def work(row: Any) -> Any:
        append_line(log, row.id)
        return {"y": result_text(row.id)}

    return work


def expected_rows(rows: int = ROWS) -> list[tuple[int, str]]:
    return [(n, result_text(n)) for n in range(rows)]


def make_stage(place: StageRig, directory: Path | str | None, **options: Any) -> Any:
    options = {"file_rows": 64, "file_bytes": 4000, **options}
    if directory is not None:
        options["spool"] = directory
    return place.stage(sized_results(place.log), schema="y string", **options)


def part_files(path: str | Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(path).glob("part-*"))}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_executors_write_the_same_part_files_as_the_ledger_service(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    with make_stage(place, None, name="plain").run(spark.range(ROWS), output=place.path / "plain"):
        pass
    with make_stage(place, directory).run(spark.range(ROWS), output=place.output) as run:
        assert tuples(run.output()) == expected_rows()
    executor_files = part_files(place.output)
    assert len(executor_files) > ROWS // 64, "parts end by bytes, too"
    assert executor_files == part_files(place.path / "plain")
    metadata_files = set(os.listdir(Path(place.output) / "_holdfast"))
    assert metadata_files == {"manifest.json", "parts.jsonl"}, "files under way are gone"


def test_ledger_service_reads_no_result(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    size = RESULT_BYTES

    def large(row: Any) -> Any:
        return {"y": os.urandom(size)}

    stage = place.stage(large, schema="y binary", spool=directory, flush_rows=20)
    service_supervisor._services.discard_idle()  # which may have read results of other runs
    read: dict[int, int] = {}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            try:
                pid = service_pid(os.getpid(), Path(place.store))
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            except (OSError, ValueError):
                continue
            read[pid] = int(lines[0].removeprefix("rchar: "))

    watch = threading.Thread(target=sample)
    watch.start()
    try:
        with stage.run(spark.range(ROWS), output=place.output):
            pass
    finally:
        ended.set()
        watch.join()
    written = sum(path.stat().st_size for path in Path(place.output).glob("part-*"))
    assert written > ROWS * RESULT_BYTES
    assert read
    assert max(read.values()) < SERVICE_READ_BYTES_MAX < written


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_executors_write_to_an_object_store(
    spark: SparkSession, place: StageRig, bucket: S3Bucket, kind: str
) -> None:
    spool = f"s3://{bucket.name}/spool"
    url = f"s3://{bucket.name}/{kind}"
    sinks: dict[str, Any] = {"parquet": ParquetSink, "delta": DeltaSink}
    sink = sinks[kind](url, storage_options=bucket.options)
    stage = make_stage(place, spool, storage_options=bucket.options)
    with stage.run(spark.range(ROWS), output=sink) as run:
        assert run.counts()["COMMITTED"] == ROWS
    if kind == "delta":
        from deltalake import DeltaTable

        table = DeltaTable(url, storage_options=bucket.options).to_pyarrow_table().sort_by("id")
        assert (
            list(zip(*(table[name].to_pylist() for name in ("id", "y")), strict=True))
            == expected_rows()
        )
        return
    manifest = read_parts(url)
    assert manifest.complete
    assert manifest.rows == ROWS
    # The file name of an executor contains the run id, so another run cannot replace the file.
    assert all(manifest.run_id in part.path for part in manifest.parts)


def test_executors_write_partitions_of_a_delta_table(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    log = place.log

    def work(row: Any) -> Any:
        append_line(log, row.id)
        return {"lang": ["de", "en", None][row.id % 3], "y": row.id}

    stage = place.stage(work, schema="lang string, y bigint", spool=directory, file_rows=100)
    sink = DeltaSink(place.output, partition_by="lang")
    with stage.run(spark.range(ROWS), output=sink):
        pass
    from deltalake import DeltaTable

    table = DeltaTable(place.output).to_pyarrow_table().sort_by("id")
    assert table["y"].to_pylist() == list(range(ROWS))
    assert table["lang"].to_pylist() == [["de", "en", None][n % 3] for n in range(ROWS)]
    english = DeltaTable(place.output).to_pyarrow_table(filters=[("lang", "=", "en")])
    assert sorted(english["y"].to_pylist()) == list(range(1, ROWS, 3))


def test_executors_write_an_iceberg_table_without_its_catalog(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    """Executors do not get the catalog properties, and the SQL catalog is a file of the driver."""
    catalog = {"type": "sql", "uri": f"sqlite:///{place.path}/catalog.db"}
    catalog["warehouse"] = f"file://{place.path}/warehouse"
    load_catalog("cat", **catalog).create_namespace("db")
    sink = IcebergSink("cat.db.labels", catalog=catalog)
    with make_stage(place, directory).run(spark.range(ROWS), output=sink):
        pass
    table = load_catalog("cat", **catalog).load_table("db.labels").scan().to_arrow().sort_by("id")
    assert table["y"].to_pylist() == [text for _, text in expected_rows()]


def test_task_killed_during_a_part_write_is_replaced(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    sink = FailingParquetSink(place.output, how="killed", times=2)
    with make_stage(place, directory).run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected_rows()
    assert len(os.listdir(f"{place.output}.failures")) == 2
    # The temporary files of the killed processes are removed.
    assert not list((Path(place.output) / "_holdfast").glob("*.tmp"))


def test_part_write_is_retried_while_the_executor_disk_is_full(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    sink = FailingParquetSink(place.output, how="full", times=3)
    with make_stage(place, directory).run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected_rows()
    assert len(place.calls()) == ROWS


def test_output_read_only_for_executors_is_refused_before_the_first_call(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    sink = FailingParquetSink(place.output, how="denied", times=100)
    with pytest.raises(OutputReadOnly) as refused:
        make_stage(place, directory).run(spark.range(ROWS), output=sink)
    assert "not from this executor" in str(refused.value)
    assert place.calls() == []


def test_failed_part_write_ends_the_run_and_keeps_the_calls(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    sink = FailingParquetSink(place.output, how="corrupt", times=1)
    stage = make_stage(place, directory)
    with pytest.raises(OutputCorrupt):
        stage.run(spark.range(ROWS), output=sink)
    with stage.run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected_rows()
    called = place.calls()
    assert len(called) - len(set(called)) <= 2 * (100 + 1)


def test_ledger_service_killed_during_part_writes_is_restarted(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    failures = Path(f"{place.output}.failures")
    failures.mkdir()
    sink = FailingParquetSink(place.output, how="slow")
    stage = make_stage(place, directory)
    outputs: list[Any] = []

    def run() -> None:
        with stage.run(spark.range(ROWS), output=sink) as done:
            outputs.append(tuples(done.output()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until((failures / "writing").exists, "a part under way", 90)
        os.kill(service_pid(os.getpid(), Path(place.store)), signal.SIGKILL)
    finally:
        (failures / "go").touch()
        thread.join()
    assert outputs == [expected_rows()]


def test_resumed_run_with_only_final_rows_writes_its_output_without_calls(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    sink = FailingParquetSink(place.output, how="corrupt", times=1)
    # One part for all rows: it is written after the last row.
    stage = make_stage(place, directory, file_rows=1 << 20, file_bytes=1 << 30)
    with pytest.raises(OutputCorrupt):
        stage.run(spark.range(ROWS), output=sink)
    assert sorted(map(int, place.calls())) == list(range(ROWS))
    with stage.run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected_rows()
    assert len(place.calls()) == ROWS


def test_extended_run_keeps_unchanged_part_files(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    stage = make_stage(place, directory)
    sink = ParquetSink(place.output, grace_s=0)
    stage.run(spark.range(ROWS), output=sink).close()
    before = part_files(place.output)
    with stage.run(spark.range(ROWS + 50), output=sink, changed="extend") as run:
        assert tuples(run.output()) == expected_rows(ROWS + 50)
    after = part_files(place.output)
    assert len(before.keys() & after.keys()) > 5
    assert all(after[name] == before[name] for name in before.keys() & after.keys())
    assert len(place.calls()) == ROWS + 50
    listed = [pq.read_table(file) for file in sorted(Path(place.output).glob("part-*"))]
    assert sum(table.num_rows for table in listed) == ROWS + 50


def test_cancelled_run_ends_while_executors_write(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    stage = make_stage(place, directory, grace_s=0.1)
    log = place.log

    def slow(row: Any) -> Any:
        import time

        append_line(log, row.id)
        time.sleep(0.05)
        return {"y": "a"}

    stage.fn = slow
    error: list[BaseException] = []

    def run() -> None:
        try:
            stage.run(spark.range(ROWS), output=place.output)
        except HoldfastError as raised:
            error.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(place.calls()) > 20, "calls", 90)
    stage.cancel()
    thread.join()
    assert [type(raised_error) for raised_error in error] == [RunCancelled]


def test_run_write_exports_the_output_by_executors(
    spark: SparkSession, place: StageRig, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(place, directory)
    stage.run(spark.range(ROWS), output=place.output).close()
    with Run.of("job", spark, place.store) as run, failpoints.on("spool.read") as driver_read:
        run.write(place.path / "again")
        run.write(place.path / "again")  # idempotent
    assert driver_read.hits == 0
    assert part_files(place.path / "again") == part_files(place.output)
    assert read_parts(place.path / "again").complete


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_check_writer_refuses_an_output_on_another_machine(tmp_path: Path, kind: str) -> None:
    """The check creates no file: an executor must not write files that the driver never sees."""
    schema = pa.schema([("id", pa.int64())])
    directory = tmp_path / "out"
    sink: Any = ParquetSink(directory)
    if kind == "delta":
        sink = DeltaSink(directory)
    if kind == "iceberg":
        catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
        catalog["warehouse"] = f"file://{directory}"
        load_catalog("cat", **catalog).create_namespace("db")
        sink = IcebergSink("cat.db.labels", catalog=catalog)
    sink.begin("run-1", "labels", schema)
    writer = sink.part_writer()
    sink.check_writer(writer)
    assert not [path for path in directory.rglob("*") if "writable" in path.name]
    directory.rename(tmp_path / "elsewhere")
    with pytest.raises(OutputNotShared):
        sink.check_writer(writer)
    assert not directory.exists()
