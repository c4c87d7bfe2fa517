"""With a spool executors write the files of an output: the ledger service commits them and reads no result."""

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

from holdfast.errors import HoldfastError
from holdfast.spark import Run
from holdfast.spark.errors import OutputNotShared, RunCancelled
from holdfast.spark.sinks import (
    DeltaSink,
    IcebergSink,
    OutputCorrupt,
    OutputReadOnly,
    ParquetSink,
    read_parts,
)
from holdfast.spark.spool import Spool
from tests.process.watch import until
from tests.spark.clusters import service_of
from tests.spark.executor_sinks import Failing
from tests.spark.test_sink_s3 import Bucket, bucket
from tests.spark.test_stage import Place, note, place, tuples
from tests.spark.test_tables_on_s3 import server

__all__ = ["bucket", "place", "server"]

pytestmark = pytest.mark.timeout(180)

ROWS = 300
# Bytes of a result, and what the ledger service may read: its modules are 20 MB of it.
LARGE = 200_000
SERVICE_BYTES = 40 << 20


def text_of(n: int) -> str:
    """Results of very different sizes: parts are cut by their bytes."""
    return f"{n}:" + "x" * (n * 37 % 400)


def sized(log: str) -> Callable[[Any], Any]:
    def work(row: Any) -> Any:
        note(log, row.id)
        return {"y": text_of(row.id)}

    return work


def expected(rows: int = ROWS) -> list[tuple[int, str]]:
    return [(n, text_of(n)) for n in range(rows)]


def stage_of(place: Place, directory: Path | str | None, **options: Any) -> Any:
    options = {"file_rows": 64, "file_bytes": 4000, **options}
    if directory is not None:
        options["spool"] = directory
    return place.stage(sized(place.log), schema="y string", **options)


def part_files(path: str | Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(Path(path).glob("part-*"))}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def test_files_of_executors_are_those_that_the_ledger_service_writes(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    with stage_of(place, None, name="plain").run(spark.range(ROWS), output=place.path / "plain"):
        pass
    with stage_of(place, directory).run(spark.range(ROWS), output=place.output) as run:
        assert tuples(run.output()) == expected()
    found = part_files(place.output)
    assert len(found) > ROWS // 64, "parts end by bytes, too"
    assert found == part_files(place.path / "plain")
    left = set(os.listdir(Path(place.output) / "_holdfast"))
    assert left == {"manifest.json", "parts.jsonl"}, "files under way are gone"


def test_the_ledger_service_reads_no_result(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    size = LARGE

    def large(row: Any) -> Any:
        return {"y": os.urandom(size)}

    stage = place.stage(large, schema="y binary", spool=directory, flush_rows=20)
    read: dict[int, int] = {}
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            try:
                pid = service_of(os.getpid(), Path(place.store))
                lines = Path(f"/proc/{pid}/io").read_text().splitlines()
            except (OSError, ValueError):
                continue
            read[pid] = int(lines[0].removeprefix("rchar: "))

    watch = threading.Thread(target=sample)
    watch.start()
    try:
        with stage.run(spark.range(ROWS * 2), output=place.output):
            pass
    finally:
        ended.set()
        watch.join()
    written = sum(path.stat().st_size for path in Path(place.output).glob("part-*"))
    assert written > 2 * ROWS * LARGE
    assert read
    assert max(read.values()) < SERVICE_BYTES < written


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_executors_write_to_an_object_store(
    spark: SparkSession, place: Place, bucket: Bucket, kind: str
) -> None:
    spool = f"s3://{bucket.name}/spool"
    url = f"s3://{bucket.name}/{kind}"
    made: dict[str, Any] = {"parquet": ParquetSink, "delta": DeltaSink}
    sink = made[kind](url, storage_options=bucket.options)
    stage = stage_of(place, spool, storage_options=bucket.options)
    with stage.run(spark.range(ROWS), output=sink) as run:
        assert run.counts()["COMMITTED"] == ROWS
    if kind == "delta":
        from deltalake import DeltaTable

        table = DeltaTable(url, storage_options=bucket.options).to_pyarrow_table().sort_by("id")
        assert (
            list(zip(*(table[name].to_pylist() for name in ("id", "y")), strict=True)) == expected()
        )
        return
    manifest = read_parts(url)
    assert manifest.complete
    assert manifest.rows == ROWS
    # A file of an executor has the id of its run: one of another run cannot replace it.
    assert all(manifest.run_id in part.path for part in manifest.parts)


def test_executors_write_partitions_of_a_delta_table(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    log = place.log

    def work(row: Any) -> Any:
        note(log, row.id)
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
    spark: SparkSession, place: Place, directory: Path
) -> None:
    """The catalog's properties are not given to executors, and the SQL catalog is a file of the driver."""
    catalog = {"type": "sql", "uri": f"sqlite:///{place.path}/catalog.db"}
    catalog["warehouse"] = f"file://{place.path}/warehouse"
    load_catalog("cat", **catalog).create_namespace("db")
    sink = IcebergSink("cat.db.labels", catalog=catalog)
    with stage_of(place, directory).run(spark.range(ROWS), output=sink):
        pass
    found = load_catalog("cat", **catalog).load_table("db.labels").scan().to_arrow().sort_by("id")
    assert found["y"].to_pylist() == [text for _, text in expected()]


def test_a_task_that_dies_over_a_part_is_replaced(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    sink = Failing(place.output, how="killed", times=2)
    with stage_of(place, directory).run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected()
    assert len(os.listdir(f"{place.output}.failures")) == 2
    # What the killed processes left is gone.
    assert not list((Path(place.output) / "_holdfast").glob("*.tmp"))


def test_a_full_disk_of_executors_is_waited_for(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    sink = Failing(place.output, how="full", times=3)
    with stage_of(place, directory).run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected()
    assert len(place.calls()) == ROWS


def test_an_output_that_executors_cannot_write_is_refused_before_the_first_call(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    sink = Failing(place.output, how="denied", times=100)
    with pytest.raises(OutputReadOnly) as refused:
        stage_of(place, directory).run(spark.range(ROWS), output=sink)
    assert "not from this executor" in str(refused.value)
    assert place.calls() == []


def test_a_part_that_cannot_be_written_ends_the_run_and_calls_are_kept(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    sink = Failing(place.output, how="corrupt", times=1)
    stage = stage_of(place, directory)
    with pytest.raises(OutputCorrupt):
        stage.run(spark.range(ROWS), output=sink)
    with stage.run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected()
    called = place.calls()
    assert len(called) - len(set(called)) <= 2 * (100 + 1)


def test_a_ledger_service_that_dies_while_executors_write_is_replaced(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    failures = Path(f"{place.output}.failures")
    failures.mkdir()
    sink = Failing(place.output, how="slow")
    stage = stage_of(place, directory)
    found: list[Any] = []

    def run() -> None:
        with stage.run(spark.range(ROWS), output=sink) as done:
            found.append(tuples(done.output()))

    thread = threading.Thread(target=run)
    thread.start()
    until((failures / "writing").exists, "a part under way", 90)
    os.kill(service_of(os.getpid(), Path(place.store)), signal.SIGKILL)
    (failures / "go").touch()
    thread.join()
    assert found == [expected()]


def test_an_output_whose_rows_have_all_ended_is_written_without_a_call(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    sink = Failing(place.output, how="corrupt", times=1)
    # One part for all rows: it is written when they have ended.
    stage = stage_of(place, directory, file_rows=1 << 20, file_bytes=1 << 30)
    with pytest.raises(OutputCorrupt):
        stage.run(spark.range(ROWS), output=sink)
    assert sorted(map(int, place.calls())) == list(range(ROWS))
    with stage.run(spark.range(ROWS), output=sink) as run:
        assert tuples(run.output()) == expected()
    assert len(place.calls()) == ROWS


def test_a_grown_input_keeps_files_and_executors_write_the_others(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    stage = stage_of(place, directory)
    sink = ParquetSink(place.output, grace_s=0)
    stage.run(spark.range(ROWS), output=sink).close()
    before = part_files(place.output)
    with stage.run(spark.range(ROWS + 50), output=sink, changed="extend") as run:
        assert tuples(run.output()) == expected(ROWS + 50)
    after = part_files(place.output)
    assert len(before.keys() & after.keys()) > 5
    assert all(after[name] == before[name] for name in before.keys() & after.keys())
    assert len(place.calls()) == ROWS + 50
    listed = [pq.read_table(one) for one in sorted(Path(place.output).glob("part-*"))]
    assert sum(table.num_rows for table in listed) == ROWS + 50


def test_a_cancelled_run_ends_while_executors_write(
    spark: SparkSession, place: Place, directory: Path
) -> None:
    stage = stage_of(place, directory, grace_s=0.1)
    log = place.log

    def slow(row: Any) -> Any:
        import time

        note(log, row.id)
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
    assert [type(one) for one in error] == [RunCancelled]


def test_a_run_is_written_again_by_executors(
    spark: SparkSession, place: Place, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of(place, directory)
    stage.run(spark.range(ROWS), output=place.output).close()
    with Run.of("job", spark, place.store) as run:

        def refused(*_: object) -> bytes:
            raise AssertionError("the driver read an object of the spool")

        monkeypatch.setattr(Spool, "_checked", refused)
        run.write(place.path / "again")
        run.write(place.path / "again")  # does nothing
    assert part_files(place.path / "again") == part_files(place.output)
    assert read_parts(place.path / "again").complete


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
def test_an_output_on_the_disk_of_another_machine_is_refused_by_an_executor(
    tmp_path: Path, kind: str
) -> None:
    """Nothing is created there: an executor must not write files that the driver never sees."""
    schema = pa.schema([("id", pa.int64())])
    home = tmp_path / "out"
    sink: Any = ParquetSink(home)
    if kind == "delta":
        sink = DeltaSink(home)
    if kind == "iceberg":
        catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/catalog.db"}
        catalog["warehouse"] = f"file://{home}"
        load_catalog("cat", **catalog).create_namespace("db")
        sink = IcebergSink("cat.db.labels", catalog=catalog)
    sink.begin("run-1", "labels", schema)
    writer = sink.part_writer()
    sink.check_writer(writer)
    assert not [path for path in home.rglob("*") if "writable" in path.name]
    home.rename(tmp_path / "elsewhere")
    with pytest.raises(OutputNotShared):
        sink.check_writer(writer)
    assert not home.exists()
