"""Stages with a spool on a local session: the spool holds the data, the store holds the ledger."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import failpoints
from holdfast.cli import main
from holdfast.ledger import runs
from holdfast.spark import Fail, Run, RunStopped, Skip, Stop, spool_maintenance
from holdfast.spark import spool_client as spool_lines
from holdfast.spark.errors import NotAStage, RunChanged, SpoolLost
from holdfast.store import open as open_store
from tests.sinks.test_sink_s3 import SECRET, S3Bucket, bucket, server
from tests.spark.row_functions import append_line
from tests.spark.test_stage import StageRig, place, tuples

__all__ = ["bucket", "place", "server"]

pytestmark = pytest.mark.timeout(120)

ROWS = 60
MARK = "only-the-input-says-this"
RESULT = "only-a-result-says-this"


# The directory variant covers less code, so it runs in the long suite only.
@pytest.fixture(params=[pytest.param("directory", marks=pytest.mark.deep), "s3"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """`spool=` and, for an object store, `storage_options=`."""
    if request.param == "directory":
        return {"spool": str(tmp_path / "spool")}
    made: S3Bucket = request.getfixturevalue("bucket")
    return {"spool": f"s3://{made.name}/spool", "storage_options": made.options}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def table(spark: SparkSession, rows: int = ROWS) -> DataFrame:
    return spark.range(0, rows, 1, 3).selectExpr("id", f"'{MARK}' as text")


def labelling_function(log: str) -> Callable[[Any], Any]:
    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id % 20 == 3:
            return Skip("not this one")
        if row.id % 20 == 4:
            return Fail("it is bad")
        if row.id % 20 == 5:
            return {"y": 5, "z": RESULT}
        return {"y": f"{RESULT} {row.id} {row.text[:4]}"}

    return work


def expected_rows(ids: range) -> list[tuple[int, str]]:
    return [(n, f"{RESULT} {n} {MARK[:4]}") for n in ids if n % 20 not in (3, 4, 5)]


def all_bytes(*directories: str | Path) -> bytes:
    """All bytes below these directories."""
    paths = [
        path
        for directory in directories
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file()
    ]
    return b"".join(path.read_bytes() for path in paths)


def test_spool_holds_the_data_and_the_store_only_object_names(
    spark: SparkSession, place: StageRig, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    stage = place.stage(labelling_function(place.log), schema="y string", **options)
    for _ in range(2):
        with stage.run(table(spark)) as run:
            # Executors read the objects that the driver names.
            assert tuples(run.output()) == expected_rows(range(ROWS))
            failed = [(row.id, row._error_class, row._raw) for row in run.failed().collect()]
            assert [row.id for row in run.skipped().collect()] == [3, 23, 43]
            report = str(run.report())
    assert len(failed) == 6
    assert [one for one in failed if one[1] == "schema"] == [
        (n, "schema", f'{{"y":5,"z":"{RESULT}"}}') for n in (5, 25, 45)
    ]
    assert sorted(map(int, place.calls())) == list(range(ROWS))
    store_bytes = all_bytes(place.store)
    assert b"it is bad" in store_bytes
    for secret in (MARK, RESULT, SECRET):
        assert secret.encode() not in store_bytes
    assert main(["runs", "failed", "job", "--store", place.store]) == 0
    printed = capfd.readouterr()
    assert SECRET not in report + printed.out + printed.err + repr(stage) + repr(vars(stage))


def test_changed_spool_of_a_run_is_refused(
    spark: SparkSession, place: StageRig, directory: Path, tmp_path: Path
) -> None:
    place.stage(place.counting_function(), spool=directory).run(table(spark)).close()
    for other in (tmp_path / "other", None):
        stage = place.stage(place.counting_function(), spool=other)
        for changed in ("refuse", "extend"):
            with pytest.raises(RunChanged) as raised:
                stage.run(table(spark), changed=changed)
            assert (raised.value.what, raised.value.was) == ("spool", str(directory))
    with pytest.raises(NotAStage):
        place.stage(place.counting_function(), spool="hdfs://spool/x")
    assert len(place.calls()) == ROWS


@pytest.mark.deep
def test_unordered_input_is_sorted_into_the_spool(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    ids = [(n * 37) % ROWS for n in range(ROWS)]
    df = spark.createDataFrame([(n, MARK) for n in ids], "id bigint, text string").repartition(3)
    with place.stage(labelling_function(place.log), schema="y string", spool=directory).run(
        df
    ) as run:
        assert tuples(run.output()) == expected_rows(range(ROWS))
    # The blocks of the first pass are deleted.
    blocks = [path for path in directory.rglob("*") if path.is_file() and path.parent.name == "i"]
    assert all_bytes(directory).count(MARK.encode()) == ROWS
    assert blocks


def stopped_run_stage(spark: SparkSession, place: StageRig, directory: Path) -> Any:
    """Run until `stop_after` stops the run with some rows done. Return its stage without `stop_after`."""

    def work(row: Any) -> Any:
        append_line(log, row.id)
        return Fail("no") if row.id >= 20 and not os.path.exists(mended) else {"y": row.id}

    log, mended = place.log, str(place.path / "mended")
    limited = place.stage(work, spool=directory, stop_after=Stop(failures=1), flush_rows=5, tasks=1)
    with pytest.raises(RunStopped):
        limited.run(table(spark))
    Path(mended).touch()
    return place.stage(work, spool=directory, flush_rows=5)


def objects(directory: Path, kind: str) -> list[Path]:
    [run] = directory.iterdir()
    return sorted(path for path in (run / kind).rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "kind",
    [pytest.param("i", id="input", marks=pytest.mark.deep), pytest.param("o", id="outcomes")],
)
def test_run_with_lost_spool_objects_is_refused_before_any_call(
    spark: SparkSession, place: StageRig, directory: Path, kind: str
) -> None:
    stage = stopped_run_stage(spark, place, directory)
    before = place.calls()
    for path in objects(directory, kind)[:1]:
        kept = path.read_bytes()
        path.unlink()
    for _ in range(2):
        with pytest.raises(SpoolLost) as raised:
            stage.run(table(spark))
        [[lo, hi], *_] = raised.value.seqs
        assert 0 <= lo < hi <= ROWS
    assert place.calls() == before
    path.write_bytes(kept)
    # The restored object has another time. It is read and accepted.
    with stage.run(table(spark)) as run:
        assert run.output().count() >= 20
    if kind == "o":
        again = place.stage(place.counting_function(), spool=directory)
        with again.run(table(spark), fresh=True) as run:
            assert run.output().count() == ROWS


def test_corrupt_spool_bytes_raise_spool_lost_when_read(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    """The listing cannot show the change: size and time are equal."""
    stage = stopped_run_stage(spark, place, directory)
    for path in objects(directory, "i"):
        status, data = path.stat(), path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    before = place.calls()
    with pytest.raises(SpoolLost) as raised:
        stage.run(table(spark))
    assert raised.value.what == "input"
    assert place.calls() == before


def test_spool_object_of_a_killed_writer_is_deleted(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    def work(row: Any) -> Any:
        def die(step: str) -> None:
            # A child that lives keeps this function for later tests, which run without this directory.
            is_first = os.path.isdir(os.path.dirname(dead)) and not os.path.exists(dead)
            if step == "stored" and is_first:
                Path(dead).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        spool_lines.step = die
        append_line(log, row.id)
        return {"y": row.id * 2}

    log, dead = place.log, str(place.path / "dead")
    stage = place.stage(work, spool=directory, flush_rows=4, attempts=3)
    with stage.run(table(spark)) as run:
        assert tuples(run.output()) == [(n, 2 * n) for n in range(ROWS)]
    assert Path(dead).exists()
    calls = Counter(map(int, place.calls()))
    assert set(calls) == set(range(ROWS))
    # Repeated calls: rows begun and not reported by the killed child, at most flush_rows + concurrency.
    assert 0 < sum(calls.values()) - ROWS <= 5
    # The unreferenced object was deleted at the end of the run.
    assert [
        f"o/{path.parent.name}/{path.name}" for path in objects(directory, "o")
    ] == referenced_results(place)


def referenced_results(place: StageRig) -> list[str]:
    """The result objects that the ledger references."""
    with open_store(place.store) as store:
        record = store.read(runs.get_latest, "job")
        assert record is not None
        referenced = spool_maintenance.iter_referenced(store, record)
        return sorted(at.name for what, _, at in referenced if what == "outcomes")


def test_extended_input_reuses_rows_of_the_spool(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    stage = place.stage(labelling_function(place.log), schema="y string", spool=directory)
    stage.run(table(spark)).close()
    options = {"changed": "extend", "retry_failed": False}
    with stage.run(table(spark, 2 * ROWS), **options) as run:
        assert tuples(run.output()) == expected_rows(range(2 * ROWS))
        assert run.reused().count() == ROWS
        raws = {row.id: row._raw for row in run.failed().collect() if row._raw}
    assert sorted(raws) == [5, 25, 45, 65, 85, 105]
    assert len(set(raws.values())) == 1
    assert sorted(map(int, place.calls())) == list(range(2 * ROWS))
    assert RESULT.encode() not in all_bytes(place.store)
    # Remap the rows that failed with a schema error, without a call.
    with stage.remap(lambda raw: {"y": str(raw["y"])}) as run:
        assert run.counts()["TERMINAL_SUCCESS"] == len(expected_rows(range(2 * ROWS))) + 6
    assert len(place.calls()) == 2 * ROWS


def test_executors_read_spooled_outcomes_and_the_driver_reads_none(
    spark: SparkSession, place: StageRig, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = place.stage(labelling_function(place.log), schema="y string", spool=directory)
    stage.run(table(spark)).close()
    with (
        stage.run(table(spark, 2 * ROWS), changed="extend", retry_failed=False) as run,
        failpoints.on("spool.read") as driver_read,
    ):
        assert tuples(run.output()) == expected_rows(range(2 * ROWS))
        assert [row.id for row in run.failed().collect()] == [
            n for n in range(2 * ROWS) if n % 20 in (4, 5)
        ]
        assert [row.id for row in run.skipped().collect()] == [
            n for n in range(2 * ROWS) if n % 20 == 3
        ]
        assert run.skipped().columns == [
            "id",
            "_seq",
            "_state",
            "_attempts",
            "_error_class",
            "_error",
        ]
    assert driver_read.hits == 0


def test_the_lazy_form_reads_results_from_the_spool(
    spark: SparkSession, place: StageRig, options: dict[str, Any]
) -> None:
    stage = place.stage(labelling_function(place.log), schema="y string", on_fail="keep", **options)
    df = table(spark).transform(stage)
    assert [tuple(row) for row in df.orderBy("id").collect()] == expected_rows(range(ROWS))
    assert df.count() == len(expected_rows(range(ROWS)))
    assert sorted(map(int, place.calls())) == list(range(ROWS))
    assert RESULT.encode() not in all_bytes(place.store)


@pytest.mark.deep
def test_output_is_written_and_exported_from_the_spool(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    stage = place.stage(labelling_function(place.log), schema="y string", spool=directory)
    with stage.run(table(spark), output=place.output) as run:
        assert tuples(run.output()) == expected_rows(range(ROWS))
        run.write(place.path / "again")
    names = ["out", "again"]
    first, second = (sorted((place.path / name).glob("part-*")) for name in names)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    with Run.of("job", spark, place.store) as run:
        assert run.output().count() == len(expected_rows(range(ROWS)))


def test_prune_and_delete_remove_the_spool_objects_of_runs(
    spark: SparkSession, place: StageRig, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = place.stage(place.counting_function(), spool=directory)
    for _ in range(3):
        stage.run(table(spark), fresh=True).close()
    assert len(list(directory.iterdir())) == 3
    assert main(["runs", "prune", "--keep", "2", "--store", place.store]) == 0
    assert len(list(directory.iterdir())) == 2
    directory.rename(place.path / "elsewhere")
    directory.write_text("no directory")
    assert main(["runs", "prune", "--keep", "1", "--store", place.store]) == 0
    printed = capsys.readouterr().out
    assert "spool_kept" in printed
    directory.unlink()
    (place.path / "elsewhere").rename(directory)
    assert main(["runs", "prune", "--keep", "1", "--store", place.store]) == 0
    assert len(list(directory.iterdir())) == 1
    assert stage.delete() == 1
    assert list(directory.iterdir()) == []


def test_finished_run_sweeps_unreferenced_spool_objects(
    spark: SparkSession, place: StageRig, directory: Path
) -> None:
    """Unreferenced objects also arise without faults: a stopped first pass leaves blocks."""
    spool = str(directory)

    def work(row: Any) -> Any:
        [run] = Path(spool).iterdir()
        (run / "i" / f"9-0-{row.id}-stray").write_bytes(b"stray")
        return {"y": row.id}

    stage = place.stage(work, spool=directory)
    with stage.run(spark.range(5)) as run:
        assert run.output().count() == 5
    assert not list(directory.rglob("*-stray"))
