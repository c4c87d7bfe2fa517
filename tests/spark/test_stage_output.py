"""Outputs of a stage: refused before the first call, or written and readable by Spark."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer
from pyspark.sql import SparkSession

from holdfast.errors import HoldfastError, Invalid, StoreFull
from holdfast.spark import Fail, Run, Stage
from holdfast.spark.errors import NotAStage, OutputUnreadable, RunChanged
from holdfast.spark.output_file_check import check_files_exist, missing_file_error
from holdfast.spark.sinks import (
    DeltaSink,
    OutputCorrupt,
    OutputNotOurs,
    OutputReadOnly,
    OutputUnknown,
    ParquetSink,
    read_parts,
)
from tests.process.watch import until
from tests.sinks.test_sink_s3 import SECRET, S3Bucket
from tests.sinks.test_sinks import small_disk
from tests.spark.executor_sinks import FullDiskMarkerSink
from tests.spark.row_functions import append_line
from tests.spark.test_stage import RunThread, StageRig

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


@pytest.mark.parametrize("output", ["dbfs:/x", "default.labels", "hdfs://nn/x"])
def test_unknown_output_scheme_is_refused_before_the_first_call(
    spark: SparkSession, place: StageRig, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    before = sorted(os.listdir(place.path))
    with pytest.raises(OutputUnknown):
        place.stage(place.counting_function()).run(spark.range(5), output=output)
    assert sorted(os.listdir(place.path)) == before
    assert place.calls() == []


@pytest.fixture
def read_only(tmp_path: Path) -> Any:
    if os.geteuid() != 0:
        pytest.fail("this test mounts a disk, as root only: sudo make test")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1M", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_read_only_output_is_refused_before_the_first_call(
    spark: SparkSession, place: StageRig, kind: str, read_only: Path
) -> None:
    output: Any = str(read_only / "out") if kind == "parquet" else DeltaSink(read_only / "out")
    with pytest.raises(OutputReadOnly):
        place.stage(place.counting_function()).run(spark.range(5), output=output)
    assert place.calls() == []


STORE_DISK_BYTES = 64 << 20


def disk_filling_function(log: str, filler: Path, at: int) -> Callable[[Any], Any]:
    """A function that fills the disk of `filler` when called for row `at`. Its results do not compress."""
    path = str(filler)

    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id == at and not os.path.exists(path):
            with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        # Faster calls would be reported in larger batches.
        time.sleep(0.001)
        return {"t": os.urandom(5000).hex()}

    return work


def test_commit_waits_while_the_output_disk_is_full(spark: SparkSession, place: StageRig) -> None:
    with small_disk(place.path / "disk") as disk:
        filler, full_marker = disk / "filler", place.path / "told"
        sink = FullDiskMarkerSink(str(disk / "out"), str(full_marker))
        stage = place.stage(disk_filling_function(place.log, filler, 0), schema="t string")
        runs: list[Run] = []
        thread = RunThread(lambda: runs.append(stage.run(spark.range(20), output=sink)))
        until(full_marker.exists, "a commit that finds the disk full", 90)
        filler.unlink()
        thread.join(90)
        assert thread.error is None
        with runs[0] as run:
            assert [row.id for row in run.output().collect()] == list(range(20))
    assert sorted(map(int, place.calls())) == list(range(20))


def test_full_store_disk_raises_store_full_and_the_run_resumes(
    spark: SparkSession, place: StageRig
) -> None:
    with small_disk(place.path / "disk", STORE_DISK_BYTES) as disk:
        filler = disk / "filler"

        def stage_of(full_at: int) -> Stage:
            work = disk_filling_function(place.log, filler, full_at)
            return place.stage(work, schema="t string", store=str(disk / "data"), flush_rows=5)

        with pytest.raises(StoreFull):
            stage_of(20).run(spark.range(0, 400, 1, 2))
        filler.unlink()
        # Only rows begun and not reported are called again.
        with stage_of(-1).run(spark.range(0, 400, 1, 2)) as run:
            assert run.counts()["COMMITTED"] == 400
    called = Counter(place.calls())
    assert set(map(int, called)) == set(range(400))
    assert sum(called.values()) - 400 <= 2 * (5 + 1)


class RefusingSink:
    """A sink without `check` that refuses at `begin`, in the service."""

    def __init__(self, path: str = "x") -> None:
        self.path = path

    def spec(self) -> dict[str, str | int | bool]:
        return {"kind": "tests.spark.test_stage_output:RefusingSink", "path": self.path}

    def check_vacant(self) -> None: ...

    def begin(self, run_id: str, name: str, schema: Any) -> int:
        raise Invalid(what="output", why="not today")

    def commit(self, lo: int, hi: int, table: Any) -> int:
        raise AssertionError

    def commit_many(self, parts: Any) -> int:
        raise AssertionError

    def finish(self) -> None: ...

    def parts(self, run_id: str) -> list[str]:
        return []


def test_output_that_refuses_begin_costs_no_call(spark: SparkSession, place: StageRig) -> None:
    stage = place.stage(place.counting_function())
    for _ in range(2):  # a new run, and its resume
        with pytest.raises(HoldfastError, match="not today"):
            stage.run(spark.range(50), output=RefusingSink())
    assert place.calls() == []


def test_unreadable_result_type_is_refused_before_the_first_call(
    spark: SparkSession, place: StageRig
) -> None:
    for schema in ("t time", "a array<struct<t: time>>"):
        with pytest.raises(NotAStage):
            place.stage(place.counting_function(), schema=schema).run(
                spark.range(5), output=place.output
            )
    assert place.calls() == []
    assert not Path(place.output).exists()


def test_a_complete_output_has_a_success_file(spark: SparkSession, place: StageRig) -> None:
    with place.stage(place.counting_function()).run(spark.range(5), output=place.output) as run:
        assert run.counts()["COMMITTED"] == 5
    assert (Path(place.output) / "_SUCCESS").read_bytes() == b""
    assert spark.read.parquet(place.output).count() == 5


@pytest.mark.parametrize("rows", [0, 4], ids=["no input", "every row failed"])
def test_an_output_without_rows_has_its_columns(
    spark: SparkSession, place: StageRig, rows: int
) -> None:
    def fail(row: Any) -> Any:
        return Fail("always")

    with place.stage(fail).run(spark.range(rows), output=place.output) as run:
        assert run.output().count() == 0
    found = spark.read.parquet(place.output)
    assert (found.columns, found.count()) == (["id", "y"], 0)
    manifest = read_parts(place.output)
    assert (manifest.rows, manifest.complete, len(manifest.files)) == (0, True, 1)
    # The output is complete, so a second run writes nothing.
    with place.stage(fail).run(spark.range(rows), output=place.output) as run:
        assert run.output().count() == 0


def test_parts_are_cut_by_file_bytes_for_any_number_of_tasks(
    spark: SparkSession, place: StageRig
) -> None:
    def text(row: Any) -> Any:
        return {"t": "x" * (row.id * 37 % 900)} if row.id % 11 else Fail("eleven")

    expected = [(i, "x" * (i * 37 % 900)) for i in range(300) if i % 11]
    names: list[list[str]] = []
    for tasks in (1, 3):
        out = f"{place.output}-{tasks}"
        stage = place.stage(
            text, name=f"cut-{tasks}", schema="t string", file_bytes=10_000, tasks=tasks
        )
        with stage.run(spark.range(300), output=out) as run:
            assert [tuple(row) for row in run.output().collect()] == expected
        manifest = read_parts(out)
        assert len(manifest.parts) > 10
        assert all(part.rows == 1 or part.bytes < 14_000 for part in manifest.parts)
        names.append([f"{part.path} {part.sha256}" for part in manifest.parts])
    assert names[0] == names[1]


def test_changed_file_bytes_is_refused_on_resume(spark: SparkSession, place: StageRig) -> None:
    place.stage(place.counting_function()).run(spark.range(3), output=place.output).close()
    with pytest.raises(RunChanged) as raised:
        place.stage(place.counting_function(), file_bytes=1).run(
            spark.range(3), output=place.output
        )
    assert raised.value.what == "file_bytes"


def test_run_writes_to_s3_and_output_raises_output_unreadable(
    spark: SparkSession, place: StageRig
) -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        bucket = S3Bucket("http://{}:{}".format(*server.get_host_and_port()), "labels")
        sink = ParquetSink(bucket.out, storage_options=bucket.options)
        with place.stage(place.counting_function(), file_rows=4).run(
            spark.range(10), output=sink
        ) as run:
            assert bucket.ids_by_manifest() == bucket.ids_by_listing() == list(range(10))
            with pytest.raises(OutputUnreadable) as raised:
                run.output()
            assert raised.value.path.startswith("s3a://labels/a/out/part-")
        for file in Path(place.store).rglob("*"):
            assert not file.is_file() or SECRET.encode() not in file.read_bytes()
        with place.stage(place.counting_function(), file_rows=4).run(spark.range(10), output=sink):
            assert len(place.calls()) == 10
    finally:
        server.stop()


def test_run_write_restores_a_deleted_output_and_exports_elsewhere(
    spark: SparkSession, place: StageRig
) -> None:
    def text(row: Any) -> Any:
        return {"t": "x" * row.id} if row.id % 7 else Fail("seven")

    stage = place.stage(text, schema="t string", file_bytes=500)
    with stage.run(spark.range(100), output=place.output) as run:
        before = {file.name: file.read_bytes() for file in Path(place.output).glob("part-*")}
        shutil.rmtree(place.output)
        for output in (place.output, f"{place.output}-2"):
            run.write(output)
            run.write(output)  # the output exists: nothing is written
            after = {file.name: file.read_bytes() for file in Path(output).glob("part-*")}
            assert after == before
        assert run.output().count() == spark.read.parquet(place.output).count() == 85
        run.write(DeltaSink(f"{place.output}-delta"))
        with pytest.raises(OutputNotOurs):
            run.write(place.path)  # contains the store


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_deleted_part_file_is_named_and_run_write_restores_its_rows(
    spark: SparkSession, place: StageRig, kind: str
) -> None:
    output: Any = place.output if kind == "parquet" else DeltaSink(place.output)
    stage = place.stage(place.counting_function(), file_rows=4)
    with stage.run(spark.range(10), output=output) as run:
        deleted = sorted(Path(place.output).glob("*.parquet"))[1]
        deleted.unlink()
        with pytest.raises(OutputCorrupt) as raised:
            run.output()
        assert raised.value.path == str(deleted)
        assert "run.write(output)" in raised.value.why
        assert "\n" not in str(raised.value)
        # The two remedies of the error: write elsewhere, or move the rest away and write here.
        run.write(f"{place.output}-2")
        assert spark.read.parquet(f"{place.output}-2").count() == 10
        os.rename(place.output, f"{place.output}-old")
        run.write(output)
        assert [row.id for row in run.output().collect()] == list(range(10))
    assert len(place.calls()) == 10


def test_missing_file_error_names_the_object_store_path() -> None:
    url = "s3a://labels/out/part-000000000000-000000000004-5f.parquet"
    text = f"[PATH_NOT_FOUND] Path does not exist: {url}. SQLSTATE: 42K03"
    for error in (text, f"{text}\n\nJVM stacktrace:\norg.apache.spark.sql.AnalysisException"):
        found_error = missing_file_error(RuntimeError(error))
        assert found_error is not None
        assert found_error.path == url
    assert missing_file_error(RuntimeError("No FileSystem for scheme s3a")) is None


def test_check_files_exist_checks_only_local_files(tmp_path: Path) -> None:
    here = tmp_path / "a%20b.parquet"
    here.touch()
    check_files_exist([str(here), f"file://{here}", "s3://labels/gone.parquet"])
    for gone in (f"{tmp_path}/gone.parquet", f"file://{tmp_path}/gone.parquet"):
        with pytest.raises(OutputCorrupt) as raised:
            check_files_exist([str(here), gone])
        assert raised.value.path == f"{tmp_path}/gone.parquet"
