"""Outputs of a stage: refused before the first call, or written so that Spark reads them."""

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
from holdfast.spark.output_files import check_present, missing_file
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
from tests.spark.executor_sinks import Telling
from tests.spark.test_sink_s3 import SECRET, Bucket
from tests.spark.test_sinks import small_disk
from tests.spark.test_stage import Place, Thread, note

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("output", ["dbfs:/x", "default.labels", "hdfs://nn/x"])
def test_a_foreign_scheme_or_a_table_name_is_refused_before_the_first_call(
    spark: SparkSession, place: Place, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.path)
    before = sorted(os.listdir(place.path))
    with pytest.raises(OutputUnknown):
        place.stage(place.counting()).run(spark.range(5), output=output)
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
def test_an_output_that_cannot_be_written_is_refused_before_the_first_call(
    spark: SparkSession, place: Place, kind: str, read_only: Path
) -> None:
    output: Any = str(read_only / "out") if kind == "parquet" else DeltaSink(read_only / "out")
    with pytest.raises(OutputReadOnly):
        place.stage(place.counting()).run(spark.range(5), output=output)
    assert place.calls() == []


STORE_DISK_BYTES = 64 << 20


def filling(log: str, filler: Path, at: int) -> Callable[[Any], Any]:
    """A function whose call for the row `at` fills the disk of `filler`. Results do not compress."""
    path = str(filler)

    def work(row: Any) -> Any:
        note(log, row.id)
        if row.id == at and not os.path.exists(path):
            with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        # Quicker calls are reported in larger lots.
        time.sleep(0.001)
        return {"t": os.urandom(5000).hex()}

    return work


def test_a_full_disk_of_the_output_is_waited_for(spark: SparkSession, place: Place) -> None:
    with small_disk(place.path / "disk") as disk:
        filler, told = disk / "filler", place.path / "told"
        sink = Telling(str(disk / "out"), str(told))
        stage = place.stage(filling(place.log, filler, 0), schema="t string")
        runs: list[Run] = []
        thread = Thread(lambda: runs.append(stage.run(spark.range(20), output=sink)))
        until(told.exists, "a commit that finds the disk full", 90)
        filler.unlink()
        thread.join(90)
        assert thread.error is None
        with runs[0] as run:
            assert [row.id for row in run.output().collect()] == list(range(20))
    assert sorted(map(int, place.calls())) == list(range(20))


def test_a_full_disk_of_the_store_ends_the_run_and_it_resumes(
    spark: SparkSession, place: Place
) -> None:
    with small_disk(place.path / "disk", STORE_DISK_BYTES) as disk:
        filler = disk / "filler"

        def stage_of(full_at: int) -> Stage:
            work = filling(place.log, filler, full_at)
            return place.stage(work, schema="t string", store=str(disk / "data"), flush_rows=5)

        with pytest.raises(StoreFull):
            stage_of(20).run(spark.range(0, 400, 1, 2))
        filler.unlink()
        # What was begun and not reported is called again, and no other row.
        with stage_of(-1).run(spark.range(0, 400, 1, 2)) as run:
            assert run.counts()["COMMITTED"] == 400
    called = Counter(place.calls())
    assert set(map(int, called)) == set(range(400))
    assert sum(called.values()) - 400 <= 2 * (5 + 1)


class Refusing:
    """A sink without `check` that refuses at `begin`, in the service."""

    def __init__(self, path: str = "x") -> None:
        self.path = path

    def spec(self) -> dict[str, str | int | bool]:
        return {"kind": "tests.spark.test_stage_output:Refusing", "path": self.path}

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


def test_an_output_that_refuses_to_begin_costs_no_call(spark: SparkSession, place: Place) -> None:
    stage = place.stage(place.counting())
    for _ in range(2):  # a new run, and its resume
        with pytest.raises(HoldfastError, match="not today"):
            stage.run(spark.range(50), output=Refusing())
    assert place.calls() == []


def test_a_type_that_spark_cannot_read_from_files_is_refused_before_the_first_call(
    spark: SparkSession, place: Place
) -> None:
    for schema in ("t time", "a array<struct<t: time>>"):
        with pytest.raises(NotAStage):
            place.stage(place.counting(), schema=schema).run(spark.range(5), output=place.output)
    assert place.calls() == []
    assert not Path(place.output).exists()


def test_a_complete_output_has_a_success_file(spark: SparkSession, place: Place) -> None:
    with place.stage(place.counting()).run(spark.range(5), output=place.output) as run:
        assert run.counts()["COMMITTED"] == 5
    assert (Path(place.output) / "_SUCCESS").read_bytes() == b""
    assert spark.read.parquet(place.output).count() == 5


@pytest.mark.parametrize("rows", [0, 4], ids=["no input", "every row failed"])
def test_an_output_without_rows_has_its_columns(
    spark: SparkSession, place: Place, rows: int
) -> None:
    def fail(row: Any) -> Any:
        return Fail("always")

    with place.stage(fail).run(spark.range(rows), output=place.output) as run:
        assert run.output().count() == 0
    found = spark.read.parquet(place.output)
    assert (found.columns, found.count()) == (["id", "y"], 0)
    manifest = read_parts(place.output)
    assert (manifest.rows, manifest.complete, len(manifest.files)) == (0, True, 1)
    # Complete as it is: a second run does nothing.
    with place.stage(fail).run(spark.range(rows), output=place.output) as run:
        assert run.output().count() == 0


def test_parts_are_cut_by_bytes_and_a_resume_makes_the_same(
    spark: SparkSession, place: Place
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


def test_another_bound_of_bytes_on_resume_is_refused(spark: SparkSession, place: Place) -> None:
    place.stage(place.counting()).run(spark.range(3), output=place.output).close()
    with pytest.raises(RunChanged) as told:
        place.stage(place.counting(), file_bytes=1).run(spark.range(3), output=place.output)
    assert told.value.what == "file_bytes"


def test_an_output_in_s3_is_written_by_a_run_and_spark_says_which_file_system_it_lacks(
    spark: SparkSession, place: Place
) -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        bucket = Bucket("http://{}:{}".format(*server.get_host_and_port()), "labels")
        sink = ParquetSink(bucket.out, storage_options=bucket.options)
        with place.stage(place.counting(), file_rows=4).run(spark.range(10), output=sink) as run:
            assert bucket.rows() == bucket.listed() == list(range(10))
            with pytest.raises(OutputUnreadable) as told:
                run.output()
            assert told.value.path.startswith("s3a://labels/a/out/part-")
        for file in Path(place.store).rglob("*"):
            assert not file.is_file() or SECRET.encode() not in file.read_bytes()
        with place.stage(place.counting(), file_rows=4).run(spark.range(10), output=sink):
            assert len(place.calls()) == 10
    finally:
        server.stop()


def test_an_output_that_was_deleted_is_written_again_and_elsewhere(
    spark: SparkSession, place: Place
) -> None:
    def text(row: Any) -> Any:
        return {"t": "x" * row.id} if row.id % 7 else Fail("seven")

    stage = place.stage(text, schema="t string", file_bytes=500)
    with stage.run(spark.range(100), output=place.output) as run:
        before = {file.name: file.read_bytes() for file in Path(place.output).glob("part-*")}
        shutil.rmtree(place.output)
        for output in (place.output, f"{place.output}-2"):
            run.write(output)
            run.write(output)  # it is there: nothing is done
            after = {file.name: file.read_bytes() for file in Path(output).glob("part-*")}
            assert after == before
        assert run.output().count() == spark.read.parquet(place.output).count() == 85
        run.write(DeltaSink(f"{place.output}-delta"))
        with pytest.raises(OutputNotOurs):
            run.write(place.path)  # holds the store and more


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_a_part_file_that_was_deleted_is_named_and_its_rows_are_written_again(
    spark: SparkSession, place: Place, kind: str
) -> None:
    output: Any = place.output if kind == "parquet" else DeltaSink(place.output)
    stage = place.stage(place.counting(), file_rows=4)
    with stage.run(spark.range(10), output=output) as run:
        gone = sorted(Path(place.output).glob("*.parquet"))[1]
        gone.unlink()
        with pytest.raises(OutputCorrupt) as told:
            run.output()
        assert told.value.path == str(gone)
        assert "run.write(output)" in told.value.why
        assert "\n" not in str(told.value)
        # What the error says: elsewhere, or here once the rest is moved away.
        run.write(f"{place.output}-2")
        assert spark.read.parquet(f"{place.output}-2").count() == 10
        os.rename(place.output, f"{place.output}-old")
        run.write(output)
        assert [row.id for row in run.output().collect()] == list(range(10))
    assert len(place.calls()) == 10


def test_a_file_that_spark_does_not_find_in_an_object_store_is_named() -> None:
    url = "s3a://labels/out/part-000000000000-000000000004-5f.parquet"
    text = f"[PATH_NOT_FOUND] Path does not exist: {url}. SQLSTATE: 42K03"
    for error in (text, f"{text}\n\nJVM stacktrace:\norg.apache.spark.sql.AnalysisException"):
        told = missing_file(RuntimeError(error))
        assert told is not None
        assert told.path == url
    assert missing_file(RuntimeError("No FileSystem for scheme s3a")) is None


def test_only_files_on_a_local_disk_are_looked_for(tmp_path: Path) -> None:
    here = tmp_path / "a%20b.parquet"
    here.touch()
    check_present([str(here), f"file://{here}", "s3://labels/gone.parquet"])
    for gone in (f"{tmp_path}/gone.parquet", f"file://{tmp_path}/gone.parquet"):
        with pytest.raises(OutputCorrupt) as told:
            check_present([str(here), gone])
        assert told.value.path == f"{tmp_path}/gone.parquet"
